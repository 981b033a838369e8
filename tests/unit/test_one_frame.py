"""What all schedulers do alike is written once, in `engine.core.common`."""

import ast
from pathlib import Path

import pytest

from engine.config import EncoderConfig, ImageGenerationConfig, SchedulerConfig
from engine.core.common.core import Core
from engine.core.common.one_choice import OneChoiceCore
from engine.core.common.waiting_queue import WaitingQueue
from engine.core.encode.live_request import LiveEncode
from engine.core.encode.scheduler import EncodeScheduler
from engine.core.image_generation.scheduler import ImageGenerationScheduler
from engine.core.text.scheduler import Scheduler
from engine.settings import QueueLimits
from tests.simulator import counting
from tests.support import counting_calls
from tests.support.encode_driver import EncodeDriver
from tools.rooms import modules

CORES = [
    Scheduler(SchedulerConfig(num_blocks=128)),
    EncodeScheduler(EncoderConfig(max_model_len=64)),
    ImageGenerationScheduler(ImageGenerationConfig()),
    counting.CountCore(QueueLimits(), 2),
]


@pytest.mark.parametrize("core", CORES, ids=lambda core: type(core).__name__)
@pytest.mark.parametrize(
    "name",
    [
        *("apply", "plan", "is_idle", "is_live", "phase_of", "has_begun", "explain"),
        *("_submit", "_refusal", "_counts", "_take_events"),
    ],
)
def test_a_kind_does_not_do_again_what_the_frame_does(core, name):
    assert getattr(type(core), name) is getattr(Core, name)


@pytest.mark.parametrize("core", CORES[1:], ids=lambda core: type(core).__name__)
@pytest.mark.parametrize("name", ["_end", "_explain", "_unpark"])
def test_the_kinds_with_one_choice_end_and_explain_requests_alike(core, name):
    assert getattr(type(core), name) is getattr(OneChoiceCore, name)


def test_there_is_one_waiting_queue_and_one_table_of_live_requests():
    names = [
        node.name
        for module, path in modules().items()
        if module.startswith("engine.core.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and "Queue" in node.name
    ]
    assert [name for name in names if name != "Queued"] == ["WaitingQueue"]
    assert [type(core._waiting) for core in CORES] == [WaitingQueue] * 4
    text, encode, image, _ = CORES
    ledger = text._ledger
    assert (ledger.requests, ledger.waiting) == (text._requests, text._waiting)
    assert ledger.requests is text._requests
    assert ledger.parked.unread is text._parked
    assert encode._inputs.queue is encode._waiting
    assert image._deadlines._queue is image._waiting


def test_the_steps_of_an_encoder_seldom_sort_its_queue(monkeypatch):
    """The queue is sorted again only every `aging_late_s` seconds."""
    driver, keys = EncodeDriver(max_num_seqs=4), []
    own = LiveEncode.key_in_queue
    monkeypatch.setattr(LiveEncode, "key_in_queue", lambda *args: keys.append(1) or own(*args))
    for number in range(300):
        driver.add(driver.request([8], request_id=f"{number}", arrival=0.0), buffer=1)
    keys.clear()
    for _ in range(20):
        driver.begin_step()
        driver.end_step()
    assert len(keys) <= 300


def test_a_new_kind_takes_at_most_200_lines():
    """A kind needs values, a core, a fake runner, a stream, a codec, a driver and clients."""
    files = [Path(module.__file__) for module in (counting, counting_calls)]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 200
