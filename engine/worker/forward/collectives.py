"""The collective operations of a divided model's ranks: they add up activations and share tokens.

The ranks are processes of one machine, joined by torch.distributed: gloo over loopback on CPUs,
NCCL between CUDA devices. They find one another through a file that only they have open, so that no
port has to be agreed on.

Rule 1: all ranks call the same collectives in the same order, with tensors of the same shapes, so
order and shapes may depend only on the plan, never on values that only one rank has. Rule 2:
nothing here has a timeout. A collective cannot be cancelled: if a rank is missing, the others wait
until their processes are killed (`engine.worker.process.group`).

Source: D29.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine.worker.forward.decoder import NativeDecoder
from engine.worker.forward.kernel_structs import SumFunction
from engine.worker.skeleton.division_plans import Style, style_of

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
FOR_EVER = timedelta(days=30)  # no timeout (rule 2); torch accepts no infinite one


class Ranks:
    """A rank's connection to its group. ``num_calls`` counts the collectives that it has begun."""

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device) -> None:
        """Join the group. Waits until all ranks have opened the file ``meeting``."""
        self.rank = rank
        self.size = size
        self.num_calls = 0
        self._device = device
        store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]  # not in __all__
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = FOR_EVER
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            options._timeout = FOR_EVER
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        self.add_up(torch.zeros(1, device=device))  # the first collective connects the ranks

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by the sum of all ranks' tensors, in place.

        Raises:
            RuntimeError: A rank has ended; the group cannot be used again.
        """
        self.num_calls += 1
        self._group.allreduce([tensor]).wait()

    def share(self, numbers: Sequence[int] | None, count: int) -> list[int]:
        """Return the ``count`` numbers that the first rank passes; the other ranks pass None.

        Raises:
            RuntimeError: A rank has ended; the group cannot be used again.
        """
        self.num_calls += 1
        tensor = torch.tensor(numbers or [0] * count, dtype=torch.int64, device=self._device)
        self._group.broadcast([tensor]).wait()
        return tensor.tolist()


class ReducedNorm(torch.nn.Module):
    """An RMS norm over all ranks' heads, of which this rank has a part, with the stock weight."""

    def __init__(self, stock: Any, ranks: Ranks) -> None:
        super().__init__()
        self.weight = stock.weight
        self._eps = float(stock.variance_epsilon)
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [..., own width] to the same shape, as the stock norm does over the whole width."""
        wide = hidden.to(torch.float32)
        squares = wide.pow(2).sum(-1, keepdim=True)
        self._ranks.add_up(squares)
        mean = squares / (hidden.shape[-1] * self._ranks.size)
        return (self.weight * (wide * torch.rsqrt(mean + self._eps))).to(hidden.dtype)


class NoLogits(torch.nn.Module):
    """Replaces a stock model's head on ranks that need no logits. The head's weight is not freed,
    because an embedding may share it."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return no logits for each token, [..., 0]."""
        return hidden[..., :0]


def connect(module: torch.nn.Module, architecture: str, ranks: Ranks) -> None:
    """Have a rank's model add up the outputs that `PLANS` marks, from its next forward on.

    A compiled decoder calls back after each of its branches. The layers of a stock module get a
    hook.
    """
    if isinstance(module, NativeDecoder):
        module.add_up_by(SumCall(ranks), has_logits=ranks.rank == 0)
        return
    for name, child in list(module.named_modules()):
        style = style_of(name, architecture)
        if style in (Style.ROWS, Style.SUM):
            child.register_forward_hook(_add_up_output(ranks))
        elif style is Style.NORM:
            owner = module.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], ReducedNorm(child, ranks))
    if ranks.rank:
        module.lm_head = NoLogits(module.lm_head)  # type: ignore[arg-type]  # a stock module


def _add_up_output(ranks: Ranks) -> Any:
    def hook(_module: object, _arguments: object, output: torch.Tensor) -> torch.Tensor:
        whole = output.contiguous()
        ranks.add_up(whole)
        return whole

    return hook


class SumCall:
    """The function that a compiled decoder calls to add up a branch. An exception cannot pass
    through compiled code, so it is kept; the compiled step makes no more such calls, and the
    decoder's forward raises the exception at its end."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.error: BaseException | None = None
        self.function = SumFunction(self._call)

    def _call(self, numbers: int, count: int) -> int:
        try:
            memory = (ctypes.c_float * count).from_address(numbers)
            self._ranks.add_up(torch.frombuffer(memory, dtype=torch.float32))
        except BaseException as error:
            self.error = error
            return 1
        return 0

    def raise_error(self) -> None:
        """Raise the exception of the last call, if there was one."""
        error, self.error = self.error, None
        if error is not None:
            raise error
