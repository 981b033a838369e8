"""The kinds of work of `tests.support.ending_kinds` at the HTTP port.

Phases are left out that a kind does not have there: answers that are sent whole keep every event,
so that none waits for its reader, and embeddings take no images and have no kinds.
"""

import base64
import dataclasses
from types import SimpleNamespace

from engine.worker.fakes.image_generation import image_of
from tests.support import ending_kinds
from tests.support import image_generation_wire as draw_wire
from tests.support.doors import HTTP, HttpCall, HttpGeneration
from tests.support.ending_kinds import DRAW, ENCODE, TEXT
from tests.support.openai_calls import CLASSIFY, EMBED, RERANK
from tests.support.openai_calls import DRAW as DRAW_PATH


class AtHttp:
    """What the kinds share: the door, and blockers that come by gRPC."""

    door = HTTP


class HttpText(AtHttp, ending_kinds.Text):
    """Streams of completions and of chats."""

    blocking = TEXT


class WholeText(HttpText):
    """Completions and chats whose answers are sent whole."""

    rare = ("tokenize", "load", "compile", "encode_image")

    def call(self, client, fields, **options):
        return HttpGeneration(client, is_stream=False, **fields, **options)

    def check_begun(self, call, fields):
        """Check that the tokens are right. Return how many there are; None without an answer."""
        found = super().check_begun(call, fields)
        return found if call.messages else None


class HttpEncode(AtHttp, ending_kinds.Encode):
    """Embeddings, rankings and classifications."""

    rare = ("tokenize", "load", "encode_for_best", "encode_apart", "encode_entities")

    blocking = ENCODE

    def call(self, client, fields, **options):
        if "query" in fields:
            return Ranking(client, RERANK, fields, **options)
        fields = dict(fields)
        if fields.get("model") in ("moods", "names"):
            how = fields.pop("aggregation", "AGGREGATION_").removeprefix("AGGREGATION_").lower()
            body = {"input": fields.pop("inputs"), "aggregation_strategy": how or None, **fields}
            return Labelled(client, CLASSIFY, body, **options)
        return Vectors(client, EMBED, {"input": fields.pop("inputs"), **fields}, **options)


class Vectors(HttpCall):
    """A request for embeddings; its messages are as those of `encode_wire.Encode`."""

    def messages_of(self, answer):
        return [
            SimpleNamespace(index=one["index"], values=one["embedding"]) for one in answer["data"]
        ]

    def by_index(self):
        """Return the messages in the order of their inputs. Each input must have one."""
        found = {message.index: message for message in self.messages}
        assert len(found) == len(self.messages)
        return [found[index] for index in sorted(found)]


class Labelled(Vectors):
    """A request for labels or entities."""

    def messages_of(self, answer):
        return [
            SimpleNamespace(
                index=one["index"],
                labels=sorted(
                    [
                        SimpleNamespace(label=label, score=score)
                        for label, score in zip(
                            one.get("labels", ()), one.get("probs", ()), strict=True
                        )
                    ],
                    key=lambda each: -each.score,
                ),
                entities=[SimpleNamespace(**each) for each in one.get("entities", ())],
            )
            for one in answer["data"]
        ]


class Ranking(Vectors):
    """A request for a ranking."""

    def messages_of(self, answer):
        return [
            SimpleNamespace(index=one["index"], score=one["relevance_score"])
            for one in answer["results"]
        ]


class HttpDraw(AtHttp, ending_kinds.Draw):
    """Drawings, which are sent whole."""

    rare = ("tokenize", "load", "encode")

    blocking = DRAW

    def call(self, client, fields, **options):
        fields = {"prompt": "a cat", "seed": 5, **fields}
        if "steps" in fields:
            fields["num_inference_steps"] = fields.pop("steps")
        if "width" in fields:
            fields["size"] = f"{fields.pop('width')}x{fields.pop('height')}"
        return HttpCall(client, DRAW_PATH, fields, **options)

    def check_begun(self, call, fields):
        """Do nothing, as an answer comes whole or not at all."""

    def check(self, call, fields):
        """Check that the answer has the right pixels."""
        assert call.error is None, call.error
        [answer] = call.messages
        asked = draw_wire.draw_request(**{name: fields[name] for name in fields if name != "model"})
        width, height = map(int, answer["size"].split("x"))
        started = SimpleNamespace(width=width, height=height, seed=answer["seed"])
        drawing = draw_wire.drawing_of(asked, started)
        assert len(answer["data"]) == drawing.num_images
        for index, one in enumerate(answer["data"]):
            pixels = draw_wire.pixels_of(base64.b64decode(one["b64_json"]))
            assert pixels == image_of(drawing, drawing.steps, index).pixels


def at_http(make, kind, name, *left_out):
    """Return a kind at the HTTP port, without some phases."""
    given = {field.name: getattr(kind, field.name) for field in dataclasses.fields(kind)}
    given["phases"] = {name: one for name, one in kind.phases.items() if name not in left_out}
    given["server"] = {"server": {"openai_port": 0}}
    return make(**given | {"name": name})


STREAM = at_http(HttpText, TEXT, "http text")
WHOLE = at_http(WholeText, TEXT, "http whole", "parked")
HTTP_ENCODE = at_http(
    HttpEncode,
    ENCODE,
    "http encode",
    *("parked", "decode image", "encode_images", "encode_sparse", "encode_rows"),
)
HTTP_DRAW = at_http(HttpDraw, DRAW, "http draw", "parked", "decode image", "write")
HTTP_KINDS = (STREAM, WHOLE, HTTP_ENCODE, HTTP_DRAW)
