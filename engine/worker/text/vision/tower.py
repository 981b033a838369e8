"""A model's tower: transformers' own modules without the text model, which encode images.

Rule 1: as in `engine.worker.load.loader`, a model is refused if the checkpoint lacks a parameter or
has a tensor that the tower does not use. Rule 2: images are encoded one at a time, so that an
image's embeddings do not depend on other images.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.import_lock import holds_import_lock
from engine.worker.load.checkpoint import is_finite
from engine.worker.load.loader import first_line
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.core.text.types import PromptImage
    from engine.images.preprocessor import Preprocessor, SeenImage
    from engine.worker.load.checkpoint import Checkpoint
    from engine.worker.load.vision_architectures import VisionArchitecture

# The number of embeddings that are kept, but at least those of two images. About as many as four
# steps of the default budget compute; not tuned.
KEPT_EMBEDDINGS = 8192
# The activations of a tower, in numbers per patch and unit of width. Same as in
# `engine.worker.encode.runner`.
ACTIVATIONS_PER_WIDTH = 16
# The copies of a patch's numbers that exist at once, in float32: scaled, cut into patches, and
# contiguous.
INPUT_COPIES = 3


@holds_import_lock
def build_base(vision: VisionArchitecture, config: Any, text_module: str) -> Any:
    """Return transformers' model without its text model, on the meta device.

    Raises:
        Refusal: The config does not describe such a model.
    """
    package = f"transformers.models.{vision.module}.modeling_{vision.module}"
    try:
        with torch.device("meta"):
            base = getattr(importlib.import_module(package), vision.base)(config)
    except Exception as error:
        raise Refusal(
            f"its config.json does not describe a {vision.name} ({first_line(error)})",
            detail=str(error),
        ) from error
    setattr(base, text_module, None)
    return base


def fill(base: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Give a tower on the meta device its weights and buffers.

    Raises:
        Refusal: The checkpoint does not fit the tower, or has numbers that are not finite.
    """
    parameters = dict(base.named_parameters())
    missing = sorted(parameters.keys() - checkpoint.tensors.keys())
    if missing:
        raise Refusal(f"its checkpoint lacks the tensor {missing[0]}")
    unused = sorted(checkpoint.tensors.keys() - parameters.keys())
    if unused:
        raise Refusal(
            f"its checkpoint holds a tensor that the architecture does not use, {unused[0]}"
        )
    for name, parameter in parameters.items():
        stored = checkpoint.tensors[name]
        if stored.shape != tuple(parameter.shape):
            raise Refusal(
                f"its tensor {name} has the shape {list(stored.shape)}, and the config asks for "
                f"{list(parameter.shape)}"
            )
        tensor = checkpoint.read(name).to(device=device, dtype=dtype, copy=True)
        if not is_finite(tensor):
            checkpoint.check_finite(name)
            raise Refusal(f"its tensor {name} has numbers that {dtype} cannot hold")
        own = torch.nn.Parameter(tensor, requires_grad=False)
        own._is_hf_initialized = True  # type: ignore[attr-defined]  # read by _init_weights
        owner, _, attribute = name.rpartition(".")
        setattr(base.get_submodule(owner), attribute, own)
    _fill_buffers(base, base._init_weights, device)
    base.eval()


def _fill_buffers(module: Any, init: Callable[[Any], None], device: torch.device) -> None:
    """Allocate the buffers on the device. The `_init_weights` of the innermost model of
    transformers that has them computes them."""
    init = getattr(module, "_init_weights", init)
    for child in module.children():
        _fill_buffers(child, init, device)
    empty = [name for name, one in module.named_buffers(recurse=False) if one.is_meta]
    for name in empty:
        setattr(module, name, torch.empty_like(getattr(module, name), device=device))
    if empty:
        init(module)


class Tower:
    """A loaded tower with a cache of images' embeddings, by the images' digests.

    ``max_bytes`` of embeddings are kept. ``num_encoded`` counts the images that were encoded. The
    least recently used embeddings are dropped first, but never those of the step that is being
    prepared, so that a running step may keep more than ``max_bytes``.
    """

    def __init__(self, base: Any, reader: Any, max_bytes: int) -> None:
        self.base = base
        self.reader = reader
        self.num_encoded = 0
        self.max_bytes = max_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the tower's weights."""
        return sum(one.numel() * one.element_size() for one in self.base.parameters())

    def embeddings(self, images: Iterable[PromptImage]) -> list[torch.Tensor]:
        """Return the embeddings of images, [1 + num_deep, num_tokens, hidden] each, in the dtype of
        the tower.

        Raises:
            ValueError: The tower made another number of embeddings than an image has tokens.
        """
        wanted = list(images)
        found = [self._embedding(image) for image in wanted]
        self._make_room({image.digest for image in wanted})
        return found

    def encode(self, image: SeenImage) -> torch.Tensor:
        """Compute an image's embeddings, even if they are kept."""
        found: torch.Tensor = self.reader.features(self.base, image)
        if found.shape[1] != image.num_tokens:
            raise ValueError(f"{found.shape[1]} embeddings for {image.num_tokens} image tokens")
        return found

    def _embedding(self, image: PromptImage) -> torch.Tensor:
        kept = self._kept.get(image.digest)
        if kept is None:
            content: Any = image.content
            kept = self._kept[image.digest] = self.encode(content)
            self.num_encoded += 1
            self._num_bytes += _bytes_of(kept)
        self._kept.move_to_end(image.digest)
        return kept

    def _make_room(self, used: set[bytes]) -> None:
        for digest in list(self._kept):
            if self._num_bytes <= self.max_bytes:
                return
            if digest not in used:
                self._num_bytes -= _bytes_of(self._kept.pop(digest))


def cache_bytes(config: Any, preprocessor: Preprocessor, limit: int, dtype: torch.dtype) -> int:
    """Return the bytes of the embeddings that are kept. A prompt has at most ``limit`` tokens."""
    num_deep = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    width = (1 + num_deep) * int(config.get_text_config().hidden_size)
    return max(KEPT_EMBEDDINGS, 2 * min(preprocessor.max_tokens, limit)) * width * dtype.itemsize


def activation_bytes(config: Any, cost: int, dtype: torch.dtype) -> int:
    """Return an upper estimate of the memory that encoding ``cost`` patches takes."""
    vision = config.vision_config
    width = int(getattr(vision, "embed_dim", None) or vision.hidden_size)
    numbers = 3 * int(vision.patch_size) ** 2 * int(getattr(vision, "temporal_patch_size", 1))
    of_patch = ACTIVATIONS_PER_WIDTH * width * dtype.itemsize
    return cost * (of_patch + INPUT_COPIES * numbers * 4)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return embeddings joined along their tokens, float32 and contiguous."""
    return torch.cat(list(parts), dim=1).to(torch.float32).contiguous()
