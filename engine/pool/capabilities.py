"""How the pool describes and loads the models of each capability.

Nothing else in the pool depends on what a model computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.status import Capability


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """How the pool treats the models of one capability.

    ``description`` completes the sentence "a model that …". ``also`` has other capabilities that
    such models have. ``loads_alone``: no two such models load at the same time in the server's
    process. ``loads_last``: when the server starts, such a model loads after all others have
    loaded. ``has_kv_cache``: the model's memory includes a KV pool, whose size the operator can set
    and which may hold a request's prefix.
    """

    description: str
    also: tuple[Capability, ...] = ()
    loads_alone: bool = False
    loads_last: bool = False
    has_kv_cache: bool = False


def _sentence_transformers(description: str, *also: Capability) -> ModelTraits:
    """Return the traits of models that sentence-transformers or transformers' own classes load:
    their loading changes torch's default dtype for every thread, and their import takes seconds
    (D14)."""
    return ModelTraits(description, also, loads_alone=True, loads_last=True)


# diffusers' import takes seconds, too, and its loading changes torch for every thread.
_DRAWS = ModelTraits("makes images", loads_alone=True, loads_last=True)

TRAITS = {
    Capability.TEXT_TO_TEXT: ModelTraits("generates text", has_kv_cache=True),
    Capability.TEXT_EMBEDDING: _sentence_transformers("makes embeddings"),
    # A reranker is a classifier with one label, as reward models are, too.
    Capability.RERANK: _sentence_transformers("reranks", Capability.TEXT_CLASSIFICATION),
    Capability.TEXT_CLASSIFICATION: _sentence_transformers("classifies texts"),
    Capability.TOKEN_CLASSIFICATION: _sentence_transformers("labels the tokens of texts"),
    Capability.IMAGE_EMBEDDING: _sentence_transformers("embeds images", Capability.TEXT_EMBEDDING),
    Capability.SPARSE_EMBEDDING: _sentence_transformers("makes sparse vectors", Capability.RERANK),
    Capability.MULTI_VECTOR_EMBEDDING: _sentence_transformers(
        "makes a vector for each token", Capability.RERANK
    ),
    Capability.VISION: ModelTraits("reads images", (Capability.TEXT_TO_TEXT,), has_kv_cache=True),
    Capability.TEXT_TO_IMAGE: _DRAWS,
}


def all_of(own: Capability) -> tuple[Capability, ...]:
    """Return all capabilities of a model, its own first."""
    return (own, *TRAITS[own].also)


def can(own: Capability, needed: Capability | None) -> bool:
    """Return whether a model of the capability ``own`` has ``needed``; None is any capability."""
    return needed is None or needed in all_of(own)
