"""Checks the arguments that a loaded model's layers pass to their attention.

Rule: the config is not trusted. One small forward records every attention call. The model is
refused by name if a layer was not called exactly once, has another shape than the cache, or passes
a keyword outside the closed list of `engine.worker.forward.attention`. So an unsupported model
fails when it is loaded, and not in a user's answer. A skeleton cannot run; it computes its calls
from its config (`engine.worker.skeleton.modules`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.worker.forward.attention import KEYWORD, AttentionCall, UnsupportedAttention
from engine.worker.import_lock import holds_import_lock
from engine.worker.load.architectures import NO_KEYS, LayerShape
from engine.worker.load.loader import first_line
from engine.worker.load.refusal import Refusal
from engine.worker.skeleton.modules import Skeleton

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.worker.load.loader import LoadedModel


@dataclass(slots=True)
class _Recorder:
    """A `PreparedStep` that computes nothing and records every call."""

    calls: list[AttentionCall] = field(default_factory=list)
    shapes: list[tuple[LayerShape, LayerShape]] = field(default_factory=list)

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Record the call and its shapes, and return zeros."""
        self.calls.append(call)
        self.shapes.append((LayerShape(*key.shape[1:]), LayerShape(*value.shape[1:])))
        return query.new_zeros((*query.shape[:2], value.shape[2]))


def probe(model: LoadedModel, shapes: Sequence[LayerShape]) -> tuple[AttentionCall, ...]:
    """Run the model once over two packed tokens and return its layers' calls in layer order. A
    skeleton is not run: its ``calls`` are returned.

    Raises:
        Refusal: The paged cache does not support the model's attention, or its config's sizes do
            not fit each other.
    """
    if isinstance(model.module, Skeleton):
        return model.module.calls
    recorder = _Recorder()
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    try:
        _first_forward(model, tokens, recorder)
    except UnsupportedAttention as error:
        raise Refusal(f"{model.architecture.name} is not served: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:  # sizes that do not fit each other
        raise Refusal(
            f"its config.json does not describe a {model.architecture.name} ({first_line(error)})",
            detail=str(error),
        ) from error
    _check_layers(model.architecture.name, recorder, shapes)
    return tuple(sorted(recorder.calls, key=lambda call: call.layer))


@holds_import_lock
def _first_forward(model: LoadedModel, tokens: torch.Tensor, recorder: _Recorder) -> None:
    """Run the model; its modules may import others in their first forward."""
    model.module(input_ids=tokens, position_ids=tokens, use_cache=False, **{KEYWORD: recorder})


def _check_layers(name: str, recorder: _Recorder, shapes: Sequence[LayerShape]) -> None:
    layers = sorted(call.layer for call in recorder.calls)
    wanted = [layer for layer, shape in enumerate(shapes) if shape != NO_KEYS]
    if layers != wanted:
        raise Refusal(
            f"{name} is not served: its {len(wanted)} layers called the attention "
            f"{len(layers)} times, and each layer must call it once"
        )
    for call, (keys, values) in zip(recorder.calls, recorder.shapes, strict=True):
        if keys != shapes[call.layer] or values != shapes[call.layer]:
            raise Refusal(
                f"{name} is not served: layer {call.layer} keeps {keys.num_kv_heads} keys of "
                f"{keys.head_dim} and values of {values.head_dim} for a token, but its config "
                f"implies {shapes[call.layer].num_kv_heads} of {shapes[call.layer].head_dim}"
            )
