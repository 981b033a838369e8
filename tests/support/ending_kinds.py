"""The kinds of work for tests/service/test_endings.py: the phases of their requests, and the checks
of what a request has given.

In a phase with a ``script``, the fake waits at the gate (`tests.support.gate`) each time that it
would sleep for a cost of the script, except for the first ``passes`` times.
"""

import json
import os
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain

from PIL import Image

from engine.core.text.types import PromptImage
from engine.images.preprocessor import digest_of
from engine.worker.fakes.encode import (
    LABELS,
    SEPARATOR,
    TOKEN_LABELS,
    entities_of,
    label_scores_of,
    rows_of,
    score_of,
    vector_of,
    weights_of,
)
from engine.worker.fakes.preprocessor import num_tokens_of
from engine.worker.fakes.tokenizer import IMAGE_ID, FakeTokenizer
from grpc_service.client import messages as pb
from tests.simulator.encode_oracle import image_file, pixels_in
from tests.support import encode_wire
from tests.support import image_generation_wire as draw_wire
from tests.support.core_driver import expected_tokens
from tests.support.doors import GRPC

COST_S = 1e-6  # the cost of work at which a fake waits
LONG = 2000  # tokens, more than a stopped client's window and buffer take
LATE = [f"late{number}" for number in range(12)]  # models that are not loaded, one for each test
LONG_TEXT = "<" + "0" * 4092 + "12>"  # one token, made in a thread
NEVER_S = 1e6  # a timeout that never comes first, though the tests skip time


@dataclass(frozen=True)
class Phase:
    """A way into a phase, for a request with ``fields``.

    With ``is_unread`` the client stops reading, and its window is small. ``counted_as`` is the
    server's own name for the phase, if it is another one. Explain's answer
    for the request has ``state``, and ``waits_for`` in the field of that name.
    """

    fields: dict
    waits_for: str = ""
    state: str = "WAITING"
    script: dict | None = None
    passes: int = 0
    engine: dict = field(default_factory=dict)
    is_unread: bool = False
    counted_as: str = ""
    holds_decoder: bool = False


def running(fields, passes=0, *, cost="step_s", state="RUNNING", **more):
    """Return a phase in which the model computes the request."""
    script = cost if isinstance(cost, dict) else {cost: COST_S}
    return Phase(fields, state=state, script=script, passes=passes, **more)


def phases(*, short, queued, blocked, parked, long_text=None, images=None, **more):
    """Return the phases of a kind of work by name. Tokenising and decoding are among them with
    ``long_text`` or ``images``, the fields of a request that takes them. The request ``queued``
    waits in the queue of an engine ``blocked``; ``parked`` is (fields, settings with few slots)."""
    if images is not None:
        more = {"decode image": Phase(images, "images", holds_decoder=True), **more}
    if long_text is not None:
        more = {"tokenize": Phase(long_text, "tokens", script={"encode_s": COST_S}), **more}
    return {
        "queued": Phase(queued, script={"step_s": COST_S}, engine=blocked),
        "load": Phase(short, "model load"),
        **more,
        "parked": Phase(parked[0], "reader", "PARKED", engine=parked[1], is_unread=True),
    }


@dataclass(frozen=True)
class Kind:
    """A kind of work at one door.

    Requests are for ``model`` unless their fields say otherwise. ``after`` are the fields of a
    request that must succeed after an end. ``blockers`` are the fields of requests that take every
    seat, while ``num_waiting`` inputs of another request wait in the queue. When a request's reader
    stops, ``num_parked`` of its choices or inputs are parked. ``runner`` are fields of the fake
    text model, and ``server`` others of `tests.support.fake_server.start`. The blockers come by
    ``blocking``, the kind itself unless it is another.
    """

    door = GRPC
    rare = ()  # names of phases that only --full has

    name: str
    model: str
    after: dict
    blockers: tuple
    phases: dict
    num_waiting: int = 1
    num_parked: int = 1
    runner: dict = field(default_factory=dict)
    server: dict = field(default_factory=dict)

    @property
    def blocking(self):
        return self

    def read_result(self, call):
        """Read the first result."""
        assert call.read() is not None

    def renewed(self, fields):
        """Return the fields of a further request, which the server treats as a new one."""
        return fields

    def expected(self, fields):
        """Return the values of a request's messages, if the kind's messages are plain values."""
        raise NotImplementedError

    def check_begun(self, call, fields):
        """Check the messages that have come."""
        values = [one.value for one in call.messages]
        assert values == self.expected(fields)[: len(values)]

    def check(self, call, fields):
        """Check that everything has come."""
        assert call.error is None, call.error
        assert len(call.messages) == len(self.expected(fields))
        self.check_begun(call, fields)


class Text(Kind):
    """Generate."""

    def models(self, script):
        return [{"name": "fake", "capability": "vision", "script": script}]

    def renewed(self, fields):
        """Return the fields with new images, because a server does not decode an image twice, or
        with a new constraint."""
        if "constraint" in fields:
            schema = {"const": os.urandom(8).hex()}  # a server does not compile a form twice
            return fields | {"constraint": {"json_schema": json.dumps(schema)}}
        if "chat" not in fields:
            return fields
        parts = [{"image": image_file(os.urandom(48))} for _ in range(12)]
        return fields | {"chat": {"messages": [{"role": "user", "parts": parts}]}}

    def prompt_of(self, fields):
        """Return the ids of a request's prompt, and its images."""
        if "chat" not in fields:
            return fields.get("prompt_ids") or FakeTokenizer().encode(fields["text"]), ()
        [message] = fields["chat"]["messages"]
        ids, images = FakeTokenizer().encode("user: "), []
        for part in message["parts"]:
            count = num_tokens_of(pixels_in(part["image"]))
            images.append(PromptImage(len(ids), count, 0, digest_of(part["image"])))
            ids += (IMAGE_ID,) * count
        return ids, images

    def call(self, client, fields, **options):
        """Return a call at the kind's door."""
        return self.door.generate(client, **fields, **options)

    def read_result(self, call):
        call.read_deltas(1)

    def check_begun(self, call, fields):
        """Check that the tokens that have come are right. Return how many there are."""
        prompt, images = self.prompt_of(fields)
        found = [call.heard.ids(choice) for choice in range(fields.get("n", 1))]
        for choice, ids in enumerate(found):
            wanted = expected_tokens(prompt, count=len(ids), choice=choice, images=images)
            assert ids == wanted
        return sum(map(len, found))

    def check(self, call, fields):
        """Check that everything has come."""
        assert call.heard.error is None, call.heard.error
        count = fields.get("n", 1)
        assert self.check_begun(call, fields) == count * fields["max_tokens"]
        for choice in range(count):
            assert call.heard.finished(choice).reason == pb.FINISH_REASON_LENGTH


MANY = [[number + 1, 1] for number in range(300)]
IMAGES = [image_file(bytes([number, 1] * 24)) for number in range(20)]
DOCUMENTS = [f"<{number + 1}>" for number in range(300)]


class Encode(Kind):
    """Embed, Rerank and Classify."""

    def models(self, script):
        embedder = {"name": "emb", "capability": "image-embedding", "script": script}
        ranker = {"name": "rank", "capability": "rerank", "script": script}
        sparse = {"name": "sparse", "capability": "sparse-embedding", "script": script}
        multi = {"name": "multi", "capability": "multi-vector-embedding", "script": script}
        moods = {"name": "moods", "capability": "text-classification", "script": script}
        names = {"name": "names", "capability": "token-classification", "script": script}
        return [{"name": "fake"}, embedder, ranker, sparse, multi, moods, names]

    def call(self, channel, fields, **options):
        is_pairs = "query" in fields
        make = encode_wire.rerank_request if is_pairs else encode_wire.embed_request
        if fields.get("model") in ("moods", "names"):
            make = encode_wire.classify_request
        return encode_wire.Encode(channel, make(**fields), **options)

    def check_begun(self, call, fields):
        """Check that the values that have come are each input's own."""
        for message in call.messages:
            if "query" in fields:
                encode = FakeTokenizer().encode
                pair = [*encode("q"), SEPARATOR, *encode(DOCUMENTS[message.index])]
                assert message.score == score_of(pair)
                continue
            one = fields["inputs"][message.index]
            if isinstance(one, dict):
                one = pixels_in(one["image"])
            elif isinstance(one, str):
                one = FakeTokenizer().encode(one)
            if fields.get("model") == "moods":
                found = [(LABELS.index(each.label), each.score) for each in message.labels]
                assert found == label_scores_of(one, "")
            elif fields.get("model") == "names":
                found = [
                    (TOKEN_LABELS.index(each.label), each.score, each.start, each.end)
                    for each in message.entities
                ]
                assert found == entities_of(one, "none")
            elif fields.get("model") == "sparse":
                found = zip(message.sparse.indices, message.sparse.weights, strict=True)
                assert dict(found) == weights_of(one)
            elif fields.get("model") == "multi":
                assert message.rows == len(rows_of(one))
                assert list(message.values) == [*chain.from_iterable(rows_of(one))]
            else:
                assert list(message.values) == vector_of(one)
        assert "top_n" not in fields or len(call.messages) in (0, fields["top_n"])

    def check(self, call, fields):
        """Check that everything has come."""
        assert call.error is None, call.error
        self.check_begun(call, fields)
        inputs = fields.get("inputs") or fields["documents"]
        assert len(call.by_index()) == fields.get("top_n", len(inputs))


def white_image(width, height):
    """Return a PNG of white."""
    file = BytesIO()
    Image.new("RGB", (width, height), "white").save(file, "PNG")
    return file.getvalue()


class Draw(Kind):
    """GenerateImage."""

    def models(self, script):
        return [{"name": "fake"}, draw_wire.ARTIST | {"script": script}]

    def call(self, channel, fields, **options):
        return draw_wire.Draw(channel, draw_wire.draw_request(**fields), **options)

    def read_result(self, call):
        assert call.read_until("progress") is not None

    def check_begun(self, call, fields):
        """Check that the steps that have come follow one another."""
        steps = [one.step for one in call.of("progress")]
        assert steps == list(range(1, len(steps) + 1))
        call.files()

    def check(self, call, fields):
        """Check that everything has come."""
        if "source" in fields:
            assert call.error is None, call.error
            assert len(call.files()) == 1
        else:
            call.check()


SHORT = {"text": "x", "max_tokens": 30, "n": 2}
SHOWN = {"chat": {}, "max_tokens": 30, "n": 2}
FEW = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
UNFORKED = {"state": "WAITING", "waits_for": "another choice"}  # the second choice
TEXT = Text(
    *("text", "fake", {"text": "Once", "max_tokens": 3}),
    blockers=({"prompt_ids": [1], "max_tokens": 300}, {"prompt_ids": [2], "max_tokens": 300}),
    num_parked=2,
    runner={"max_model_len": 8192, "num_blocks": 2048},
    phases=phases(
        short=SHORT,
        long_text=SHORT | {"text": "x" * 5000},
        images=SHOWN,
        queued=SHORT,
        blocked=FEW,
        parked=(SHORT | {"max_tokens": LONG}, {"stream_buffer": 16}),
        compile=Phase(
            SHORT | {"constraint": {}}, "constraint", script={"compile_s": COST_S}, engine=FEW
        ),
        prefill=running(SHORT | {"text": "x" * 1500}, 2, engine=FEW, **UNFORKED),
        # Each image costs 2 to 14 tokens, so that a step has one or a few.
        encode_image=running(
            SHOWN, 1, cost="image_s", engine=FEW, counted_as="prefill", **UNFORKED
        ),
        decode=running(SHORT, 4, engine=FEW),
    ),
)

PICTURES = {"inputs": [{"image": one} for one in IMAGES]}
RANKED = {"query": "q", "documents": DOCUMENTS, "model": "rank"}
SPARSE = {"inputs": MANY, "kind": "VECTOR_KIND_SPARSE", "model": "sparse"}
ROWS = {"inputs": MANY, "kind": "VECTOR_KIND_MULTI_VECTOR", "model": "multi"}
MOODS = {"inputs": MANY, "model": "moods"}
NAMES = {"inputs": DOCUMENTS, "aggregation": "AGGREGATION_NONE", "model": "names"}
TWO = {"max_num_seqs": 2}
ENCODE = Encode(
    *("encode", "emb", {"inputs": ["after"]}),
    blockers=({"inputs": MANY},),
    num_waiting=40,
    phases=phases(
        short={"inputs": ["x"]},
        long_text={"inputs": ["x" * 5000]},
        images=PICTURES,
        queued={"inputs": [[5]] * 50, "priority": 1},
        blocked=TWO,
        parked=({"inputs": MANY * 6}, {"stream_buffer": 8}),
        encode=running({"inputs": MANY}, 3, engine=TWO),
        encode_images=running(PICTURES, 3, engine=TWO, counted_as="encode"),
        encode_pairs=running(RANKED, 3, engine=TWO, counted_as="encode"),
        encode_sparse=running(SPARSE, 3, engine=TWO, counted_as="encode"),
        encode_rows=running(ROWS, 3, engine=TWO, counted_as="encode"),
        encode_apart=running(RANKED | {"model": "sparse"}, 3, engine=TWO, counted_as="encode"),
        encode_labels=running(MOODS, 3, engine=TWO, counted_as="encode"),
        encode_entities=running(NAMES, 3, engine=TWO, counted_as="encode"),
        encode_for_best=running(RANKED | {"top_n": 3}, 3, engine=TWO, counted_as="encode"),
    ),
)

LARGE = {"n": 8, "width": 256, "height": 256}
TILED = {"n": 2, "width": 240, "height": 240, "steps": 2}
DRAW = Draw(
    *("draw", "artist", {"prompt": "after"}),
    blockers=({"prompt": "blocker", "steps": 100},),
    phases=phases(
        short={},
        long_text={"prompt": LONG_TEXT},
        images={"source": {"image": white_image(64, 64)}, "width": 64, "height": 64},
        queued={},
        blocked={"max_drawings": 1},
        parked=(LARGE | {"steps": 100, "preview_every": 1}, {"stream_buffer": 4}),
        encode=running({}, cost={"verb_s": {"encode": COST_S}}),
        denoise=running({"steps": 10}, 2, cost={"verb_s": {"denoise": COST_S}}),
        decode=running(TILED, 2, cost={"verb_s": {"decode": COST_S}}),
        write=Phase(LARGE | {"steps": 1}, "has not taken", is_unread=True),
    ),
)
KINDS = (TEXT, ENCODE, DRAW)
