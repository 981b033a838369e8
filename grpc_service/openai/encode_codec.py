"""Embeddings, rankings and drawings: their bodies as the engine's requests, and their answers."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

from engine.core.common.events import Finished
from engine.errors import InvalidRequest, Unsupported
from engine.requests.encode.values import (
    MAX_INPUTS,
    Embedding,
    EmbedRequest,
    RerankRequest,
    Score,
)
from engine.requests.image_generation.values import (
    MAX_SEED,
    DrawingFinished,
    DrawingStarted,
    DrawRequest,
    GeneratedImage,
)
from engine.requests.text.values import Started
from grpc_service.openai.fields import Fields, is_ids, most_of, texts_or_ids
from grpc_service.openai.json_text import encode_json
from grpc_service.openai.work import Context, WholeEncoder, Work, id_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.requests.encode.values import EncodeEvent
    from engine.requests.image_generation.values import ImageGenerationEvent

INT32_MAX = 2**31 - 1
INPUT_PATH = re.compile(
    r"inputs\[(\d+)\](?:\.text|\.token_ids(?:\.ids)?|\.pair)?((?:\[\d+\]|\.text(?:_pair)?)?)"
)


def common_fields(fields: Fields, context: Context) -> dict[str, Any]:
    """Return the fields that the requests of all routes have."""
    return {
        "model": fields.text("model") or "",
        "priority": fields.whole("priority", -INT32_MAX - 1, INT32_MAX),
        "request_id": id_of(fields, context),
        "timeout_s": context.timeout_s,
        "check": False,
    }


def _renaming(fields: Fields) -> Callable[[int, str], str]:
    """Return what says under which name a field of triolet.v1 came."""
    return lambda source, path: fields.sent_as.get(path, path)


# ---- embeddings


def decode_embeddings(body: dict[str, Any], context: Context) -> Work:
    """Return the work of ``/v1/embeddings``.

    Raises:
        InvalidRequest, Unsupported: a field has a wrong value, or is none that this server knows.
    """
    fields = Fields(body)
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise Unsupported("encoding_format is not float or base64", field="encoding_format")
    request = EmbedRequest(
        inputs=_inputs_of(fields),
        dimensions=fields.whole("dimensions"),
        normalize=fields.switch("normalize"),
        truncate=fields.switch("truncate"),
        prompt_name=fields.text("prompt_name") or "",
        precision=_precision_of(fields),
        ranges=_ranges_of(fields),
        background=fields.is_flex(),
        **common_fields(fields, context),
    )
    fields.done()
    encoder = EmbeddingsWhole(is_base64=form == "base64")
    fields.sent_as |= {"inputs": "input", "precision": "output_dtype"}
    return Work(request.request_id, (request,), encoder, rename=input_renamer(fields, body))


def input_renamer(
    fields: Fields, body: dict[str, Any], name: str = "input"
) -> Callable[[int, str], str]:
    """Return the function that names a field of triolet.v1, where inputs came in ``name``."""
    is_list = isinstance(body[name], list) and not is_ids(body[name])

    def rename(source: int, path: str) -> str:
        found = INPUT_PATH.fullmatch(path)
        if found is None:
            return fields.sent_as.get(path, path)
        return f"{name}[{found[1]}]{found[2]}" if is_list else f"{name}{found[2]}"

    return rename


def _inputs_of(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    return tuple(texts_or_ids(fields, "input", most_of("TokenIds.ids"), 0, MAX_INPUTS))


def _precision_of(fields: Fields) -> str:
    """Take ``output_dtype``, Voyage's name of a vector's precision, whose float is float32."""
    name = fields.text("output_dtype") or ""
    return "float32" if name == "float" else name


def _ranges_of(fields: Fields) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    ranges = fields.inner("ranges")
    if ranges is None:
        return None
    low, high = (ranges.numbers(name, most_of(f"VectorRanges.{name}")) for name in ("low", "high"))
    ranges.done()
    return low, high


class EmbeddingsWhole(WholeEncoder):
    """The answer of ``/v1/embeddings``. In base64 a vector is little-endian, in the precision that
    was asked for; OpenAI's clients read float32."""

    def __init__(self, *, is_base64: bool) -> None:
        self._is_base64 = is_base64
        self._model = ""
        self._found: dict[int, Embedding] = {}

    def is_heavy(self, events: Sequence[EncodeEvent]) -> bool:
        """Return whether the whole answer is made of these events."""
        return any(isinstance(event, Finished) for event in events)

    def encode(self, source: int, events: Sequence[EncodeEvent]) -> list[bytes]:
        """Keep vectors; after the last one, return the answer, in the inputs' order."""
        is_done = False
        for event in events:
            if isinstance(event, Started):
                self._model = event.model
            elif isinstance(event, Embedding):
                self._found[event.index] = event
            elif isinstance(event, Finished):
                is_done = event.reason.is_success
        return [self._answer()] if is_done else []

    def _answer(self) -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(self._found[index])}
            for index in sorted(self._found)
        ]
        tokens = sum([one.tokens for one in self._found.values()])
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return encode_json({"object": "list", "model": self._model, "data": data, "usage": usage})

    def _vector(self, found: Embedding) -> str | list[float] | list[int]:
        if self._is_base64:
            return base64.b64encode(found.values.tobytes()).decode()
        return list(found.numbers)


# ---- rankings


def decode_rerank(body: dict[str, Any], context: Context) -> Work:
    """Return the work of ``/v1/rerank``, in the form of Jina and Cohere. Raises as
    `decode_embeddings`."""
    fields = Fields(body)
    documents = []
    for index, given in enumerate(
        fields.items("documents", most_of("RerankRequest.documents")) or ()
    ):
        if isinstance(given, str):
            documents.append(given)
            continue
        inside = Fields(given, f"documents[{index}].")
        documents.append(inside.text("text") or "")
        inside.done()
    shows = fields.switch("return_documents")
    request = RerankRequest(
        query=fields.text("query") or "",
        documents=tuple(documents),
        top_n=fields.whole("top_n"),
        raw_scores=fields.switch("raw_scores"),
        truncate=fields.switch("truncate"),
        background=fields.is_flex(),
        **common_fields(fields, context),
    )
    fields.done()
    encoder = RerankWhole(request.request_id, request.documents if shows else ())
    return Work(request.request_id, (request,), encoder, rename=_renaming(fields))


class RerankWhole(WholeEncoder):
    """The answer of ``/v1/rerank``: the best document first, with its text if ``documents`` are
    given."""

    def __init__(self, request_id: str, documents: tuple[str, ...]) -> None:
        self._id = request_id
        self._documents = documents
        self._model = ""
        self._scores: list[Score] = []

    def is_heavy(self, events: Sequence[EncodeEvent]) -> bool:
        """Return whether the whole answer is made of these events, with the documents."""
        return bool(self._documents) and any(isinstance(event, Finished) for event in events)

    def encode(self, source: int, events: Sequence[EncodeEvent]) -> list[bytes]:
        """Keep scores; after the last one, return the answer."""
        for event in events:
            if isinstance(event, Started):
                self._model = event.model
            elif isinstance(event, Score):
                self._scores.append(event)
            elif isinstance(event, Finished) and event.reason.is_success:
                return [self._answer(event.usage.prompt_tokens)]
        return []

    def _answer(self, tokens: int) -> bytes:
        results: list[dict[str, Any]] = []
        for one in sorted(self._scores, key=lambda one: (-one.score, one.index)):
            shown = {"document": {"text": self._documents[one.index]}} if self._documents else {}
            results.append({"index": one.index, "relevance_score": one.score, **shown})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        head = {"id": f"rerank-{self._id}", "model": self._model}
        return encode_json({**head, "results": results, "usage": usage})


# ---- drawings


def decode_images(body: dict[str, Any], context: Context) -> Work:
    """Return the work of ``/v1/images/generations``. Raises as `decode_embeddings`."""
    fields = Fields(body)
    fields.expect("response_format", "b64_json")
    fields.expect("quality", "auto", "standard")
    fields.expect("style", "natural")
    fields.expect("moderation", "auto")
    fields.expect("background", "auto")
    fields.expect("stream", False)
    fields.expect("partial_images", 0)
    width, height = _size_of(fields)
    request = DrawRequest(
        prompt=fields.text("prompt") or "",
        negative_prompt=fields.text("negative_prompt") or "",
        width=width,
        height=height,
        steps=fields.whole("num_inference_steps"),
        guidance=fields.number("guidance_scale"),
        seed=fields.whole("seed", 0, MAX_SEED),
        n=fields.whole("n"),
        scheduler=fields.text("scheduler") or "",
        format=fields.text("output_format") or "",
        quality=fields.whole("output_compression"),
        **common_fields(fields, context),
    )
    fields.done()
    fields.sent_as |= IMAGE_NAMES
    encoder = ImagesWhole(context.created)
    return Work(request.request_id, (request,), encoder, rename=_renaming(fields))


IMAGE_NAMES = {
    **{"width": "size", "height": "size", "steps": "num_inference_steps"},
    **{"guidance": "guidance_scale", "format": "output_format", "quality": "output_compression"},
}


def _size_of(fields: Fields) -> tuple[int | None, int | None]:
    size = fields.text("size")
    if size is None or size == "auto":
        return None, None
    width, _, height = size.partition("x")
    if not all(side.isascii() and side.isdigit() and len(side) < 6 for side in (width, height)):
        raise InvalidRequest.of("size", "is not of the form 512x512")
    return int(width), int(height)


class ImagesWhole(WholeEncoder):
    """The answer of ``/v1/images/generations``."""

    def __init__(self, created: int) -> None:
        self._created = created
        self._started: DrawingStarted | None = None
        self._images: dict[int, GeneratedImage] = {}

    def is_heavy(self, events: Sequence[ImageGenerationEvent]) -> bool:
        """Return whether the whole answer is made of these events."""
        return any(isinstance(event, DrawingFinished) for event in events)

    def encode(self, source: int, events: Sequence[ImageGenerationEvent]) -> list[bytes]:
        """Keep images; after the last one, return the answer."""
        for event in events:
            match event:
                case DrawingStarted():
                    self._started = event
                case GeneratedImage():
                    self._images[event.index] = event
                case DrawingFinished():
                    return [self._answer(event)]
        return []

    def _answer(self, event: DrawingFinished) -> bytes:
        assert self._started is not None
        data = [
            {"b64_json": base64.b64encode(self._images[index].data).decode()}
            for index in sorted(self._images)
        ]
        tokens, image = event.usage.prompt_tokens, next(iter(self._images.values()))
        return encode_json(
            {
                "created": self._created,
                "data": data,
                "size": f"{self._started.width}x{self._started.height}",
                "output_format": image.format,
                "seed": event.seed,
                "usage": {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens},
            }
        )
