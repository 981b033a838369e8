"""What the package `engine` offers. Importing it imports neither torch, transformers nor asyncio;
programs for asyncio import `engine.aio`."""

from engine.api import handles
from engine.api._generated import blocking
from engine.api.engine import Engine, Stream, open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.common.types import EndReason
from engine.core.text.types import Constraint, Tokens
from engine.errors import TrioletError
from engine.requests.encode.values import Embedding, EmbedRequest, RerankRequest, Score
from engine.requests.image_generation.values import (
    DrawingFinished,
    DrawingStarted,
    DrawRequest,
    GeneratedImage,
    Progress,
)
from engine.requests.text.chat_values import Chat
from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.values import (
    AnswerTokens,
    GenerateRequest,
    OutputOptions,
    PromptOptions,
    SamplingParams,
    Started,
    ToolCallDelta,
)

__all__ = [
    "AnswerTokens",
    "Chat",
    "Constraint",
    "Continuation",
    "ContinuedChoice",
    "DrawRequest",
    "DrawingFinished",
    "DrawingStarted",
    "EmbedRequest",
    "Embedding",
    "EndReason",
    "Engine",
    "EngineConfig",
    "Finished",
    "GenerateRequest",
    "GeneratedImage",
    "ModelConfig",
    "OutputOptions",
    "Progress",
    "PromptOptions",
    "RerankRequest",
    "SamplingParams",
    "Score",
    "Started",
    "Stream",
    "Tokens",
    "ToolCallDelta",
    "TrioletError",
    "blocking",
    "handles",
    "open_engine",
]
