"""Compares the device's attention with the reference attention in float64, over random steps."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.worker.forward.attention import AttentionCall
from engine.worker.forward.reference_attention import ReferenceBackend
from tests.support.attention_rows import caches, lay_out, numbers
from tools.lab.bench.frame import Row

if TYPE_CHECKING:
    from engine.worker.forward.attention import AttentionBackend
    from tools.lab.gpu.target import Target

DTYPES = ("bfloat16", "float16")
SHAPES = ((1, 1, 8), (4, 2, 8), (6, 2, 24), (9, 3, 64), (14, 2, 64), (32, 8, 128), (8, 1, 256))
WINDOWS = (None, 1, 2, 7, 40, 600)
BAR = 6e-2  # the largest difference; rounding to bfloat16 makes 3e-2


def run(target: Target) -> None:
    """Measure the worst difference of each dtype."""
    device, count = torch.device(target.device), 200 if target.is_cuda else 20
    for name in DTYPES:
        title = f"kernel, {name}: worst difference"
        if target.wants(title):
            worst = max(_difference(seed, getattr(torch, name), device) for seed in range(count))
            row = Row(title, worst, "", BAR, n=count, note=f"{count} drawn steps")
            target.add([row])


def _backend(device: torch.device) -> AttentionBackend:
    if device.type != "cuda":
        return ReferenceBackend()
    from engine.worker.forward.varlen_attention import VarlenBackend

    return VarlenBackend()


def _difference(seed: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference in a step whose rows, shape and window are drawn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    prefixes = [draw.randint(1, 3) for _ in range(draw.randint(0, 2))]
    drawn = [
        (
            draw.choice([None, *range(len(prefixes))]),
            draw.randint(0, 40),
            draw.choice([1, draw.randint(1, 40)]),
        )
        for _ in range(draw.randint(1, 6))
    ]
    rows, num_blocks = lay_out((draw.choice([1, 2, 4, 16, 256]), prefixes, drawn), draw)
    shape = draw.choice(SHAPES)
    cpu = torch.device("cpu")
    near, exact = caches(rows, num_blocks, shape, (dtype, device), (torch.float64, cpu))
    sinks = torch.randn(shape[0]) if draw.random() < 0.5 else None
    call = AttentionCall(0, shape[2] ** -0.5, draw.choice(WINDOWS), sinks=sinks)
    sent = replace(call, sinks=None if sinks is None else sinks.to(device))
    inputs = numbers(rows, shape, dtype)
    out = _backend(device).prepare(rows, near).attend(sent, *(one.to(device) for one in inputs))
    wanted = ReferenceBackend().prepare(rows, exact).attend(call, *(one.double() for one in inputs))
    difference = (out.cpu().double() - wanted).abs().max()
    return float(difference.nan_to_num(torch.inf))
