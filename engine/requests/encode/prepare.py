"""Makes the core's request from an Embed or Rerank request: checked and cut inputs.

Rule 1: everything that can be wrong in a request is found here, before its first result, and every
violation names its proto path. Rule 2: texts are tokenised in turns of their own, so that a large
Embed does not delay a Generate's prompt. Rule 3: images are decoded one at a time, so that requests
take turns, and a cancelled request waits for one image at most; the memory of decoded images is
bounded (`engine.requests.image_memory`).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.common.vocabulary import violation_of_ids, violation_of_text
from engine.core.encode.types import (
    EncodeInput,
    EncodeOptions,
    EncodeRequest,
    ImageInput,
    TokenizedInput,
)
from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge
from engine.requests.encode.values import EmbedRequest
from engine.requests.image_memory import ImageMemory
from engine.requests.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from engine.core.encode.types import AnyInput
    from engine.replica.replica import Replica
    from engine.requests.encode.values import EncodeRequests, RerankRequest
    from engine.requests.prepared import Assignment
    from engine.requests.tokenizing import Tokenizing
    from engine.worker.encode.interface import EncoderInfo, EncoderTokenizer

    EncodeReplica = Replica[EncoderInfo, "EncodeTools"]
    EncodeAssignment = Assignment[EncodeRequests, EncodeReplica]

INPUT_CHARS = 64  # cost of tokenising an input beside its text, in characters; a guess


@dataclass(frozen=True, slots=True)
class EncodeTools:
    """The parts of an encoder's runner that requests use, beside its tokenizer for plain text."""

    tokenizer: EncoderTokenizer


class InputPreparer:
    """Makes the core's requests from Embed and Rerank requests. Belongs to the Trio thread."""

    def __init__(self, tokenizing: Tokenizing) -> None:
        self._tokenizing = tokenizing
        self.image_memory = ImageMemory()

    async def prepare(self, assignment: EncodeAssignment) -> Prepared[EncodeRequest]:
        """Return the core's request: every text tokenised, checked and cut, every image decoded and
        fitted. The memory of the images is held.

        Raises:
            InvalidRequest: Fields are wrong for this model; it lists every one of them. Images are
                only read if all other fields are right.
            RequestTooLarge: Inputs are too long and may not be cut, or there are too many images.

        Cancellation: at once. A thread that tokenises or decodes goes on to its end, and its result
            is dropped.
        """
        asked, replica, party = assignment.request, assignment.replica, assignment.party
        info = replica.info
        images: list[ImageInput] = []
        if isinstance(asked, EmbedRequest):
            _check_embed(asked, info)
            tokenized = await self._tokenize_inputs(asked, replica, party)
            paths = [
                f"inputs[{index}].{'text' if isinstance(one, str) else 'token_ids'}"
                for index, one in enumerate(asked.inputs)
                if not isinstance(one, bytes)
            ]
            options = EncodeOptions(asked.dimensions, asked.normalize)
        else:
            tokenized = await self._tokenize_pairs(asked, replica, party)
            paths = [f"documents[{index}]" for index in range(len(tokenized))]
            options = EncodeOptions(raw_scores=bool(asked.raw_scores))
        _check_lengths(tokenized, paths, info.max_model_len, may_cut=asked.truncate is not False)
        if isinstance(asked, EmbedRequest) and asked.has_images:
            images = await self._read_images(assignment, asked.inputs)
        request = EncodeRequest(
            request_id=assignment.core_id,
            inputs=_in_order(asked, tokenized, images),
            arrival=assignment.arrival,
            options=options,
            priority=asked.priority or 0,
            deadline=assignment.deadline,
        )
        return Prepared(request)

    async def _tokenize_inputs(
        self, asked: EmbedRequest, replica: EncodeReplica, party: Hashable
    ) -> list[TokenizedInput]:
        """Return the inputs as tokens, in order. Inputs that are ids are only cut."""
        info = replica.info
        places = [place for place, one in enumerate(asked.inputs) if isinstance(one, str)]
        texts = [one for one in asked.inputs if isinstance(one, str)]

        def encode() -> list[TokenizedInput]:
            paths = [f"inputs[{place}].text" for place in places]
            with _paths_of(paths):
                found = replica.tools.tokenizer.encode_texts(texts, asked.prompt_name)
            _check_tokens(found, paths, replica)
            return found

        found = await self._tokenizing.run(_size_of(texts), encode, party) if texts else []
        made = iter(found)
        return [
            _widened(
                next(made)
                if isinstance(one, str)
                else TokenizedInput(EncodeInput(one[: info.max_model_len]), len(one)),
                info.text_width,
            )
            for one in asked.inputs
            if not isinstance(one, bytes)
        ]

    async def _read_images(
        self, assignment: EncodeAssignment, inputs: Sequence[str | tuple[int, ...] | bytes]
    ) -> list[ImageInput]:
        """Return the images as the model reads them, in order.

        Raises:
            InvalidRequest: Images cannot be read; it lists every one of them.
            RequestTooLarge: There are too many images for one request.
        """
        fit = assignment.replica.info.images
        assert fit is not None, "the capability was checked when the replica was leased"
        files = [
            (f"inputs[{index}].image", one)
            for index, one in enumerate(inputs)
            if isinstance(one, bytes)
        ]
        hint = "; send the others in further requests"
        self.image_memory.check_count("inputs", len(files), fit.max_bytes, hint)
        assignment.report(Phase.DECODE_IMAGE)
        num_bytes = len(files) * fit.max_bytes
        await self.image_memory.take(num_bytes, assignment.held, assignment.core_id)
        read = partial(self._tokenizing.image_decoder, fit.read)
        made = await self._tokenizing.read_images(files, read)
        return [ImageInput(image, fit.num_tokens) for image in made]

    async def _tokenize_pairs(
        self, asked: RerankRequest, replica: EncodeReplica, party: Hashable
    ) -> list[TokenizedInput]:
        """Return each document with the query as tokens, in order."""
        documents = asked.documents
        size = _size_of(documents) + len(asked.query) * len(documents)

        def encode() -> list[TokenizedInput]:
            paths = [f"documents[{index}]" for index in range(len(documents))]
            with _paths_of(paths):
                found = replica.tools.tokenizer.encode_pairs(asked.query, documents)
            _check_tokens(found, paths, replica, asked.query)
            return found

        return await self._tokenizing.run(size, encode, party)


def _widened(one: TokenizedInput, width: int) -> TokenizedInput:
    """Return a text that the model pads to ``width`` tokens, if that is not 0."""
    if not width or not one.input.token_ids:
        return one
    return one._replace(input=one.input._replace(width=width))


def _in_order(
    asked: EmbedRequest | RerankRequest,
    tokenized: Sequence[TokenizedInput],
    images: Sequence[ImageInput],
) -> tuple[AnyInput, ...]:
    """Return texts and images in the order in which the client sent them."""
    if not isinstance(asked, EmbedRequest) or not images:
        return tuple(one.input for one in tokenized)
    texts, pixels = iter(tokenized), iter(images)
    return tuple(
        next(pixels) if isinstance(one, bytes) else next(texts).input for one in asked.inputs
    )


@contextmanager
def _paths_of(paths: Sequence[str]) -> Iterator[None]:
    """Replace the indices in a tokenizer's violations by the client's proto paths."""
    try:
        yield
    except InvalidRequest as error:
        raise error.renamed(
            lambda field: paths[int(field)] if field.isdigit() else field
        ) from error


def _size_of(texts: Sequence[str]) -> int:
    """Return the cost of tokenising texts, in characters."""
    return sum(map(len, texts)) + INPUT_CHARS * len(texts)


def _check_embed(asked: EmbedRequest, info: EncoderInfo) -> None:
    """Raise InvalidRequest with every field that the loaded model does not support."""
    found = []
    if asked.dimensions is not None and asked.dimensions > info.dimensions:
        found.append(
            FieldViolation("dimensions", f"is {asked.dimensions}, outside [1, {info.dimensions}]")
        )
    if asked.prompt_name and asked.prompt_name not in info.prompt_names:
        known = ", ".join(info.prompt_names) or "none"
        found.append(FieldViolation("prompt_name", f"is not one of the model's prompts: {known}"))
    for index, one in enumerate(asked.inputs):
        if isinstance(one, tuple):
            path = f"inputs[{index}].token_ids.ids"
            if (wrong := violation_of_ids(path, one, info.vocab_size)) is not None:
                found.append(wrong)
    if found:
        raise InvalidRequest(found)


def _check_lengths(
    tokenized: Sequence[TokenizedInput], paths: Sequence[str], most: int, *, may_cut: bool
) -> None:
    """Check the number of tokens of every input.

    Raises:
        InvalidRequest: Inputs have no tokens.
        RequestTooLarge: Inputs have more than ``most`` tokens, and inputs may not be cut.
    """
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


def _check_tokens(
    tokenized: Sequence[TokenizedInput],
    paths: Sequence[str],
    replica: EncodeReplica,
    query: str = "",
) -> None:
    """Check that the tokens of every text are of the model's vocabulary. A wrong token of a pair is
    reported of the query if the query has one.

    Raises:
        InvalidRequest: Some are not; it lists every text with such a token.
    """
    vocab_size, tokenizer = replica.info.vocab_size, replica.tokenizer
    texts = [
        violation_of_text(path, one.input.token_ids, vocab_size, tokenizer)
        for path, one in zip(paths, tokenized, strict=True)
    ]
    found = [one for one in texts if one is not None]
    if found and query:
        own = tokenizer.encode(query, add_special_tokens=False)
        if (wrong := violation_of_text("query", own, vocab_size, tokenizer)) is not None:
            found = [wrong]
    if found:
        raise InvalidRequest(found)
