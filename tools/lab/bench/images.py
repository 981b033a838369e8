"""Measures images: the throughput of image embeddings against sentence-transformers' own, what
images cost the texts beside them, and chats with images.

All models have random weights. "clip" has 6 layers of width 384 and reads 224 × 224 pixels in 49
patches. "see" is a SmolVLM whose text model has 12 layers of width 576 and whose tower has 6 layers
of width 384; it reads a photograph in five tiles of 256 × 256 pixels, which are 320 tokens of 1,280
patches. Photographs have 640 × 480 pixels or, as a phone's, 12 million. Clients send their next
request when they have the answer to the last (`tools.lab.bench.image_loads`).

- throughput: 64 requests at once, of one photograph of 640 × 480 each, against one call of
  ``encode`` for all. The library decodes the photographs, too, and runs in the bench's own process
  with as many threads as the encoder's worker: one.
- beside: 4 clients send photographs of both sizes in turn to "clip". Meanwhile 8 clients send 16
  short texts at a time to an embedding model of MiniLM-L6's shape; or 16 streams of the shipped
  story model are read. "A photograph, alone" is a phone's photograph, from its bytes to its vector:
  most of the time is decoding and resizing, which cannot be interrupted.
- same: 16 clients send 8 photographs of 640 × 480 at a time to "clip", so that each of its steps is
  full. Meanwhile a client sends short texts to "clip" at random moments. A text waits for one step
  of images at most. The longest step of a window is taken as the longest time in which no images
  were answered, which includes a text's own step (2 to 3 %). The time of a full step is the mean of
  `triolet:step_seconds`, while images alone are sent.
- seeing: 16 streams of "see" are read, while 4 clients ask it about new photographs of both sizes.
  Without other requests, one step computes a whole photograph: "one image's piece" is the time from
  the start of its prompt to the first token. Beside streams, a step computes one tile of it.
- chats: the time of the first token after a photograph of 640 × 480 (of at most 64 KB) and 20
  words, all of which are cached, against that of a cached text of as many tokens. "A further image"
  is a new photograph with the same words.

Each part alternates what it compares, so that a drift of the machine affects both alike.
`BENCH_ONLY` is a regular expression that selects among these five names.

Ways to decode images beside steps were tried by hand. Threads of lower priority, longer time slices
for these (a thread that holds the GIL and has no core stops everybody), and never decoding and
encoding at once did not help; a process for decoding did (D23), at niceness 10 as at 19.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import grpc

from grpc_service.client import messages as pb
from tests.checkpoints import vision as vision_checkpoint
from tests.checkpoints.encode import PRESETS, Shape, make_embedder, make_image_embedder
from tools.lab.bench.embed import EMBED, Client, texts
from tools.lab.bench.frame import REPEATS, Row, percentile, repeat_in_turn, row_of
from tools.lab.bench.image_loads import (
    SMALL,
    Load,
    mixed,
    never_the_same,
    photographs,
    windows,
)
from tools.lab.bench.served import served
from tools.lab.bench.wire import GENERATE, NO_PROXY
from tools.lab.peers.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MEASURES = (
    "engine/core/common",
    "engine/core/encode",
    "engine/core/text",
    "engine/images",
    "engine/replica",
    "engine/requests",
    "engine/worker",
    "grpc_service/rpc",
    "grpc_service/services",
    "tools/lab/bench/image_loads.py",
)

COUNT = 64
SHAPE = Shape(layers=6, hidden=384, heads=12, mlp=1536, vocab=30522, max_len=77)
IMAGE_CLIENTS, EMBED_CLIENTS, STREAMS = 4, 8, 16
BATCH_CLIENTS, BATCH_IMAGES = 16, 8  # enough for four full steps
TEXT_PAUSE_S = 0.5
BAR, BAR_BESIDE, BAR_AGAIN = 0.85, 2.2, 1.15
AGAIN = 20  # how often the image is sent again
BLOCK = 16  # the prefix before the image fills at most one block
WORDS = "What is this? " * 5
SEEING_TEXT = {
    "num_hidden_layers": 12,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 2048,
}
TILE, TILE_PATCH, TILES = 256, 16, 5
SEEING_EYES = {
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "image_size": TILE,
    "patch_size": TILE_PATCH,
}


def run() -> list[Row]:
    """Return the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    rows: list[Row] = []
    with ExitStack() as held:
        clip, minilm, see = (
            held.enter_context(tempfile.TemporaryDirectory()) for _ in ("clip", "minilm", "see")
        )
        make_image_embedder(clip, "clip", SHAPE, side=224, patch=32)
        make_embedder(minilm, PRESETS["minilm"], normalize=True)
        seeing_model(see)
        if wanted.search("throughput") or wanted.search("beside"):
            models = [("demo-stories", "stories"), (minilm, "minilm"), (clip, "clip")]
            with served(models) as address:
                rows += throughput(address, clip) if wanted.search("throughput") else []
                rows += beside(address) if wanted.search("beside") else []
        rows += same_model(clip) if wanted.search("same") else []
        if wanted.search("seeing") or wanted.search("chats"):
            with served([(see, "see")]) as address:
                rows += seeing(address) if wanted.search("seeing") else []
                rows += again(address) if wanted.search("chats") else []
    return rows


def seeing_model(directory: str) -> None:
    """Write the model that sees."""
    with (
        patch.dict(vision_checkpoint.TEXT, SEEING_TEXT),
        patch.dict(vision_checkpoint.EYES, SEEING_EYES),
        patch.multiple(vision_checkpoint, SIDE=TILE, PATCH=TILE_PATCH),
    ):
        vision_checkpoint.make(directory, "smolvlm")


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


# ---- what images cost other models


def beside(address: str) -> list[Row]:
    """Return the rows of other models' texts beside images."""
    pictures = [embed_of("clip", image=one) for one in mixed(8)]
    short = pb.EmbedRequest(model="minilm", inputs=[{"text": text} for text in texts()[:16]])
    images = partial(Load, EMBED, cycle(pictures), IMAGE_CLIENTS)
    embeds = partial(Load, EMBED, cycle([short.SerializeToString()]), EMBED_CLIENTS)
    streams = partial(Load, GENERATE, cycle([story("stories")]), STREAMS)
    large = partial(Load, EMBED, cycle(pictures[1::2]), 1)
    sets = [[embeds], [embeds, images], [large], [streams], [streams, images]]
    alone, mixed_with, single, read, read_beside = asyncio.run(windows(address, sets))
    pieces = [median_ms(loads[0]) for loads in single]
    return [
        *_compared("another model's Embed{}, p50", alone, mixed_with, median_ms),
        row_of("images beside another model's Embed", _rates(mixed_with), "images/s"),
        *_compared(f"between tokens of {STREAMS} streams{{}}, p99", read, read_beside, p99_gap_ms),
        row_of("a photograph, alone", pieces, "ms"),
        _against_limit(f"between tokens of {STREAMS} streams", read, read_beside, pieces),
        row_of(f"images beside {STREAMS} streams", _rates(read_beside), "images/s"),
    ]


def _against_limit(
    name: str,
    alone: Sequence[list[Load]],
    beside: Sequence[list[Load]],
    pieces: Sequence[float],
) -> Row:
    """Return the row of the streams' gaps beside images, divided by their limit in each window: the
    time of an image (``pieces``) or `BAR_BESIDE` times the gaps alone, whichever is longer."""
    before, then = ([p99_gap_ms(loads[0]) for loads in one] for one in (alone, beside))
    shares = [
        mine / max(piece, BAR_BESIDE * other)
        for mine, other, piece in zip(then, before, pieces, strict=True)
    ]
    return row_of(f"{name} against an image, or {BAR_BESIDE} × of alone", shares, "×", bar=1.0)


def embed_of(model: str, **inputs: Any) -> bytes:
    """Return a request for the vector of a text or an image."""
    return pb.EmbedRequest(model=model, inputs=[inputs]).SerializeToString()


def story(model: str) -> bytes:
    """Return a request for a stream of 64 tokens. It asks for token ids, so that a token without
    text is a message, too."""
    asked = pb.GenerateRequest(
        model=model,
        text="Once upon a time",
        sampling={"max_tokens": 64, "ignore_eos": True},
        output={"token_ids": True},
    )
    return asked.SerializeToString()


def median_ms(load: Load) -> float:
    """Return the median time of a load's requests."""
    return 1e3 * percentile(load.times, 0.5)


def p99_gap_ms(load: Load) -> float:
    """Return the 99th percentile of the times between a load's tokens."""
    return 1e3 * percentile(load.gaps, 0.99)


def _compared(
    name: str,
    alone: Sequence[list[Load]],
    beside: Sequence[list[Load]],
    figure: Callable[[Load], float],
) -> list[Row]:
    """Return the rows of ``figure`` of the first load of each window: alone, beside images, and
    their ratio. Braces in ``name`` stand for the words that tell these rows apart."""
    before, then = ([figure(loads[0]) for loads in one] for one in (alone, beside))
    ratios = [mine / other for mine, other in zip(then, before, strict=True)]
    return [
        row_of(name.format(" alone"), before, "ms"),
        row_of(name.format(" beside images"), then, "ms"),
        row_of(name.format(" against alone"), ratios, "×", bar=BAR_BESIDE),
    ]


def _rates(beside: Sequence[list[Load]]) -> list[float]:
    return [images.rate for _, images in beside]


# ---- what images cost texts of the same encoder


class Steps(NamedTuple):
    """How many steps a model has computed, and how many seconds they took together."""

    seconds: float
    count: float


def same_model(directory: str) -> list[Row]:
    """Return the rows of texts that are sent to an encoder whose steps are full of images."""
    port = free_port()
    with served([(directory, "clip")], "--metrics-port", str(port)) as address:
        return asyncio.run(_same_model(address, port))


async def _same_model(address: str, port: int) -> list[Row]:
    batches = [photographs(BATCH_IMAGES, SMALL)]
    asked = pb.EmbedRequest(model="clip", inputs=[{"image": one} for one in batches[0]])
    images = partial(Load, EMBED, cycle([asked.SerializeToString()]), BATCH_CLIENTS)
    words = cycle([embed_of("clip", text=one) for one in texts()[:64]])
    text = partial(Load, EMBED, words, 1, TEXT_PAUSE_S)
    alone, waits, steps, ratios, rates = [], [], [], [], []
    longest, of_longest = [], []
    async with grpc.aio.insecure_channel(address, options=NO_PROXY) as channel:
        for turn in range(REPEATS + 1):
            first, only, mine, beside = text(), images(), text(), images()
            await first.run(channel)
            before = steps_of(port)
            await only.run(channel)
            after = steps_of(port)
            await asyncio.gather(mine.run(channel), beside.run(channel))
            if not turn:
                continue
            steps.append(1e3 * (after.seconds - before.seconds) / (after.count - before.count))
            alone.append(1e3 * percentile(first.times, 0.5))
            waits.append(1e3 * percentile(mine.times, 0.99))
            ratios.append(waits[-1] / (alone[-1] + steps[-1]))
            longest.append(1e3 * beside.longest_pause)
            of_longest.append(waits[-1] / (alone[-1] + longest[-1]))
            rates.append(BATCH_IMAGES * beside.rate)
    return [
        row_of("a text alone, p50", alone, "ms"),
        row_of("a full step of images", steps, "ms"),
        row_of("a text beside images of the same model, p99", waits, "ms"),
        row_of("the longest step of images beside texts", longest, "ms"),
        row_of("such a text against one alone and the longest step", of_longest, "×", bar=1.0),
        row_of("such a text against one alone and a step of images", ratios, "×"),
        row_of("images beside texts of the same model", rates, "images/s"),
    ]


def steps_of(port: int) -> Steps:
    """Return the steps of a server's only model, read from the server's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found = {
        key: float(value)
        for key, value in re.findall(
            r"^triolet:step_seconds_(sum|count)\{[^}]*\} (\S+)", text, re.M
        )
    }
    return Steps(found["sum"], found["count"])


# ---- images in chats


def chat_of(image: bytes | None, words: str) -> pb.GenerateRequest:
    """Return a request for one token; its chat has one message with an image, if any, and words."""
    parts = [{"text": words}] if image is None else [{"image": image}, {"text": words}]
    chat = {"messages": [{"role": "user", "parts": parts}]}
    return pb.GenerateRequest(
        model="see", chat=chat, sampling={"max_tokens": 1, "ignore_eos": True}
    )


def finished(call: Any, request: pb.GenerateRequest) -> Any:
    """Return the last event of a request."""
    *_, last = [pb.GenerateResponse.FromString(one) for one in call(request.SerializeToString())]
    return last.finished


def seeing(address: str) -> list[Row]:
    """Return the rows of streams of a vision model while it is asked about images."""
    new = never_the_same(mixed(8))
    asked = (chat_of(image, WORDS).SerializeToString() for image in new)
    streams = partial(Load, GENERATE, cycle([story("see")]), STREAMS)
    images = partial(Load, GENERATE, asked, IMAGE_CLIENTS)
    pieces = one_piece(address, new)
    alone, beside = asyncio.run(windows(address, [[streams], [streams, images]]))
    then = [p99_gap_ms(loads[0]) for loads in beside]
    piece = percentile(pieces, 0.5)
    of_tile = [TILES * mine / piece for mine in then]
    name = f"between tokens of {STREAMS} streams of the model that sees"
    return [
        row_of("one image's piece of the model that sees", pieces, "ms"),
        row_of(f"{name} alone, p99", [p99_gap_ms(loads[0]) for loads in alone], "ms"),
        row_of(f"{name} beside images, p99", then, "ms"),
        _against_limit(name, alone, beside, [piece] * len(beside)),
        row_of(f"{name} against one tile", of_tile, "×"),
        row_of("images beside streams of the model that sees", _rates(beside), "images/s"),
    ]


def one_piece(address: str, new: Iterator[bytes]) -> list[float]:
    """Return the prefill times in ms of prompts with a new photograph and some words."""
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        call = channel.unary_stream(GENERATE)
        found = [finished(call, chat_of(next(new), WORDS)) for _ in range(2 * REPEATS)]
    return [1e3 * one.timings.prefill.ToTimedelta().total_seconds() for one in found[REPEATS:]]


def again(address: str) -> list[Row]:
    """Return the rows of a cached image: its first token, and what a new image finds cached."""
    images = photographs(2 * AGAIN, SMALL)
    assert max(map(len, images)) <= 64 * 1024
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        call = channel.unary_stream(GENERATE)
        first_token(call, chat_of(images[0], WORDS))
        _, length, _ = first_token(call, chat_of(images[0], WORDS))
        text = _text_of_length(call, length)
        shown, said, ratios, hits = [], [], [], []
        for number in range(AGAIN):
            said.append(first_token(call, text)[0])
            shown.append(first_token(call, chat_of(images[0], WORDS))[0])
            ratios.append(shown[-1] / said[-1])
            hits.append(float(first_token(call, chat_of(images[1 + number], WORDS))[2]))
    return [
        row_of(f"a cached text of {length} tokens, first token", [1e3 * s for s in said], "ms"),
        row_of("the same image and words again, first token", [1e3 * s for s in shown], "ms"),
        row_of("the same image against the text", ratios, "×", bar=BAR_AGAIN),
        row_of("cached tokens behind a further image", hits, "", bar=float(BLOCK)),
    ]


def first_token(call: Any, request: pb.GenerateRequest) -> tuple[float, int, int]:
    """Return the seconds to a request's end, its prompt's tokens, and how many were cached."""
    start = time.perf_counter()
    usage = finished(call, request).usage
    return time.perf_counter() - start, usage.prompt_tokens, usage.cached_tokens


def _text_of_length(call: Any, length: int) -> pb.GenerateRequest:
    """Return a chat of about ``length`` tokens, after sending it once, so that it is cached."""
    words = "and "
    while first_token(call, chat_of(None, words))[1] < length:
        words += "and "
    first_token(call, chat_of(None, words))
    return chat_of(None, words)
