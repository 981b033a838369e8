"""The forms of tensors that join a mixture's experts, in checkpoints and in transformers' modules.

All other code handles each expert's weights separately: gate_proj, up_proj and down_proj, [outputs,
inputs], with biases if there are any. This file has their places in joined tensors.

Rule: the names of the tensors alone decide the form. GPT-OSS is recognised by its experts' biases,
which no other mixture has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

JOINED_EXPERTS = re.compile(
    r"(?P<base>.*\.experts)\.(?P<part>gate_up_proj|down_proj)(?P<bias>_bias)?"
)
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
SIGN_OF_GPT_OSS = ".experts.gate_up_proj_bias"


class Piece(NamedTuple):
    """The weight or bias of one expert: its name, and its outputs' place in the joined tensor."""

    name: str
    expert: int
    outputs: slice


@dataclass(frozen=True, slots=True)
class Joining:
    """How the experts of a layer are joined along the first dimension. Weights are [experts,
    outputs, inputs], with the outputs of gates before those of ups. If they are ``alternating``, as
    in GPT-OSS, weights are [experts, inputs, outputs], and gates and ups alternate."""

    alternating: bool = False

    def shape(self, name: str, joined: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each piece of a joined tensor of this name and shape."""
        match = JOINED_EXPERTS.fullmatch(name)
        assert match is not None
        shape = list(reversed(joined[1:])) if self.alternating else list(joined[1:])
        return shape[0] // len(EXPERT_PARTS[match["part"]]), *shape[1:]

    def take(self, joined: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return a view of one piece of a joined tensor."""
        own = joined[piece.expert]
        return (own.T if self.alternating and own.dim() == 2 else own)[piece.outputs]

    def join(self, pieces: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Return the joined tensor of this shape, from the pieces in the order of `pieces`."""
        if not self.alternating:
            return torch.cat(list(pieces)).view(*shape)
        experts, of_each = shape[0], len(pieces) // shape[0]
        own = torch.stack(list(pieces)).view(experts, of_each, *pieces[0].shape).transpose(1, 2)
        own = own.reshape(experts, -1, *pieces[0].shape[1:])
        return own.transpose(1, 2).contiguous() if own.dim() == 3 else own

    def pieces(self, name: str, joined: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces of a joined tensor of this name and shape, expert by expert."""
        match = JOINED_EXPERTS.fullmatch(name)
        assert match is not None
        parts, kind = EXPERT_PARTS[match["part"]], "bias" if match["bias"] else "weight"
        outputs = self.shape(name, joined)[0]
        for expert in range(joined[0]):
            for index, part in enumerate(parts):
                own = slice(index * outputs, (index + 1) * outputs)
                if self.alternating:
                    own = slice(index, None, len(parts))
                yield Piece(f"{match['base']}.{expert}.{part}.{kind}", expert, own)


def is_joined(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor joins the experts of a layer."""
    match = JOINED_EXPERTS.fullmatch(name)
    return match is not None and len(shape) == (2 if match["bias"] else 3)


def joining_of(names: Iterable[str]) -> Joining:
    """Return how the experts among tensors or parameters of these names are joined."""
    return Joining(alternating=any(name.endswith(SIGN_OF_GPT_OSS) for name in names))
