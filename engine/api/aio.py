"""The engine for asyncio programs: web applications, notebooks, actors.

    async with engine.aio.open_engine(config) as eng:
        async for event in eng.generate(request):
            ...

Rule 1: `engine.api.portal` has the engine's Trio thread, and `engine.api.crossing` what passes
between that thread and event loops; this file is the surface. The surface for threads that block
is generated from it, with `engine.api.waiting` for crossing (`tools/regen_faces.py`).
Rule 2: any number of loops, in any threads, may use one engine; each stream belongs to the loop
that was running when the stream was made.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from engine.api import engine as api
from engine.api import handles
from engine.api.arguments import completion_request, request_of
from engine.api.crossing import Reply, Stream, Streams, end_silently_at_exit, wait_end
from engine.api.handle import Handle
from engine.api.portal import Portal
from engine.config import engine_config
from engine.core.text.types import Tokens
from engine.errors import ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
    from typing import Self

    from engine.api.portal import Feed, Source
    from engine.config import EngineConfig, ModelConfig
    from engine.core.common.events import PauseMode
    from engine.core.common.types import Explanation
    from engine.pool.loader import RunnerFactory
    from engine.requests.encode.classify_values import ClassifyEvent, ClassifyRequest
    from engine.requests.encode.values import EmbedEvent, EmbedRequest, RerankEvent, RerankRequest
    from engine.requests.image_generation.values import DrawRequest, ImageGenerationEvent
    from engine.requests.kind import ClientRequest
    from engine.requests.text.chat_values import Chat as ChatMessages
    from engine.requests.text.values import GenerateRequest, SamplingParams, StreamEvent
    from engine.status import AbortOutcome, EngineStatistics, ModelStatus
    from engine.worker.interface import TokenSpan

T = TypeVar("T")


# ---- waiting for the engine


class _Caller:
    """Asks the engine on behalf of tasks that wait for its answers."""

    def __init__(self, portal: Portal) -> None:
        self.portal = portal
        self.streams = Streams(portal)

    async def ask(self, question: Callable[[api.Engine], T]) -> T:
        """Return the result of a function that does not wait, called on the engine's thread.

        Cancellation: the function may have been called.
        """
        reply: Reply[T] = Reply()
        return await self._wait(reply, partial(self.portal.ask, question, reply))

    async def call(self, job: Callable[[api.Engine], Awaitable[T]]) -> T:
        """Return the result of an async function, awaited on the engine's thread.

        Cancellation: cancels the function as well.
        """
        reply: Reply[T] = Reply()
        return await self._wait(reply, partial(self.portal.call, job, reply))

    async def _wait(self, reply: Reply[T], post: Callable[[], None]) -> T:
        try:
            post()
            try:
                take = await reply.wait()
            except BaseException:  # above all a cancellation
                self.portal.abandon(reply)
                raise
            return take()
        except ShuttingDown:
            await end_silently_at_exit()
            raise


# ---- the engine


class _Block:
    """An object that is closed at the end of its ``async with`` block."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Engine(_Block):
    """A running engine, for asyncio programs; made by `open_engine`. Tasks of any event loop may
    call every method. Once the engine is closed, every method and the next event of a stream raise
    ShuttingDown.

    Cancellation: unless a method's docstring differs, what the task waited for is cancelled, too.
    """

    def __init__(self, config: EngineConfig, portal: Portal) -> None:
        self.config = config
        self._portal = portal
        self._caller = _Caller(portal)

    def __del__(self) -> None:
        self._portal.signal_close()

    async def close(self, timeout_s: float | None = None) -> None:
        """End the requests that still run, read or not, and wait until the engine's thread has
        ended. A running step or load ends first, which may take its whole time; ``timeout_s``
        bounds the waiting. Idempotent. `drain` first to let other tasks finish.

        Other tasks that wait for the engine get ShuttingDown. After a fork this does not wait.
        Cancellation: only the waiting ends.
        """
        self._portal.signal_close()
        if self._portal.is_own_process:
            await wait_end(self._portal, timeout_s)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, and wait until the running ones have ended; after ``timeout_s`` (the
        configured drain timeout) they are cut. `close` is still to be called.

        Cancellation: only the waiting ends.
        """
        await self._caller.call(lambda engine: engine.drain_in_background(timeout_s))

    # ---- generating and encoding

    def generate(self, request: GenerateRequest | str) -> Stream[StreamEvent]:
        """Run a request, or continue a prompt; it begins at once, and a refusal is raised at the
        first event."""
        return self._submit(request_of("generate", request))

    async def complete(self, request: GenerateRequest | str, **sampling: Any) -> str:
        """Return the whole text for a prompt, or for a request of one choice
        (`engine.api.engine.Engine.complete`)."""
        async with self.generate(completion_request(request, sampling)) as stream:
            return "".join([event.text async for event in stream if isinstance(event, Tokens)])

    def embed(self, request: EmbedRequest) -> Stream[EmbedEvent]:
        """Make one vector per input (`engine.api.engine.Engine.embed`); begins like `generate`."""
        return self._submit(request_of("embed", request))

    def rerank(self, request: RerankRequest) -> Stream[RerankEvent]:
        """Score every document (`engine.api.engine.Engine.rerank`); begins like `generate`."""
        return self._submit(request_of("rerank", request))

    def classify(self, request: ClassifyRequest) -> Stream[ClassifyEvent]:
        """Label every input (`engine.api.engine.Engine.classify`); begins like `generate`."""
        return self._submit(request_of("classify", request))

    def draw(self, request: DrawRequest | str) -> Stream[ImageGenerationEvent]:
        """Draw images of a prompt (`engine.api.engine.Engine.draw`); begins like `generate`."""
        return self._submit(request_of("draw", request))

    def _submit(self, request: ClientRequest) -> Stream[Any]:
        buffer = self.config.in_process_buffer
        return self._caller.streams.open(
            self, lambda engine, feed: engine.submit(request, buffer=buffer, reader=feed)
        )

    # ---- handles

    def chat(
        self,
        model: str = "",
        *,
        system: str = "",
        sampling: SamplingParams | Mapping[str, Any] | None = None,
    ) -> Chat:
        """Return a conversation (`engine.api.handles.Chat`)."""
        engine = self._portal.engine
        return Chat(self, handles.Chat(engine, model, system=system, sampling=sampling))

    def encoder(self, model: str = "", *, function: handles.EmbedFunction | None = None) -> Encoder:
        """Return a maker of vectors (`engine.api.handles.Encoder`). ``function`` runs on the
        engine's Trio thread."""
        return Encoder(self, handles.Encoder(self._portal.engine, model, function=function))

    def cross_encoder(
        self, model: str = "", *, function: handles.RankFunction | None = None
    ) -> CrossEncoder:
        """Return a scorer of documents (`engine.api.handles.CrossEncoder`). ``function`` runs on
        the engine's Trio thread."""
        engine = self._portal.engine
        return CrossEncoder(self, handles.CrossEncoder(engine, model, function=function))

    # ---- text and tokens

    async def tokenize(
        self,
        model: str = "",
        *,
        text: str | None = None,
        chat: ChatMessages | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[tuple[TokenSpan, ...], int]:
        """Return the tokens of a text or a chat (`engine.api.engine.Engine.tokenize`)."""
        return await self._caller.call(
            lambda engine: engine.tokenize(
                model, text=text, chat=chat, add_special_tokens=add_special_tokens
            )
        )

    async def detokenize(
        self, ids: Sequence[int], model: str = "", *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids (`engine.api.engine.Engine.detokenize`)."""
        return await self._caller.call(
            lambda engine: engine.detokenize(model, ids, skip_special_tokens=skip_special_tokens)
        )

    # ---- views

    async def list_models(self) -> tuple[ModelStatus, ...]:
        """Return every configured model, in the order of the configuration."""
        return await self._caller.ask(lambda engine: engine.list_models())

    async def get_model(self, name: str) -> ModelStatus:
        """Return one model, by name or alias (`engine.api.engine.Engine.get_model`)."""
        return await self._caller.ask(lambda engine: engine.get_model(name))

    async def wait_ready(self, name: str = "") -> None:
        """Wait until a model is ready (`engine.api.engine.Engine.wait_ready`).

        Cancellation: the load goes on.
        """
        await self._caller.call(lambda engine: engine.wait_ready(name))

    async def statistics(self) -> EngineStatistics:
        """Return the counters as they stand; does not wait for a step."""
        return await self._caller.ask(lambda engine: engine.statistics())

    # ---- operating

    async def pause(self, mode: PauseMode, model: str = "") -> None:
        """Pause a model or all (`engine.api.engine.Engine.pause`)."""
        await self._caller.ask(lambda engine: engine.pause(mode, model))

    async def resume(self, model: str = "") -> None:
        """End a pause (`engine.api.engine.Engine.resume`)."""
        await self._caller.ask(lambda engine: engine.resume(model))

    async def reset_prefix_cache(self, model: str = "") -> None:
        """Forget cached prefixes (`engine.api.engine.Engine.reset_prefix_cache`)."""
        await self._caller.ask(lambda engine: engine.reset_prefix_cache(model))

    async def abort(self, request_id: str) -> AbortOutcome:
        """End a request for the operator (`engine.api.engine.Engine.abort`)."""
        return await self._caller.ask(lambda engine: engine.abort(request_id))

    async def explain(self, request_id: str) -> Explanation:
        """Return what a live request does and waits for (`engine.api.engine.Engine.explain`)."""
        return await self._caller.ask(lambda engine: engine.explain(request_id))


async def _launched(config: EngineConfig, make_runner: RunnerFactory) -> Portal:
    """Return a portal whose engine has started. Raises what keeps it from starting."""
    started: Reply[None] = Reply()
    portal = Portal(config, make_runner, started)
    portal.launch()
    try:
        take = await started.wait()
    except BaseException:
        portal.signal_close()
        raise
    try:
        take()
    except BaseException:
        portal.thread.join()  # the engine's thread has nothing left to do
        raise
    return portal


class _Opening:  # asyncio only
    """An engine to be opened: by ``async with``, which closes it, or by ``await``."""

    def __init__(self, config: EngineConfig, make_runner: RunnerFactory) -> None:
        self._config = config
        self._runners = make_runner
        self._engine: Engine | None = None

    def __await__(self) -> Generator[Any, None, Engine]:
        return self._open().__await__()

    async def _open(self) -> Engine:
        return Engine(self._config, await _launched(self._config, self._runners))

    async def __aenter__(self) -> Engine:
        self._engine = await self._open()
        return self._engine

    async def __aexit__(self, *_: object) -> None:
        engine, self._engine = self._engine, None
        assert engine is not None
        await engine.close()


def open_engine(
    config: EngineConfig | ModelConfig | str | None = None,
    *,
    make_runner: RunnerFactory = api.make_torch_runner,
) -> _Opening:
    """Start an engine in a thread of its own; its models load in the background. ``config`` may
    also be a model, or its name or path.

    ``async with`` the result closes the engine at the block's end. ``await`` of it returns an
    engine that is closed by `Engine.close`, when it is collected, or at exit: for a notebook or an
    actor, where no block lasts.

    Raises:
        Exception: what keeps it from starting; nothing is left running.
    Cancellation: the engine does not start.
    """
    return _Opening(engine_config(config), make_runner)


# ---- handles

H = TypeVar("H", bound=Handle)


class _Handle(_Block, Generic[H]):
    """A chat or an encoder (`engine.api.handles`), for asyncio programs. Dropping it closes it."""

    def __init__(self, engine: Engine, handle: H) -> None:
        self._handle = handle
        self._engine = engine
        self._caller = engine._caller

    def __del__(self) -> None:
        self._caller.portal.try_post(self._handle.close)

    def stop(self) -> None:
        """End what any task has asked for before now. Idempotent; never waits."""
        self._caller.portal.try_post(self._handle.stop)

    async def close(self) -> None:
        """End everything that runs, refuse new calls, and wait until all has ended, which does not
        depend on any reader. Idempotent; no effect once the engine is closed.

        Cancellation: only the waiting ends.
        """
        handle = self._handle
        with suppress(ShuttingDown):
            await self._caller.call(lambda engine: handle.aclose())


class Chat(_Handle[handles.Chat]):
    """A conversation (`engine.api.handles.Chat`). An event counts as read once the reader's loop
    has it, even if nobody takes it from the stream; a stream that is closed or dropped is stopped.
    Its first event says which messages were left out to make room (`Started.dropped`)."""

    def ask(self, text: str, *, timeout_s: float | None = None) -> Stream[StreamEvent]:
        """Ask for an answer; it begins at once. What `engine.api.handles.Chat.ask` raises is raised
        at the first event."""
        handle = self._handle

        def make_source(engine: api.Engine, feed: Feed) -> Source:
            return handle.ask(text, timeout_s=timeout_s, reader=feed)

        return self._caller.streams.open(self, make_source)

    async def reset(self, *, system: str | None = None) -> None:
        """Forget the conversation (`engine.api.handles.Chat.reset`)."""
        await self._caller.ask(lambda engine: self._handle.reset(system=system))

    async def messages(self) -> tuple[dict[str, str], ...]:
        """Return the conversation so far (`engine.api.handles.Chat.messages`)."""
        return await self._caller.ask(lambda engine: self._handle.messages)


class Encoder(_Handle[handles.Encoder]):
    """Makes vectors (`engine.api.handles.Encoder`)."""

    async def embed(self, inputs: handles.Inputs) -> tuple[tuple[float, ...], ...]:
        """Return one vector per text, in their order (`engine.api.handles.Encoder.embed`).

        Cancellation: ends the call.
        """
        return await self._caller.call(lambda engine: self._handle.embed(inputs))


class CrossEncoder(_Handle[handles.CrossEncoder]):
    """Scores documents (`engine.api.handles.CrossEncoder`)."""

    async def rank(self, query: str, documents: Sequence[str]) -> tuple[float, ...]:
        """Return one score per document, in their order (`engine.api.handles.CrossEncoder.rank`).

        Cancellation: ends the call.
        """
        return await self._caller.call(lambda engine: self._handle.rank(query, documents))


__all__ = ["Chat", "CrossEncoder", "Encoder", "Engine", "Stream", "open_engine"]
