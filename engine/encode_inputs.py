"""From what a client asked of an encoder to what its core schedules: inputs, checked and cut.

Rule 1: everything a request can be wrong in is known here, before its first result, and every
violation is told by its proto path. Rule 2: texts are tokenised where `engine.prompts` does it,
with a limiter of their own: a large Embed delays no Generate's prompt.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.core.encode_types import (
    EncodeInput,
    EncodeOptions,
    EncodeRequest,
    EncoderInfo,
    TokenizedInput,
)
from engine.encode_requests import EmbedRequest
from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge
from engine.prompts import Prompts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.core.encode_types import EncoderTokenizer
    from engine.encode_requests import RerankRequest
    from engine.encoding import Encoding
    from engine.replica import Replica

INPUT_CHARS = 64  # guess: what an input costs beside its text, in characters


class EncodeInputs(Prompts):
    """Makes an encoder's core requests. Belongs to the Trio thread."""

    async def prepare_inputs(self, encoding: Encoding, replica: Replica) -> EncodeRequest:
        """The core's request: every input tokenised, checked and cut.

        Raises:
            InvalidRequest: what only the model can tell is wrong, all of it. RequestTooLarge:
                inputs that are too long, and may not be cut.
        Cancellation: at once; a thread that tokenises goes on to its end, for nobody.
        """
        asked, info = encoding.request, replica.info
        assert isinstance(info, EncoderInfo)
        assert replica.encoder_tokenizer is not None
        if isinstance(asked, EmbedRequest):
            _check_embed(asked, info)
            tokenized = await self._tokenize_inputs(asked, info, replica.encoder_tokenizer)
            paths = [
                f"inputs[{index}].{'text' if isinstance(one, str) else 'token_ids'}"
                for index, one in enumerate(asked.inputs)
            ]
            options = EncodeOptions(asked.dimensions, asked.normalize)
        else:
            tokenized = await self._tokenize_pairs(asked, replica.encoder_tokenizer)
            paths = [f"documents[{index}]" for index in range(len(tokenized))]
            options = EncodeOptions(raw_scores=bool(asked.raw_scores))
        _check_lengths(tokenized, paths, info.max_model_len, may_cut=asked.truncate is not False)
        deadline = encoding.scope.deadline
        return EncodeRequest(
            request_id=encoding.core_id,
            inputs=tuple(one.input for one in tokenized),
            arrival=encoding.started_at,
            options=options,
            priority=asked.priority or 0,
            deadline=None if math.isinf(deadline) else deadline,
        )

    async def _tokenize_inputs(
        self, asked: EmbedRequest, info: EncoderInfo, tokenizer: EncoderTokenizer
    ) -> list[TokenizedInput]:
        """Each input as tokens, in their order; ids are only cut."""
        places = [place for place, one in enumerate(asked.inputs) if isinstance(one, str)]
        texts = [one for one in asked.inputs if isinstance(one, str)]

        def encode() -> list[TokenizedInput]:
            with _paths_of([f"inputs[{place}].text" for place in places]):
                return tokenizer.encode_texts(texts, asked.prompt_name)

        made = iter(await self._inline_or_thread(_size_of(texts), encode)) if texts else iter(())
        return [
            next(made)
            if isinstance(one, str)
            else TokenizedInput(EncodeInput(one[: info.max_model_len]), len(one))
            for one in asked.inputs
        ]

    async def _tokenize_pairs(
        self, asked: RerankRequest, tokenizer: EncoderTokenizer
    ) -> list[TokenizedInput]:
        documents = asked.documents
        size = _size_of(documents) + len(asked.query) * len(documents)

        def encode() -> list[TokenizedInput]:
            with _paths_of([f"documents[{index}]" for index in range(len(documents))]):
                return tokenizer.encode_pairs(asked.query, documents)

        return await self._inline_or_thread(size, encode)


@contextmanager
def _paths_of(paths: Sequence[str]) -> Iterator[None]:
    """Turn the indices that a tokenizer names into the paths that the client knows."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(
            FieldViolation(
                paths[int(one.field)] if one.field.isdigit() else one.field, one.description
            )
            for one in error.violations
        ) from error


def _size_of(texts: Sequence[str]) -> int:
    return sum(map(len, texts)) + INPUT_CHARS * len(texts)


def _check_embed(asked: EmbedRequest, info: EncoderInfo) -> None:
    """Raise InvalidRequest for what the loaded model cannot do, all of it."""
    found = []
    if asked.dimensions is not None and asked.dimensions > info.dimensions:
        found.append(
            FieldViolation("dimensions", f"is {asked.dimensions}, outside [1, {info.dimensions}]")
        )
    if asked.prompt_name and asked.prompt_name not in info.prompt_names:
        known = ", ".join(info.prompt_names) or "none"
        found.append(FieldViolation("prompt_name", f"is not one of the model's prompts: {known}"))
    for index, one in enumerate(asked.inputs):
        if not isinstance(one, str):
            found += _unknown_ids(f"inputs[{index}].token_ids.ids", one, info.vocab_size)
    if found:
        raise InvalidRequest(found)


def _unknown_ids(path: str, ids: Sequence[int], vocab_size: int) -> Iterator[FieldViolation]:
    """The first id of an input that is outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        place = next(i for i, one in enumerate(ids) if not 0 <= one < vocab_size)
        what = f"is {ids[place]}, outside the vocabulary of {vocab_size}"
        yield FieldViolation(f"{path}[{place}]", what)


def _check_lengths(
    tokenized: Sequence[TokenizedInput], paths: Sequence[str], most: int, *, may_cut: bool
) -> None:
    """Raise for every input without tokens and, unless it may be cut, every one with too many."""
    found, has_empty = [], False
    for path, one in zip(paths, tokenized, strict=True):
        if not one.input.token_ids:
            has_empty = True
            found.append(FieldViolation(path, "has no tokens"))
        elif one.full_tokens > most and not may_cut:
            what = f"has {one.full_tokens} tokens, of at most {most}"
            found.append(FieldViolation(path, what))
    if found:
        raise (InvalidRequest if has_empty else RequestTooLarge)(found)
