"""`grpc_service.client` against a server of fake models, for blocking threads and for asyncio.

The tests check answers, errors with details, deadlines and cancellation.
"""

import asyncio
import inspect
import threading
import time

import grpc
import pytest

from grpc_service import client as public
from grpc_service.client import (
    Aborted,
    AsyncClient,
    AsyncStream,
    CallError,
    Cancelled,
    Client,
    DeadlineExceeded,
    EmbedRequest,
    GenerateRequest,
    InvalidArgument,
    NotFound,
    PemError,
    RerankRequest,
    ResourceExhausted,
    Tls,
    TokenizeRequest,
    Unavailable,
    aio,
    errors,
    messages,
)
from grpc_service.client._generated import blocking
from grpc_service.services.error_status import TABLE
from tests.service.fake_backend import runner
from tests.support.encode_wire import ENCODERS
from tests.support.programs import imported_by
from tests.support.server import fake
from tests.support.wire import ended, wait_idle, wait_until

SILENT = "127.0.0.1:1"  # nobody listens on port 1
LONG = 2000  # tokens: 20 s of steps
CALL_LIMIT_S = 30
SOON_S = 5  # seconds; a longer call has waited for the request's own end


@pytest.fixture(scope="module")
def server():
    """Yield a server with a text model and encoders."""
    settings = {
        "models": ENCODERS,
        "script": {"step_s": 0.01},
        "runner": {"max_model_len": 4096, "num_blocks": 1024},
    }
    with fake(**settings) as one:
        yield one


class OnALoop:
    """An `AsyncClient`, or what its methods return, with the methods of a `Client`."""

    def __init__(self, one, loop):
        self._one, self._loop = one, loop

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.__getattr__("__aexit__")(*failure)

    def __iter__(self):
        return self

    def __next__(self):
        message = self.__getattr__("__anext__")()
        if message is None:
            raise StopIteration
        return message

    def __getattr__(self, name):
        value = getattr(self._one, name)
        if not callable(value):
            return OnALoop(value, self._loop)

        async def call(*given, **fields):
            try:
                found = value(*given, **fields)
                return await found if inspect.isawaitable(found) else found
            except StopAsyncIteration:
                return None

        def wait(*given, **fields):
            future = asyncio.run_coroutine_threadsafe(call(*given, **fields), self._loop)
            found = future.result(CALL_LIMIT_S)
            return OnALoop(found, self._loop) if isinstance(found, AsyncStream) else found

        return wait


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request):
    """Return a function that returns a client for an address."""
    if request.param == "blocking":
        yield Client
        return
    loop = runner().get_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def made(address, settings):
        return AsyncClient(address, **settings)

    def connect_on_the_loop(address, **settings):
        making = asyncio.run_coroutine_threadsafe(made(address, settings), loop)
        return OnALoop(making.result(), loop)

    yield connect_on_the_loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def client(server, connect):
    """Yield a client of the server."""
    with connect(server.address) as one:
        yield one


def on_asyncio(server, main, **settings):
    """Run ``main(client)`` with an AsyncClient."""

    async def bounded():
        async with asyncio.timeout(CALL_LIMIT_S), AsyncClient(server.address, **settings) as one:
            return await main(one)

    return runner().run(bounded())


def story(**fields):
    """Return a request for a short story."""
    return GenerateRequest(
        **{"text": "Once", "sampling": {"max_tokens": 3, "seed": 7}, "model": "fake"} | fields
    )


def cancelled(server):
    """Return how many requests were cancelled so far."""
    return ended(server.channel).get("cancelled", 0)


def endless(**fields):
    """Return a request for more tokens than any test waits for."""
    return story(sampling={"max_tokens": LONG}, **fields)


# ---- answers ---------------------------------------------------------------------------------


def test_a_generation_comes_event_by_event(client):
    events = list(client.generate(story(), timeout=CALL_LIMIT_S))
    assert [event.WhichOneof("event") for event in events] == [
        *("started", "delta", "delta", "delta", "finished"),
    ]
    assert events[-1].finished.reason == messages.FINISH_REASON_LENGTH
    text = "".join(event.delta.text for event in events)
    assert text
    assert client.generate(story(), timeout=CALL_LIMIT_S).text() == text


def test_the_text_of_another_choice(client):
    request = story(n=2, sampling={"max_tokens": 3, "seed": 7, "temperature": 1})
    texts = [client.generate(request, timeout=CALL_LIMIT_S).text(choice) for choice in (0, 1)]
    assert all(texts)
    assert texts[0] != texts[1]


def test_a_chat_takes_mappings_and_messages(client):
    turns = [{"role": "user", "content": "Hi"}]
    sampling = {"max_tokens": 3, "seed": 7}
    text = client.chat(turns, model="fake", sampling=sampling, timeout=CALL_LIMIT_S).text()
    same = [messages.Message(role="user", content="Hi")]
    assert client.chat(same, model="fake", sampling=sampling, timeout=CALL_LIMIT_S).text() == text
    other = [messages.Message(role="user", content="Ho")]
    assert client.chat(other, model="fake", sampling=sampling, timeout=CALL_LIMIT_S).text() != text


def test_a_text_and_a_mapping_stand_for_a_request(client):
    """The client takes the same forms as the engine's own methods."""
    wanted = client.generate(story(), timeout=CALL_LIMIT_S).text()
    sampling = {"max_tokens": 3, "seed": 7}
    mapping = {"text": "Once", "sampling": sampling, "model": "fake"}
    assert client.generate(mapping, timeout=CALL_LIMIT_S).text() == wanted
    assert client.complete("Once", timeout=CALL_LIMIT_S, **sampling) == wanted
    asked = story(sampling={"max_tokens": 9, "seed": 7, "stop": ["x", "y"]})
    assert client.complete(asked, max_tokens=3, stop="z") == wanted
    assert (asked.sampling.max_tokens, list(asked.sampling.stop)) == (9, ["x", "y"])
    with client.generate("Once", timeout=CALL_LIMIT_S) as stream:
        assert next(stream).started
    turns = [{"role": "user", "content": "Hi"}]
    said = client.chat(turns, sampling=sampling, timeout=CALL_LIMIT_S).text()
    assert client.chat("Hi", sampling=sampling, timeout=CALL_LIMIT_S).text() == said
    assert client.chat("Hi", timeout=CALL_LIMIT_S, **sampling).text() == said
    assert client.chat("Hi", sampling={"max_tokens": 9, "seed": 7}, max_tokens=3).text() == said
    assert client.models.get_model("emb").model.name == "emb"
    assert client.control.abort("no-one").results[0].request_id == "no-one"


def test_vectors_scores_and_tokens(client):
    inputs = [{"text": "a"}, {"text": "b"}]
    found = client.embed(EmbedRequest(model="emb", inputs=inputs), timeout=CALL_LIMIT_S)
    assert sorted(vector.index for vector in found) == [0, 1]
    request = RerankRequest(model="rank", query="a", documents=["b", "c", "d"], top_n=2)
    assert len(list(client.rerank(request, timeout=CALL_LIMIT_S))) == 2
    tokens = client.tokenize(TokenizeRequest(model="fake", text="hi"), timeout=CALL_LIMIT_S).tokens
    request = messages.DetokenizeRequest(model="fake", ids=[token.id for token in tokens])
    assert client.detokenize(request, timeout=CALL_LIMIT_S).text == "<105><106>"


MODELS = ["fake", "emb", "rank", "sparse", "multi", "moods", "names"]


def test_models_and_control(client):
    listed = client.models.list_models(timeout=CALL_LIMIT_S).models
    assert [model.name for model in listed] == MODELS
    got = client.models.get_model(messages.GetModelRequest(model="emb"), timeout=CALL_LIMIT_S)
    assert got.model.capability == messages.CAPABILITY_TEXT_EMBEDDING
    unload = messages.UnloadModelRequest(model="emb")
    client.models.unload_model(unload, timeout=CALL_LIMIT_S)
    stages = list(
        client.models.load_model(messages.LoadModelRequest(model="emb"), timeout=CALL_LIMIT_S)
    )
    assert stages[-1].state == messages.MODEL_STATE_READY
    with client.control.watch_stats(timeout=CALL_LIMIT_S) as snapshots:
        assert next(snapshots).totals.total_blocks > 0
    client.control.pause(messages.PauseRequest(mode=messages.PAUSE_MODE_WAIT), timeout=CALL_LIMIT_S)
    replica = client.control.get_stats(timeout=CALL_LIMIT_S).replicas[0]
    assert replica.pause == messages.PAUSE_MODE_WAIT
    client.control.resume(messages.ResumeRequest(), timeout=CALL_LIMIT_S)
    client.control.reset_prefix_cache(messages.ResetPrefixCacheRequest(), timeout=CALL_LIMIT_S)
    answer = client.control.abort(messages.AbortRequest(request_ids=["nobody"]), timeout=9)
    assert answer.results[0].outcome == messages.ABORT_OUTCOME_REMEMBERED


def test_both_clients_have_every_rpc():
    pairs = (
        ("Client", messages.GenerateRequest, {"close", "chat", "complete"}),
        ("ModelsClient", messages.GetModelRequest, set()),
        ("ControlClient", messages.PauseRequest, set()),
    )
    for name, request, more in pairs:
        [service] = request.DESCRIPTOR.file.services_by_name.values()
        rpcs = {_snake(method.name) for method in service.methods}
        for cls in (getattr(blocking, name), getattr(aio, f"Async{name}")):
            assert {one for one in vars(cls) if not one.startswith("_")} == rpcs | more


def _snake(name):
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


# ---- errors ----------------------------------------------------------------------------------


def test_a_refusal_names_the_fields(client):
    with pytest.raises(InvalidArgument) as caught:
        list(client.generate(story(n=17, sampling={"top_p": 2}), timeout=CALL_LIMIT_S))
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert {v.field: v.description for v in error.violations} == {
        "n": "is 17, outside [1, 16]",
        "sampling.top_p": "is 2, outside (0, 1]",
    }
    assert "n: is 17" in str(error)
    assert (error.retry_after_s, error.is_retryable) == (None, False)


def test_an_error_of_a_call_with_one_answer(client):
    with pytest.raises(NotFound) as caught:
        client.models.get_model(messages.GetModelRequest(model="none"), timeout=CALL_LIMIT_S)
    assert caught.value.reason == "MODEL_NOT_FOUND"


def test_an_image_for_a_model_of_texts_is_refused_by_name(client):
    request = EmbedRequest(model="emb", inputs=[{"image": b"png"}])
    with pytest.raises(InvalidArgument) as caught:
        list(client.embed(request, timeout=CALL_LIMIT_S))
    assert [one.field for one in caught.value.violations] == ["model"]


def test_a_full_queue_says_when_to_try_again(connect):
    settings = {"engine": {"max_num_seqs": 1, "max_queued_requests": 1}}
    with (
        fake(**settings, script={"step_s": 0.05}) as server,
        connect(server.address) as client,
        client.generate(endless()) as running,
    ):
        assert next(running).started
        with client.generate(endless()):
            wait_until(lambda: client.control.get_stats(timeout=5).totals.waiting == 1)
            with pytest.raises(ResourceExhausted) as caught:
                list(client.generate(endless(), timeout=CALL_LIMIT_S))
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.is_retryable
    assert caught.value.retry_after_s > 0


def test_an_abort_ends_the_call(client):
    with client.generate(endless(request_id="mine"), timeout=CALL_LIMIT_S) as stream:
        assert next(stream).started.request_id == "mine"
        client.control.abort(messages.AbortRequest(request_ids=["mine"]), timeout=9)
        with pytest.raises(Aborted) as caught:
            list(stream)
    assert caught.value.reason == "ABORTED"


def test_a_missing_server_is_unavailable_and_without_a_reason(connect):
    with connect(SILENT) as client, pytest.raises(Unavailable) as caught:
        client.models.list_models(timeout=CALL_LIMIT_S)
    assert (caught.value.reason, caught.value.is_retryable) == ("", False)
    assert isinstance(caught.value, CallError)


def test_every_code_that_the_server_sends_has_a_class():
    sent = {row.code.name for row in TABLE.values()}
    assert sent == {code.name for code in errors.CLASSES}
    for cls in errors.CLASSES.values():
        assert getattr(public, cls.__name__) is cls


# ---- deadlines and cancellation --------------------------------------------------------------


def test_a_deadline_is_the_servers_too(server, client):
    before = ended(server.channel).get("deadline", 0)
    with pytest.raises(DeadlineExceeded) as caught:
        list(client.generate(endless(), timeout=0.5))
    error = caught.value
    assert error.reason in ("DEADLINE_EXCEEDED", "")  # "": the client's own timer came first
    if error.reason:
        assert (error.phase, error.tokens_done > 0) == ("decode", True)
    wait_until(lambda: ended(server.channel).get("deadline", 0) == before + 1)


def test_leaving_the_block_ends_the_request(server, client):
    before = cancelled(server)
    with client.generate(endless(), timeout=CALL_LIMIT_S) as stream:
        next(stream)
    wait_until(lambda: cancelled(server) == before + 1, SOON_S)
    wait_idle(server.channel)
    with pytest.raises(Cancelled):
        list(stream)


def test_another_thread_cancels(client):
    stream = client.generate(endless(), timeout=CALL_LIMIT_S)
    next(stream)
    threading.Timer(0.2, stream.cancel).start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        list(stream)
    assert time.monotonic() - started < SOON_S


def test_cancelling_the_task_ends_the_request(server):
    before = cancelled(server)

    async def main(client):
        begun = asyncio.Event()

        async def read():
            async for _ in client.generate(endless(), timeout=CALL_LIMIT_S):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: cancelled(server) == before + 1, SOON_S)

    on_asyncio(server, main)


def test_a_stream_that_another_task_cancels_does_not_cancel_its_reader(server):
    async def main(client):
        stream = client.generate(endless(), timeout=CALL_LIMIT_S)
        await anext(stream)
        asyncio.get_running_loop().call_later(0.2, stream.cancel)
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        assert asyncio.current_task().cancelling() == 0

    on_asyncio(server, main)


# ---- the connection --------------------------------------------------------------------------


def test_a_unix_socket(tmp_path, connect):
    path = str(tmp_path / "socket")
    with fake(server={"uds": path}), connect(f"unix:{path}") as client:
        assert client.generate(story(), timeout=CALL_LIMIT_S).text()


def test_a_message_limit_holds_for_sent_messages(server, connect):
    with connect(server.address, max_message_bytes=2000) as client:
        assert client.tokenize(TokenizeRequest(text="x" * 20), timeout=9).tokens
        with pytest.raises(ResourceExhausted) as caught:
            client.tokenize(TokenizeRequest(text="x" * 3000), timeout=9)
        assert not caught.value.reason


def test_broken_tls_files_are_found_at_once(tmp_path):
    broken = tmp_path / "ca.pem"
    broken.write_text("nothing")
    with pytest.raises(PemError, match=r"ca\.pem holds no PEM certificate"):
        Client("localhost", tls=Tls(ca=str(broken)))
    with pytest.raises(ValueError, match="given together"):
        Client("localhost", tls=Tls(cert="a.pem"))


def test_the_client_imports_neither_engine_nor_trio_nor_torch():
    heavy = {"engine", "trio", "torch", "h2", "numpy"}
    assert not heavy & imported_by("import grpc_service.client")


def test_the_client_exports_every_message_and_value():
    of_files = ("Capability", "GenerateImageRequest", "GenerateRequest", "Model", "PauseRequest")
    files = {getattr(messages, name).DESCRIPTOR.file.name for name in of_files}
    assert len(files) == len(of_files)
    for name in of_files:
        file = getattr(messages, name).DESCRIPTOR.file
        names = {*file.message_types_by_name, *file.enum_types_by_name}
        names |= {v.name for enum in file.enum_types_by_name.values() for v in enum.values}
        assert names <= set(messages.__all__)
    assert all(hasattr(messages, name) for name in messages.__all__)
