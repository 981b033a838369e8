"""Measures images: the throughput of image embeddings against sentence-transformers' own, and what
images cost the texts beside them.

The model is a CLIP of random weights, of 6 layers of width 384, that reads 224 × 224 pixels in 49
patches. Throughput: 64 gRPC requests at once, of one JPEG of 640 × 480 pixels each, against one
call of ``encode`` for all. The library decodes them, too, and runs in the bench's own process with
as many threads as the encoder's worker: one. The measurements alternate, so that a drift of the
machine affects both alike.

What images cost: four clients send one JPEG after the other, each as soon as they have the vector
of the last, half of them of 640 × 480 pixels and half of 12 million, as a phone's. Beside them,
eight clients send 16 short texts at a time to an embedding model of MiniLM-L6's shape; or 16
streams of the shipped story model are read. Both are measured alone and beside the images, in turn.

Images in chats: a SmolVLM of random weights whose text model has 12 layers of width 576, and a JPEG
of 640 × 480 pixels and at most 64 KB. "The same image again": the time of the first token behind an
image and 20 words that came before, against that of a text of as many tokens which came before. "A
further image" has the same words.

`BENCH_ONLY` is a regular expression that selects among throughput, beside and chats.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import grpc

from grpc_service.client import messages as pb
from tools import make_vision
from tools.bench.embed import EMBED, Client, texts
from tools.bench.frame import REPEATS, Row, percentile, repeat_in_turn, row_of
from tools.bench.served import served
from tools.bench.wire import GENERATE, NO_PROXY
from tools.make_encoder import PRESETS, Shape, make_embedder, make_image_embedder

if TYPE_CHECKING:
    from collections.abc import Sequence

MEASURES = (
    "engine/core/common",
    "engine/core/encode",
    "engine/images",
    "engine/replica",
    "engine/requests",
    "engine/worker",
    "grpc_service/rpc",
    "grpc_service/services",
)

COUNT = 64
SMALL, LARGE = (640, 480), (4000, 3000)
SHAPE = Shape(layers=6, hidden=384, heads=12, mlp=1536, vocab=30522, max_len=77)
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "8"))
WARM_UP_S = 0.5
IMAGE_CLIENTS, EMBED_CLIENTS, STREAMS = 4, 8, 16
BAR, BAR_BESIDE, BAR_AGAIN = 0.85, 2.2, 1.15
AGAIN = 20  # times that an image comes again
BLOCK = 16  # tokens, which may be the same before the image
SEEING_TEXT = {
    "num_hidden_layers": 12,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
}


def photographs(count: int, size: tuple[int, int]) -> list[bytes]:
    """Return JPEGs of noise that is as smooth as a photograph."""
    import numpy as np
    from PIL import Image

    rng, made = np.random.default_rng(0), []
    for _ in range(count):
        small = Image.fromarray(rng.integers(0, 256, (size[1] // 16, size[0] // 16, 3), np.uint8))
        file = io.BytesIO()
        small.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        made.append(file.getvalue())
    return made


# ---- throughput


def throughput(address: str, directory: str) -> list[Row]:
    """Return the rows of many images at once."""
    import torch
    from PIL import Image
    from sentence_transformers import SentenceTransformer

    asked = photographs(COUNT, SMALL)
    library = SentenceTransformer(directory, device="cpu")

    def all_at_once() -> float:
        torch.set_num_threads(1)
        start = time.perf_counter()
        library.encode(
            [Image.open(io.BytesIO(one)) for one in asked],  # type: ignore[arg-type]
            show_progress_bar=False,
        )
        return time.perf_counter() - start

    client = Client(address, [{"image": one} for one in asked], "clip")
    ours, whole = repeat_in_turn([client.seconds, all_at_once])
    client.close()
    ratios = [theirs / mine for theirs, mine in zip(whole, ours, strict=True)]
    return [
        row_of(f"{COUNT} requests of an image through gRPC", ours, "s"),
        row_of("encode, all in one call, 1 thread", whole, "s"),
        row_of("throughput against one call", ratios, "×", bar=BAR, better="higher"),
    ]


# ---- what images cost others


@dataclass
class Load:
    """Clients that each send ``requests`` in turn, the next one when they have the answer to the
    last. ``times`` are those of whole requests, ``gaps`` those between two messages of one."""

    method: str
    requests: Sequence[Any]
    clients: int
    times: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    async def run(self, channel: Any) -> None:
        """Send requests for `WINDOW_S`, and until one counts; those of the first `WARM_UP_S` do
        not."""
        start, call = time.perf_counter(), channel.unary_stream(self.method)
        asked = [one.SerializeToString() for one in self.requests]

        async def client(number: int) -> None:
            while (begin := time.perf_counter()) - start < WINDOW_S or not self.times:
                last = 0.0
                async for _ in call(asked[number % len(asked)]):
                    now = time.perf_counter()
                    if last > start + WARM_UP_S:
                        self.gaps.append(now - last)
                    last = now
                if begin > start + WARM_UP_S:
                    self.times.append(time.perf_counter() - begin)
                number += 1

        await asyncio.gather(*map(client, range(self.clients)))


def loads() -> dict[str, Load]:
    """Return the loads by name."""
    pictures = [
        one
        for pair in zip(photographs(8, SMALL), photographs(8, LARGE), strict=True)
        for one in pair
    ]
    story = {"max_tokens": 64, "ignore_eos": True}
    return {
        "images": Load(
            EMBED,
            [pb.EmbedRequest(model="clip", inputs=[{"image": one}]) for one in pictures],
            IMAGE_CLIENTS,
        ),
        "embed": Load(
            EMBED,
            [pb.EmbedRequest(model="minilm", inputs=[{"text": text} for text in texts()[:16]])],
            EMBED_CLIENTS,
        ),
        "generate": Load(
            GENERATE,
            [pb.GenerateRequest(model="stories", text="Once upon a time", sampling=story)],
            STREAMS,
        ),
    }


@dataclass
class Seen:
    """The figures of all windows, in ms, and the images in a second."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    images: list[float] = field(default_factory=list)


async def measure(address: str) -> dict[str, Seen]:
    """Return what each load saw alone and beside images."""
    seen = {"embed": Seen(), "generate": Seen()}
    async with grpc.aio.insecure_channel(address, options=NO_PROXY) as channel:
        for turn in range(REPEATS + 1):
            for name, one in seen.items():
                for figures, names in ((one.alone, [name]), (one.beside, [name, "images"])):
                    found = loads()
                    await asyncio.gather(*(found[each].run(channel) for each in names))
                    load = found[name]
                    taken, share = (load.times, 0.5) if name == "embed" else (load.gaps, 0.99)
                    if turn:  # the first turn only warms up
                        figures.append(1e3 * percentile(taken, share))
                        if "images" in names:
                            number = len(found["images"].times)
                            one.images.append(number / (WINDOW_S - WARM_UP_S))
    return seen


def beside(address: str) -> list[Row]:
    """Return the rows of texts beside images."""
    seen = asyncio.run(measure(address))
    embed, generate = seen["embed"], seen["generate"]
    return [
        row_of("another model's Embed alone, p50", embed.alone, "ms"),
        row_of("another model's Embed beside images, p50", embed.beside, "ms"),
        row_of("another model's Embed against alone", _ratios(embed), "×", bar=BAR_BESIDE),
        row_of("images beside another model's Embed", embed.images, "images/s", better="higher"),
        row_of(f"between tokens of {STREAMS} streams alone, p99", generate.alone, "ms"),
        row_of(f"between tokens of {STREAMS} streams beside images, p99", generate.beside, "ms"),
        row_of(
            f"between tokens of {STREAMS} streams against alone",
            _ratios(generate),
            "×",
            bar=BAR_BESIDE,
        ),
        row_of(f"images beside {STREAMS} streams", generate.images, "images/s", better="higher"),
    ]


# ---- images in chats


def seeing_model(directory: str) -> None:
    """Write the model that sees."""
    with patch.dict(make_vision.TEXT, SEEING_TEXT):
        make_vision.make(directory, "smolvlm")


def chat_of(image: bytes | None, words: str) -> pb.GenerateRequest:
    """Return a request for one token behind a text, and an image before it."""
    parts = [{"text": words}] if image is None else [{"image": image}, {"text": words}]
    chat = {"messages": [{"role": "user", "parts": parts}]}
    return pb.GenerateRequest(
        model="see", chat=chat, sampling={"max_tokens": 1, "ignore_eos": True}
    )


def first_token(call: Any, request: pb.GenerateRequest) -> tuple[float, int, int]:
    """Return the seconds to a request's end, and its prompt's tokens and those that were cached."""
    asked, start = request.SerializeToString(), time.perf_counter()
    *_, last = [pb.GenerateResponse.FromString(one) for one in call(asked)]
    usage = last.finished.usage
    return time.perf_counter() - start, usage.prompt_tokens, usage.cached_tokens


def again(address: str) -> list[Row]:
    """Return the rows of an image that comes again."""
    images = photographs(2 * AGAIN, SMALL)
    assert max(map(len, images)) <= 64 * 1024
    words = "What is this? " * 5
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        call = channel.unary_stream(GENERATE)
        first_token(call, chat_of(images[0], words))
        _, length, _ = first_token(call, chat_of(images[0], words))
        text = _text_of_length(call, length)
        shown, said, ratios, hits = [], [], [], []
        for number in range(AGAIN):
            said.append(first_token(call, text)[0])
            shown.append(first_token(call, chat_of(images[0], words))[0])
            ratios.append(shown[-1] / said[-1])
            hits.append(float(first_token(call, chat_of(images[1 + number], words))[2]))
    return [
        row_of(f"a cached text of {length} tokens, first token", [1e3 * s for s in said], "ms"),
        row_of("the same image and words again, first token", [1e3 * s for s in shown], "ms"),
        row_of("the same image against the text", ratios, "×", bar=BAR_AGAIN),
        row_of("cached tokens behind a further image", hits, "", bar=float(BLOCK)),
    ]


def _text_of_length(call: Any, length: int) -> pb.GenerateRequest:
    """Return a text of about as many tokens, which was asked once."""
    words = "and "
    while first_token(call, chat_of(None, words))[1] < length:
        words += "and "
    first_token(call, chat_of(None, words))
    return chat_of(None, words)


def _ratios(seen: Seen) -> list[float]:
    return [beside / alone for beside, alone in zip(seen.beside, seen.alone, strict=True)]


def run() -> list[Row]:
    """Return the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    rows: list[Row] = []
    with ExitStack() as held:
        clip, minilm, see = (
            held.enter_context(tempfile.TemporaryDirectory()) for _ in ("clip", "minilm", "see")
        )
        if wanted.search("throughput") or wanted.search("beside"):
            make_image_embedder(clip, "clip", SHAPE, side=224, patch=32)
            make_embedder(minilm, PRESETS["minilm"], normalize=True)
            models = [("demo-stories", "stories"), (minilm, "minilm"), (clip, "clip")]
            address = held.enter_context(served(models))
            rows += throughput(address, clip) if wanted.search("throughput") else []
            rows += beside(address) if wanted.search("beside") else []
        if wanted.search("chats"):
            seeing_model(see)
            rows += again(held.enter_context(served([(see, "see")])))
    return rows
