"""A training that may be run in pieces: it stops after some minutes, and the next run goes on.

Rule: a training in pieces makes the same weights as one without, because a step's batch follows
from its number.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.lab.demo.encoder_parts import Schedule

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from torch.nn import Module


class Unfinished(Exception):
    """The time is over before the training is done; its state is in the file for the next run."""


class Pieces:
    """The steps of one training. ``kept`` is the file that a piece leaves for the next one; without
    it, the training runs to its end."""

    def __init__(self, model: Module, others: Module, kept: Path | None, minutes: float) -> None:
        self._modules = (model, others)
        self._schedule = Schedule(model, others)
        self._kept = kept
        self._ends = time.monotonic() + 60 * minutes
        self._losses: deque[float] = deque(maxlen=100)
        self._step, self._share = 0, 0.0
        self._cpu_before = 0.0
        if kept and kept.exists():
            self._go_on(torch.load(kept, weights_only=True))

    def steps(self, *rounds: int) -> Iterator[int]:
        """Yield the numbers of the training's remaining steps. ``rounds`` are the numbers of steps
        of its rounds, in each of which the learning rate falls to zero.

        Raises:
            Unfinished: The time is over.
        """
        total = sum(rounds)
        while self._step < total:
            self._begin_step(rounds)
            yield self._step
            self._step += 1
            if self._step % 50 == 0:
                print(f"step {self._step}/{total}  loss {self._mean():.4f}", flush=True)
            if self._kept and time.monotonic() > self._ends and self._step < total:
                self.keep()
                raise Unfinished(f"{self._step} of {total} steps are done; run this again")

    def learn(self, loss: torch.Tensor) -> None:
        """Update the weights once."""
        self._losses.append(float(loss.item()))
        self._schedule.take_step(loss, self._share)

    def _begin_step(self, rounds: Sequence[int]) -> None:
        starts = list(accumulate(rounds, initial=0))[:-1]
        at = bisect_right(starts, self._step) - 1
        if self._step == starts[at] > 0:
            self._schedule = Schedule(*self._modules)
        self._share = (self._step - starts[at]) / rounds[at]

    def facts(self) -> dict[str, float]:
        """Return the number of steps, the mean loss of the last hundred, and all CPU seconds."""
        cpu_seconds = round(self._cpu_before + time.process_time())
        return {"steps": self._step, "loss": round(self._mean(), 4), "cpu_seconds": cpu_seconds}

    def _mean(self) -> float:
        return sum(self._losses) / max(1, len(self._losses))

    def keep(self) -> None:
        """Write the training's state for the next run, if there is a file for it."""
        if self._kept is None:
            return
        torch.save(
            {
                "modules": [module.state_dict() for module in self._modules],
                "schedule": self._schedule.state(),
                "step": self._step,
                "cpu_seconds": self._cpu_before + time.process_time(),
            },
            self._kept,
        )

    def _go_on(self, kept: dict[str, Any]) -> None:
        for module, state in zip(self._modules, kept["modules"], strict=True):
            module.load_state_dict(state)
        self._schedule.go_on(kept["schedule"])
        self._step, self._cpu_before = kept["step"], kept["cpu_seconds"]


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of a training in pieces."""
    options.add_argument("--kept", type=Path, help="go on from this file, and keep the rest in it")
    options.add_argument("--minutes", type=float, default=4.0, help="of a piece with --kept")
