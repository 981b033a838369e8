"""What an encode request must get, from the request alone, without a schedule or an engine.

Rule: as in `tests.simulator.oracle`, this follows the fake encoder's definition
(`engine.worker.fakes.encode`) and shares only its primitive functions.
"""

import struct
import zlib
from array import array

from engine.core.encode.types import Numbers
from engine.requests.encode.classify_values import ClassifyRequest, Labelled, is_pair
from engine.requests.encode.values import EmbedRequest, EncodeRequests, RerankRequest
from engine.status import Capability
from engine.worker.fakes.encode import (
    IMAGE_TOKENS,
    PROMPTS,
    SEPARATOR,
    entities_of,
    label_scores_of,
    rows_of,
    score_of,
    vector_of,
    weights_of,
)
from engine.worker.fakes.precision import in_precision
from engine.worker.fakes.tokenizer import FakeTokenizer

IMAGE_SIDE = 4  # pixels of an image's side, as the fake has it, so that none is resized
PIXELS_AT = 41  # where the pixels of `image_file` begin
# Models that read texts apart, by the names of their kinds of vectors.
APART = {
    "sparse": Capability.SPARSE_EMBEDDING,
    "multi-vector": Capability.MULTI_VECTOR_EMBEDDING,
}
# Classifiers of texts and of tokens.
LABELLERS = {
    "labeller": Capability.TEXT_CLASSIFICATION,
    "tagger": Capability.TOKEN_CLASSIFICATION,
}
MAX_INPUT_LEN = 48  # tokens; drawn worlds' encoders cut longer inputs


def image_file(pixels: bytes) -> bytes:
    """Return the PNG of an image of 4 × 4 pixels, as RGB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    width = 3 * IMAGE_SIDE
    lines = b"".join(b"\0" + pixels[at : at + width] for at in range(0, len(pixels), width))
    header = struct.pack(">IIBBBBB", IMAGE_SIDE, IMAGE_SIDE, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def pixels_in(file: bytes) -> bytes:
    """Return the pixels of an `image_file`."""
    lines = zlib.decompressobj().decompress(file[PIXELS_AT:])
    width = 3 * IMAGE_SIDE + 1
    return b"".join(lines[at + 1 : at + width] for at in range(0, len(lines), width))


def tokens_of(request: EncodeRequests) -> list[int]:
    """Return how many tokens each input of a valid request has."""
    lengths = [len(ids) for ids in inputs_of(request)]
    if isinstance(request, ClassifyRequest):
        return lengths
    if not isinstance(request, EmbedRequest):
        query = len(FakeTokenizer().encode(request.query)[:MAX_INPUT_LEN]) + 1
        return [length - query for length in lengths] if request.model in APART else lengths
    return [
        IMAGE_TOKENS if isinstance(one, bytes) else length
        for one, length in zip(request.inputs, lengths, strict=True)
    ]


def prompt_tokens_of(request: EncodeRequests) -> int:
    """Return the tokens of a valid request's inputs, and of a query that is read alone."""
    if not isinstance(request, RerankRequest) or request.model not in APART:
        return sum(tokens_of(request))
    return sum(tokens_of(request)) + len(FakeTokenizer().encode(request.query)[:MAX_INPUT_LEN])


def inputs_of(request: EncodeRequests) -> list[tuple[int, ...]]:
    """Return the token ids from which a valid request's inputs are computed, in their order."""
    encode = FakeTokenizer().encode
    if isinstance(request, EmbedRequest):
        prompt = encode(PROMPTS.get(request.prompt_name, ""))
        return [_ids_of(one, prompt) for one in request.inputs]
    if isinstance(request, ClassifyRequest):
        return [_labelled_ids(one) for one in request.inputs]
    head = (*encode(request.query), SEPARATOR)
    if request.model in APART:  # each text is cut alone
        head = (*head[:-1][:MAX_INPUT_LEN], SEPARATOR)
        return [head + encode(document)[:MAX_INPUT_LEN] for document in request.documents]
    return [(head + encode(document))[:MAX_INPUT_LEN] for document in request.documents]


def _ids_of(one: str | bytes | tuple[int, ...], prompt: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(one, bytes):
        return tuple(pixels_in(one))
    ids = prompt + FakeTokenizer().encode(one) if isinstance(one, str) else one
    return ids[:MAX_INPUT_LEN]


def _labelled_ids(one: Labelled) -> tuple[int, ...]:
    if is_pair(one):
        first, second = map(FakeTokenizer().encode, one)
        return (*first, SEPARATOR, *second)[:MAX_INPUT_LEN]
    return _ids_of(one, ())  # type: ignore[arg-type]


def _numbers_of(values: list[float], request: EmbedRequest) -> Numbers:
    """Return a vector's numbers as a request wants them."""
    values = values[: request.dimensions]
    if request.normalize:
        length = sum(value * value for value in values) ** 0.5
        values = [value / length for value in values]
    low, high = request.ranges or ((), ())
    return in_precision(values, request.precision or "float32", low, high)


def _labels_of(ids: tuple[int, ...], request: ClassifyRequest) -> list[float]:
    """Return an input's labels and then their scores, and of entities their places."""
    if request.aggregation:
        entities = entities_of(ids, request.aggregation)
        labels, scores = [one[0] for one in entities], [one[1] for one in entities]
        return [*labels, *scores, *(place for one in entities for place in one[2:])]
    best = label_scores_of(ids, request.activation, request.top_k)
    return [*(label for label, _ in best), *(score for _, score in best)]


def expected_results(request: EncodeRequests) -> list[list[float]]:
    """Return each input's numbers, in the precision asked for; of a sparse vector, the indices and
    then the weights; of labels, likewise."""
    found = []
    for ids in inputs_of(request):
        if isinstance(request, ClassifyRequest):
            found.append(_labels_of(ids, request))
            continue
        if isinstance(request, EmbedRequest) and request.kind == "sparse":
            weights = weights_of(ids, request.top_k, request.threshold or 0.0)
            found.append([*weights, *weights.values()])
        elif isinstance(request, EmbedRequest):
            rows = rows_of(ids) if request.kind == "multi-vector" else [vector_of(ids)]
            found.append([number for row in rows for number in _numbers_of(row, request)])
        else:
            found.append(list(array("f", [score_of(ids, raw=bool(request.raw_scores))])))
    return found
