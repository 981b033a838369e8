"""The engine for Trio programs.

    async with open_engine(config) as engine:
        async with engine.generate(GenerateRequest(text="Once upon a time")) as stream:
            async for event in stream:
                ...

Rule 1: leaving the block of a stream ends its request; leaving the block of `open_engine` drains.
Rule 2: an error that a client may receive is a `TrioletError`; any other exception is a bug.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import trio

from engine.api.arguments import completion_request, request_of
from engine.api.snapshots import Snapshots
from engine.api.stream import Stream
from engine.config import engine_config
from engine.core.common.events import Pause, PauseMode, Resume
from engine.core.text.types import ResetPrefixCache, Tokens
from engine.errors import ShuttingDown
from engine.images.decoder import DecodeImage, DecoderProcess, decode_here
from engine.kinds import EncodeKind, ImageGenerationKind, TextKind
from engine.pool.pool import Pool
from engine.replica.loop import Unbatched
from engine.replica.replica import ReplicaKind
from engine.replica.threads import Threads, WorkerThreads
from engine.replica.watchdog import Watchdog
from engine.requests.kind import RequestKind
from engine.requests.quota import NOWHERE, Origin
from engine.requests.supervisor import Supervisor
from engine.requests.text.prepare_chat import VisionInput
from engine.requests.text.values import validate_tokenize
from engine.status import Capability, ModelState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from engine.config import EngineConfig, ModelConfig
    from engine.core.common.types import Explanation
    from engine.pool.load_watch import LoadWatch
    from engine.pool.loader import RunnerFactory
    from engine.pool.registry import FindCapability
    from engine.replica.loop import OnEvent, WriteBatch
    from engine.replica.replica import AnyRunner
    from engine.requests.encode.classify_values import ClassifyEvent, ClassifyRequest
    from engine.requests.encode.values import EmbedEvent, EmbedRequest, RerankEvent, RerankRequest
    from engine.requests.image_generation.values import DrawRequest, ImageGenerationEvent
    from engine.requests.text.chat_values import Chat
    from engine.requests.text.values import GenerateRequest, StreamEvent
    from engine.status import EngineStatistics, ModelStatus
    from engine.worker.interface import TokenSpan


class Kind(ReplicaKind, RequestKind, Protocol):
    """A kind of work (`engine.kinds`)."""


KINDS: tuple[Kind, ...] = (TextKind(), EncodeKind(), ImageGenerationKind())


class Engine:
    """A running engine; made by `open_engine`. All methods belong to its Trio thread.

    ``submit`` is `Supervisor.submit`, for callers with a reader of their own. ``abort``,
    ``abort_all``, ``list_live`` and ``num_live_of`` are the supervisor's, too. ``telemetry``
    returns the statistics and the timings, and never waits for a step. ``registry`` has the
    configured models, and is read-only. ``detached`` has the streams that clients may attach to,
    and the streams whose clients are away. ``usage`` has what requests have used. ``adapters``
    loads and unloads adapters (LoRA) while their bases serve.
    """

    def __init__(self, config: EngineConfig, pool: Pool, supervisor: Supervisor) -> None:
        self.config = config
        self.registry = pool.registry
        self.submit = supervisor.submit
        self.abort = supervisor.abort
        self.abort_all = supervisor.abort_all
        self.list_live = supervisor.list_live
        self.num_live_of = supervisor.num_live_of
        self.detached = supervisor.detached
        self.usage = supervisor.usage
        self.adapters = pool.adapters
        self._pool = pool
        self._supervisor = supervisor
        self._vision_input = VisionInput(supervisor.tokenizing)
        self._snapshots = Snapshots(pool, supervisor)
        self.telemetry = self._snapshots.telemetry

    # ---- generating and encoding

    def generate(self, request: GenerateRequest | str) -> Stream[StreamEvent]:
        """Return the stream of a request, or of a prompt; a refusal is raised at the first event.

        Cancellation, or leaving the block early: the request ends; its blocks are free after at
        most one step.
        """
        return Stream(self, request_of("generate", request))

    async def complete(self, request: GenerateRequest | str, **sampling: Any) -> str:
        """Return the whole text for a prompt, or for a request of one choice. ``sampling`` are
        fields of `SamplingParams`, and override the request's.

        Raises:
            TrioletError: The request failed. TypeError: There is no such option.
        Cancellation: the request ends, as with `generate`.
        """
        async with self.generate(completion_request(request, sampling)) as stream:
            return "".join([event.text async for event in stream if isinstance(event, Tokens)])

    def embed(self, request: EmbedRequest) -> Stream[EmbedEvent]:
        """Return a stream of one vector per input, each sent as it is ready; a refusal is raised at
        the first event, before any vector.

        Cancellation, or leaving the block early: the request ends, and the encoder is done with it
        after at most one step.
        """
        return Stream(self, request_of("embed", request))

    def rerank(self, request: RerankRequest) -> Stream[RerankEvent]:
        """Return a stream of one score per document, like `embed`; with ``top_n``, sorted and at
        the end."""
        return Stream(self, request_of("rerank", request))

    def classify(self, request: ClassifyRequest) -> Stream[ClassifyEvent]:
        """Return a stream of the labels or the entities of each input, like `embed`."""
        return Stream(self, request_of("classify", request))

    def draw(self, request: DrawRequest | str) -> Stream[ImageGenerationEvent]:
        """Return the stream of a drawing; a text is its prompt. The stream has Started, the
        progress, and each image as soon as it is ready. A refusal is raised at the first event.

        Cancellation, or leaving the block early: the request ends, and the model is done with it
        after at most one denoising step.
        """
        return Stream(self, request_of("draw", request))

    # ---- text and tokens

    async def tokenize(
        self,
        model: str,
        *,
        text: str | None = None,
        chat: Chat | None = None,
        add_special_tokens: bool | None = None,
        origin: Origin = NOWHERE,
    ) -> tuple[tuple[TokenSpan, ...], int]:
        """Return the tokens of a text or of a chat, and the model's max_model_len. Each token has
        its range of characters. The tokens of a chat are those of the prompt that the model would
        get by its template, with the tokens of its images.

        ``add_special_tokens`` None means True for a text, and False for a chat.

        Raises:
            InvalidRequest: Not exactly one input is given, the chat is invalid, or an image cannot
                be read.
            RequestTooLarge: There are more characters or tokens than one call may have. Overloaded:
                The images of all requests have too many bytes, or the caller's holder has used the
                seconds of its minute. Others as `Leases.acquire`.
        Cancellation: at once.
        """
        validate_tokenize(text, chat)
        _check_tokenizer(origin)
        images = [] if chat is None else [data for _, data in chat.images]
        needed = _text_if_unnamed(model, Capability.VISION if images else Capability.TEXT_TO_TEXT)
        with self._supervisor.image_files.held(sum(map(len, images))):
            async with self._pool.leases.acquire(model, needed) as replica:
                adds = chat is None if add_special_tokens is None else add_special_tokens
                if chat is None:
                    spans = await self._supervisor.tokenizing.spans(
                        replica, text or "", add_special_tokens=adds, party=origin.party
                    )
                else:
                    spans = await self._vision_input.spans(replica, chat, adds, origin.party)
                return spans, replica.info.max_model_len

    async def detokenize(
        self,
        model: str,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        origin: Origin = NOWHERE,
    ) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequest: An id is outside the vocabulary, and the tokenizer has no token for it
                either. Overloaded: as `tokenize`. Others as `Leases.acquire`.
        Cancellation: at once.
        """
        _check_tokenizer(origin)
        needed = _text_if_unnamed(model, Capability.TEXT_TO_TEXT)
        async with self._pool.leases.acquire(model, needed) as replica:
            return await self._supervisor.tokenizing.decode(
                replica, ids, skip_special_tokens=skip_special_tokens, party=origin.party
            )

    # ---- views

    def list_models(self) -> tuple[ModelStatus, ...]:
        """Return the status of every configured model, in the order of the configuration, each
        followed by its adapters."""
        return tuple(
            [status for entry in self.registry.entries.values() for status in entry.statuses()]
        )

    def get_model(self, name: str) -> ModelStatus:
        """Return the status of one model, by name or alias.

        Raises:
            ModelNotFound: no such model.
        """
        return self.registry.status_of(name)

    async def wait_ready(self, name: str = "") -> None:
        """Wait until a model is ready; an empty name means the first model.

        Raises:
            SpawnFailed, SpawnTimeout, ModelNotFound: as `Leases.acquire`.
        Cancellation: the load goes on.
        """
        async with self._pool.leases.acquire(name):
            pass

    def statistics(self) -> EngineStatistics:
        """Return the current counters; never waits for a step."""
        return self._snapshots.statistics()

    # ---- operating

    def watch_load(self, name: str, replicas: int | None = None) -> LoadWatch:
        """Begin to load a model, or more replicas of it, and return a watch over the load
        (`Pool.watch_load`). Never waits.

        Raises:
            ModelNotFound: no such model. ShuttingDown, NoWorkers: it cannot be loaded now.
        """
        return self._pool.watch_load(name, replicas)

    async def load_model(self, name: str, replicas: int | None = None) -> ModelStatus:
        """Load a model, or more replicas of it, as far as there is room, and wait for that.

        Raises:
            SpawnFailed, MemoryExhausted: the load failed. Others as `watch_load`.
        Cancellation: the load goes on.
        """
        watch = self.watch_load(name, replicas)
        while await watch.next() is not None:
            pass
        return self.get_model(name)

    async def unload_model(self, name: str, drain_s: float | None = None) -> None:
        """Take a model out of memory (`Pool.unload`). ``drain_s`` None means the configured drain
        timeout.

        Raises:
            ModelNotFound: no such model. ShuttingDown: everything is being unloaded.
        Cancellation: the unload goes on.
        """
        await self._pool.unload(name, _drain_limit(self.config, drain_s))

    def pause(self, mode: PauseMode, model: str = "") -> None:
        """Pause a model's scheduler or, without a name, all schedulers (D19). Pausing again changes
        the mode.

        Raises:
            ModelNotFound: no such model.
        """
        self._pool.post(Pause(mode), model)

    def resume(self, model: str = "") -> None:
        """Undo `pause`. No effect if nothing is paused.

        Raises:
            ModelNotFound: no such model. ShuttingDown: the engine was drained.
        """
        if self.is_draining:
            raise ShuttingDown("the server was drained, which resume does not undo; start it again")
        self._pool.post(Resume(), model)

    def reset_prefix_cache(self, model: str = "") -> None:
        """Forget every cached prefix of a model or, without a name, of all. Raises as `pause`."""
        self._pool.post(ResetPrefixCache(), model)

    def explain(self, request_id: str, only_of: str | None = None) -> Explanation:
        """Return the state of a live request and what it waits for (`Supervisor.explain`).

        Raises:
            RequestNotFound: no such request is live, or it is another holder's.
        """
        return self._supervisor.explain(request_id, only_of)

    # ---- the end

    async def drain(self, timeout_s: float | None = None) -> int:
        """Await ``take_leave`` (`open_engine`), refuse new requests, and let running requests
        finish, all within ``timeout_s`` seconds (None: the configured drain timeout); then cut
        those that remain. Return the number of requests cut, by this drain and earlier ones.

        Cancellation: cuts running requests at once.
        """
        return await self._supervisor.drain(_drain_limit(self.config, timeout_s))

    async def drain_in_background(self, timeout_s: float | None = None) -> None:
        """`drain` in a task that continues if the caller leaves; wait for its end.

        Cancellation: only the waiting ends.
        """
        limit_s = _drain_limit(self.config, timeout_s)
        await self._supervisor.drain_in_background(limit_s)

    async def wait_idle(self) -> None:
        """Wait until no request is live and no scheduler has a step in flight.

        Cancellation: only the waiting ends.
        """
        await self._supervisor.wait_idle()
        for entry in self.registry.entries.values():
            for replica in list(entry.replicas):
                await replica.loop.wait_idle()

    @property
    def is_draining(self) -> bool:
        """Whether a drain has begun; it refuses new requests once ``take_leave`` has returned."""
        return self._supervisor.is_draining

    @property
    def num_live(self) -> int:
        """The number of requests that have not ended."""
        return self._supervisor.num_live


def _drain_limit(config: EngineConfig, timeout_s: float | None) -> float:
    return config.drain_timeout_s if timeout_s is None else timeout_s


def _check_tokenizer(origin: Origin) -> None:
    """Raise Overloaded if the holder has used a tokenizer as long as it may."""
    if origin.quota is not None:
        origin.quota.counted.check_tokenizer(trio.current_time())


def _text_if_unnamed(model: str, capability: Capability) -> Capability | None:
    """Return the capability by which a model is chosen: None if the request names it."""
    return None if model else capability


def make_torch_runner(model: ModelConfig, config: EngineConfig) -> AnyRunner:
    """Return the runner of a text model from transformers, or of an encoder from
    sentence-transformers. This may import torch, which takes seconds."""
    from engine.worker.factory import make_runner

    return make_runner(model, config)


def capability_by_files(model: ModelConfig) -> Capability | None:
    """Return a model's capability by its files; None if they are not on this machine."""
    from engine.worker.load.capability import find

    return find(model.model, model.revision)


def files_of(model: ModelConfig) -> Path | None:
    """Return the directory of a model's files; None if they are not on this machine."""
    from engine.worker.load.resolve import resolve_local

    path = resolve_local(model.model, model.revision)
    return None if path is None else path.directory


@asynccontextmanager
async def open_engine(
    config: EngineConfig | ModelConfig | str | None = None,
    *,
    make_runner: RunnerFactory = make_torch_runner,
    threads: Threads | None = None,
    on_change: Callable[[], None] = lambda: None,
    take_leave: Callable[[], Awaitable[None]] | None = None,
    on_event: OnEvent | None = None,
    watchdog: Watchdog | None = None,
    find_capability: FindCapability | None = None,
    kinds: Sequence[Kind] = KINDS,
    batch: WriteBatch | None = None,
) -> AsyncIterator[Engine]:
    """Start an engine; its models load in the background (`Engine.wait_ready`). ``config`` may also
    be a model, or its name or path. Raises ConfigError if no model's path exists.

    ``make_runner`` and ``threads`` can be replaced by fakes and virtual time, in which images are
    decoded without another process. ``on_change`` is called on the Trio thread whenever a model's
    state changes, and when a drain begins, which awaits ``take_leave`` before it refuses requests.
    ``on_event`` is called with every input and output of a scheduler (`journal_line` writes them as
    text). A ``watchdog`` is passed by a program that also calls its `Watchdog.leave`.
    ``find_capability`` returns a model's capability before it is loaded, if its configuration has
    none; by default the model's files decide, unless ``make_runner`` is given. ``kinds`` are the
    kinds of work that the engine does; ``batch`` holds back writes while a step is delivered.

    Cancellation, or an exception from the block: running requests are cut at once; otherwise
    leaving the block drains for the configured time.
    """
    config = engine_config(config)
    if make_runner is make_torch_runner:
        from engine.worker import factory

        factory.require_a_model(config)
    if watchdog is None and threads is None:  # virtual time has no hung steps
        watchdog = Watchdog(config.step_timeout_s)
    own_threads = WorkerThreads()
    own_decoder = DecoderProcess()
    decoder: DecodeImage = own_decoder if threads is None else decode_here
    if find_capability is None and make_runner is make_torch_runner:
        find_capability = capability_by_files
    threads = threads or own_threads
    by_capability = {capability: kind for kind in kinds for capability in kind.capabilities}
    pool = Pool(
        config,
        make_runner,
        threads,
        on_change,
        on_event,
        watchdog,
        find_capability,
        kinds=by_capability,
        batch=batch or Unbatched(),
    )
    supervisor = Supervisor(config, pool, threads, kinds, decoder, take_leave)
    engine = Engine(config, pool, supervisor)
    with closing(own_threads), closing(own_decoder), _running(watchdog):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            try:
                yield engine
            except BaseException:
                nursery.cancel_scope.cancel(reason="the engine's block raised")
                raise
            await engine.drain()


@contextmanager
def _running(watchdog: Watchdog | None) -> Iterator[None]:
    """Run the watchdog while the block lasts; it reports hung steps to this Trio run."""
    if watchdog is None:
        yield
        return
    token = trio.lowlevel.current_trio_token()

    def tell(callback: Callable[[], None]) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(callback)

    watchdog.start(tell)
    try:
        yield
    finally:
        watchdog.stop()


__all__ = ["Engine", "ModelState", "Stream", "make_torch_runner", "open_engine"]
