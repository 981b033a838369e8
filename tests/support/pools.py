"""A pool of scripted models in virtual time, watched at every change.

`Model` says how each load of a model goes. `World` runs tasks over a pool, and checks the pool's
invariants whenever the pool reports a change.
"""

from dataclasses import dataclass, field, replace

import trio

from engine.api.engine import KINDS
from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.core.common.events import Tick
from engine.errors import TrioletError
from engine.kinds import EncodeKind
from engine.pool.pool import Pool
from engine.replica.loop import Unbatched
from engine.status import Capability
from engine.worker.fakes.encode import FakeEncoder
from engine.worker.fakes.image_generation import FAKE_INFO, FakeImageGenerationRunner
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.interface import MemoryEstimate
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.support.bodies import run_by

GB = 1 << 30


@dataclass
class Model:
    """A model of the pool.

    Its loads raise ``load_errors`` in turn; None stands for a load that succeeds, as all later ones
    do. ``measured`` is the memory that a load turns out to need, if not ``num_bytes``. With
    ``devices``, a load needs ``num_bytes`` on each, like the ranks of a divided model.
    """

    name: str
    num_bytes: int = GB
    load_s: float = 1.0
    prepare_s: float = 0.0
    replicas: int = 1
    lazy: bool = True
    capability: Capability | None = None
    runner: str = "thread"
    load_errors: list = field(default_factory=list)
    estimate_error: BaseException | None = None
    measured: int | None = None
    devices: tuple[str, ...] = ()

    def config(self):
        """Return the model's configuration."""
        workers = (WorkerConfig(count=self.replicas),)
        return ModelConfig(
            self.name,
            lazy=self.lazy,
            workers=workers,
            capability=self.capability,
            runner=self.runner,
        )


class Worker:
    """A fake runner that records its loads and closes."""

    def __init__(self, world, model):
        self.world, self.model = world, model
        self.num_loads = self.num_closes = 0
        error = model.load_errors.pop(0) if model.load_errors else None
        script = FakeScript(load_s=model.load_s, load_error=error, sleep=world.threads.note_sleep)
        needs = model.num_bytes * (len(model.devices) or 1)
        needs = needs if model.measured is None else model.measured
        if model.capability in EncodeKind.capabilities:
            self.runner = FakeEncoder(model.capability, script=script, memory_bytes=needs)
        elif model.capability is Capability.TEXT_TO_IMAGE:
            info = FAKE_INFO if needs is None else replace(FAKE_INFO, memory_bytes=needs)
            self.runner = FakeImageGenerationRunner(info, script=script)
        else:
            self.runner = FakeRunner(script=script, memory_bytes=needs)

    def estimate(self):
        if self.model.estimate_error is not None:
            raise self.model.estimate_error
        self.world.threads.note_sleep(self.model.prepare_s)
        needs = [MemoryEstimate(self.model.num_bytes, one, GB) for one in self.model.devices]
        if needs:
            return replace(needs[0], others=tuple(needs[1:]))
        return MemoryEstimate(self.model.num_bytes)

    def load(self, progress):
        self.num_loads += 1
        self.world.loads.append((self.model.name, trio.current_time()))
        return self.runner.load(progress)

    def close(self):
        self.num_closes += 1
        self.runner.close()

    def __getattr__(self, name):
        return getattr(self.runner, name)


class World:
    """A pool, and a record of what happened in it."""

    def __init__(self, *models, limit=100 * GB, **config):
        copies = [replace(one, load_errors=list(one.load_errors)) for one in models]
        self.models = {model.name: model for model in copies}
        self.threads = VirtualThreads()
        self.workers = []
        self.loads = []  # (model, time) of each load that began
        self.pool = None
        self._config = EngineConfig(
            models=tuple(model.config() for model in models),
            memory_limit=limit,
            check_level=2,
            **config,
        )

    def run(self, body, seed=0):
        """Run ``body(world)`` with the pool, close it, and check that it gave everything back."""

        async def main():
            self.pool = Pool(
                self._config,
                self._make_runner,
                self.threads,
                self.check,
                kinds={one: kind for kind in KINDS for one in kind.capabilities},
                batch=Unbatched(),
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.pool.run)
                await body(self)
                self.pool.close()
            self.check()
            assert self.pool.memory.total_reserved == 0
            for worker in self.workers:
                assert worker.num_closes == 1
                assert worker.num_loads <= 1
            for entry in self.pool.registry.entries.values():
                assert not entry.replicas
                assert entry.load is None
                assert entry.num_waiting == entry.num_unloads == 0

        run_deterministically(main, seed)

    def _make_runner(self, config, _):
        worker = Worker(self, self.models[config.name])
        self.workers.append(worker)
        return worker

    def check(self):
        """Check what must hold at every instant."""
        if self.pool is None:
            return
        memory = self.pool.memory
        entries = self.pool.registry.entries.values()
        held = sum(r.reservation.num_bytes for e in entries for r in e.replicas)
        assert held <= memory.total_reserved
        is_measured = any(model.measured is not None for model in self.models.values())
        assert memory.peak() <= memory.limit() or is_measured
        for entry in entries:
            assert not any(replica.reservation.is_released for replica in entry.replicas)
            ids = [replica.replica_id for replica in entry.replicas]
            assert len(set(ids)) == len(ids)

    # ---- acts of tasks

    async def hold(self, name, seconds=0.0, cut=lambda: None):
        """Lease a model for ``seconds``.

        Return the error, or None, and the time at which the lease was granted or refused.
        """
        try:
            async with self.pool.leases.acquire(name, cut=cut):
                had_at = trio.current_time()
                await trio.sleep(seconds)
        except TrioletError as error:
            return error, trio.current_time()
        return None, had_at

    async def hold_all(self, *asks):
        """Run `hold` at once for each of ``asks``, and return the results in their order."""
        results = [None] * len(asks)

        async def one(index, ask):
            results[index] = await self.hold(*ask)

        async with trio.open_nursery() as nursery:
            for index, ask in enumerate(asks):
                nursery.start_soon(one, index, ask)
        return results

    def num_loads(self, name):
        """Return how many loads of a model began."""
        return sum(model == name for model, _ in self.loads)

    def crash(self, name):
        """End the loop of one of the model's replicas, as a bug of the engine would."""
        for replica in self.pool.registry.entries[name].ready[:1]:
            self.crash_replica(replica)

    def crash_replica(self, replica):
        """End a replica's loop, as a bug of the engine would."""
        replica.loop.core.plan = self._break
        replica.loop.post(Tick())

    @staticmethod
    def _break(now):
        raise AssertionError("planted")


def in_world(*models, **settings):
    """Make a test of an async function (`run_by`) that gets a `World` of these models."""
    return run_by(lambda body, seed=0: World(*models, **settings).run(body, seed))
