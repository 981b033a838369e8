"""The kind of work that draws images, for requests of GenerateImage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import ImageConfig
from engine.core.image.scheduler import ImageScheduler
from engine.requests.draw_stream import DrawStream
from engine.requests.draw_values import DrawRequest
from engine.requests.prepare_drawing import DrawPreparer
from engine.settings import share
from engine.status import Capability

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.replica.threads import Threads
    from engine.requests.tasks import RequestTasks
    from engine.requests.tokenizing import Tokenizing
    from engine.worker.image_interface import ImageModelInfo, ImageRunner


@dataclass(frozen=True, slots=True)
class ImageKind:
    """Implements `ReplicaKind` and `RequestKind` for drawing."""

    capabilities = (Capability.TEXT_TO_IMAGE,)
    request_types = (DrawRequest,)
    default_threads = 0
    token_event = None
    make_stream = DrawStream

    def make_core(self, info: ImageModelInfo, config: EngineConfig, name: str) -> ImageScheduler:
        """Return the scheduler of one replica. ``name`` and ``info`` are not used."""
        return ImageScheduler(share(ImageConfig, config))

    def make_tools(self, runner: ImageRunner, threads: Threads) -> None:
        """Return None: requests use nothing of a runner beside its tokenizer."""

    def make_preparer(self, tokenizing: Tokenizing, tasks: RequestTasks) -> DrawPreparer:
        """Return the preparer of one engine."""
        return DrawPreparer(tokenizing)
