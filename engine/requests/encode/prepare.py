"""Makes the core's request from an Embed, Rerank or Classify request: checked and cut inputs.

Rule 1: everything that can be wrong in a request is found here, before its first result, and every
violation names its proto path. Rule 2: texts are tokenised in turns of their own, so that a large
Embed does not delay a Generate's prompt. Rule 3: images are decoded one at a time, so that requests
take turns, and a cancelled request waits for one image at most; the memory of decoded images is
bounded (`engine.requests.image_memory`).
"""

from __future__ import annotations

import itertools
from array import array
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.common.vocabulary import violation_of_ids, violation_of_text
from engine.core.encode.types import (
    RANGED,
    EncodeInput,
    EncodeOptions,
    EncodeRequest,
    ImageInput,
    TokenizedInput,
    bytes_of_row,
)
from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge
from engine.requests.encode.classify_values import ClassifyRequest, is_ids, is_pair
from engine.requests.encode.values import QUERY, EmbedRequest, RerankRequest
from engine.requests.image_memory import ImageMemory
from engine.requests.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from engine.core.encode.types import AnyInput
    from engine.replica.replica import Replica
    from engine.requests.encode.values import EncodeRequests
    from engine.requests.prepared import Assignment
    from engine.requests.tokenizing import Tokenizing
    from engine.worker.encode.interface import EncoderInfo, EncoderTokenizer

    AnyGiven = str | bytes | tuple[int, ...] | tuple[str, str]
    EncodeReplica = Replica[EncoderInfo, "EncodeTools"]
    EncodeAssignment = Assignment[EncodeRequests, EncodeReplica]

# The most bytes of the vectors of one text. A message has all of them, and every client refuses one
# of more than 4 MiB unless it is told otherwise; the slack is for the other fields.
MATRIX_BYTES_MAX = 4 * 2**20 - 4096
INPUT_CHARS = 64  # an input costs as much tokenising as so many characters of text; a guess


@dataclass(frozen=True, slots=True)
class EncodeTools:
    """The parts of an encoder's runner that requests use, beside its tokenizer for plain text."""

    tokenizer: EncoderTokenizer


class InputPreparer:
    """Makes the core's requests from those of clients. Belongs to the Trio thread."""

    def __init__(self, tokenizing: Tokenizing) -> None:
        self._tokenizing = tokenizing
        self.image_memory = ImageMemory()

    async def prepare(self, assignment: EncodeAssignment) -> Prepared[EncodeRequest]:
        """Return the core's request: every text tokenised, checked and cut, every image decoded and
        fitted. The memory of the images is held.

        Raises:
            InvalidRequest: Fields are wrong for this model; it lists every one of them. Images are
                only read if all other fields are right.
            RequestTooLarge: Inputs are too long and may not be cut, there are too many images, or
                the vectors of a text may not fit into a message.

        Cancellation: at once. A thread that tokenises or decodes goes on to its end, and its result
            is dropped.
        """
        request, replica, party = assignment.request, assignment.replica, assignment.origin.party
        info = replica.info
        images: list[ImageInput] = []
        if isinstance(request, RerankRequest):
            tokenized = await self._tokenize_pairs(request, replica, party)
            paths = [f"documents[{index}]" for index in range(len(tokenized))]
        else:
            _check_fields(request, info)
            prompt_name = request.prompt_name if isinstance(request, EmbedRequest) else ""
            tokenized = await self._tokenize_inputs(request.inputs, prompt_name, replica, party)
            paths = _paths_to(request.inputs)
        _check_lengths(tokenized, paths, may_cut=request.truncate is not False)
        if isinstance(request, EmbedRequest) and request.kind == "multi-vector":
            _check_matrices(request, tokenized, info)
        if isinstance(request, EmbedRequest) and request.has_images:
            images = await self._read_images(assignment, request.inputs)
        core_request = EncodeRequest(
            request_id=assignment.core_id,
            inputs=_in_order(request, tokenized, images),
            arrival=assignment.arrival,
            options=_options_of(request, info),
            priority=assignment.origin.priority_of(
                request.priority, is_background=request.background
            ),
            deadline=assignment.deadline,
            holder=assignment.origin.holder,
            weight=assignment.origin.weight,
        )
        return Prepared(core_request)

    async def _tokenize_inputs(
        self,
        inputs: Sequence[AnyGiven],
        prompt_name: str,
        replica: EncodeReplica,
        party: Hashable,
    ) -> list[TokenizedInput]:
        """Return the inputs as tokens, in order, without images. Inputs that are ids are only cut,
        to as many as a text in their role may have."""
        info, is_query = replica.info, prompt_name == QUERY
        most = (info.query_len if is_query else info.document_len) or info.max_model_len
        texts = {place: given for place, given in enumerate(inputs) if isinstance(given, str)}
        pairs = {place: given for place, given in enumerate(inputs) if is_pair(given)}
        ids = {place: given for place, given in enumerate(inputs) if is_ids(given)}

        def encode() -> dict[int, TokenizedInput]:
            paths = [f"inputs[{place}].text" for place in texts]
            with _paths_of(paths):
                encoded = replica.tools.tokenizer.encode_texts([*texts.values()], prompt_name)
            _check_tokens(encoded, paths, replica)
            made = dict(zip(texts, encoded, strict=True))
            for place, (first, second) in pairs.items():
                path = f"inputs[{place}].pair"
                with _paths_of([f"{path}.text_pair"], {"query": f"{path}.text"}):
                    [made[place]] = replica.tools.tokenizer.encode_pairs(first, [second])
            _check_tokens(
                [made[place] for place in pairs],
                [f"inputs[{place}].pair" for place in pairs],
                replica,
            )
            return made

        size = _size_of([*texts.values(), *itertools.chain(*pairs.values())])
        made = await self._tokenizing.run(size, encode, party) if texts or pairs else {}
        for place, given in ids.items():
            cut = EncodeInput(given[:most], is_query=is_query)
            made[place] = TokenizedInput(cut, len(given))
        return [_widened(made[place], info.text_width) for place in sorted(made)]

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
            (f"inputs[{index}].image", input_)
            for index, input_ in enumerate(inputs)
            if isinstance(input_, bytes)
        ]
        hint = "; send the others in further requests"
        self.image_memory.check_count("inputs", len(files), fit.max_bytes, hint)
        assignment.report(Phase.DECODE_IMAGE)
        num_bytes = len(files) * fit.max_bytes
        await self.image_memory.take(num_bytes, assignment.held, assignment.core_id)
        read = partial(self._tokenizing.image_decoder, fit.read)
        made = await self._tokenizing.read_images(files, read, assignment.origin.party)
        return [ImageInput(image, fit.num_tokens) for image in made]

    async def _tokenize_pairs(
        self, request: RerankRequest, replica: EncodeReplica, party: Hashable
    ) -> list[TokenizedInput]:
        """Return each document with the query as tokens, in order."""
        documents = request.documents
        size = _size_of(documents) + len(request.query) * len(documents)

        def encode() -> list[TokenizedInput]:
            paths = [f"documents[{index}]" for index in range(len(documents))]
            with _paths_of(paths):
                encoded = replica.tools.tokenizer.encode_pairs(request.query, documents)
            _check_tokens(encoded, paths, replica, request.query)
            return encoded

        return await self._tokenizing.run(size, encode, party)


def _widened(item: TokenizedInput, width: int) -> TokenizedInput:
    """Return a text with the ``width`` to which the model pads it; 0 means no padding."""
    if not width or not item.input.token_ids:
        return item
    return item._replace(input=item.input._replace(width=width))


def _in_order(
    request: EncodeRequests,
    tokenized: Sequence[TokenizedInput],
    images: Sequence[ImageInput],
) -> tuple[AnyInput, ...]:
    """Return texts and images in the order in which the client sent them."""
    if not isinstance(request, EmbedRequest) or not images:
        return tuple(item.input for item in tokenized)
    texts, pixels = iter(tokenized), iter(images)
    return tuple(
        next(pixels) if isinstance(x, bytes) else next(texts).input for x in request.inputs
    )


@contextmanager
def _paths_of(paths: Sequence[str], names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Replace the indices in a tokenizer's violations by the client's proto paths, and other fields
    by their ``names``."""
    known = {str(index): path for index, path in enumerate(paths)} | dict(names or {})
    try:
        yield
    except InvalidRequest as error:
        raise error.renamed(lambda field: known.get(field, field)) from error


def _paths_to(inputs: Sequence[AnyGiven]) -> list[str]:
    """Return the proto paths of the inputs that are no images."""
    return [
        f"inputs[{index}].{_name_of(given)}"
        for index, given in enumerate(inputs)
        if not isinstance(given, bytes)
    ]


def _name_of(given: AnyGiven) -> str:
    return "text" if isinstance(given, str) else "pair" if is_pair(given) else "token_ids"


def _size_of(texts: Sequence[str]) -> int:
    """Return the cost of tokenising texts, in characters."""
    return sum(map(len, texts)) + INPUT_CHARS * len(texts)


def _options_of(request: EncodeRequests, info: EncoderInfo) -> EncodeOptions:
    """Return what becomes of the model's output."""
    if isinstance(request, RerankRequest):
        return EncodeOptions(raw_scores=bool(request.raw_scores))
    if isinstance(request, ClassifyRequest):
        return EncodeOptions(
            top_k=request.top_k,
            activation=None if request.aggregation else request.activation,
            aggregation=request.aggregation,
        )
    return EncodeOptions(
        request.dimensions,
        request.normalize,
        precision=request.precision or "float32",
        ranges=_ranges_of(request, info),
        top_k=request.top_k,
        threshold=request.threshold or 0.0,
    )


def _check_fields(request: EmbedRequest | ClassifyRequest, info: EncoderInfo) -> None:
    """Raise InvalidRequest with every field that the loaded model does not support."""
    if isinstance(request, EmbedRequest):
        faults = [*_embed_faults(request, info)]
    else:
        faults = [*_classify_faults(request, info)]
    for index, given in enumerate(request.inputs):
        if is_ids(given):
            path = f"inputs[{index}].token_ids.ids"
            if (wrong := violation_of_ids(path, given, info.vocab_size)) is not None:
                faults.append(wrong)
    if faults:
        raise InvalidRequest(faults)


def _embed_faults(request: EmbedRequest, info: EncoderInfo) -> Iterator[FieldViolation]:
    if request.dimensions is not None and request.dimensions > info.dimensions:
        what = f"is {request.dimensions}, outside [1, {info.dimensions}]"
        yield FieldViolation("dimensions", what)
    if request.prompt_name and request.prompt_name not in info.prompt_names:
        known = ", ".join(info.prompt_names) or "none"
        yield FieldViolation("prompt_name", f"is not one of the model's prompts: {known}")
    role = QUERY if request.prompt_name == QUERY else "document"
    if request.normalize is False and role in info.must_scale:
        yield FieldViolation("normalize", f"is false, and the model scales vectors of a {role}")
    yield from _range_faults(request, info)


def _classify_faults(request: ClassifyRequest, info: EncoderInfo) -> Iterator[FieldViolation]:
    for index, given in enumerate(request.inputs):
        if info.reads_pairs and isinstance(given, str):
            what = "is one text, and the model's chat template takes pairs"
            yield FieldViolation(f"inputs[{index}].text", what)


def _range_faults(request: EmbedRequest, info: EncoderInfo) -> Iterator[FieldViolation]:
    """Yield a violation if a request needs ranges that neither it nor the model has, or has others
    than its vectors take."""
    number = request.dimensions or info.dimensions
    if request.ranges is not None:
        if len(request.ranges[0]) != number:
            what = f"are of {len(request.ranges[0])} dimensions, and the vectors have {number}"
            yield FieldViolation("ranges", what)
    elif request.precision in RANGED and not info.ranges:
        yield FieldViolation(
            "ranges", f"are not set, {request.precision} needs them, and the model has none"
        )
    elif request.precision in RANGED and (number, request.normalize) != (info.dimensions, None):
        what = "are not set, and the model's are of its whole vectors, scaled as it does itself"
        yield FieldViolation("ranges", what)


def _ranges_of(request: EmbedRequest, info: EncoderInfo) -> bytes:
    """Return the ranges for a request's vectors (`EncodeOptions.ranges`), which were checked."""
    if request.ranges is not None:
        return array("f", [*request.ranges[0], *request.ranges[1]]).tobytes()
    return info.ranges if request.precision in RANGED else b""


def _check_lengths(
    tokenized: Sequence[TokenizedInput], paths: Sequence[str], *, may_cut: bool
) -> None:
    """Check the number of tokens of every input, and of the query that all of them have.

    Raises:
        InvalidRequest: Inputs have no tokens; it lists these alone.
        RequestTooLarge: Inputs were cut, and may not be.
    """
    empty, long = [], []
    inputs = [(item.input, item.full_tokens) for item in tokenized]
    if tokenized and (query := tokenized[0].input.query) is not None:
        inputs, paths = [(query, tokenized[0].full_query), *inputs], ["query", *paths]
    for path, (text, full_tokens) in zip(paths, inputs, strict=True):
        most = len(text.token_ids)
        if not most:
            empty.append(FieldViolation(path, "has no tokens"))
        elif full_tokens > most and not may_cut:
            what = f"has {full_tokens} tokens, of at most {most}"
            long.append(FieldViolation(path, what))
    if empty:
        raise InvalidRequest(empty)
    if long:
        raise RequestTooLarge(long)


def _check_matrices(
    request: EmbedRequest, tokenized: Sequence[TokenizedInput], info: EncoderInfo
) -> None:
    """Check that a vector for each token of an input fits into one message.

    Raises:
        RequestTooLarge: It may not; the error lists every such input.
    """
    each = bytes_of_row(request.dimensions or info.dimensions, request.precision)
    violations = [
        FieldViolation(
            f"inputs[{index}]",
            f"has {number} tokens, whose vectors of {each} bytes may take more than the "
            f"{MATRIX_BYTES_MAX} of a message; ask for a smaller precision or fewer dimensions, or "
            "split the text",
        )
        for index, item in enumerate(tokenized)
        if (number := len(item.input.token_ids)) * each > MATRIX_BYTES_MAX
    ]
    if violations:
        raise RequestTooLarge(violations)


def _check_tokens(
    tokenized: Sequence[TokenizedInput],
    paths: Sequence[str],
    replica: EncodeReplica,
    query: str = "",
) -> None:
    """Check that the tokens of every text are of the model's vocabulary. If the query of a rerank
    has a wrong token, only the query is reported, whether it is in each text or beside it.

    Raises:
        InvalidRequest: A token is not in it; the error lists every text with such a token.
    """
    vocab_size, tokenizer = replica.info.vocab_size, replica.tokenizer
    texts = [
        violation_of_text(path, item.input.token_ids, vocab_size, tokenizer)
        for path, item in zip(paths, tokenized, strict=True)
    ]
    violations = [text for text in texts if text is not None]
    if query and (violations or (tokenized and tokenized[0].input.query is not None)):
        own = tokenizer.encode(query, add_special_tokens=False)
        if (wrong := violation_of_text("query", own, vocab_size, tokenizer)) is not None:
            violations = [wrong]
    if violations:
        raise InvalidRequest(violations)
