"""The kinds of encoders: what the modules' output is, and what a row's result is made of.

Rule: a result depends on its own input and options alone. An output's ``results`` yields None for a
row with numbers that are not finite.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.core.encode.types import EncodeRowResult
from engine.status import Capability
from engine.worker.encode.precision import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.core.encode.types import EncodeOptions, EncodeRow

    Array = np.ndarray[Any, Any]
    Results = Iterator[EncodeRowResult | None]

LEAST_LENGTH = 1e-12  # a shorter vector is divided by this, as torch's normalize does


class Output(Protocol):
    """A kind of encoder. ``modules`` are those of the library's model that are called one after the
    other; ``dimensions`` is the length of a vector, 0 without vectors."""

    modules: list[Any]
    dimensions: int

    def results(self, features: dict[str, Any], rows: Sequence[EncodeRow]) -> Results:
        """Yield the result of each row of a forward."""


class Vectors:
    """One vector for each input."""

    def __init__(self, model: Any) -> None:
        self.modules, self._normalizes = _without_normalize(list(model), "sentence_embedding")
        self.dimensions = int(model.get_embedding_dimension())

    def results(self, features: dict[str, Any], rows: Sequence[EncodeRow]) -> Results:
        """Yield each row's vector (`Output.results`)."""
        vectors = features["sentence_embedding"].float().cpu().numpy()
        for row, vector in zip(rows, vectors, strict=True):
            made = packed(finished(vector, row.options, scales=self._normalizes), row.options)
            yield None if made is None else EncodeRowResult(row.sequence, made)


class Scores:
    """One score for each pair of texts, which are read together."""

    dimensions = 0

    def __init__(self, model: Any) -> None:
        self.modules = list(model)
        self._activation = model.activation_fn

    def results(self, features: dict[str, Any], rows: Sequence[EncodeRow]) -> Results:
        """Yield each row's score, after the activation unless the raw one is requested."""
        raw = features["scores"].float().cpu()
        active = self._activation(raw)
        for place, row in enumerate(rows):
            score = (raw if row.options.raw_scores else active)[place].item()
            yield EncodeRowResult(row.sequence, array("f", [score])) if np.isfinite(score) else None


def _without_normalize(modules: list[Any], name: str) -> tuple[list[Any], bool]:
    """Return a model's modules without a Normalize at the end of the output ``name``, and whether
    there was one. A request may leave it out, and it comes after a cut."""
    last = modules[-1]
    normalizes = type(last).__name__ == "Normalize" and last.module_output_name == name
    return (modules[:-1] if normalizes else modules), normalizes


def finished(vectors: Array, options: EncodeOptions, *, scales: bool) -> Array:
    """Cut vectors ([…, dimensions] float32) to the requested dimensions, and then scale them to
    length 1 if the request wants that or, without its word, the model does (``scales``). (The
    library cuts vectors after scaling them, so that theirs are shorter than 1.)"""
    vectors = vectors[..., : options.dimensions]
    if not (scales if options.normalize is None else options.normalize):
        return vectors
    with np.errstate(invalid="ignore", over="ignore"):  # `packed` sees what is not finite
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        scaled: Array = vectors / np.maximum(lengths, LEAST_LENGTH)
    return scaled


OUTPUTS: dict[Capability, Callable[[Any], Output]] = {
    Capability.TEXT_EMBEDDING: Vectors,
    Capability.IMAGE_EMBEDDING: Vectors,
    Capability.RERANK: Scores,
}
