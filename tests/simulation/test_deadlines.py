"""Deadlines in virtual time, where the instants are exact (D18)."""

import base64
from contextlib import asynccontextmanager

import pytest
import trio
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from engine.errors import DeadlineExceeded
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeScript
from grpc_service.access.interceptor import Interceptor
from grpc_service.access.unread_calls import UnreadCalls
from grpc_service.client import messages as pb
from grpc_service.rpc.status import StatusCode
from grpc_service.services.backend import Backend
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import methods
from tests.simulator.determinism import run_deterministically
from tests.support import rpc_calls
from tests.support.virtual_engine import fake_engine

STEP_S = 0.1
GENERATE = "triolet.v1.Inference/Generate"


def ends_of(arrivals, *, timeout_s, seed):
    """Submit requests to an idle engine, each of which arrived one of ``arrivals`` seconds ago.

    Return for each request its error, the seconds until its end, and the number of steps.
    """
    ends = []

    async def main():
        async with fake_engine(FakeScript(step_s=STEP_S)) as engine:
            for age in arrivals:
                steps = engine.statistics().totals.step_count
                start = trio.current_time()
                generation = engine.submit(
                    GenerateRequest(
                        token_ids=(1,),
                        sampling=SamplingParams(max_tokens=100),
                        timeout_s=timeout_s,
                    ),
                    buffer=200,
                    arrived_at=start - age,
                )
                await generation.wait_closed()
                took = trio.current_time() - start
                await trio.sleep(1)
                made = engine.statistics().totals.step_count - steps
                ends.append((generation.error, round(took, 6), made))

    run_deterministically(main, seed)
    return ends


def ends_of_leavers(leavers, *, timeout_s):
    """Return how many requests counted as cancelled and as ended by the deadline. ``leavers`` has
    for each request when its client left, and when the server learnt of that, in seconds."""

    async def main():
        async with fake_engine(FakeScript(step_s=STEP_S)) as engine:
            for left_s, heard_s in leavers:
                start = trio.current_time()
                request = GenerateRequest(
                    token_ids=(1,), sampling=SamplingParams(max_tokens=100), timeout_s=timeout_s
                )
                generation = engine.submit(request, buffer=200)
                await trio.sleep_until(start + heard_s)
                generation.close_reader(None if left_s is None else start + left_s)
                await generation.wait_closed()
            totals.append(engine.statistics().totals.requests_total)

    totals = []
    run_deterministically(main, 0)
    return totals[0].cancelled, totals[0].deadline


@pytest.mark.parametrize(
    ("timeout_s", "left_s", "heard_s", "is_deadline"),
    [
        (0.1, 0.079, 0.079, False),
        (0.1, 0.081, 0.081, True),
        (0.1, 0.079, 0.085, False),  # the client left before its deadline, the server knew after it
        (0.1, 0.1, 0.1, True),
        (10.0, 9.97, 9.97, False),
        (10.0, 9.99, 9.99, True),
        (None, 3.0, 3.0, False),
        (0.1, None, 0.085, False),  # in process, there is no client's timer
    ],
)
def test_a_call_that_grpc_ends_close_to_its_deadline_counts_as_a_deadline(
    timeout_s, left_s, heard_s, is_deadline
):
    """A client's timer may end a call 20 ms before its deadline, or a tenth of a short timeout."""
    counted = ends_of_leavers([(left_s, heard_s)], timeout_s=timeout_s)
    assert counted == ((0, 1) if is_deadline else (1, 0))


@pytest.mark.parametrize("seed", range(4))
def test_a_deadline_that_has_passed_on_arrival_starts_nothing(seed):
    [(error, took, steps)] = ends_of([0.5], timeout_s=0.4, seed=seed)
    assert isinstance(error, DeadlineExceeded)
    assert (took, steps) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_the_time_a_request_spent_on_its_way_counts(seed):
    """The server ends a request 20 ms before its deadline, or a tenth of a short timeout."""
    ends = ends_of([0.0, 0.15, 0.3], timeout_s=0.5, seed=seed)
    assert [took for _, took, _ in ends] == [0.48, 0.33, 0.18]
    assert all(isinstance(error, DeadlineExceeded) for error, _, _ in ends)
    [(_, took, _)] = ends_of([0.0], timeout_s=0.1, seed=seed)
    assert took == 0.09


# ---- clients that count the time themselves, over HTTP/2 in memory ---------------------------


@asynccontextmanager
async def serving(step_s=STEP_S):
    """Yield an engine, and a client that is connected to its services in memory."""
    async with fake_engine(FakeScript(step_s=step_s)) as engine:
        served = methods(Backend(engine, UnreadCalls(trio.current_time)), 4 * 2**20)
        async with rpc_calls.serving(Interceptor(served, None, status_of).serve) as server:
            yield engine, await server.connect()


def asked(timeout_s):
    request = pb.GenerateRequest(token_ids={"ids": [1]}, sampling={"max_tokens": 200})
    return request.SerializeToString(), {"grpc-timeout": f"{round(timeout_s * 1000)}m"}


def error_info_of(answer):
    packed = answer.headers["grpc-status-details-bin"]
    status = Status.FromString(base64.b64decode(packed + "=" * (-len(packed) % 4)))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


def test_every_client_gets_the_details_before_its_own_timer_ends_the_call():
    """Messages are on their way for nearly 10 ms, and thirty deadlines are 20 ms apart.

    Red with a margin of 10 ms (`DEADLINE_MARGIN_S`): the status would come after the timer.
    """
    way_s, late = 0.0099, []

    async def ask(client, timeout_s):
        arrived_at = trio.current_time()
        message, headers = asked(timeout_s)
        answer = await client.request(GENERATE, message, headers=headers)
        took = way_s + (trio.current_time() - arrived_at) + way_s
        info = error_info_of(answer)
        assert (answer.code, info.reason) == (StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert info.metadata["phase"] == "decode"
        assert int(info.metadata["tokens_done"]) == len(answer.messages) - 1  # one is Started
        late.append(took >= timeout_s)

    async def main():
        async with serving() as (_, client), trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(ask, client, 0.4 + 0.02 * number)

    run_deterministically(main, 0)
    assert late == [False] * 30


def test_a_clients_reset_close_to_its_deadline_counts_as_a_deadline():
    """The client's timer and the server's are milliseconds apart at these timeouts: a reset 19 ms
    before the deadline counts as the deadline, a reset 21 ms before it as a cancel.

    Red if the time of the reset gets lost on its way to the request (`CallWriter._cancel`).
    """
    counted = []

    async def reset(engine, client, timeout_s, left_s):
        message, headers = asked(timeout_s)
        call = client.call(message, path=f"/{GENERATE}", headers=headers)
        await trio.sleep(timeout_s - left_s)
        await client.settle()
        assert call not in client.ends
        client.reset(call)
        await client.settle()
        ends = engine.statistics().totals.requests_total
        counted.append((ends.deadline, ends.cancelled))

    async def main():
        # With longer steps, once measured, the engine would refuse such short deadlines at once.
        async with serving(step_s=0.001) as (engine, client):
            for timeout_ms in range(22, 100, 2):
                await reset(engine, client, timeout_ms / 1000, 0.019)
                await reset(engine, client, timeout_ms / 1000, 0.021)

    run_deterministically(main, 0)
    assert counted == [(1 + i // 2, (i + 1) // 2) for i in range(len(counted))]
    assert len(counted) == 78
