"""Measures what batching across requests gains: 256 simultaneous gRPC requests of one short text
each, against sentence-transformers with all texts in one call, and with one text after another.

The model has MiniLM-L6's shape and random weights. The library runs in the bench's own process with
as many threads as the encoder's worker: one. The measurements alternate, so that a drift of the
machine affects all alike. With ``BENCH_THREADS``, the single call is also timed with that many
threads.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from typing import TYPE_CHECKING, Any

import grpc

from grpc_service.client import messages as pb
from tests.checkpoints.encode import PRESETS, WORDS, make_embedder
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.served import served
from tools.lab.bench.wire import NO_PROXY

if TYPE_CHECKING:
    from collections.abc import Sequence

MEASURES = (
    "engine/core/common",
    "engine/core/encode",
    "engine/replica",
    "engine/requests",
    "engine/worker",
    "grpc_service/rpc",
    "grpc_service/services",
)

EMBED = "/triolet.v1.Inference/Embed"
COUNT = 256
BAR_ALL, BAR_ONE = 0.85, 3.0


def texts(seed: int = 0) -> list[str]:
    """Return texts of 6 to 16 tokens, including the two special tokens."""
    draw, words = random.Random(seed), WORDS.split()
    return [" ".join(draw.choices(words, k=draw.randint(4, 14))) for _ in range(COUNT)]


class Client:
    """Sends a request for each input at once over one connection, and waits for every answer."""

    def __init__(self, address: str, asked: Sequence[dict[str, Any]], model: str = "") -> None:
        self._runner = asyncio.Runner()
        self._requests = [
            pb.EmbedRequest(model=model, inputs=[one]).SerializeToString() for one in asked
        ]
        self._channel: Any = self._runner.run(self._open(address))

    async def _open(self, address: str) -> Any:
        return grpc.aio.insecure_channel(address, options=NO_PROXY)

    async def _send(self) -> None:
        call = self._channel.unary_stream(EMBED)

        async def one(request: bytes) -> None:
            async for _ in call(request):
                pass

        await asyncio.gather(*map(one, self._requests))

    def seconds(self) -> float:
        """Return the time until every request is answered."""
        start = time.perf_counter()
        self._runner.run(self._send())
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the connection."""
        self._runner.run(self._channel.close())
        self._runner.close()


def run() -> list[Row]:
    """Return the bench's rows."""
    import torch
    from sentence_transformers import SentenceTransformer

    asked, more = texts(), int(os.environ.get("BENCH_THREADS", "0"))
    with tempfile.TemporaryDirectory() as directory:
        make_embedder(directory, PRESETS["minilm"], normalize=True)
        library = SentenceTransformer(directory, device="cpu")

        def all_at_once(threads: int = 1) -> float:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            library.encode(asked, show_progress_bar=False)
            return time.perf_counter() - start

        def one_by_one() -> float:
            torch.set_num_threads(1)
            start = time.perf_counter()
            for text in asked:
                library.encode(text, show_progress_bar=False)
            return time.perf_counter() - start

        with served([(directory, "minilm")]) as address:
            client = Client(address, [{"text": text} for text in asked])
            measures = [client.seconds, all_at_once, one_by_one]
            if more:
                measures.append(lambda: all_at_once(more))
            ours, whole, single, *other = repeat_in_turn(measures)
            client.close()
    rows = [
        row_of("256 requests through gRPC", ours, "s"),
        row_of("encode, all in one call, 1 thread", whole, "s"),
        row_of("encode, one by one, 1 thread", single, "s"),
        row_of(
            "throughput against one call", _ratios(whole, ours), "×", bar=BAR_ALL, better="higher"
        ),
        row_of(
            "throughput against one by one",
            _ratios(single, ours),
            "×",
            bar=BAR_ONE,
            better="higher",
        ),
    ]
    if other:
        rows.append(row_of(f"encode, all in one call, {more} threads", other[0], "s"))
    return rows


def _ratios(reference: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [theirs / mine for theirs, mine in zip(reference, ours, strict=True)]
