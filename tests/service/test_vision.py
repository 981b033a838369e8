"""Chats with images in a Python program, with a tiny model of random weights: the whole way from
the bytes of files to tokens."""

from dataclasses import replace

import pytest
import trio

from engine import (
    Chat,
    Continuation,
    ContinuedChoice,
    EngineConfig,
    GenerateRequest,
    ModelConfig,
    open_engine,
)
from engine.core.text.memory import sequence_keys
from engine.errors import InvalidRequest
from tests.checkpoints.text import make as make_text
from tests.support.images import picture
from tests.support.vision import CHATS, FILES, load

pytestmark = pytest.mark.model

ROUNDS = 10  # rounds of requests together, until some lose their blocks
NUM_NEW = 16
GREEDY = {"temperature": 0, "max_tokens": NUM_NEW, "ignore_eos": True}


@pytest.fixture(scope="module", params=["smolvlm", "gemma3", "qwen3_vl"])
def vision_model(request, tmp_path_factory):
    """Yield a SmolVLM of random weights, a Gemma 3, which computes an image in one step, and a
    Qwen3-VL, with three positions of a token and with images' rows behind the first layers."""
    found = load(tmp_path_factory.mktemp("vision"), request.param)
    yield found
    found.runner.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Yield a Gemma 3, which computes an image's tokens in one step."""
    found = load(tmp_path_factory.mktemp("whole"), "gemma3")
    yield found
    found.runner.close()


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    """Return a text model."""
    return ModelConfig(str(make_text(tmp_path_factory.mktemp("text"))), dtype="float32")


def engine_of(*models, **fields):
    """Return an engine with a small pool and a small step."""
    sizes = {"kv_cache_memory": 8 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    sizes |= {"spawn_timeout_s": 600.0}  # the default is too short for a load on a busy machine
    return open_engine(EngineConfig(models=models, **sizes | fields))


def model_of(vision_model):
    """Return the configuration of the model that reads images."""
    return ModelConfig(str(vision_model.directory), dtype="float32")


async def answer(engine, messages, **fields):
    """Return the tokens of an answer, and its usage."""
    ids = []
    fields = {"output": {"token_ids": True}} | fields
    request = GenerateRequest(chat=Chat(messages), sampling=GREEDY, **fields)
    async with engine.generate(request) as stream:
        async for event in stream:
            ids += getattr(event, "token_ids", ())
    return ids, event.usage


async def test_answers_are_those_of_transformers_and_prefixes_are_shared(vision_model):
    async with engine_of(model_of(vision_model)) as engine:
        for name, turns in CHATS.items():
            wanted = vision_model.expected(turns, NUM_NEW)
            length = vision_model.inputs(turns)["input_ids"].shape[1]
            first, usage = await answer(engine, vision_model.parts(turns))
            again, cached = await answer(engine, vision_model.parts(turns))
            assert first == again == wanted, name
            assert usage.prompt_tokens == length
            assert cached.cached_tokens >= length - 1 - 16, name


async def test_another_image_never_hits_the_same_text(vision_model):
    async with engine_of(model_of(vision_model)) as engine:
        for name in ("square", "square2"):
            data = FILES["square"] if name == "square" else FILES["small"]
            messages = [
                {"role": "user", "content": [{"type": "image", "image": data},
                                             {"type": "text", "text": "What is this? " * 8}]}
            ]  # fmt: skip
            _, usage = await answer(engine, messages)
            assert usage.cached_tokens < 16


async def test_a_planted_fault_of_the_keys_is_seen(vision_model, monkeypatch):
    """Without the digests of images in prefixes, another image of as many tokens gets the first
    image's answer."""

    def without(images, block_size):
        return stock([replace(one, digest=b"") for one in images], block_size)

    stock = sequence_keys.contents_of_blocks
    monkeypatch.setattr(sequence_keys, "contents_of_blocks", without)
    monkeypatch.setitem(FILES, "another", picture(40, 40, "JPEG", seed=9))
    found = []
    async with engine_of(model_of(vision_model)) as engine:
        for name in ("square", "another"):
            turns = [(name, "What is this? " * 3)]
            ids, _ = await answer(engine, vision_model.parts(turns))
            found.append(ids == vision_model.expected(turns, NUM_NEW))
    assert found == [True, False]


async def test_choices_of_one_prompt_are_those_of_single_requests(vision_model):
    """The choices fork behind the images; the first request computes the images' blocks, later ones
    find them in the cache."""
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": NUM_NEW, "ignore_eos": True}
    async with engine_of(model_of(vision_model)) as engine:
        for turns in CHATS.values():
            found, cached = [], []
            for number in (3, 3, 1):
                request = GenerateRequest(
                    chat=Chat(vision_model.parts(turns)),
                    sampling=sampling,
                    n=number,
                    output={"token_ids": True},
                )
                choices, usages = [[] for _ in range(number)], []
                async with engine.generate(request) as stream:
                    async for event in stream:
                        if hasattr(event, "token_ids"):
                            choices[event.choice] += event.token_ids
                        elif hasattr(event, "usage"):
                            usages.append(event.usage.cached_tokens)
                found.append(choices)
                cached.append(max(usages))
            assert found[0] == found[1]
            assert found[0][:1] == found[2]
            assert min(cached[1:]) >= 16


async def test_a_literal_image_token_is_text(vision_model):
    preprocessor = vision_model.info.images
    words = f"{preprocessor.token}{preprocessor.marker}"
    async with engine_of(model_of(vision_model)) as engine:
        said = [{"role": "user", "content": f"What does {words} mean?"}]
        _, usage = await answer(engine, said)
        both = [
            {"role": "user", "content": [{"type": "text", "text": f"Is {words} this:"},
                                         {"type": "image", "image": FILES["small"]}]}
        ]  # fmt: skip
        first, _ = await answer(engine, both)
        assert usage.prompt_tokens > 10
        assert len(first) == NUM_NEW


async def test_images_go_to_the_first_model_that_sees_and_others_refuse_them(
    vision_model, text_model
):
    async with engine_of(text_model, model_of(vision_model)) as engine:
        messages = vision_model.parts(CHATS["before"])
        ids, _ = await answer(engine, messages)
        assert ids == vision_model.expected(CHATS["before"], NUM_NEW)
        with pytest.raises(InvalidRequest, match="reads images"):
            await answer(engine, messages, model=text_model.name)


async def test_a_file_that_is_no_image_is_refused_by_its_field(vision_model):
    async with engine_of(model_of(vision_model)) as engine:
        parts = [{"type": "text", "text": "a"}, {"type": "image", "image": b"GIF89a"}]
        messages = [{"role": "user", "content": parts}]
        with pytest.raises(InvalidRequest) as caught:
            await answer(engine, messages)
        [violation] = caught.value.violations
        assert violation.field == "chat.messages[0].parts[1].image"


async def tokenized(engine, messages, **fields):
    """Return the tokens of a chat as Tokenize gives them."""
    asked = Chat(messages, add_generation_prompt=fields.pop("opens", None))
    spans, _ = await engine.tokenize(fields.pop("model", ""), chat=asked)
    return spans


async def test_tokenize_gives_the_tokens_of_images_and_where_they_stand(vision_model, text_model):
    async with engine_of(text_model, model_of(vision_model)) as engine:
        for name, turns in CHATS.items():
            model = "" if name != "no image" else model_of(vision_model).name
            spans = await tokenized(engine, vision_model.parts(turns), model=model)
            wanted = vision_model.inputs(turns)["input_ids"][0].tolist()
            assert [one.token_id for one in spans] == wanted, name
            assert all(one.start < one.end for one in spans), name
            _, usage = await answer(engine, vision_model.parts(turns), model=model)
            assert usage.prompt_tokens == len(spans), name


async def test_tokenize_gives_a_literal_image_token_as_plain_text(vision_model):
    word = vision_model.info.images.token
    parts = [{"type": "text", "text": f"Is {word} this:"},
             {"type": "image", "image": FILES["small"]}]  # fmt: skip
    messages = [{"role": "user", "content": parts}]
    async with engine_of(model_of(vision_model)) as engine:
        spans = await tokenized(engine, messages)
        _, usage = await answer(engine, messages)
        assert usage.prompt_tokens == len(spans)
        literal = [one for one in spans if one.end - one.start == len(word)]
        image = [one for one in literal if one.text == word]
        rest = [one for one in literal if one not in image]
        assert image
        assert "".join(one.text for one in rest) == word


async def test_tokenize_refuses_images_that_it_cannot_count(vision_model, text_model):
    async with engine_of(text_model, model_of(vision_model)) as engine:
        for model, data in ((text_model.name, FILES["small"]), ("", b"GIF89a")):
            messages = [{"role": "user", "content": [{"type": "image", "image": data}]}]
            with pytest.raises(InvalidRequest) as caught:
                await tokenized(engine, messages, model=model)
            [violation] = caught.value.violations
            assert violation.field == "chat.messages[0].parts[0].image"


@pytest.mark.slow
async def test_a_worker_in_a_process_sees_the_same(whole):
    model = ModelConfig(str(whole.directory), dtype="float32", runner="process")
    async with engine_of(model) as engine:
        for name, turns in CHATS.items():
            ids, _ = await answer(engine, whole.parts(turns))
            assert ids == whole.expected(turns, NUM_NEW), name


async def test_a_cached_prefix_may_end_inside_an_image_that_is_whole(whole):
    """For the logits see `tests/conformance/test_vision.py`."""
    turns = CHATS["after"]
    _, [image] = whole.prompt(turns)
    length = whole.inputs(turns)["input_ids"].shape[1]
    assert image.is_inside((length - 1) // 16 * 16)
    async with engine_of(model_of(whole)) as engine:
        _, usage = await answer(engine, whole.parts(turns))
        assert usage.cached_tokens == 0
        again, usage = await answer(engine, whole.parts(turns))
        assert image.is_inside(usage.cached_tokens)
        assert again == whole.expected(turns, NUM_NEW)


async def test_choices_behind_an_image_that_is_whole_and_preemptions_change_nothing(whole):
    """The pool holds about two of the prompts, so that some requests lose their blocks."""
    turns = [CHATS[name] for name in ("before", "after", "turns", "side by side", "no image")]
    sizes = {"kv_cache_memory": 24 * 16 * 768, "max_model_len": 256}
    async with engine_of(model_of(whole), **sizes) as engine:
        found = {}

        async def ask(index):
            request = GenerateRequest(
                chat=Chat(whole.parts(turns[index])), sampling=GREEDY, n=2,
                prompt={"bypass_prefix_cache": True}, output={"token_ids": True},
            )  # fmt: skip
            ids = {0: [], 1: []}
            async with engine.generate(request) as stream:
                async for event in stream:
                    if hasattr(event, "token_ids"):
                        ids[event.choice] += event.token_ids
            found[index] = ids

        num_preempted = 0
        for _ in range(ROUNDS):  # several, as chance decides which requests share a step
            async with trio.open_nursery() as nursery:
                for index in range(len(turns)):
                    nursery.start_soon(ask, index)
            num_preempted = engine.statistics().totals.preemptions
            if num_preempted:
                break
    for index, chat in enumerate(turns):
        assert found[index] == dict.fromkeys((0, 1), whole.expected(chat, NUM_NEW))
    assert num_preempted


async def test_log_probabilities_of_a_prompt_with_whole_images_are_refused(whole):
    async with engine_of(model_of(whole)) as engine:
        messages = whole.parts(CHATS["before"])
        with pytest.raises(InvalidRequest, match="whose tokens see each other") as caught:
            await answer(engine, messages, output={"prompt_logprobs": 0})
        [violation] = caught.value.violations
        assert violation.field == "output.prompt_logprobs"


async def test_an_answer_behind_images_goes_on_after_a_cut(vision_model):
    async with engine_of(model_of(vision_model)) as engine:
        for name, turns in CHATS.items():
            wanted = vision_model.expected(turns, NUM_NEW)
            for cut in (1, NUM_NEW - 1):
                received = Continuation((ContinuedChoice(tuple(wanted[:cut])),))
                rest, usage = await answer(engine, vision_model.parts(turns), continuation=received)
                assert rest == wanted[cut:], name
                assert usage.resumed_tokens == cut


async def test_drafts_behind_images_change_no_token(vision_model):
    """The answer repeats itself, so that drafts are found in it."""
    long = 48
    same = {"temperature": 0, "max_tokens": long, "ignore_eos": True}
    sampling = same | {"allowed_token_ids": (5, 6)}
    counts = []
    async with engine_of(model_of(vision_model)) as engine:
        for turns in CHATS.values():
            found = []
            for speculation in (True, False):
                request = GenerateRequest(
                    chat=Chat(vision_model.parts(turns)),
                    sampling=sampling | {"speculation": speculation},
                    output={"token_ids": True},
                )
                ids = []
                async with engine.generate(request) as stream:
                    async for event in stream:
                        ids += getattr(event, "token_ids", ())
                found.append(ids)
                counts.append(event.usage.accepted_tokens)
            assert found[0] == found[1]
            assert len(found[0]) == long
    assert any(counts[::2])
    assert not any(counts[1::2])
