"""The kind of work that encodes texts and images, for requests of Embed and Rerank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EncoderConfig
from engine.core.encode.scheduler import EncodeScheduler
from engine.requests.encode_stream import EncodeStream
from engine.requests.encode_values import EmbedRequest, RerankRequest
from engine.requests.prepare_inputs import EncodeTools, InputPreparer
from engine.settings import share
from engine.status import Capability

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.replica.threads import Threads
    from engine.requests.tasks import RequestTasks
    from engine.requests.tokenizing import Tokenizing
    from engine.worker.interface import EncoderInfo, EncodeRunner


@dataclass(frozen=True, slots=True)
class EncodeKind:
    """Implements `ReplicaKind` and `RequestKind` for embedding and reranking."""

    capabilities = (Capability.TEXT_EMBEDDING, Capability.IMAGE_EMBEDDING, Capability.RERANK)
    request_types = (EmbedRequest, RerankRequest)
    default_threads = 1
    token_event = None
    make_stream = EncodeStream

    def make_core(self, info: EncoderInfo, config: EngineConfig, name: str) -> EncodeScheduler:
        """Return the scheduler of one replica. ``name`` is not used."""
        limits = share(EncoderConfig, config, max_model_len=info.max_model_len)
        return EncodeScheduler(limits)

    def make_tools(self, runner: EncodeRunner, threads: Threads) -> EncodeTools:
        """Return what the preparer uses of a loaded runner: its tokenizer for inputs."""
        return EncodeTools(runner.encoder_tokenizer)

    def make_preparer(self, tokenizing: Tokenizing, tasks: RequestTasks) -> InputPreparer:
        """Return the preparer of one engine, which tokenises apart from other kinds."""
        return InputPreparer(tokenizing.with_own_turns())
