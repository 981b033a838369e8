"""The protocol of workers that encode, on top of `engine.worker.interface`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.core.encode.types import EncodePlan, EncodeResult, TokenizedInput
from engine.worker.interface import Runner, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.images.fit import ImageFit
    from engine.status import Capability


@dataclass(frozen=True, slots=True)
class EncoderInfo(WorkerInfo):
    """Describes an encoder once it is loaded. Its ``kind`` is what it computes, such as a vector
    for each text, a score for each pair of texts, or scores of labels. Of a pair of texts that are
    read together, ``max_model_len`` is of both."""

    kind: Capability
    dimensions: int = 0  # length of its vectors; 0 for a cross-encoder
    ranges: bytes = b""  # of its whole vectors' numbers (`EncodeOptions.ranges`); b"": not known
    prompt_names: tuple[str, ...] = ()
    text_width: int = 0  # tokens to which each text is padded, in any batch; 0: no such padding
    images: ImageFit | None = None  # fits its images; None: it reads no images
    # The roles (query, document) of texts whose vectors a module scales, whatever a request wants.
    must_scale: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # names of a classifier's labels, in the order of its scores
    reads_pairs: bool = False  # its chat template takes pairs of texts alone
    # The most tokens of queries and of other texts, where they differ; None: ``max_model_len``.
    query_len: int | None = None
    document_len: int | None = None

    @property
    def capability(self) -> Capability:
        """What the encoder can do."""
        return self.kind


class EncoderTokenizer(Protocol):
    """Turns texts into inputs, and cuts inputs that are too long. Safe to call from any thread."""

    def encode_texts(self, texts: Sequence[str], prompt_name: str) -> list[TokenizedInput]:
        """Return one input for each text, with the named prompt before it. An empty name means the
        model's default prompt.

        Raises:
            InvalidRequest: A text cannot be encoded; the violation's field is its index.
        """

    def encode_pairs(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        """Return one input for each document, the query first. If both together are too long, the
        longer text is cut.

        Raises:
            InvalidRequest: A text cannot be encoded; the violation's field is its index or query.
        """


class EncodeRunner(Runner[EncodePlan, EncodeResult, EncoderInfo], Protocol):
    """A runner of an encoder. It keeps nothing between steps. Except for the noise of float
    arithmetic, the result of a row does not depend on the other rows."""

    @property
    def encoder_tokenizer(self) -> EncoderTokenizer:
        """The tokenizer that makes the inputs of plans. Valid after `load`."""
