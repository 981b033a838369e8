"""Clients that leave, in every phase, with the demo model behind `triolet serve`.

The blocks are free when GetStats is next called, or a few milliseconds later.
"""

import contextlib
import time

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.doors import DOORS
from tests.support.server import (
    DEMO,
    READY,
    listen_until_ready,
    openai_port_of,
    process,
    real,
    serve_argv,
)
from tests.support.wire import (
    Generation,
    connect,
    ended,
    generate,
    is_idle,
    stats,
    wait_idle,
    wait_until,
)

pytestmark = pytest.mark.model

FREE_WITHIN_S = 1.0  # a step of this model takes 2-5 ms; on a busy machine, a hundred times that
LONG = 1500
SEATS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--stream-buffer", "16")


@pytest.fixture(scope="module")
def narrow():
    """Yield a server with the demo model and two seats."""
    with real(*SEATS, "--openai-port", "0") as server:
        server.openai_port = openai_port_of(server)
        yield server


@pytest.fixture
def free_within(request, capsys):
    """Return a function that prints how long a phase's blocks took to come back."""
    took = {}
    yield took
    with capsys.disabled():
        for phase, seconds in took.items():
            print(f"\n{phase}: idle {1e3 * seconds:.1f} ms after the cancel", end="")


@contextlib.contextmanager
def both_seats_taken(channel, are_wanted):
    """Take both seats by two requests."""
    with contextlib.ExitStack() as stack:
        for text in ("Once", "One day") if are_wanted else ():
            fields = {"text": text, "max_tokens": LONG, "sampling": {"ignore_eos": True}}
            call = stack.enter_context(Generation(channel, **fields))
            call.read_deltas(1)
        yield


STORY = "Once upon a time there was a brave fox named Mina. "
PHASES = {
    "queued": ({"text": "Once"}, lambda now, before: now.waiting == 1),
    "tokenize": (
        {"text": STORY * 8000, "prompt": {"truncate_to": 900}},
        lambda now, before: now.running + now.waiting == 0,
    ),
    "prefill": (
        {"text": STORY * 120},
        lambda now, before: (
            now.step_count - before.step_count >= 2
            and now.completion_tokens_total == before.completion_tokens_total
        ),
    ),
    "decode": (
        {"text": "Once"},
        lambda now, before: now.completion_tokens_total - before.completion_tokens_total >= 5,
    ),
    "parked": ({"text": "Once", "n": 2}, lambda now, before: now.parked == 2),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancel_frees_the_blocks(narrow, phase, free_within, door):
    channel = narrow.channel
    fields, is_there = PHASES[phase]
    before = wait_idle(channel)
    with (
        both_seats_taken(channel, phase == "queued"),
        door.connect(door.address(narrow), is_small=True) as own,
    ):
        ends = ended(channel)
        name = {"request_id": phase}
        fields = {"max_tokens": LONG, "sampling": {"ignore_eos": True}} | name | fields
        with door.generate(own, **fields) as call:
            if phase == "tokenize":
                wait_until(lambda: is_tokenized(channel, fields["request_id"]), 20, phase)
            wait_until(lambda: is_there(stats(channel), before), 20, phase)
            start = time.monotonic()
            call.cancel()
            if phase == "queued":
                wait_until(lambda: stats(channel).waiting == 0, FREE_WITHIN_S)
            else:
                wait_until(lambda: is_idle(stats(channel)), FREE_WITHIN_S, "blocks free")
            free_within[f"{phase}, {door.name}"] = time.monotonic() - start
        wait_until(lambda: ended(channel) != ends, FREE_WITHIN_S)
        assert ended(channel)["cancelled"] == ends.get("cancelled", 0) + 1
    wait_idle(channel)
    assert generate(channel, text="Once", max_tokens=3, temperature=0.0).error is None


def is_tokenized(channel, name):
    """Return whether a request waits for its tokens; False before it has arrived."""
    try:
        asked = pb.ExplainRequest(request_id=name)
        return "tokens" in stubs.ControlStub(channel).Explain(asked).waiting_for
    except grpc.RpcError:
        return False


@pytest.mark.full
def test_a_cancel_while_the_model_loads(tmp_path, free_within):
    uds = tmp_path / "socket"
    with process(serve_argv("--model", DEMO, "--uds", str(uds))) as server:
        server.address = f"unix:{uds}"
        with connect(server.address) as channel:
            wait_until(lambda: answers(channel), 60, "bound")
            with Generation(channel, text="Once", max_tokens=LONG) as call:
                stats(channel)  # answered, so the server has received the call before
                is_loading = READY.search(server.out) is None
                start = time.monotonic()
                call.call.cancel()
                wait_until(lambda: ended(channel).get("cancelled") == 1, FREE_WITHIN_S)
                free_within["load"] = time.monotonic() - start
                assert is_loading, "the model was ready too soon"
            listen_until_ready(server)
            heard = generate(channel, text="Once", max_tokens=3)
            assert heard.error is None
            assert ended(channel) == {"cancelled": 1, "finished": 1}


def answers(channel):
    """Return the statistics, or None if the server does not answer."""
    try:
        return stats(channel, timeout=2)
    except Exception:
        return None
