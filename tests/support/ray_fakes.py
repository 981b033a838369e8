"""A fleet of fake models for tests of Ray Serve. Ray's processes import this file.

Each replica writes what its engine does to a file of its own in the folder that the argument
``reports`` names: a line of JSON whenever something has changed.
"""

import asyncio
import json
import os
from pathlib import Path

from engine.config import EngineConfig, ModelConfig
from engine.worker.fakes.text import FakeRunner, FakeScript
from grpc_service.ray.application import Replica, application

POLL_S = 0.005


def make_fake(model, config):
    """Return the runner of a fake model, whose name is the seconds that a step takes."""
    return FakeRunner(script=FakeScript(step_s=float(model.model)))


class Reporting(Replica):
    """A replica that writes reports."""

    async def __init__(self, config, options):
        options = dict(options)
        folder = Path(options.pop("reports"))
        await super().__init__(config, options)
        self._reporting = asyncio.create_task(self._report(folder / f"{os.getpid()}.jsonl"))

    async def _report(self, path):
        last = None
        while True:
            counts = (await self._engine.statistics()).totals
            now = {
                "free": counts.free_blocks,
                "total": counts.total_blocks,
                "steps": counts.step_count,
                "hits": counts.prefix_hits,
                "ended": sum(
                    getattr(counts.requests_total, name)
                    for name in ("finished", "cancelled", "deadline", "failed")
                ),
                "finished": counts.requests_total.finished,
                "cancelled": counts.requests_total.cancelled,
                "deadline": counts.requests_total.deadline,
            }
            if now != last:
                last = now
                with path.open("a") as file:
                    file.write(json.dumps(now) + "\n")
            await asyncio.sleep(POLL_S)


def build(args):
    """Return the application of fakes whose steps take ``step_s``."""
    config = EngineConfig(
        models=(ModelConfig(str(args["step_s"]), name="fake"),),
        max_num_seqs=32,
        check_level=2,
        drain_timeout_s=30,
        step_timeout_s=args.get("step_timeout_s", 60),
    )
    return application(config, Reporting, make_runner=make_fake, reports=args["reports"])
