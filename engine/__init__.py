"""Triolet's engine: structured-concurrency scheduling of language models on Trio.

`engine.public` has what the package offers. It is imported when one of its names is first used,
because it brings the whole engine with it: a worker process, or a command that only asks a server,
needs a few modules of `engine` and would wait for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from engine.public import (
        AnswerTokens,
        Chat,
        Constraint,
        Continuation,
        ContinuedChoice,
        DrawingFinished,
        DrawingStarted,
        DrawRequest,
        Embedding,
        EmbedRequest,
        EndReason,
        Engine,
        EngineConfig,
        Finished,
        GeneratedImage,
        GenerateRequest,
        ModelConfig,
        OutputOptions,
        Progress,
        PromptOptions,
        RerankRequest,
        SamplingParams,
        Score,
        Started,
        Stream,
        Tokens,
        ToolCallDelta,
        TrioletError,
        blocking,
        handles,
        open_engine,
    )
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from engine import public

        return getattr(public, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
