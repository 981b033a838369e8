"""Embed and Rerank over real gRPC, with fake encoders."""

import contextlib
import struct
import time
from itertools import chain

import grpc
import pytest

from engine.requests.encode.values import MAX_INPUTS
from engine.worker.fakes.encode import (
    IMAGE_TOKENS,
    PROMPTS,
    SEPARATOR,
    rows_of,
    score_of,
    vector_of,
    weights_of,
)
from engine.worker.fakes.precision import in_precision
from grpc_service.client import messages as pb
from tests.simulator.encode_oracle import image_file, pixels_in
from tests.support.encode_wire import (
    ENCODERS,
    Encode,
    embed,
    embed_request,
    rerank,
    rerank_request,
    wait_all_idle,
)
from tests.support.fake_server import ENCODER_MAX_LEN, POISONED_ROW, POISONED_STEP
from tests.support.images import BOMBS
from tests.support.server import fake
from tests.support.wire import (
    SERVING,
    SMALL_WINDOW,
    broken_fields,
    connect,
    ended,
    generate,
    health,
    list_models,
    reason,
    stats,
    tokenize,
    wait_serving,
    wait_until,
)

Code = grpc.StatusCode


def ids_of(text):
    """Return the fake tokenizer's ids for a text."""
    return [byte + 1 for byte in text.encode()]


@pytest.fixture(scope="module")
def server():
    """Yield a server with a text model and encoders."""
    failures = "STEP_FAILED|Traceback"
    with fake(models=ENCODERS, engine={"stream_buffer": 16}, may_log=failures) as one:
        wait_serving(one.channel)
        for name in ("emb", "rank"):
            wait_until(lambda name=name: health(one.channel, f"model/{name}") == SERVING)
        yield one


# ---- values


def test_one_message_per_input_by_its_index(server):
    inputs = ["ab", [1, 2, 3], "a longer text", [5]]
    heard = embed(server.channel, inputs)
    assert heard.error is None
    for message, one in zip(heard.by_index(), inputs, strict=True):
        ids = ids_of(one) if isinstance(one, str) else one
        assert list(message.values) == vector_of(ids)
        assert message.tokens == len(ids)


def test_only_the_first_message_names_the_model(server):
    heard = embed(server.channel, ["a", "b", "c"])
    assert [message.model for message in heard.messages] == ["emb", "", ""]


def test_options_reach_the_encoder(server):
    [message] = embed(server.channel, ["ab"], dimensions=3, prompt_name="query").messages
    prompt = [7, 8]
    assert PROMPTS["query"] == "<7><8>"
    assert list(message.values) == vector_of(prompt + ids_of("ab"), 3)
    assert message.tokens == 4
    [message] = embed(server.channel, ["ab"], normalize=True).messages
    assert sum(value**2 for value in message.values) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("precision", "num_bytes"),
    [("FLOAT16", 16), ("INT8", 8), ("UINT8", 8), ("BINARY", 1), ("UBINARY", 1)],
)
def test_a_vector_in_another_precision_is_packed(server, precision, num_bytes):
    ranges = {} if not precision.endswith("INT8") else {"low": [0.2] * 8, "high": [0.6] * 8}
    fields = {"precision": f"PRECISION_{precision}"} | ({"ranges": ranges} if ranges else {})
    [message] = embed(server.channel, ["ab"], **fields).messages
    want = in_precision(vector_of(ids_of("ab")), precision.lower(), **ranges)
    if precision == "FLOAT16":
        rounded = struct.unpack("<8e", message.packed)
        assert rounded == pytest.approx(vector_of(ids_of("ab")), rel=2**-11)
    form = "<8H" if precision == "FLOAT16" else f"<{num_bytes}{want.typecode}"
    assert not message.values
    assert len(message.packed) == num_bytes
    assert list(struct.unpack(form, message.packed)) == list(want)


def test_a_models_own_ranges_are_of_its_whole_vectors(server):
    fields = {"precision": "PRECISION_UINT8"}
    [message] = embed(server.channel, ["ab"], **fields).messages
    want = in_precision(vector_of(ids_of("ab")), "uint8", [0.0] * 8, [1.0] * 8)
    assert list(message.packed) == list(want)
    for changed in ({"dimensions": 4}, {"normalize": True}, {"normalize": False}):
        error = embed(server.channel, ["ab"], **fields, **changed).error
        assert broken_fields(error) == ["ranges"], changed
    assert embed(server.channel, ["ab"], **fields, dimensions=8).error is None


@pytest.mark.parametrize("raw", [None, False, True])
def test_scores_come_by_index_as_they_are_ready(server, raw):
    documents = ["a", "a much longer one", "bb"]
    fields = {} if raw is None else {"raw_scores": raw}
    heard = rerank(server.channel, "q", documents, **fields)
    want = [score_of([*ids_of("q"), SEPARATOR, *ids_of(one)], raw=bool(raw)) for one in documents]
    assert [message.score for message in heard.by_index()] == want


@pytest.mark.parametrize("top_n", [1, 3, 50])
def test_the_best_come_sorted_at_the_end(server, top_n):
    documents = [f"document {number}" for number in range(40)]  # more than the stream's buffer
    everything = rerank(server.channel, "q", documents).messages
    best = sorted(everything, key=lambda one: (-one.score, one.index))[:top_n]
    assert rerank(server.channel, "q", documents, top_n=top_n).messages == best


def test_too_long_inputs_are_cut_unless_that_is_refused(server):
    long = "x" * (ENCODER_MAX_LEN + 5)
    for fields in ({}, {"truncate": True}):
        [message] = embed(server.channel, [long], **fields).messages
        assert message.tokens == ENCODER_MAX_LEN
        assert list(message.values) == vector_of(ids_of(long)[:ENCODER_MAX_LEN])
    error = embed(server.channel, ["a", long, [1] * (ENCODER_MAX_LEN + 1)], truncate=False).error
    assert (error.code(), reason(error)) == (Code.INVALID_ARGUMENT, "REQUEST_TOO_LARGE")
    assert broken_fields(error) == ["inputs[1].text", "inputs[2].token_ids"]
    error = rerank(server.channel, "q", ["a", long], truncate=False).error
    assert broken_fields(error) == ["documents[1]"]
    assert rerank(server.channel, "q", ["a", long]).error is None


def sparse_of(message):
    """Return a sparse vector as weights by index, which must ascend."""
    assert message.HasField("sparse")
    assert (len(message.values), message.packed) == (0, b"")
    assert list(message.sparse.indices) == sorted(message.sparse.indices)
    return dict(zip(message.sparse.indices, message.sparse.weights, strict=True))


@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"threshold": 0.75}, {"threshold": 1.0}])
def test_sparse_vectors_come_by_index(server, limits):
    inputs = ["ab", [1, 2, 3], "a longer text", [5]]
    heard = embed(server.channel, inputs, kind="VECTOR_KIND_SPARSE", **limits)
    assert heard.error is None
    assert heard.messages[0].model == "sparse"
    for message, one in zip(heard.by_index(), inputs, strict=True):
        ids = ids_of(one) if isinstance(one, str) else one
        assert sparse_of(message) == weights_of(ids, **limits)


@pytest.mark.parametrize("precision", [None, "PRECISION_BINARY"])
def test_the_vectors_of_a_text_come_one_after_the_other(server, precision):
    inputs = ["ab", [1, 2, 3], [5, 10]]
    kind = {"kind": "VECTOR_KIND_MULTI_VECTOR", "precision": precision}
    heard = embed(server.channel, inputs, **kind, dimensions=4)
    assert heard.error is None
    assert [message.rows for message in heard.by_index()] == [2, 3, 0]
    for message, one in zip(heard.by_index(), inputs, strict=True):
        rows = [row[:4] for row in rows_of(ids_of(one) if isinstance(one, str) else one)]
        assert message.HasField("rows")
        if precision is None:
            assert list(message.values) == [*chain.from_iterable(rows)]
        else:
            assert message.packed == b"".join(in_precision(row, "binary").tobytes() for row in rows)


@pytest.mark.parametrize("model", ["sparse", "multi"])
def test_a_model_that_reads_texts_apart_reranks_by_comparing_them(server, model):
    documents = ["a", "a much longer one", "bb"]
    heard = rerank(server.channel, "q", documents, model=model)
    want = [score_of([*ids_of("q"), SEPARATOR, *ids_of(one)]) for one in documents]
    assert [message.score for message in heard.by_index()] == want
    long = "x" * (ENCODER_MAX_LEN + 5)
    for query, texts in ((long, ["a"]), ("a", ["b", long])):
        assert rerank(server.channel, query, texts, model=model).error is None
        error = rerank(server.channel, query, texts, model=model, truncate=False).error
        assert reason(error) == "REQUEST_TOO_LARGE"
        assert broken_fields(error) == ["query" if query is long else "documents[1]"]


# ---- bad input

E = embed_request
R = rerank_request
BAD = {
    "no inputs": (E([]), ["inputs"]),
    "too many inputs": (E(["a"] * (MAX_INPUTS + 1)), ["inputs"]),
    "an input of nothing": (E(["a", {}]), ["inputs[1]"]),
    "no ids": (E(["a", []]), ["inputs[1].token_ids.ids"]),
    "no dimensions": (E(["a"], dimensions=0), ["dimensions"]),
    "an id of nobody's": (E([[1], [2, 1000]]), ["inputs[1].token_ids.ids[1]"]),
    "too many dimensions": (E(["a"], dimensions=9), ["dimensions"]),
    "an unknown prompt": (E(["a"], prompt_name="z"), ["prompt_name"]),
    "an unknown precision": (E(["a"], precision=99), ["precision"]),
    "ranges reversed": (
        E(["a"], precision=3, ranges={"low": [0, 2], "high": [1, 1]}),
        ["ranges.high[1]"],
    ),
    "ranges of other vectors": (
        E(["a"], precision=4, ranges={"low": [0] * 7, "high": [1] * 7}),
        ["ranges"],
    ),
    "ranges of whole vectors": (
        E(["a"], dimensions=3, precision=4, ranges={"low": [0] * 8, "high": [1] * 8}),
        ["ranges"],
    ),
    "ranges without their use": (E(["a"], ranges={"low": [0], "high": [1]}), ["ranges"]),
    "no number in a range": (
        E(["a"], precision=4, ranges={"low": [float("nan")], "high": [1]}),
        ["ranges.low[0]"],
    ),
    "a text without tokens": (E(["a", "b", "c", ""]), ["inputs[3].text"]),
    "a request id": (E(["a"], request_id="x\n"), ["request_id"]),
    "everything at once": (
        E(["a", [], {}], dimensions=0, request_id="x" * 200, prompt_name="p" * 200),
        ["inputs[2]", "request_id", "inputs[1].token_ids.ids", "dimensions", "prompt_name"],
    ),
    "what the model tells, at once": (
        E([[1000], "a", [0, 2000]], dimensions=99, prompt_name="z"),
        [
            "dimensions",
            "prompt_name",
            "inputs[0].token_ids.ids[0]",
            "inputs[2].token_ids.ids[1]",
        ],
    ),
    "an unknown kind": (E(["a"], kind=99), ["kind"]),
    "a dense vector of few weights": (E(["a"], top_k=3, threshold=0.5), ["top_k", "threshold"]),
    "vectors of few weights": (E(["a"], kind=3, top_k=3), ["top_k"]),
    "several vectors of a sparse model": (E(["a"], model="sparse", kind=3), ["model"]),
    "no weights": (E(["a"], kind=2, top_k=0), ["top_k"]),
    "weights below zero": (E(["a"], kind=2, threshold=-0.5), ["threshold"]),
    "no number of a weight": (E(["a"], kind=2, threshold=float("nan")), ["threshold"]),
    "a sparse vector of another form": (
        E(["a"], kind=2, dimensions=3, normalize=False, precision=2),
        ["dimensions", "normalize", "precision"],
    ),
    "an image's sparse vector": (E(["a", {"image": b"x"}], kind=2), ["inputs[1].image"]),
    "a sparse vector of a dense model": (E(["a"], model="emb", kind=2), ["model"]),
    "a dense vector of a sparse model": (E(["a"], model="sparse"), ["model"]),
    "the model generates": (E(["a"], model="fake"), ["model"]),
    "the model reranks": (E(["a"], model="rank"), ["model"]),
    "no documents": (R("q", []), ["documents"]),
    "too many documents": (R("q", ["a"] * (MAX_INPUTS + 1)), ["documents"]),
    "no query": (R("", ["a"]), ["query"]),
    "no best": (R("q", ["a"], top_n=0), ["top_n"]),
    "the model embeds": (R("q", ["a"], model="emb"), ["model"]),
    "no query and no best": (R("", [], top_n=0), ["documents", "query", "top_n"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_before_any_result(server, name):
    request, fields = BAD[name]
    before = stats(server.channel).step_count
    with Encode(server.channel, request) as call:
        heard = call.finish()
    assert heard.messages == []
    assert heard.error.code() is Code.INVALID_ARGUMENT
    assert broken_fields(heard.error) == fields
    assert stats(server.channel).step_count == before, "nothing was computed"
    assert embed(server.channel, ["a"]).error is None


def test_images_for_a_model_of_texts_are_refused(server):
    heard = embed(server.channel, ["a", {"image": GOOD[0]}], model="emb")
    assert (heard.error.code(), broken_fields(heard.error)) == (Code.INVALID_ARGUMENT, ["model"])
    assert "embeds images" in heard.error.details()
    heard = embed(server.channel, [{"image": GOOD[0]}])
    assert heard.error.code() is Code.NOT_FOUND, "no model that embeds images is configured"


def test_generating_with_an_encoder_is_refused(server):
    error = generate(server.channel, model="emb").error
    assert (error.code(), broken_fields(error)) == (Code.INVALID_ARGUMENT, ["model"])


def test_an_unknown_model_and_one_without_the_capability(server):
    assert embed(server.channel, ["a"], model="who").error.code() is Code.NOT_FOUND
    with fake() as text_only:
        wait_serving(text_only.channel)
        for heard in (embed(text_only.channel, ["a"]), rerank(text_only.channel, "q", ["a"])):
            assert heard.error.code() is Code.NOT_FOUND
            assert reason(heard.error) == "MODEL_NOT_FOUND"


# ---- images

GOOD = [image_file(bytes([number, 9] * 24)) for number in range(5)]
CLIP = ({"name": "fake"}, {"name": "clip", "capability": "image-embedding"})


@pytest.fixture(scope="module")
def images():
    """Yield a server with a model of images. A request may have 1 MiB of images."""
    limits = {"max_message_bytes": 2**16, "max_image_bytes": 2**20}
    with fake(models=CLIP, server=limits) as one:
        wait_serving(one.channel)
        wait_until(lambda: health(one.channel, "model/clip") == SERVING)
        yield one


def test_texts_and_images_come_back_by_their_index(images):
    inputs = ["ab", {"image": GOOD[1]}, [1, 2, 3], {"image": GOOD[0]}]
    heard = embed(images.channel, inputs)
    assert heard.error is None
    ids = [ids_of("ab"), pixels_in(GOOD[1]), [1, 2, 3], pixels_in(GOOD[0])]
    got = heard.by_index()
    assert [list(message.values) for message in got] == [vector_of(one) for one in ids]
    assert [message.tokens for message in got] == [2, IMAGE_TOKENS, 3, IMAGE_TOKENS]
    assert heard.messages[0].model == "clip"


def test_a_text_alone_is_embedded_by_a_model_of_images_too(images):
    for model in ("", "clip"):
        heard = embed(images.channel, ["ab"], model=model)
        assert list(heard.by_index()[0].values) == vector_of(ids_of("ab"))


@pytest.mark.parametrize("name", ["a URL", *BOMBS])
def test_a_hostile_image_is_named_and_others_are_served(images, name):
    before = stats(images.channel).step_count
    data = BOMBS.get(name, b"https://example.com/cat.png")
    heard = embed(images.channel, [{"image": GOOD[0]}, {"image": data}, {"image": b""}])
    assert heard.messages == []
    assert heard.error.code() is Code.INVALID_ARGUMENT
    assert "inputs[2].image" in broken_fields(heard.error)
    heard = embed(images.channel, [{"image": GOOD[0]}, {"image": data}])
    if heard.error is not None:
        is_large = len(data) > 2**20
        fields = [] if is_large else ["inputs[1].image"]
        code = Code.RESOURCE_EXHAUSTED if is_large else Code.INVALID_ARGUMENT
        assert (heard.error.code(), broken_fields(heard.error)) == (code, fields)
        assert stats(images.channel).step_count == before, "nothing was computed"
    assert embed(images.channel, [{"image": GOOD[2]}]).error is None


def test_only_images_make_a_request_larger_than_others_may_be(images):
    large = GOOD[0] + bytes(2**20 - 2**15)  # what follows a PNG's end is not read
    assert embed(images.channel, ["x" * 1000, {"image": large}]).error is None
    for inputs in (["x" * 2**17], [[1] * 2**17], [{"image": b""}] * 2**16, [{"image": large}] * 2):
        error = embed(images.channel, inputs).error
        assert (error.code(), reason(error)) == (Code.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE")
    error = generate(images.channel, text="x" * 2**17).error
    assert reason(error) == "REQUEST_TOO_LARGE"


def test_many_large_images_at_once_wait_for_each_other_and_all_are_embedded(images):
    """Together they have 40 MiB; the server keeps 16 MiB, and other windows stay closed."""
    large = GOOD[0] + bytes(2**20 - 2**12)
    with contextlib.ExitStack() as open_calls:
        calls = [
            open_calls.enter_context(Encode(images.channel, embed_request([{"image": large}])))
            for _ in range(40)
        ]
        assert [call.finish().error for call in calls] == [None] * 40


# ---- streams


def test_two_thousand_inputs_in_one_call_are_held_back_by_its_reader():
    """No more results wait than the stream's buffer holds; others are served meanwhile."""
    count, buffer = 2000, 16
    models = [one | {"script": {"step_s": 0.001}} for one in ENCODERS]
    with fake(models=models, engine={"stream_buffer": buffer, "max_num_seqs": 8}) as server:
        wait_serving(server.channel)

        def is_held(now, others=0):
            return not now.running and now.parked + now.step_rows_total == count + others

        with (
            connect(server.address, *SMALL_WINDOW) as own,
            Encode(own, embed_request([[1 + i % 800, i // 800] for i in range(count)])) as call,
        ):
            assert call.read() is not None
            wait_until(lambda: is_held(stats(server.channel)), 20, "parked")
            assert embed(server.channel, ["a"]).error is None
            wait_until(lambda: is_held(stats(server.channel), 1), 20, "parked")
            # computed are the results that were read, buffered, or taken by the transport
            assert stats(server.channel).step_rows_total < 400
            heard = call.finish()
        assert heard.error is None
        for index, message in enumerate(heard.by_index()):
            assert list(message.values) == vector_of([1 + index % 800, index // 800])
        wait_all_idle(server.channel)


def test_requests_of_many_clients_share_steps():
    with fake(models=ENCODERS, script={"step_s": 0.05}) as server:
        wait_serving(server.channel)
        calls = [Encode(server.channel, embed_request([[i + 1]])) for i in range(40)]
        for i, call in enumerate(calls):
            with call:
                [message] = call.finish().messages
                assert list(message.values) == vector_of([i + 1])
        done = stats(server.channel)
        assert done.step_rows_total == 40
        assert done.step_count < 15


def test_a_live_request_id_is_its_own(server):
    with (
        connect(server.address, *SMALL_WINDOW) as own,
        Encode(own, embed_request([[1]] * 2000, request_id="mine")) as first,
    ):
        first.read()
        error = embed(server.channel, ["a"], request_id="mine").error
        assert (error.code(), reason(error)) == (Code.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        error = rerank(server.channel, "q", ["a"], request_id="mine").error
        assert error.code() is Code.ALREADY_EXISTS
        assert generate(server.channel, request_id="mine").error.code() is Code.ALREADY_EXISTS
    wait_all_idle(server.channel)


def test_priority_goes_first():
    with fake(models=ENCODERS, script={"step_s": 0.1}, engine={"max_num_seqs": 1}) as server:
        wait_serving(server.channel)
        ended_at = {}
        with (
            Encode(server.channel, embed_request([[1]])) as busy,
            Encode(server.channel, embed_request([[2]] * 6)) as usual,
        ):
            wait_until(lambda: stats(server.channel).waiting >= 3)
            with Encode(server.channel, embed_request([[3]], priority=-1)) as urgent:
                for name, call in (("urgent", urgent), ("usual", usual), ("busy", busy)):
                    call.finish()
                    ended_at[name] = time.monotonic()
        assert ended_at["usual"] - ended_at["urgent"] > 0.15


# ---- failures


def test_an_input_that_fails_ends_its_own_request_alone(server):
    heard = embed(server.channel, [[1], [POISONED_ROW], [2]])
    assert (heard.error.code(), reason(heard.error)) == (Code.INTERNAL, "STEP_FAILED")
    assert "scripted" not in heard.error.details()
    assert embed(server.channel, ["a"]).error is None


def test_a_step_that_raises_costs_only_the_request_that_made_it_raise():
    models = [one | {"script": {"step_s": 0.05}} for one in ENCODERS]
    with fake(models=models, may_log="step .* failed|scripted secret|Traceback") as server:
        wait_serving(server.channel)
        with (
            Encode(server.channel, embed_request([[9]])) as first,  # both others wait for its step
            Encode(server.channel, embed_request([[1], [2]])) as good,
            Encode(server.channel, embed_request([[3], [POISONED_STEP]])) as bad,
        ):
            assert first.finish().error is None
            assert good.finish().error is None
            assert [list(one.values) for one in good.by_index()] == [vector_of([1]), vector_of([2])]
            assert reason(bad.finish().error) == "STEP_FAILED"
        assert ended(server.channel) == {"finished": 2, "failed": 1}


# ---- what operators see


def test_models_and_their_capabilities_are_listed(server):
    listed = {model.name: model for model in list_models(server.channel)}
    assert {name: model.capability for name, model in listed.items()} == {
        "fake": pb.CAPABILITY_TEXT_TO_TEXT,
        "emb": pb.CAPABILITY_TEXT_EMBEDDING,
        "rank": pb.CAPABILITY_RERANK,
        "sparse": pb.CAPABILITY_SPARSE_EMBEDDING,
        "multi": pb.CAPABILITY_MULTI_VECTOR_EMBEDDING,
        "moods": pb.CAPABILITY_TEXT_CLASSIFICATION,
        "names": pb.CAPABILITY_TOKEN_CLASSIFICATION,
    }
    for name, model in listed.items():
        others = [pb.CAPABILITY_RERANK] if name in ("sparse", "multi") else []
        others += [pb.CAPABILITY_TEXT_CLASSIFICATION] if name == "rank" else []
        assert list(model.capabilities) == [model.capability, *others]
    assert listed["emb"].replicas[0].threads == 1
    assert listed["emb"].max_model_len == ENCODER_MAX_LEN


def test_an_encoders_tokens_are_counted_under_its_name(server):
    assert tokenize(server.channel, "ab", model="emb") == ids_of("ab")


def test_a_lazy_encoder_is_loaded_once_for_all_requests():
    lazy = {"name": "emb", "capability": "text-embedding", "lazy": True, "script": {"load_s": 0.3}}
    with fake(models=[{"name": "fake"}, lazy]) as server:
        wait_serving(server.channel)
        calls = [Encode(server.channel, embed_request([[i + 1]])) for i in range(5)]
        for call in calls:
            with call:
                assert call.finish().error is None


def test_the_server_serves_while_its_encoders_load():
    slow = [one | {"script": {"load_s": 3.0 * ("capability" in one)}} for one in ENCODERS]
    with fake(models=slow, is_command=True) as server:
        assert health(server.channel) == SERVING
        assert health(server.channel, "model/emb") != SERVING
        assert generate(server.channel, max_tokens=2).error is None
        assert embed(server.channel, ["a"]).error is None
        assert health(server.channel, "model/emb") == SERVING


def test_an_encoder_that_cannot_be_loaded_shows_under_its_own_name():
    broken = {
        "name": "emb", "capability": "text-embedding", "script": {"load_error": "scripted"},
    }  # fmt: skip
    with fake(
        models=[{"name": "fake"}, broken], may_log="model emb failed|scripted|Trace"
    ) as server:
        wait_serving(server.channel)
        error = embed(server.channel, ["a"]).error
        assert (error.code(), reason(error)) == (Code.FAILED_PRECONDITION, "SPAWN_FAILED")
        assert health(server.channel) == SERVING
        assert health(server.channel, "model/emb") != SERVING
        assert generate(server.channel, max_tokens=2).error is None
