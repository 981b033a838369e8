"""Triolet's engine: structured-concurrency scheduling of language models on Trio.

The public face; importing it imports neither torch nor transformers.
"""

from engine import handles, sync
from engine.api import Engine, Stream, open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.events import Finished, Tokens
from engine.core.types import EndReason
from engine.encode_requests import Embedding, EmbedRequest, RerankRequest, Score
from engine.errors import TrioletError
from engine.requests import (
    AnswerTokens,
    Chat,
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
    "EmbedRequest",
    "Embedding",
    "EndReason",
    "Engine",
    "EngineConfig",
    "Finished",
    "GenerateRequest",
    "ModelConfig",
    "OutputOptions",
    "PromptOptions",
    "RerankRequest",
    "SamplingParams",
    "Score",
    "Started",
    "Stream",
    "Tokens",
    "ToolCallDelta",
    "TrioletError",
    "handles",
    "open_engine",
    "sync",
]
