"""The bodies of OpenAI's API: how they are parsed and translated, without a server."""

import json
import time

import pytest

from engine.core.common.events import Finished
from engine.core.common.types import EndReason, Timings, Usage
from engine.core.text.types import Alternative, TokenLogprob, Tokens
from engine.errors import InvalidRequest, RequestTooLarge
from engine.requests.encode.values import Score
from engine.requests.text.values import MAX_CHOICES, Started
from grpc_service.openai import answers, encode_codec, text_codec
from grpc_service.openai.json_text import parse_json
from grpc_service.openai.work import Context

CONTEXT = Context("an-id", None, 0, 2**20)
CHAT = {"messages": [{"role": "user", "content": "a"}]}
TEXT = {"prompt": ["a", "b"]}
CHATS, TEXTS = (text_codec.decode_chat, CHAT), (text_codec.decode_completion, TEXT)


def refused(decode, body):
    """Return the field that a body is refused for."""
    with pytest.raises(InvalidRequest) as caught:
        decode(body, CONTEXT)
    return caught.value.violations[0].field


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("decode", "body"), [CHATS, TEXTS], ids=["chat", "text"])
@pytest.mark.parametrize("count", [0, MAX_CHOICES + 1, 20_000, 2**32 - 1])
def test_choices_are_counted_before_anything_is_made_of_them(decode, body, is_stream, count):
    assert refused(decode, body | {"n": count, "stream": is_stream}) == "n"


@pytest.mark.parametrize(("decode", "body"), [CHATS, TEXTS], ids=["chat", "text"])
def test_the_most_choices_are_taken(decode, body):
    work = decode(body | {"n": MAX_CHOICES}, CONTEXT)
    assert {request.n for request in work.requests} == {MAX_CHOICES}


def test_a_name_that_stands_twice_among_many_is_found_at_once():
    names = [f'"name{number}":0' for number in range(60_000)]
    body = ("{" + ",".join([*names, names[-1]]) + "}").encode()
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="name59999"):
        parse_json(body)
    assert time.monotonic() - began < 5  # with a search for each name: a minute
    assert len(parse_json(json.dumps(dict.fromkeys(map(str, range(60_000)))).encode())) == 60_000


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_function_that_is_called_like_a_mode_cannot_be_demanded(name):
    tool = {"type": "function", "function": {"name": name}}
    body = CHAT | {"tools": [tool], "tool_choice": tool}
    assert refused(text_codec.decode_chat, body) == "tool_choice.function.name"
    [request] = text_codec.decode_chat(body | {"tool_choice": "auto"}, CONTEXT).requests
    assert request.chat.tool_choice == "auto"


@pytest.mark.parametrize("detail", ["low", "high", "auto"])
def test_the_detail_of_an_image_changes_nothing(detail):
    url = "data:image/png;base64,AAAA"
    images = [{"url": url}, {"url": url, "detail": detail}]
    parts = [{"type": "image_url", "image_url": image} for image in images]
    body = {"messages": [{"role": "user", "content": parts}]}
    [request] = text_codec.decode_chat(body, CONTEXT).requests
    one, other = request.chat.messages[0]["content"]
    assert one == other


@pytest.mark.parametrize("wants", [{}, {"logprobs": False}])
def test_no_alternatives_beside_no_log_probabilities_are_no_error(wants):
    [request] = text_codec.decode_chat(CHAT | wants | {"top_logprobs": 0}, CONTEXT).requests
    assert request.output.logprobs is None
    assert refused(text_codec.decode_chat, CHAT | wants | {"top_logprobs": 1}) == "top_logprobs"


def test_a_body_may_begin_with_the_mark_of_utf_8_and_has_no_other_encoding():
    body = json.dumps({"prompt": "é"}, ensure_ascii=False)
    assert parse_json(body.encode("utf-8-sig")) == {"prompt": "é"}
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(InvalidRequest, match="UTF-8"):
            parse_json(body.encode(encoding))


HALVES = {
    "a text": (rb'{"prompt": "\ud800"}', "prompt"),
    "inside": (rb'{"messages": [{"a": 1}, {"content": "b\udc00"}]}', "messages[1].content"),
    "a name": (rb'{"metadata": {"\ud800": 1}}', "metadata"),
}


@pytest.mark.parametrize(("body", "field"), HALVES.values(), ids=HALVES)
def test_half_a_surrogate_pair_is_refused_by_its_field(body, field):
    assert refused(lambda data, _: parse_json(data), body) == field


def test_half_a_surrogate_pair_in_bytes_is_no_utf_8():
    with pytest.raises(InvalidRequest, match="UTF-8"):
        parse_json(b'{"prompt": "\xed\xa0\x80"}')


def test_a_whole_surrogate_pair_is_one_character():
    assert parse_json(rb'{"prompt": "\ud83d\ude00"}') == {"prompt": "\U0001f600"}


def test_a_token_has_one_bias():
    assert refused(text_codec.decode_chat, CHAT | {"logit_bias": {"5": 1, "05": 2}}) == "logit_bias"


def test_an_argument_of_the_template_is_no_infinite_number():
    body = parse_json(b'{"messages": [], "chat_template_kwargs": {"a": [1e999]}}') | CHAT
    assert refused(text_codec.decode_chat, body) == "chat_template_kwargs"


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("decode", "body"), [CHATS, TEXTS], ids=["chat", "text"])
@pytest.mark.parametrize(("matched", "shown"), [(2, None), (7, 7), ("b", "b"), (None, None)])
def test_an_answer_names_what_its_client_asked_it_to_stop_at(
    decode, body, is_stream, matched, shown
):
    body = body | ({"prompt": "a"} if body is TEXT else {})
    body |= {"stream": is_stream, "stop_token_ids": [7], "stop": "b"}
    encoder = decode(body, CONTEXT).encoder
    end = Finished("r", 0, EndReason.STOP, Usage(1, 0, 1), Timings(0.0), matched)
    [part] = encoder.encode(0, [Started("r", "m", 1), end])
    answer = part.split(b"\n\n")[-3].removeprefix(b"data: ") if is_stream else part
    [choice] = json.loads(answer)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice.get("stop_reason") == shown


@pytest.mark.parametrize("num_chars", [10, 2**20])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("decode", "body"), [CHATS, TEXTS], ids=["chat", "text"])
def test_long_texts_are_encoded_in_a_thread(decode, body, is_stream, num_chars):
    """Such as echoes: four million characters would keep the server's loop for 30 ms."""
    body = body | ({"prompt": "a"} if body is TEXT else {}) | {"stream": is_stream}
    encoder = decode(body, CONTEXT).encoder
    encoder.encode(0, [Started("r", "m", 1)])
    text = Tokens("r", 0, (5,), "a" * num_chars)
    end = Finished("r", 0, EndReason.STOP, Usage(1, 0, 1), Timings(0.0))
    is_long = num_chars > 10
    assert (encoder.encode_short(0, text) is None) == (is_long or not is_stream)
    assert encoder.is_heavy([text, end]) == is_long
    encoder.encode(0, [text])
    assert encoder.is_heavy([end]) == (is_long and not is_stream)


@pytest.mark.parametrize("shows", [False, True])
def test_a_ranking_with_its_documents_is_encoded_in_a_thread(shows):
    body = {"query": "a", "documents": ["b"], "return_documents": shows}
    encoder = encode_codec.decode_rerank(body, CONTEXT).encoder
    end = Finished("r", 0, EndReason.STOP, Usage(1, 0, 1), Timings(0.0))
    assert not encoder.is_heavy([Score(0, 0.5)])
    assert encoder.is_heavy([end]) == shows


SCORE = TokenLogprob(5, "a", -0.5, (Alternative(6, "b", -1.0, 1),))
SCORED = {
    "prompts": ([Started("r", "m", 9, prompt_logprobs=(SCORE,) * 9)], 27),
    "tokens": ([Started("r", "m", 1), *[Tokens("r", 2, (5,), "a", (SCORE,))] * 9], 9),
}


@pytest.mark.parametrize(("events", "count"), SCORED.values(), ids=SCORED)
def test_the_scores_that_a_whole_answer_keeps_are_bounded(monkeypatch, events, count):
    """A prompt's scores are in the answer once for each choice: a body of 640 KB, 64 prompts and
    16 choices would make an answer of a gigabyte."""
    body = {"prompt": "a", "echo": True, "logprobs": 1, "n": 3}
    monkeypatch.setattr(answers, "SCORES_MAX", 2 * count)
    encode_all(text_codec.decode_completion(body, CONTEXT), events)
    monkeypatch.setattr(answers, "SCORES_MAX", 2 * count - 1)
    work = text_codec.decode_completion(body, CONTEXT)
    with pytest.raises(RequestTooLarge) as caught:
        encode_all(work, events)
    [violation] = caught.value.violations
    assert work.rename(0, violation.field) == "logprobs"
    streamed = text_codec.decode_completion(body | {"stream": True}, CONTEXT)
    encode_all(streamed, events)  # keeps a prompt's once, and no others


def encode_all(work, events):
    """Have each event encoded."""
    for event in events:
        work.encoder.encode(0, [event])
