"""The kinds of encoders: what the modules' output is, and what a row's result is made of.

Rule: a result depends on its own input and options alone. An output's ``results`` yields None for a
row with numbers that are not finite, and a violation for one that its options cannot have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from engine.core.encode.types import EncodeInput, EncodeOptions, EncodeRowResult, queries_of
from engine.status import Capability
from engine.worker.encode.classifier import ONE_SCORE, activation_of, labels_of
from engine.worker.encode.labels import entities_of, labelled, packed_entities
from engine.worker.encode.precision import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.core.encode.types import EncodeRow
    from engine.errors import FieldViolation

    Array = np.ndarray[Any, Any]
    Features = dict[str, Any]
    Forward = Callable[[Sequence[EncodeInput]], Features]
    Result = EncodeRowResult | FieldViolation | None
    Results = Iterator[Result]

QUERIES_KEPT = 16  # queries whose vectors are kept for the documents of later steps; a guess
WORDS_AT_ONCE = 1024  # tokens of a forward that gives weights of a vocabulary for each; a guess
LEAST_LENGTH = 1e-12  # a shorter vector is divided by this, as torch's normalize does


class Output(Protocol):
    """A kind of encoder. ``modules`` are those of the library's model that are called one after the
    other, for at most ``tokens_at_once`` tokens if that is not None and the input allows it.
    ``dimensions`` is the length of a vector, 0 without vectors, and ``labels`` are the names of a
    classifier's. Texts in the roles ``must_scale`` have vectors that a module scales and cannot
    leave as they are. Its constructor takes the library's model and a function that returns the
    modules' output for texts."""

    modules: list[Any]
    dimensions: int
    labels: tuple[str, ...]
    must_scale: tuple[str, ...]
    tokens_at_once: ClassVar[int | None]

    def take_queries(self, rows: Sequence[EncodeRow]) -> None:
        """Compute what `results` needs of the queries beside a plan's rows, each once."""

    def results(self, features: Features, rows: Sequence[EncodeRow]) -> Results:
        """Yield the result of each row of a forward of the plan."""


class _Alone:
    """Something for each input, which has no query beside it."""

    labels: tuple[str, ...] = ()
    must_scale: tuple[str, ...] = ()
    tokens_at_once: ClassVar[int | None] = None
    dimensions = 0

    def take_queries(self, rows: Sequence[EncodeRow]) -> None:
        """Do nothing."""


class Vectors(_Alone):
    """One vector for each input."""

    def __init__(self, model: Any, _: Forward) -> None:
        self.modules, self._normalizes = _without_normalize(list(model), "sentence_embedding")
        self.dimensions = int(model.get_embedding_dimension())

    def results(self, features: Features, rows: Sequence[EncodeRow]) -> Results:
        """Yield each row's vector (`Output.results`)."""
        vectors = features["sentence_embedding"].float().cpu().numpy()
        for row, vector in zip(rows, vectors, strict=True):
            made = packed(finished(vector, row.options, scales=self._normalizes), row.options)
            yield EncodeRowResult(row.sequence, made) if isinstance(made, array) else made


class Scores(_Alone):
    """One score for each pair of texts, which are read together. As a classifier, the model has the
    score as its one label's."""

    def __init__(self, model: Any, _: Forward) -> None:
        self.modules = list(model)
        self._activation = model.activation_fn
        config = model[0].model.config
        is_classifier = len(self.modules) == 1
        self.labels = labels_of(config, 1) if is_classifier else (ONE_SCORE,)
        self._own = activation_of(config) if is_classifier else "sigmoid"

    def results(self, features: Features, rows: Sequence[EncodeRow]) -> Results:
        """Yield each row's score, after the activation unless the raw one is requested."""
        raw = features["scores"].float().cpu()
        active = self._activation(raw)
        for place, row in enumerate(rows):
            if row.options.activation is not None:
                yield labelled(row, raw[place].reshape(1).numpy(), self._own)
                continue
            score = (raw if row.options.raw_scores else active)[place].item()
            yield EncodeRowResult(row.sequence, array("f", [score])) if np.isfinite(score) else None


class LabelScores(_Alone):
    """The scores of an input's labels."""

    def __init__(self, model: Any, _: Forward) -> None:
        self.modules = list(model)
        config = model[0].model.config
        self.labels = labels_of(config, config.num_labels)
        self._activation = activation_of(config)

    def results(self, features: Features, rows: Sequence[EncodeRow]) -> Results:
        """Yield each row's scores (`Output.results`)."""
        for row, logits in zip(rows, features["logits"].float().cpu().numpy(), strict=True):
            yield labelled(row, logits, self._activation)


class Entities(_Alone):
    """The entities of a text, by the labels of its tokens."""

    def __init__(self, model: Any, _: Forward) -> None:
        self.modules = list(model)
        config = model[0].model.config
        self.labels = labels_of(config, config.num_labels)

    def results(self, features: Features, rows: Sequence[EncodeRow]) -> Results:
        """Yield each row's entities (`Output.results`)."""
        for row, padded in zip(rows, features["logits"].float().cpu().numpy(), strict=True):
            assert isinstance(row.input, EncodeInput), "no classifier reads images"
            logits = padded[: len(row.input.token_ids)]
            if not np.isfinite(logits).all():
                yield None
                continue
            aggregation = row.options.aggregation or "none"
            found = entities_of(logits, row.input.spans, self.labels, aggregation)
            yield packed_entities(row, found)


class _Compared(ABC):
    """Something for each text, which is read alone. What a query and a document have make a score,
    by the model's own similarity. That of a query is kept for the documents of later steps."""

    modules: list[Any]
    dimensions: int
    labels: tuple[str, ...] = ()
    must_scale: tuple[str, ...] = ()
    tokens_at_once: ClassVar[int | None] = None

    def __init__(self, model: Any, forward: Forward) -> None:
        self._similarity = model.similarity
        self._forward = forward
        self._of_query: dict[EncodeInput, Any] = {}  # the one that was used last is at the end

    @abstractmethod
    def _parts(self, features: Features) -> Sequence[Any]:
        """Return the tensor of each text of a forward, float32 on the CPU."""

    def _compared(self, part: Any) -> Any:
        """Return the tensor of a text as it is compared."""
        return part

    @abstractmethod
    def _result(self, row: EncodeRow, part: Array) -> Result:
        """Return the result of a row without a query."""

    def take_queries(self, rows: Sequence[EncodeRow]) -> None:
        """Compute the queries that are not kept. However many a plan has, all are kept until the
        next one, so that none is computed twice."""
        kept, wanted = self._of_query, queries_of(row.input for row in rows)
        for query in wanted:
            made = kept.pop(query, None)
            if made is None:
                made = self._compared(self._parts(self._forward([query]))[0])
            kept[query] = made
        for query in list(kept)[: -max(QUERIES_KEPT, len(wanted))]:
            del kept[query]

    def results(self, features: Features, rows: Sequence[EncodeRow]) -> Results:
        """Yield each row's vector, or the score of a row with a query (`Output.results`)."""
        for row, part in zip(rows, self._parts(features), strict=True):
            query = getattr(row.input, "query", None)
            if query is None:
                yield self._result(row, part.numpy())
                continue
            score = self._similarity([self._of_query[query]], [self._compared(part)]).item()
            yield EncodeRowResult(row.sequence, array("f", [score])) if np.isfinite(score) else None


class SparseVectors(_Compared):
    """A weight for each word of the vocabulary, most of them 0."""

    tokens_at_once = WORDS_AT_ONCE

    def __init__(self, model: Any, forward: Forward) -> None:
        super().__init__(model, forward)
        self.modules = list(model)
        self.dimensions = int(model[0].model.config.vocab_size)
        self._most = model.max_active_dims

    def _parts(self, features: Features) -> Any:
        return features["sentence_embedding"].float().cpu()

    def _compared(self, part: Any) -> Any:
        """Return a text's weights as the library compares them: as many as the model says."""
        from sentence_transformers.util import select_max_active_dims

        return select_max_active_dims(part[None], self._most)[0]

    def _result(self, row: EncodeRow, part: Array) -> Result:
        if not np.isfinite(part).all():
            return None
        indices = np.flatnonzero(part > row.options.threshold)
        most = self._most if row.options.top_k is None else row.options.top_k
        if most is not None and len(indices) > most:  # of equal weights, the first go on
            indices = np.sort(indices[np.argsort(-part[indices], kind="stable")[:most]])
        weights = array("f", part[indices].tolist())
        return EncodeRowResult(row.sequence, weights, array("I", indices.tolist()))


class MultiVectors(_Compared):
    """A vector for each token of a text that the model's masks leave."""

    def __init__(self, model: Any, forward: Forward) -> None:
        super().__init__(model, forward)
        self.modules, self._normalizes = _without_normalize(list(model), "token_embeddings")
        # A module that clusters the tokens of texts in some roles may scale what is left. In the
        # other roles what comes before it decides.
        last, self._scaled = self.modules[-1], set[str]()
        if hasattr(last, "normalize_embeddings"):
            _, before = _without_normalize(self.modules[:-1], "token_embeddings")
            for role in ("query", "document"):
                if last.normalize_embeddings if last.applies_to(role) else before:
                    self._scaled.add(role)
        self.must_scale = tuple(sorted(self._scaled))
        self.dimensions = int(model.get_embedding_dimension())

    def _parts(self, features: Features) -> Sequence[Any]:
        vectors, masks = features["token_embeddings"].float().cpu(), features["attention_mask"]
        return [one[mask] for one, mask in zip(vectors, masks.bool().cpu(), strict=True)]

    def _compared(self, part: Any) -> Any:
        return torch.from_numpy(finished(part.numpy(), EncodeOptions(), scales=self._normalizes))

    def _result(self, row: EncodeRow, part: Array) -> Result:
        role = "query" if getattr(row.input, "is_query", False) else "document"
        scales = self._normalizes or role in self._scaled
        made = packed(finished(part, row.options, scales=scales), row.options)
        if not isinstance(made, array):
            return made
        return EncodeRowResult(row.sequence, made, rows=len(part))


def _without_normalize(modules: list[Any], name: str) -> tuple[list[Any], bool]:
    """Return a model's modules without each Normalize at the end of the output ``name``, and
    whether there was one. A request may leave it out, and it comes after a cut. Masks behind it
    only leave vectors out."""
    place = len(modules) - 1
    while type(modules[place]).__name__ == "MultiVectorMask":
        place -= 1
    last = modules[place]
    if type(last).__name__ != "Normalize":
        return modules, False
    if not last.module_input_name == last.module_output_name == name:
        return modules, False
    return _without_normalize(modules[:place] + modules[place + 1 :], name)[0], True


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


OUTPUTS: dict[Capability, type[Vectors | Scores | LabelScores | Entities | _Compared]] = {
    Capability.TEXT_EMBEDDING: Vectors,
    Capability.IMAGE_EMBEDDING: Vectors,
    Capability.RERANK: Scores,
    Capability.TEXT_CLASSIFICATION: LabelScores,
    Capability.TOKEN_CLASSIFICATION: Entities,
    Capability.SPARSE_EMBEDDING: SparseVectors,
    Capability.MULTI_VECTOR_EMBEDDING: MultiVectors,
}
