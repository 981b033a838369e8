"""Plans and results are values: they pickle without torch and come back equal (D8)."""

import dataclasses
import pickle
from array import array

import pytest

from engine.core.common import steps as s
from engine.core.common.types import BlockId, EndReason, PlanId, RequestId, SequenceId
from engine.core.encode import types as e
from engine.core.text import plan as p
from engine.core.text.types import Alternative, Constraint, Sampling, Stops, TokenLogprob
from engine.images.fit import FittedImage, ImageFit
from engine.status import Capability
from engine.worker import interface as w
from engine.worker.encode import interface as encode
from engine.worker.text import interface as text
from tests.support.programs import output_of

SAMPLING = Sampling(0.7, 5, 0.9, seed=3, logit_bias=((1, 2.0),), bad_words=((4, 5),), logprobs=2)
STOPS = Stops(9, 1, ("a", "b"), frozenset({2}), include=True)
LOGPROB = TokenLogprob(5, "x", -0.5, (Alternative(6, "y", -1.0, 1),))
INPUT = e.EncodeInput((1, 2), (0, 1), 1)
IMAGE = e.ImageInput(FittedImage(1, 2, bytes(6)), 5)
FIT = ImageFit(5, 100, size=(1, 2))
OPTIONS = e.EncodeOptions(4, True, True)
VALUES = [
    e.TokenizedInput(INPUT, 3),
    e.CharSpan(0, 3, False),
    p.StepPlan(
        PlanId(7),
        (
            p.Row(
                SequenceId(1),
                0,
                4,
                p.BlockDelta(0, (BlockId(3),)),
                p.Logits.LAST,
                (p.ChildFork(SequenceId(2), 1, (BlockId(4),)),),
            ),
            p.Row(SequenceId(9), 8, 1, None, p.Logits.ALL, state=p.StateDelta(BlockId(2))),
        ),
        ((BlockId(3), BlockId(4)),),
        (
            p.AdmittedSequence(
                SequenceId(1), (5, 6, 7, 8), SAMPLING, STOPS, Constraint("regex", "a+")
            ),
        ),
        (SequenceId(0),),
    ),
    p.StepResult(
        PlanId(7),
        (
            p.RowResult(SequenceId(1), (5,), "x", (LOGPROB,), (), EndReason.STOP, "a"),
            s.RowFailure(SequenceId(2), "sample", "why"),
        ),
        s.StepTimings(1.0, 2.0, 3.0, 4.0),
    ),
    s.StepFailure(PlanId(7), s.FailureKind.OUT_OF_MEMORY, "why"),
    e.EncodeRequest(RequestId("r"), (INPUT, IMAGE), 1.0, OPTIONS, 2, 3.0),
    e.EncodePlan(PlanId(8), (e.EncodeRow(SequenceId(1), INPUT, OPTIONS),)),
    e.EncodeResult(PlanId(8), (e.EncodeRowResult(SequenceId(1), array("f", [0.5])),)),
    e.EncodeRowResult(SequenceId(1), array("f", [0.5]), array("I", [7])),
    e.EncodeRowResult(SequenceId(1), array("b", [5, 7]), rows=2),
    e.EncodeInput((1, 2), (), 0, 0, e.EncodeInput((3, 4), is_query=True, expanded=1)),
    e.Encoded(RequestId("r"), 0, e.EncodeRowResult(SequenceId(1), array("f", [0.5])), 2),
    encode.EncoderInfo(
        "bert", "float32", "cpu", 10, 20, 30, Capability.TEXT_EMBEDDING, 4, ("query",)
    ),
    encode.EncoderInfo("clip", "", "cpu", 10, 20, 30, Capability.IMAGE_EMBEDDING, images=FIT),
    w.RunnerSpec("demo-stories", kv_bytes=1, threads=2),
    text.ModelInfo("llama", "float32", "cpu", 10, 20, 99, 30, 16, frozenset({1})),
    w.LoadProgress("weights", 1, 2, 3, 4),
    w.MemoryEstimate(1 << 30, "cuda:0", 1 << 33),
    w.TokenSpan(1, "x", 0, 1),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_equal_from_a_pickle(value):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_cannot_be_changed(value):
    name = value._fields[0] if isinstance(value, tuple) else dataclasses.fields(value)[0].name
    with pytest.raises(AttributeError):
        setattr(value, name, None)


def test_every_value_class_of_the_plan_is_in_the_list():
    def walk(value):
        yield type(value)
        if isinstance(value, tuple):
            for part in value:
                yield from walk(part)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                yield from walk(getattr(value, field.name))

    seen = {cls for value in VALUES for cls in walk(value)}
    declared = {
        cls
        for module in (p, e)
        for cls in vars(module).values()
        if isinstance(cls, type)
        and cls.__module__ == module.__name__
        and not getattr(cls, "_is_protocol", False)
    }
    assert declared - seen == {text.SamplingDefaults, e.InputKind} - seen


def test_a_plan_is_unpickled_by_a_process_without_torch():
    code = (
        "import pickle, sys; sys.modules['torch'] = None\n"
        "assert len(pickle.load(sys.stdin.buffer)) > 5"
    )
    output_of(code, input=pickle.dumps(VALUES), text=False)
