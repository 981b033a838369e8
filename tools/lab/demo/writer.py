"""Writes stories and answers with Triolet itself, as a user of the server gets them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

import engine
from engine.core.common.types import EndReason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine import GenerateRequest

    Content = str | list[dict[str, object]]  # of a chat message: a text, or a list of parts


@dataclass(frozen=True, slots=True)
class Written:
    """A model's text after a prompt. ``ended`` is False if the token limit cut it off."""

    text: str
    ended: bool


class TrioletWriter:
    """Generates text with `engine.open_engine` and a model's folder."""

    def __init__(
        self, folder: Path, sampling: engine.SamplingParams, quantization: str = "none"
    ) -> None:
        self._model = engine.ModelConfig(str(folder), quantization=quantization)
        self._sampling = sampling

    def generate_stories(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Written]:
        """Return the continuation of each prompt."""
        return self._run([{"text": prompt} for prompt in prompts], seeds)

    def answer_requests(self, requests: Sequence[Content], seeds: Sequence[int]) -> list[Written]:
        """Return the assistant's answer to each chat of one message."""
        chats = [engine.Chat(({"role": "user", "content": asked},)) for asked in requests]
        return self._run([{"chat": chat} for chat in chats], seeds)

    def _run(self, inputs: Sequence[dict[str, object]], seeds: Sequence[int]) -> list[Written]:
        requests = [
            engine.GenerateRequest(
                **given,  # type: ignore[arg-type]
                sampling=replace(self._sampling, seed=seed),
            )
            for given, seed in zip(inputs, seeds, strict=True)
        ]
        return trio.run(self._generate, requests)

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Written]:
        written: dict[int, Written] = {}
        config = engine.EngineConfig(models=(self._model,))

        async with engine.open_engine(config) as eng:

            async def one(index: int, request: GenerateRequest) -> None:
                text, ended = "", False
                async with eng.generate(request) as stream:
                    async for event in stream:
                        if isinstance(event, engine.Tokens):
                            text += event.text
                        elif isinstance(event, engine.Finished):
                            ended = event.reason is EndReason.STOP
                written[index] = Written(text, ended)

            async with trio.open_nursery() as nursery:
                for index, request in enumerate(requests):
                    nursery.start_soon(one, index, request)
        return [written[index] for index in range(len(requests))]
