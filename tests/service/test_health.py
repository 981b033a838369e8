"""grpc.health.v1: the names that exist, their statuses, and watchers that do not read."""

import asyncio

import grpc
import pytest
import trio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trio.testing import wait_all_tasks_blocked

from engine.errors import Overloaded
from engine.status import Capability, ModelState, ModelStatus
from grpc_service.app import health
from grpc_service.app.health import HealthServicer, apply_states, model_states
from grpc_service.services.methods import SERVICE_NAMES
from tests.service.fake_backend import FakeBackend, run

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
READY, LOADING, FAILED, UNLOADED, DRAINING = (
    ModelState.READY,
    ModelState.LOADING,
    ModelState.FAILED,
    ModelState.UNLOADED,
    ModelState.DRAINING,
)


def model(name="a", state=READY, **kwargs):
    """Return a model's status."""
    return ModelStatus(name, state, **kwargs)


ENCODER = {"capability": Capability.TEXT_EMBEDDING}


@pytest.mark.parametrize(
    ("models", "is_up"),
    [
        ([model()], True),
        ([model(state=LOADING)], False),
        ([model(state=UNLOADED)], False),
        ([model(state=UNLOADED, is_lazy=True)], True),
        ([model(state=LOADING, is_lazy=True)], True),
        ([model(), model("b", LOADING)], False),
        ([model(is_hung=True)], False),
        ([model(), model("b", is_lazy=True, is_hung=True)], False),
        ([model(), model("b", FAILED)], True),
        ([model(state=FAILED)], False),
        ([model(), model("e", LOADING, **ENCODER)], True),
        ([model(), model("e", FAILED, **ENCODER)], True),
        ([model("e", LOADING, **ENCODER)], True),
    ],
)
def test_the_server_is_serving_when_every_preloaded_text_model_is_ready(models, is_up):
    states = model_states(models, draining=False)
    assert states[""] is states["triolet.v1.Inference"] is is_up
    assert states["triolet.v1.Models"] is states["triolet.v1.Control"] is True


def test_each_model_has_a_name_of_its_own():
    models = [model(), model("b", FAILED), model("c", UNLOADED, is_lazy=True), model("d", DRAINING)]
    states = model_states(models, draining=False)
    assert states.keys() == {"", *SERVICE_NAMES, *(f"model/{name}" for name in "abcd")}
    assert [states[f"model/{name}"] for name in "abcd"] == [True, False, True, False]


def test_a_draining_server_serves_nothing():
    states = model_states([model(), model("b", UNLOADED, is_lazy=True)], draining=True)
    assert not any(states.values())


def watch(channel, name):
    """Start watching a name."""
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))


async def until(condition):
    """Wait until ``condition()`` is true."""
    while not condition():  # noqa: ASYNC110 (nothing announces it)
        await asyncio.sleep(0.01)


def run_health(main):
    """Run ``main(channel, servicer)`` against a server of the health service."""
    servicer = HealthServicer()
    return run(FakeBackend(), lambda channel: main(channel, servicer), health=servicer)


def test_check_and_list():
    async def main(channel, servicer):
        stub = health_pb2_grpc.HealthStub(channel)
        before = await stub.Check(health_pb2.HealthCheckRequest())
        channel.tell(apply_states, servicer, [model()], False)
        after = await stub.Check(health_pb2.HealthCheckRequest(service="model/a"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="model/b"))
        listed = await stub.List(health_pb2.HealthListRequest())
        return before.status, after.status, caught.value.code(), set(listed.statuses)

    before, after, code, listed = run_health(main)
    assert (before, after, code) == (NOT_SERVING, SERVING, grpc.StatusCode.NOT_FOUND)
    assert listed == {"", *SERVICE_NAMES, "model/a"}


def test_a_watcher_gets_every_change_and_nothing_else():
    async def main(channel, servicer):
        call = watch(channel, "model/a")
        heard = [(await call.read()).status]
        for models, draining in (
            ([model()], False),
            ([model(), model("b", LOADING)], False),
            ([model(state=FAILED)], False),
            ([], False),
            ([model()], True),
        ):
            channel.tell(apply_states, servicer, models, draining)
            if len(models) < 2:  # the change that adds "b" leaves "a" as it was
                heard.append((await call.read()).status)
        call.cancel()
        await until(lambda: len(servicer._watchers) == 0)
        return heard

    assert run_health(main) == [UNKNOWN, SERVING, NOT_SERVING, UNKNOWN, NOT_SERVING]


class Watcher:
    """A watcher's call, and its RPC record. The client reads when the test lets it."""

    def __init__(self, *, is_stalled, address="a"):
        self.written, self.gate = [], trio.Event()
        self.call = self.connection = self
        self.address = address
        if not is_stalled:
            self.gate.set()

    async def write(self, response):
        await self.gate.wait()
        self.written.append(response.status)


async def test_a_watcher_that_does_not_read_delays_nobody_and_misses_past_changes(nursery):
    servicer, request = HealthServicer(), health_pb2.HealthCheckRequest()
    stalled, reading = Watcher(is_stalled=True), Watcher(is_stalled=False)
    for watcher in (stalled, reading):
        nursery.start_soon(servicer.Watch, request, watcher)
    await wait_all_tasks_blocked()
    for state in (READY, LOADING, READY):
        apply_states(servicer, [model(state=state)], False)
        await wait_all_tasks_blocked()
    stalled.gate.set()
    await wait_all_tasks_blocked()
    assert reading.written == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]
    assert stalled.written == [NOT_SERVING, SERVING]
    assert len(servicer._watchers) == 2


async def test_watchers_are_bounded_and_one_address_refuses_no_other(nursery, monkeypatch):
    monkeypatch.setattr(health, "WATCHERS_MAX", 3)
    servicer, request, ends = HealthServicer(), health_pb2.HealthCheckRequest(), []

    async def watch_until_refused(name, address):
        try:
            await servicer.Watch(request, Watcher(is_stalled=False, address=address))
        except Overloaded:
            ends.append(name)

    names = [("bad 0", "bad"), ("bad 1", "bad"), ("bad 2", "bad"), ("good", "good"), ("last", "c")]
    for name, address in names:
        nursery.start_soon(watch_until_refused, name, address)
        await wait_all_tasks_blocked()
        assert len(servicer._watchers) <= 3
    assert ends == ["bad 0", "bad 1"]


def test_too_many_watchers_get_a_status(monkeypatch):
    monkeypatch.setattr(health, "WATCHERS_MAX", 1)

    async def main(channel, servicer):
        first = watch(channel, "")
        await first.read()
        second = watch(channel, "")
        await second.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first.read()
        return caught.value.code()

    assert run_health(main) is grpc.StatusCode.RESOURCE_EXHAUSTED
