"""What a start without a terminal says of models that load."""

from types import SimpleNamespace

import pytest
import trio

from engine.worker.interface import LoadProgress
from grpc_service.app.startup import LINE_S, loading_line, show_loading


def entry(name, progress=None):
    traits = SimpleNamespace(loads_last=False)
    config = SimpleNamespace(name=name, lazy=False)
    return SimpleNamespace(config=config, traits=traits, progress=progress, settled=trio.Event())


@pytest.mark.parametrize(
    ("progress", "seconds", "line"),
    [
        (None, 5, "loading m: waiting, 5 s"),
        (LoadProgress("reserve"), 5, "loading m: reserve, 5 s"),
        (LoadProgress("weights", 0, 4_000_000), 5, "loading m: weights, 5 s, 0 of 4 MB"),
        (
            LoadProgress("weights", 1_000_000_000, 4_000_000_000),
            10,
            "loading m: weights, 10 s, 1000 of 4000 MB, about 30 s left",
        ),
        (LoadProgress("warm-up", 4_000_000, 4_000_000), 20, "loading m: warm-up, 20 s"),
    ],
)
def test_a_line_says_how_far_a_load_is_and_how_long_it_will_take(progress, seconds, line):
    assert loading_line(entry("m", progress), seconds) == line


async def test_a_load_gets_a_line_each_few_seconds_until_it_ends(capsys, autojump_clock):
    first, second = entry("first"), entry("second")
    engine = SimpleNamespace(registry=SimpleNamespace(entries={"a": first, "b": second}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(show_loading, engine)
        await trio.sleep(0.5 * LINE_S)
        first.progress = LoadProgress("weights", 1_000_000, 2_000_000)
        second.settled.set()
        await trio.sleep(2 * LINE_S)
        first.settled.set()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "loading first …",
        "loading second …",
        "loading first: weights, 5 s, 1 of 2 MB, about 5 s left",
        "loading first: weights, 10 s, 1 of 2 MB, about 10 s left",
    ]
