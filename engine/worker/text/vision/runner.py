"""The runner of models that read images: a text model's runner with a tower beside it (D26).

The text model is loaded and run like other text models. Where a row has tokens of an image, the
image's embeddings replace the tokens' in the forward. They are computed in the step that needs them
first, and kept by the image's digest.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.images.decode import BYTES_PER_PIXEL
from engine.images.preprocessor import KEPT_BYTES_MAX
from engine.worker.forward.attention import Mask
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.forward.image_rows import IMAGES, ImageRows, LaterRows, embed_with
from engine.worker.load.architectures import context_limit
from engine.worker.load.devices import pick_device, pick_dtype
from engine.worker.load.loader import fill
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import resolve
from engine.worker.text.files import open_files
from engine.worker.text.runner import TorchRunner
from engine.worker.text.vision.parts import PartOfCheckpoint, TextPart, read_parts, tower_name
from engine.worker.text.vision.positions import positions_of
from engine.worker.text.vision.tower import (
    Tower,
    activation_bytes,
    build_base,
    cache_bytes,
    joined,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from engine.core.text.plan import Row
    from engine.core.text.types import PromptImage
    from engine.images.preprocessor import Preprocessor
    from engine.worker.forward.attention import AttentionBackend
    from engine.worker.interface import Inspection, LoadProgress, RunnerSpec
    from engine.worker.load.vision_architectures import VisionArchitecture
    from engine.worker.text.interface import ModelInfo
    from engine.worker.text.step_batch import Batch
    from engine.worker.text.vision.inputs import VisionInputs
    from engine.worker.tokenizing.tokenizer import HfTokenizer


@dataclass(frozen=True, slots=True)
class RowImage:
    """The part of an image that a row computes: ``places`` among the step's tokens, and the indices
    of their ``embeddings`` among the image's. Both are [count] int64."""

    image: PromptImage
    places: np.ndarray[Any, np.dtype[np.int64]]
    embeddings: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepImages:
    """The parts of images in a step's rows. ``positions`` are [3, num_tokens] int64; None if the
    model's rotary embedding reads one position for each token."""

    parts: tuple[RowImage, ...]
    positions: np.ndarray[Any, np.dtype[np.int64]] | None = None


class VisionRunner(TorchRunner):
    """A `engine.worker.text.interface.TextRunner` whose prompts may have images. ``tower`` is None
    until it is loaded."""

    tower: Tower | None = None
    has_grids = False  # whether its rotary embedding reads the rows and columns of images
    later: LaterRows | None = None  # adds rows to the outputs of a stock module's first layers

    def __init__(self, spec: RunnerSpec, backend: AttentionBackend | None = None) -> None:
        super().__init__(spec, backend)
        self._division = TextPart()

    def _inspect(self) -> Inspection:
        found = super()._inspect()
        spec = self._spec
        with open_files(spec.model, spec.revision, with_tokenizer=False) as files:
            directory = files.source.directory
            vision, config = read_parts(directory)
            preprocessor = self._inputs(directory, vision, config, str).preprocessor
            with files.open_weights() as whole:
                tower = PartOfCheckpoint(whole, tower_name)
                dtype = pick_dtype(spec.dtype, whole.main_dtype, pick_device(spec.device))
                own = tower.num_values * dtype.itemsize
        limit = context_limit(config.get_text_config(), spec.max_model_len)
        working = self._working_bytes(config, preprocessor, limit, dtype, found.device)
        return replace(
            found,
            architecture=vision.name,
            weight_bytes=found.weight_bytes + own,
            workspace_bytes=found.workspace_bytes + working,
        )

    def close(self) -> None:
        """Free the tower and everything that `TorchRunner.close` frees."""
        self.tower = self.later = None
        super().close()

    def _load(self, progress: Callable[[LoadProgress], None]) -> ModelInfo:
        info = super()._load(progress)
        spec = self._spec
        source = resolve(spec.model, spec.revision)
        vision, config = read_parts(source.directory)
        token_of = partial(_token_of, self.tokenizer, info.vocab_size)
        inputs = self._inputs(source.directory, vision, config, token_of)
        preprocessor = inputs.preprocessor
        _require_budget(preprocessor, spec.max_num_batched_tokens, spec.max_num_seqs)
        base = build_base(vision, config, inputs.TEXT_MODULE)
        dtype = getattr(torch, info.dtype)
        with (
            open_files(spec.model, spec.revision, with_tokenizer=False) as files,
            files.open_weights() as whole,
        ):
            fill(base, PartOfCheckpoint(whole, tower_name), dtype, self._device, lambda _: None)
        hidden = int(config.get_text_config().hidden_size)
        self.has_grids = bool(vision.rotary)
        limit = info.max_model_len
        self.tower = tower = Tower(base, inputs, cache_bytes(config, preprocessor, limit, dtype))
        features = tower.encode(preprocessor.blank())
        if features.shape[2] != hidden or not bool(features.isfinite().all()):
            raise Refusal("its tower makes no finite embeddings of the text model's width")
        module: Any = self._model.module if self._model else None
        if len(features) > 1 and not isinstance(module, NativeDecoder):
            self.later = LaterRows(module.model.layers[: len(features) - 1])
        own = tower.num_bytes + self._working_bytes(config, preprocessor, limit, dtype, info.device)
        return replace(
            info,
            architecture=vision.name,
            memory_bytes=info.memory_bytes + own,
            images=preprocessor,
        )

    def _inputs(
        self,
        directory: Path,
        vision: VisionArchitecture,
        config: Any,
        token_of: Callable[[int], str],
    ) -> VisionInputs:
        """Return the family's `Inputs` for the model. ``token_of`` returns the token of an id."""
        family = importlib.import_module(f"engine.worker.text.vision.{vision.family}")
        inputs: VisionInputs = family.Inputs(
            directory, config, token_of, self._spec.max_image_pixels
        )
        return inputs

    def _working_bytes(
        self, config: Any, preprocessor: Preprocessor, limit: int, dtype: torch.dtype, device: str
    ) -> int:
        """Return the bytes that images take beside weights: for the kept embeddings, and for
        encoding one image; on a CPU also for decoding one image file, and for the images that are
        kept decoded. A prompt has at most ``limit`` tokens."""
        kept = cache_bytes(config, preprocessor, limit, dtype)
        encoding = activation_bytes(config, preprocessor.encoding_cost(limit), dtype)
        if device != "cpu":
            return kept + encoding
        decoding = BYTES_PER_PIXEL * self._spec.max_image_pixels
        return kept + encoding + decoding + KEPT_BYTES_MAX

    def _images_of(self, rows: Sequence[Row]) -> StepImages | None:
        """Return the parts of images that rows compute, and the positions of their tokens."""
        if self.tower is None:
            return None  # in the warm-up, when the tower is not loaded yet
        states = [self._sequences[row.sequence] for row in rows]
        if not any(state.admission.images for state in states):
            return None
        if not self.has_grids:
            return StepImages(self._parts(rows))
        positions = [
            positions_of(state.admission.images, row.start, row.count)
            for row, state in zip(rows, states, strict=True)
        ]
        return StepImages(self._parts(rows), np.concatenate(positions, axis=1))

    def _parts(self, rows: Sequence[Row]) -> tuple[RowImage, ...]:
        """Return the parts of images that rows compute."""
        assert self.tower is not None
        token_id, first, parts = self.tower.inputs.preprocessor.token_id, 0, []
        for row in rows:
            state = self._sequences[row.sequence]
            for image in state.admission.images:
                start, end = max(image.start, row.start), min(image.end, row.start + row.count)
                if start >= end:
                    continue
                is_own = np.array(state.tokens[image.start : image.end]) == token_id
                places = np.flatnonzero(is_own)
                own = slice(*np.searchsorted(places, (start - image.start, end - image.start)))
                parts.append(
                    RowImage(
                        image,
                        places[own] + image.start - row.start + first,
                        np.arange(len(places), dtype=np.int64)[own],
                    )
                )
            first += row.count
        return tuple(parts)

    def _with_images(self, batch: Batch) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """Return a function that puts images' embeddings into a forward's inputs."""
        images = batch.images
        if self.later is not None:
            self.later.images = None
        if not isinstance(images, StepImages) or self._model is None:
            return None
        module, rows = self._model.module, self._image_rows(images.parts)

        def change(inputs: dict[str, Any]) -> dict[str, Any]:
            if images.positions is not None:
                positions = torch.from_numpy(images.positions[:, None]).to(self._device)
                inputs |= {"position_ids": positions}
                if not isinstance(module, NativeDecoder):
                    inputs |= {"attention_mask": masks_of(module.config)}
            if self.later is not None:
                self.later.images = rows
            if rows is None:
                return inputs
            if isinstance(module, NativeDecoder):
                return inputs | {IMAGES: rows}
            ids = inputs.pop("input_ids")
            return inputs | {"inputs_embeds": embed_with(module, ids, rows)}

        return change

    def _image_rows(self, parts: Sequence[RowImage]) -> ImageRows | None:
        """Return the embeddings of ``parts``; None if there are no parts."""
        if not parts or self.tower is None:
            return None
        embeddings = self.tower.embeddings(part.image for part in parts)
        return ImageRows(
            torch.from_numpy(np.concatenate([part.places for part in parts])).to(self._device),
            joined(
                [
                    whole[:, torch.from_numpy(part.embeddings).to(whole.device)]
                    for part, whole in zip(parts, embeddings, strict=True)
                ]
            ),
        )


def masks_of(config: Any) -> dict[str, Mask]:
    """Return the masks of a stock module's layers, by their types. The module cannot make masks
    from three positions itself."""
    window = getattr(config, "sliding_window", None)
    return {"full_attention": Mask(), "sliding_attention": Mask(window)}


def _token_of(tokenizer: HfTokenizer, vocab_size: int, token_id: int) -> str:
    token = tokenizer.token_of(token_id)
    if not token or token_id >= vocab_size:
        raise Refusal(f"its vocabulary lacks the token {token_id}, which its config names")
    return token


def _require_budget(preprocessor: Preprocessor, budget: int, max_num_seqs: int) -> None:
    """Refuse a step budget that has no room for a whole image beside decodes, if an image must be
    computed in one step."""
    if preprocessor.is_whole and budget < preprocessor.max_tokens + max_num_seqs:
        raise Refusal(
            f"its images have {preprocessor.max_tokens} tokens that one step must compute, beside "
            f"a token of each of {max_num_seqs} sequences, and a step has {budget}; raise "
            "--max-num-batched-tokens"
        )
