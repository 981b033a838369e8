"""`Engine.embed` and `Engine.rerank` in process, in Trio and for blocking threads, on fakes."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import trio
import trio.testing

from engine.api.engine import open_engine
from engine.api.handles import CrossEncoder, Encoder
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.errors import (
    DeadlineExceeded,
    InvalidRequest,
    RequestCancelled,
    RequestTooLarge,
    ShuttingDown,
)
from engine.requests.encode import prepare
from engine.requests.encode import stream as encode_stream
from engine.requests.encode.values import Embedding, EmbedRequest, RerankRequest, Score
from engine.requests.text.values import Started
from engine.status import Capability
from engine.worker.fakes.encode import SEPARATOR, FakeEncoder, score_of, vector_of
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.support.bodies import run_by
from tests.support.facades import in_asyncio, in_threads

INPUTS = tuple((i + 1, 2) for i in range(30))


def config(**fields):
    """Return the configuration of a text model and three encoders."""
    models = (
        ModelConfig("fake"),
        ModelConfig("emb", capability=Capability.TEXT_EMBEDDING),
        ModelConfig("rank", capability=Capability.RERANK),
        ModelConfig("multi", capability=Capability.MULTI_VECTOR_EMBEDDING),
    )
    return EngineConfig(models=models, check_level=2, **fields)


def make_runner_with(script):
    """Return a maker of fake runners with this script."""

    def make_runner(model, config):
        if model.capability is not None:
            return FakeEncoder(model.capability, script=script)
        return FakeRunner()

    return make_runner


def drive(main, *, script=None, **fields):
    """Run ``main(engine)``, and check that nothing is left in any scheduler at its end."""

    async def run():
        make_runner = make_runner_with(script or FakeScript())
        with trio.fail_after(20):
            async with open_engine(config(**fields), make_runner=make_runner) as engine:
                await main(engine)
                await engine.wait_idle()
                totals = engine.statistics().totals
                assert (totals.running, totals.waiting, totals.parked, totals.ending) == (0,) * 4

    trio.run(run)


in_engine = partial(run_by, drive)


def score_ids(text):
    """Return the token ids of a query with a document."""
    return [ord("q") + 1, SEPARATOR, *(byte + 1 for byte in text.encode())]


@in_engine(in_process_buffer=4, max_num_seqs=7)
async def test_a_stream_of_vectors(engine):
    async with engine.embed(EmbedRequest(inputs=INPUTS)) as stream:
        events = [event async for event in stream]
    assert isinstance(events[0], Started)
    assert (events[0].model, events[0].prompt_tokens) == ("emb", 60)
    assert isinstance(events[-1], Finished)
    vectors = {one.index: list(one.values) for one in events[1:-1]}
    assert vectors == {i: vector_of(ids) for i, ids in enumerate(INPUTS)}


@in_engine(in_process_buffer=4)
async def test_a_stream_of_scores_and_of_the_best(engine):
    documents = tuple(f"document {i}" for i in range(20))
    request = RerankRequest(query="q", documents=documents)
    async with engine.rerank(request) as stream:
        scores = [event async for event in stream if isinstance(event, Score)]
    assert sorted(scores) == [Score(i, score_of(score_ids(d))) for i, d in enumerate(documents)]
    best = RerankRequest(query="q", documents=documents, top_n=3)
    async with engine.rerank(best) as stream:
        got = [event async for event in stream if isinstance(event, Score)]
    assert got == sorted(scores, key=lambda one: -one.score)[:3]


@in_engine(in_process_buffer=64)
async def test_the_vectors_of_tokens_that_wait_for_a_reader_are_bounded_in_bytes(engine):
    """The buffer would hold all of them."""
    inputs = tuple((i + 1, 1, 2, 3) for i in range(30))
    request = EmbedRequest(model="multi", kind="multi-vector", inputs=inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_stream, "WAITING_BYTES_MAX", 3 * 4 * 8 * 4)
        async with engine.embed(request) as stream:
            assert isinstance(await anext(stream), Started)
            while not engine.statistics().totals.parked:
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert engine.statistics().totals.parked == 27
            vectors = {one.index async for one in stream if isinstance(one, Embedding)}
    assert vectors == set(range(30))


@in_engine()
async def test_vectors_of_tokens_beyond_a_message_are_refused_by_their_input(engine):
    fields = {"model": "multi", "kind": "multi-vector", "inputs": ((1,), (2,) * 11, (3,) * 10)}

    async def read(**more):
        async with engine.embed(EmbedRequest(**fields, **more)) as stream:
            return [event async for event in stream]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "MATRIX_BYTES_MAX", 10 * 8 * 4)
        with pytest.raises(RequestTooLarge, match="a smaller precision") as caught:
            await read()
        assert [one.field for one in caught.value.violations] == ["inputs[1]"]
        for more in ({"precision": "float16"}, {"dimensions": 7}):
            assert len(await read(**more)) == 5


async def test_token_ids_have_the_limit_of_a_text_in_their_role():
    def make_runner(model, config):
        runner = FakeEncoder(model.capability)
        runner.info = replace(runner.info, query_len=2, document_len=4)
        return runner

    models = ModelConfig("multi", capability=Capability.MULTI_VECTOR_EMBEDDING)
    fields = {"model": "multi", "kind": "multi-vector", "inputs": ((1, 2, 3, 4, 6),)}
    async with open_engine(EngineConfig(models=models), make_runner=make_runner) as engine:
        for name, most in (("query", 2), ("", 4)):
            async with engine.embed(EmbedRequest(prompt_name=name, **fields)) as stream:
                _, vectors, _ = [event async for event in stream]
            assert (vectors.tokens, vectors.rows) == (most, most)
            cut = EmbedRequest(prompt_name=name, truncate=False, **fields)
            with pytest.raises(RequestTooLarge, match=f"of at most {most}"):
                async with engine.embed(cut) as stream:
                    await anext(stream)


@in_engine(script=FakeScript(step_s=0.02), max_num_seqs=1)
async def test_leaving_the_block_ends_the_request(engine):
    async with engine.embed(EmbedRequest(inputs=INPUTS)) as stream:
        async for event in stream:
            if isinstance(event, Embedding):
                break
    with pytest.raises(RequestCancelled):
        await anext(stream)
    assert engine.num_live <= 1
    await engine.wait_idle()
    ends = engine.statistics().totals.requests_total
    assert (ends.cancelled, ends.finished) == (1, 0)


@in_engine(script=FakeScript(step_s=0.05), max_num_seqs=1)
async def test_a_deadline_and_a_refusal_are_raised_where_the_stream_is_read(engine):
    async def read_all():
        async with engine.embed(EmbedRequest(inputs=INPUTS, timeout_s=0.2)) as stream:
            async for _ in stream:
                pass

    with pytest.raises(DeadlineExceeded) as caught:
        await read_all()
    assert caught.value.phase == "encode"
    with pytest.raises(InvalidRequest, match="dimensions"):
        async with engine.embed(EmbedRequest(inputs=("a",), dimensions=99)) as stream:
            await anext(stream)


@in_engine()
async def test_handles_use_the_streams(engine):
    async with Encoder(engine) as encoder, CrossEncoder(engine) as ranker:
        vectors = await encoder.embed(["a", "bb"])
        assert vectors == (tuple(vector_of([98])), tuple(vector_of([99, 99])))
        scores = await ranker.rank("q", ["a", "bb"])
        assert scores == tuple(score_of(score_ids(text)) for text in ("a", "bb"))


@pytest.mark.parametrize("facade", [in_asyncio, in_threads], ids=lambda one: one.__name__)
def test_streams_and_handles_of_both_facades(facade):
    async def main():
        fields, make_runner = config(in_process_buffer=4), make_runner_with(FakeScript())
        async with await facade(
            lambda module: module.open_engine(fields, make_runner=make_runner)
        ) as engine:
            events = [event async for event in engine.embed(EmbedRequest(inputs=INPUTS))]
            vectors = {one.index: list(one.values) for one in events if isinstance(one, Embedding)}
            assert vectors == {i: vector_of(ids) for i, ids in enumerate(INPUTS)}
            request = RerankRequest(query="q", documents=("a", "bb", "ccc") * 5, top_n=2)
            best = [one async for one in engine.rerank(request) if isinstance(one, Score)]
            assert len(best) == 2
            assert best[0].score >= best[1].score
            assert await engine.encoder().embed(["a"]) == (tuple(vector_of([98])),)
            assert await engine.cross_encoder().rank("q", ["a"]) == (score_of(score_ids("a")),)
            async with engine.embed(EmbedRequest(inputs=INPUTS)) as stream:
                await anext(stream)
        with pytest.raises(ShuttingDown):
            await anext(engine.embed(EmbedRequest(inputs=INPUTS)))

    asyncio.run(main(), debug=True)
