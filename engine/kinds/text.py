"""The kind of work that generates text, for requests of `Inference.Generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import SchedulerConfig
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Tokens
from engine.requests.compiled_constraints import CompiledConstraints
from engine.requests.prepare_text import TextPreparer, TextTools
from engine.requests.text_stream import TextStream
from engine.requests.text_values import GenerateRequest
from engine.settings import share
from engine.status import Capability

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.replica.threads import Threads
    from engine.worker.interface import ModelInfo, TextRunner


@dataclass(frozen=True, slots=True)
class TextKind:
    """Implements `ReplicaKind` and `RequestKind` for generating text."""

    capabilities = (Capability.TEXT_TO_TEXT, Capability.VISION)
    request_types = (GenerateRequest,)
    default_threads = 0
    token_event = Tokens
    make_stream = TextStream
    make_preparer = TextPreparer

    def make_core(self, info: ModelInfo, config: EngineConfig, name: str) -> Scheduler:
        """Return the scheduler of one replica. Replicas of one ``name`` share prefix-cache keys."""
        seats = config.max_num_seqs
        if info.num_states:  # each sequence that runs has a state
            seats = min(seats, info.num_states)
        limits = share(
            SchedulerConfig,
            config,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=seats,
            cache_namespace=name,
            num_states=info.num_states,
        )
        return Scheduler(limits)

    def make_tools(self, runner: TextRunner, threads: Threads) -> TextTools:
        """Return what the preparer uses of a loaded runner: its compiled constraints."""
        return TextTools(CompiledConstraints(runner, threads))
