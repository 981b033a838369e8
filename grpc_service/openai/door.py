"""The application of the HTTP port: which request goes where, and what precedes and follows it.

Life of a request: its headers come → Host, Origin and key are checked → the body is read, within
its limits → it is parsed and translated, in a thread if it is large → the engine has the request,
and `grpc_service.services.call_writer` writes its events → one line in the log, whatever happened.

Rule 1: admission is that of an RPC (`Route.rpc`), by the policy of gRPC's door. Rule 2: nothing of
a request that is not admitted is parsed. Rule 3: what is raised becomes an answer here alone.
Rule 4: a web page of another origin gets nothing, unless ``--openai-origin`` names it: neither by
a form, since bodies are JSON by their type, nor by a name that it lets point to this machine.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import trio

from engine import logs
from engine.errors import (
    DeadlineInfeasible,
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    Overloaded,
    ShuttingDown,
    TrioletError,
    Unsupported,
)
from engine.requests.stream import server_deadline
from grpc_service.access import access_log, policy
from grpc_service.addresses import is_loopback
from grpc_service.openai import (
    classify_codec,
    encode_codec,
    models,
    static_page,
    text_codec,
    vectors_codec,
)
from grpc_service.openai.call import ID_HEADER, HttpCall, HttpRecord
from grpc_service.openai.connection import BYTE_S
from grpc_service.openai.errors import CANCELLED, CODES, HttpError, renamed
from grpc_service.openai.json_text import encode_json, parse_json
from grpc_service.openai.operator import OPERATOR, Operator
from grpc_service.openai.work import Context
from grpc_service.rpc import accounts
from grpc_service.rpc.errors import Disconnected
from grpc_service.rpc.status import StatusCode
from grpc_service.services.call_writer import CallWriter, encode_in_thread

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from grpc_service.access.decoding import Decoding
    from grpc_service.access.interceptor import Record
    from grpc_service.access.keys import KeyRing
    from grpc_service.openai.connection import HttpConnection
    from grpc_service.openai.work import Work
    from grpc_service.rpc.connection import Shared
    from grpc_service.services.backend import Backend

    Decode = Callable[[dict[str, Any], Context], Work]

log = logging.getLogger(__name__)

# Larger bodies are decoded in a thread. The worst body of this size takes about 3 ms to decode; a
# thread's start and answer take 0.2 ms.
SMALL_BYTES = 2**14
OK = 200
LOST_WORK = 100.0  # points of a request that was computed and failed, or was left. Guess.
USELESS_S = 8e-4  # processor time of a request that is refused, or asks for the health. Measured.
# With these the engine refuses a request.
REFUSALS = (
    *(InvalidRequest, Unsupported, ModelNotFound, DuplicateRequest),
    *(Overloaded, DeadlineInfeasible),
)
INFERENCE = "triolet.v1.Inference/"
RESPONSES = "this server has no /v1/responses; send the conversation to /v1/chat/completions"


class Answers(NamedTuple):
    """What the door asks the application for: whether the server takes requests, its version, and
    the metrics in Prometheus' text."""

    is_healthy: Callable[[], bool]
    version: str
    metrics: Callable[[], Awaitable[bytes]]


class Route(NamedTuple):
    """A path's request. ``rpc`` is the RPC whose admission it has, "" for a probe. ``decode``
    translates the body; a route without it answers by ``reply``."""

    verb: str
    rpc: str
    decode: Decode | None = None
    reply: Callable[[HttpCall], Awaitable[None]] | None = None
    takes_images: bool = False


class Access(NamedTuple):
    """Who may call: the ``keys``, None without; the ``origins`` whose pages may; and whether the
    port is this machine's alone, so that only this machine's names are Hosts. ``has_holders``:
    clients have keys or certificates, so that the server's metrics, which are of all holders, are
    for operators."""

    keys: KeyRing | None
    origins: frozenset[str]
    is_local: bool
    has_holders: bool = False


class Door:
    """Serves HTTP requests. ``calls`` counts those that have ended, by path and name of the code;
    ``record`` gets what the log gets of each. ``max_bytes`` bounds a body without its images,
    ``max_image_bytes`` these."""

    def __init__(
        self,
        backend: Backend,
        shared: Shared,
        access: Access,
        answers: Answers,
        *,
        decoding: Decoding,
        calls: Counter[tuple[str, str]],
        record: Record | None,
        max_bytes: int,
        max_image_bytes: int,
    ) -> None:
        self._backend = backend
        self._shared = shared
        self._access = access
        self._answers = answers
        self._decoding = decoding
        self._calls = calls
        self._record = record
        self._max_bytes = max_bytes
        self._max_image_bytes = max_image_bytes
        self._routes = self._make_routes()

    def _make_routes(self) -> dict[str, Route]:
        generate = f"{INFERENCE}Generate"
        chat = Route("POST", generate, text_codec.decode_chat, takes_images=True)
        text = Route("POST", generate, text_codec.decode_completion)
        embed = Route("POST", f"{INFERENCE}Embed", encode_codec.decode_embeddings)
        rerank = Route("POST", f"{INFERENCE}Rerank", encode_codec.decode_rerank)
        classify = Route("POST", f"{INFERENCE}Classify", classify_codec.decode_classify)
        draw = Route("POST", f"{INFERENCE}GenerateImage", encode_codec.decode_images)
        has_holders = self._access.has_holders
        measure = f"{policy.CONTROL}GetStats" if has_holders else "triolet.v1.Models/ListModels"
        return {
            "/v1/chat/completions": chat,
            "/v1/completions": text,
            "/v1/embeddings": embed,
            "/embed_sparse": Route("POST", embed.rpc, vectors_codec.decode_embed_sparse),
            "/pooling": Route("POST", embed.rpc, vectors_codec.decode_pooling),
            "/v1/rerank": rerank,
            "/rerank": rerank,
            "/v2/rerank": rerank,
            "/v1/classify": classify,
            "/classify": classify,
            "/v1/images/generations": draw,
            "/v1/models": Route("GET", "triolet.v1.Models/ListModels", reply=self._list_models),
            f"{models.PREFIX}…": Route("GET", "triolet.v1.Models/GetModel", reply=self._show_model),
            "/metrics": Route("GET", measure, reply=self._show_metrics),
            "/health": Route("GET", "", reply=self._show_health),
            "/version": Route("GET", "", reply=self._show_version),
            **{path: Route("GET", "", reply=show) for path, show in static_page.replies().items()},
            **{
                path: Route(verb, rpc, reply=reply)
                for path, (verb, rpc, reply) in Operator(self._backend).replies().items()
            },
        }

    def _name(self, call: HttpCall) -> None:
        """Set the name that the log and the metrics have for a request: its route's. No path of a
        client's becomes one."""
        path = call.method
        if path.startswith(models.PREFIX):
            call.name, call.method = path.removeprefix(models.PREFIX), models.PREFIX + "…"
        elif path not in self._routes:
            call.name, call.method = path, "/…"

    def _route_of(self, call: HttpCall) -> Route:
        """Return the route of a request that has a name.

        Raises:
            HttpError: there is none, or the path has another verb.
        """
        route = self._routes.get(call.method)
        if route is None:
            is_responses = call.name.startswith("/v1/responses")
            told = RESPONSES if is_responses else f"this server has no {call.name[:100]}"
            raise HttpError(404, "NOT_FOUND", told)
        if call.verb != route.verb and not (call.verb == "HEAD" and route.verb == "GET"):
            allowed = [(b"allow", route.verb.encode())]
            raise HttpError(
                405, "METHOD_NOT_ALLOWED", f"{call.method} takes {route.verb} alone", allowed
            )
        return route

    # ---- the application

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Any],
        send: Callable[[Any], Any],
        connection: HttpConnection,
    ) -> None:
        """Serve one request to its end. Raises nothing but cancellation.

        Cancellation: the connection's end, or the server's.
        """
        call = HttpCall(scope, receive, send, connection)
        self._name(call)
        record = HttpRecord.of(call)
        connection.arrivals.add(call)
        connection.num_calls += 1
        with self._accounting(record):
            try:
                async with trio.open_nursery() as nursery:
                    with call.scope:
                        try:
                            await self._serve(call, record, nursery)
                        except Disconnected:
                            call.is_lost = call.code is None
                    nursery.cancel_scope.cancel(reason="the call has ended")
            finally:
                record.call = None  # else call and record would wait for the collector
        await call.linger()

    async def _serve(self, call: HttpCall, record: HttpRecord, nursery: trio.Nursery) -> None:
        try:
            await call.connection.pay_owed()
            origin = self._check_origin(call)
            if call.verb == "OPTIONS":
                await self._pay(call)
                await self._answer_preflight(call, origin)
                return
            route = self._route_of(call)
            if call.num_keys > 1:
                raise HttpError(400, "INVALID_REQUEST", "the request has two keys, or two holders")
            metadata = _metadata_of(call)
            record.quota, record.is_operator = policy.admit(
                route.rpc, call.peer, metadata, self._access.keys, call.connection.certified
            )
            call.only_of = record.only_of
            call.is_closing |= self._backend.engine.is_draining
            if route.reply is not None:
                if route.verb == "POST":
                    _check_type(call)
                await self._pay(call)
                await route.reply(call)
            else:
                await self._shared.start_limiter.enter(call.connection.address)
                await self._serve_body(call, record, route, nursery)
            await call.finish()
        except Disconnected:
            raise
        except Exception as error:
            call.free_body()
            if isinstance(error, (TrioletError, HttpError)):  # of a bug the log has all
                _forget(error)
            if record.stream is None or isinstance(error, REFUSALS):
                record.leave_quota()  # the holder's next request has no part in the wait
                await self._pay(call)  # one that was accepted is told of its end at once
            await call.fail(error)
            _forget(error)
            await call.finish()

    async def _pay(self, call: HttpCall) -> None:
        """Wait for the client's turn in the loop's time for work that serves no request, such as
        refusals (D21); once for each request. Cancellation: safe."""
        if call.has_paid:
            return
        call.has_paid = True
        seconds = USELESS_S + BYTE_S * call.num_read
        await self._shared.overhead.enter(call.connection.address, seconds)

    async def _serve_body(
        self, call: HttpCall, record: HttpRecord, route: Route, nursery: trio.Nursery
    ) -> None:
        if self._backend.engine.is_draining:
            raise ShuttingDown("the server takes no new requests", retry_after_s=5.0)
        _check_type(call)
        call.request_id = record.request_id = _id_of(call)
        call.read_timeout()
        extra = 4 * (self._max_image_bytes // 3 + 1) if route.takes_images else 0
        body = await call.read_body(self._max_bytes + extra)
        nursery.start_soon(call.watch)
        record.arrived_at = trio.current_time()
        work = await self._work_of(call, record, route, body)
        del body
        record.request_id = work.request_id
        logs.request_id.set(logs.printable(work.request_id))
        call.request_id = work.request_id
        work.check_fits(record.quota)
        record.enter_quota(len(work.requests))  # each prompt is a request, as on gRPC
        if work.is_stream:
            call.begin_events()
        await self._write(call, record, work)

    async def _work_of(self, call: HttpCall, record: HttpRecord, route: Route, body: bytes) -> Work:
        context = Context(
            call.request_id,
            call.time_remaining(),
            int(time.time()),
            self._max_image_bytes,
        )

        def decode(data: bytes) -> Work:
            assert route.decode is not None
            work = route.decode(parse_json(data), context)
            if len(data) - work.num_chars > self._max_bytes:
                size = len(data) - work.num_chars
                told = f"the request has {size} bytes beside its images, of at most "
                raise HttpError(413, "REQUEST_TOO_LARGE", f"{told}{self._max_bytes}")
            return work

        if len(body) <= SMALL_BYTES:
            call.free_body()
            return decode(body)

        async def take() -> bytes:
            call.free_body()
            return body

        def answer_frees(free: Callable[[], None]) -> None:
            call.on_answer = free

        deadline = server_deadline(record.arrived_at, call.time_remaining())
        owner = record.quota or record.address
        work: Work = await self._decoding.in_thread(
            decode, take, len(body), owner, deadline, answer_frees
        )
        return work

    async def _write(self, call: HttpCall, record: HttpRecord, work: Work) -> None:
        """Have the requests computed, and write their events. The first one that fails ends the
        others."""
        if len(work.requests) == 1:
            await self._write_one(record, work, 0, None)
            return
        turns, failed, writers = trio.Lock(), list[Exception](), list[HttpWriter]()

        async def serve(source: int, scope: trio.CancelScope) -> None:
            own = HttpRecord.of(call)
            own.quota, own.arrived_at = record.quota, record.arrived_at
            try:
                await self._write_one(own, work, source, turns, writers)
            except Exception as error:
                failed.append(error)
                scope.cancel(reason="another prompt has failed")
            finally:
                if record.stream is None:
                    record.stream = own.stream
                elif own.stream is not None:
                    seconds = trio.current_time() - own.arrived_at
                    record.others += (own.stream.account(seconds),)

        with _settling(writers):
            async with trio.open_nursery() as nursery:
                for source in range(len(work.requests)):
                    nursery.start_soon(serve, source, nursery.cancel_scope)
        if failed:
            raise failed[0]

    async def _write_one(
        self,
        record: HttpRecord,
        work: Work,
        source: int,
        turns: trio.Lock | None,
        writers: list[HttpWriter] | None = None,
    ) -> None:
        encoder = work.encoder
        writer = HttpWriter(
            record,
            self._backend.unread_calls,
            partial(encoder.encode, source),
            partial(encoder.encode_short, source),
            is_heavy=encoder.is_heavy,
            turns=turns,
        )
        if writers is not None:
            writers.append(writer)
        try:
            await writer.serve(self._backend.engine, work.requests[source])
        except (InvalidRequest, Unsupported) as error:
            raise renamed(error, partial(work.rename, source)) from None

    @contextlib.contextmanager
    def _accounting(self, record: HttpRecord) -> Iterator[None]:
        """Count the request and write its line when it ends."""
        started_at, call = time.monotonic(), record.call
        assert call is not None
        try:
            yield
        finally:
            call.connection.num_calls -= 1
            call.connection.note_taken(call)
            call.on_answer()
            call.free_body()
            _settle(call, has_work=record.stream is not None)
            record.leave_quota()
            code = CODES.get(call.code or CANCELLED, StatusCode.UNKNOWN.name)
            record.method = call.method
            self._calls[record.method, code] += 1
            fields = access_log.fields_of(record, code, time.monotonic() - started_at)
            access_log.write(record, fields)
            if self._record is not None and record.method.startswith(policy.HTTP_USES):
                self._record(fields, _metadata_of(call), record.logged_id)

    # ---- web pages

    def _check_origin(self, call: HttpCall) -> str:
        """Return the Origin of a page that may call, "" if the request comes from no other page.

        Raises:
            NotAllowed: the page is of another origin, or the request names another host.
        """
        host = call.headers.get(b"host", b"").decode("latin-1")
        # An operator without a key is known by the loopback address alone, which a page has, too.
        is_operating = call.method.startswith(OPERATOR)
        is_trusted = is_operating and self._access.keys is None and policy.is_local(call.peer)
        if (self._access.is_local or is_trusted) and not _is_this_machine(host):
            raise NotAllowed(f"this server is not {host[:100]!r}; call it localhost or 127.0.0.1")
        origin = call.headers.get(b"origin", b"").decode("latin-1")
        if not origin or (origin in self._access.origins and not is_operating):
            if origin:
                call.extra_headers += [
                    (b"access-control-allow-origin", origin.encode("latin-1")),
                    (b"access-control-expose-headers", b"x-request-id, retry-after"),
                    (b"vary", b"origin"),
                ]
            return origin
        with contextlib.suppress(ValueError):  # it is no origin
            if urlsplit(origin).netloc == host:
                return ""
        raise NotAllowed("pages of this origin may not call (--openai-origin)")

    async def _answer_preflight(self, call: HttpCall, origin: str) -> None:
        # OpenAI's client for pages sends a dozen headers of its own (x-stainless-…).
        wanted = call.headers.get(b"access-control-request-headers", b"authorization, content-type")
        allowed = [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"600"),
        ]
        await call.answer(204 if origin else 403, b"", headers=allowed if origin else ())
        await call.finish()

    # ---- short answers

    async def _list_models(self, call: HttpCall) -> None:
        await call.answer(200, encode_json(models.encode_models(self._backend.engine)))

    async def _show_model(self, call: HttpCall) -> None:
        shown = models.encode_one(self._backend.engine, call.name)
        if shown is None:
            raise ModelNotFound(f"there is no model {call.name[:100]!r}")
        await call.answer(200, encode_json(shown))

    async def _show_health(self, call: HttpCall) -> None:
        is_healthy = self._answers.is_healthy()
        state = {"status": "serving" if is_healthy else "not serving"}
        await call.answer(200 if is_healthy else 503, encode_json(state))

    async def _show_version(self, call: HttpCall) -> None:
        await call.answer(200, encode_json({"version": self._answers.version}))

    async def _show_metrics(self, call: HttpCall) -> None:
        text = await self._answers.metrics()
        await call.answer(200, text, b"text/plain; version=0.0.4; charset=utf-8")


class HttpWriter(CallWriter):
    """Writes to an HTTP request. ``is_heavy`` says whether events take long to encode. ``turns`` is
    held while events are encoded and written, if one answer has several writers: they share its
    encoder, and what it makes of the last event must be written last."""

    def __init__(
        self, *given: Any, is_heavy: Callable[[Sequence[Any]], bool], turns: trio.Lock | None
    ) -> None:
        super().__init__(*given)
        self._is_heavy = is_heavy
        self._turns = turns

    async def _write(self, events: Sequence[Any]) -> None:
        async with self._turns or contextlib.nullcontext():
            await super()._write(events)

    async def _fail(self, error: Exception) -> None:
        """Leave the answer to the door."""
        raise error

    def _cancel(self) -> None:
        """End the request as the class. If its events are in a part of the answer that another
        writer has to write, `settle` does it."""
        if not (self._is_answered and self._batch):
            super()._cancel()

    def _tell_usage(self) -> None:
        """Do nothing: the answer itself has the tokens, and clients of HTTP read no trailers."""

    @property
    def has_answered(self) -> bool:
        """Whether every event of the request was encoded, and written unless another writer has
        to."""
        return self._is_answered

    def settle(self, *, is_sent: bool) -> None:
        """Take note whether the whole answer was sent."""
        if self._is_answered and self._batch:
            self._batch = [] if is_sent else self._batch
            super()._cancel()

    async def _messages_of(self, events: Sequence[Any]) -> Iterable[Any]:
        if not self._is_heavy(events):
            return self._encode(events)
        return await encode_in_thread(lambda: self._encode(events))


@contextlib.contextmanager
def _settling(writers: Sequence[HttpWriter]) -> Iterator[None]:
    """Settle the writers of one answer, which is sent by the block's end or not at all."""
    is_sent = False
    try:
        yield
        is_sent = all(writer.has_answered for writer in writers)
    finally:
        for writer in writers:
            writer.settle(is_sent=is_sent)


def _settle(call: HttpCall, *, has_work: bool) -> None:
    """Take note of what a call was worth to its connection (`grpc_service.rpc.accounts`). Work that
    was answered pays for a connection, because many clients open one for each request."""
    account = call.connection.account
    account.earn(accounts.SENT_DATA * call.num_parts)
    if has_work and call.code == OK:
        account.earn(accounts.CONNECTION)
    elif has_work:
        account.owe(LOST_WORK)


def _check_type(call: HttpCall) -> None:
    """Raise HttpError unless the body says that it is JSON, as no form of a web page can."""
    kind = call.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        told = "the body's Content-Type must be application/json"
        raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", told)
    if b"content-encoding" in call.headers:
        raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", "compressed bodies are not read")


def _forget(error: Exception) -> None:
    """Drop what an error refers to: frames and a parser's error hold the body of the request, which
    would wait for the client's turn to pay and, as frames of threads are in cycles with their
    errors, for the collector."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _metadata_of(call: HttpCall) -> list[tuple[str, str | bytes]]:
    return [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in call.headers.items()
    ]


def _id_of(call: HttpCall) -> str:
    """Return the id that the client gave its request, or a new one."""
    return call.headers.get(ID_HEADER, b"").decode("latin-1") or uuid.uuid4().hex


def _is_this_machine(host: str) -> bool:
    """Return whether a Host names this machine, whatever its port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    name = name.removesuffix(".")  # of an absolute name
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)
