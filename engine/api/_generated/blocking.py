# Written by tools/regen_faces.py from engine/api/aio.py; do not edit.
"""The engine for programs that block: scripts, notebooks, threads.

    with engine.blocking.open_engine(config) as eng:
        for event in eng.generate(request):
            ...

Rule 1: `engine.api.portal` has the engine's Trio thread, and `engine.api.waiting` what passes
between that thread and others; this file is the surface.
Rule 2: any number of threads may use one engine.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from engine.api import engine as api
from engine.api import handles
from engine.api.arguments import completion_request, request_of
from engine.api.waiting import Reply, Stream, Streams, end_silently_at_exit, wait_end
from engine.api.waiting import engine_of, require_waiting_allowed
from engine.api.handle import Handle
from engine.api.portal import Portal
from engine.config import engine_config
from engine.core.text.types import Tokens
from engine.errors import ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    """Asks the engine on behalf of threads that wait for its answers."""

    def __init__(self, portal: Portal) -> None:
        self.portal = portal
        self.streams = Streams(portal)

    def ask(self, question: Callable[[api.Engine], T]) -> T:
        """Return the result of a function that does not wait, called on the engine's thread."""
        reply: Reply[T] = Reply()
        return self._wait(reply, partial(self.portal.ask, question, reply))

    def call(self, job: Callable[[api.Engine], Awaitable[T]]) -> T:
        """Return the result of an async function, awaited on the engine's thread."""
        reply: Reply[T] = Reply()
        return self._wait(reply, partial(self.portal.call, job, reply))

    def _wait(self, reply: Reply[T], post: Callable[[], None]) -> T:
        try:
            require_waiting_allowed(self.portal)
            post()
            try:
                take = reply.wait()
            except BaseException:  # above all Ctrl-C
                self.portal.abandon(reply)
                raise
            return take()
        except ShuttingDown:
            end_silently_at_exit()
            raise


# ---- the engine


class _Block:
    """An object that is closed at the end of its ``with`` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(_Block):
    """A running engine, for threads that block; made by `open_engine`. Every method may be called
    from any thread but the engine's own, and raises ShuttingDown once the engine is closed.

    A KeyboardInterrupt ends the waiting, and cancels what the thread waited for.
    """

    def __init__(self, config: EngineConfig, portal: Portal) -> None:
        self.config = config
        self._portal = portal
        self._caller = _Caller(portal)

    def __del__(self) -> None:
        self._portal.signal_close()

    def close(self, timeout_s: float | None = None) -> None:
        """End the requests that still run, read or not, and wait until the engine's thread has
        ended. A running step or load ends first, which may take its whole time; ``timeout_s``
        bounds the waiting. Idempotent. `drain` first to let other threads finish.

        Other threads that wait for the engine get ShuttingDown. On the engine's own thread, and
        after a fork, this does not wait.
        """
        self._portal.signal_close()
        if self._portal.is_own_process:
            wait_end(self._portal, timeout_s)

    def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, and wait until the running ones have ended; after ``timeout_s`` (the
        configured drain timeout) they are cut. `close` is still to be called.
        """
        self._caller.call(lambda engine: engine.drain_in_background(timeout_s))

    # ---- generating and encoding

    def generate(self, request: GenerateRequest | str) -> Stream[StreamEvent]:
        """Run a request, or continue a prompt; it begins at once, and a refusal is raised at the
        first event."""
        return self._submit(request_of("generate", request))

    def complete(self, request: GenerateRequest | str, **sampling: Any) -> str:
        """Return the whole text for a prompt, or for a request of one choice
        (`engine.api.engine.Engine.complete`)."""
        with self.generate(completion_request(request, sampling)) as stream:
            return "".join([event.text for event in stream if isinstance(event, Tokens)])

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
        engine = engine_of(self._portal)
        return Chat(self, handles.Chat(engine, model, system=system, sampling=sampling))

    def encoder(self, model: str = "", *, function: handles.EmbedFunction | None = None) -> Encoder:
        """Return a maker of vectors (`engine.api.handles.Encoder`). ``function`` runs on the
        engine's Trio thread."""
        return Encoder(self, handles.Encoder(engine_of(self._portal), model, function=function))

    def cross_encoder(
        self, model: str = "", *, function: handles.RankFunction | None = None
    ) -> CrossEncoder:
        """Return a scorer of documents (`engine.api.handles.CrossEncoder`). ``function`` runs on
        the engine's Trio thread."""
        engine = engine_of(self._portal)
        return CrossEncoder(self, handles.CrossEncoder(engine, model, function=function))

    # ---- text and tokens

    def tokenize(
        self,
        model: str = "",
        *,
        text: str | None = None,
        chat: ChatMessages | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[tuple[TokenSpan, ...], int]:
        """Return the tokens of a text or a chat (`engine.api.engine.Engine.tokenize`)."""
        return self._caller.call(
            lambda engine: engine.tokenize(
                model, text=text, chat=chat, add_special_tokens=add_special_tokens
            )
        )

    def detokenize(
        self, ids: Sequence[int], model: str = "", *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids (`engine.api.engine.Engine.detokenize`)."""
        return self._caller.call(
            lambda engine: engine.detokenize(model, ids, skip_special_tokens=skip_special_tokens)
        )

    # ---- views

    def list_models(self) -> tuple[ModelStatus, ...]:
        """Return every configured model, in the order of the configuration."""
        return self._caller.ask(lambda engine: engine.list_models())

    def get_model(self, name: str) -> ModelStatus:
        """Return one model, by name or alias (`engine.api.engine.Engine.get_model`)."""
        return self._caller.ask(lambda engine: engine.get_model(name))

    def wait_ready(self, name: str = "") -> None:
        """Wait until a model is ready (`engine.api.engine.Engine.wait_ready`)."""
        self._caller.call(lambda engine: engine.wait_ready(name))

    def statistics(self) -> EngineStatistics:
        """Return the counters as they stand; does not wait for a step."""
        return self._caller.ask(lambda engine: engine.statistics())

    # ---- operating

    def pause(self, mode: PauseMode, model: str = "") -> None:
        """Pause a model or all (`engine.api.engine.Engine.pause`)."""
        self._caller.ask(lambda engine: engine.pause(mode, model))

    def resume(self, model: str = "") -> None:
        """End a pause (`engine.api.engine.Engine.resume`)."""
        self._caller.ask(lambda engine: engine.resume(model))

    def reset_prefix_cache(self, model: str = "") -> None:
        """Forget cached prefixes (`engine.api.engine.Engine.reset_prefix_cache`)."""
        self._caller.ask(lambda engine: engine.reset_prefix_cache(model))

    def abort(self, request_id: str) -> AbortOutcome:
        """End a request for the operator (`engine.api.engine.Engine.abort`)."""
        return self._caller.ask(lambda engine: engine.abort(request_id))

    def explain(self, request_id: str) -> Explanation:
        """Return what a live request does and waits for (`engine.api.engine.Engine.explain`)."""
        return self._caller.ask(lambda engine: engine.explain(request_id))


def _launched(config: EngineConfig, make_runner: RunnerFactory) -> Portal:
    """Return a portal whose engine has started. Raises what keeps it from starting."""
    started: Reply[None] = Reply()
    portal = Portal(config, make_runner, started)
    portal.launch()
    try:
        take = started.wait()
    except BaseException:
        portal.signal_close()
        raise
    try:
        take()
    except BaseException:
        portal.thread.join()  # the engine's thread has nothing left to do
        raise
    return portal


def open_engine(
    config: EngineConfig | ModelConfig | str | None = None,
    *,
    make_runner: RunnerFactory = api.make_torch_runner,
) -> Engine:
    """Start an engine in a thread of its own; its models load in the background. ``config`` may
    also be a model, or its name or path. Leaving the engine's ``with`` block closes it; an engine
    that is left open is closed when it is collected, or at exit.

    Raises:
        Exception: what keeps it from starting; nothing is left running.
    """
    config = engine_config(config)
    return Engine(config, _launched(config, make_runner))


# ---- handles

H = TypeVar("H", bound=Handle)


class _Handle(_Block, Generic[H]):
    """A chat or an encoder (`engine.api.handles`), for threads that block. Dropping it closes it."""

    def __init__(self, engine: Engine, handle: H) -> None:
        self._handle = handle
        self._engine = engine
        self._caller = engine._caller

    def __del__(self) -> None:
        self._caller.portal.try_post(self._handle.close)

    def stop(self) -> None:
        """End what any thread has asked for before now. Idempotent; never waits."""
        self._caller.portal.try_post(self._handle.stop)

    def close(self) -> None:
        """End everything that runs, refuse new calls, and wait until all has ended, which does not
        depend on any reader. Idempotent; no effect once the engine is closed.
        """
        handle = self._handle
        with suppress(ShuttingDown):
            self._caller.call(lambda engine: handle.aclose())


class Chat(_Handle[handles.Chat]):
    """A conversation (`engine.api.handles.Chat`). An event counts as read once the reader's thread
    has it, even if nobody takes it from the stream; a stream that is closed or dropped is stopped.
    Its first event says which messages were left out to make room (`Started.dropped`)."""

    def ask(self, text: str, *, timeout_s: float | None = None) -> Stream[StreamEvent]:
        """Ask for an answer, which begins at once. Waits until the engine has the question.

        Raises:
            InvalidRequest, ShuttingDown: as `engine.api.handles.Chat.ask`.
        """
        handle = self._handle

        def make_source(engine: api.Engine, feed: Feed) -> Source:
            return handle.ask(text, timeout_s=timeout_s, reader=feed)

        return self._caller.streams.open_begun(self, make_source, self._caller.ask)

    def reset(self, *, system: str | None = None) -> None:
        """Forget the conversation (`engine.api.handles.Chat.reset`)."""
        self._caller.ask(lambda engine: self._handle.reset(system=system))

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """Return the conversation so far (`engine.api.handles.Chat.messages`)."""
        return self._caller.ask(lambda engine: self._handle.messages)


class Encoder(_Handle[handles.Encoder]):
    """Makes vectors (`engine.api.handles.Encoder`)."""

    def embed(self, inputs: handles.Inputs) -> tuple[tuple[float, ...], ...]:
        """Return one vector per text, in their order (`engine.api.handles.Encoder.embed`)."""
        return self._caller.call(lambda engine: self._handle.embed(inputs))


class CrossEncoder(_Handle[handles.CrossEncoder]):
    """Scores documents (`engine.api.handles.CrossEncoder`)."""

    def rank(self, query: str, documents: Sequence[str]) -> tuple[float, ...]:
        """Return one score per document, in their order (`engine.api.handles.CrossEncoder.rank`)."""
        return self._caller.call(lambda engine: self._handle.rank(query, documents))


__all__ = ["Chat", "CrossEncoder", "Encoder", "Engine", "Stream", "open_engine"]
