"""The bodies of OpenAI's API: how they are parsed and translated, without a server."""

import json
import time

import pytest

from engine.errors import InvalidRequest
from engine.requests.text.values import MAX_CHOICES
from grpc_service.openai import text_codec
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
