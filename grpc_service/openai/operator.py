"""What the page shows of the server: figures, live requests, and the means to end one. A client
that is no operator gets its own requests alone.

Rule 1: each path has the admission of an RPC of Control (`grpc_service.access.policy`). Rule 2:
nothing of a prompt or an answer is shown. Rule 3: the page of another origin gets nothing here,
even if ``--openai-origin`` names it (`grpc_service.openai.door`).
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from grpc_service._generated.triolet.v1 import control_pb2
from grpc_service.access.policy import CONTROL, HTTP_ABORT
from grpc_service.openai.fields import Fields
from grpc_service.openai.json_text import encode_json, parse_json
from grpc_service.services.operations_codec import ABORTS_MAX, decode_abort, decode_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from engine.replica.telemetry import Distribution, ReplicaSnapshot
    from engine.status import ModelStatus
    from grpc_service.openai.call import HttpCall
    from grpc_service.services.backend import Backend

    Reply = Callable[[HttpCall], Awaitable[None]]

OPERATOR = "/triolet/"
BODY_BYTES_MAX = 2**18  # of the longest list of ids that an abort may have
REQUESTS_MAX = 200  # shown at once. Guess: more than a person reads
LATENCIES = ("first_token", "inter_token")


class Operator:
    """Answers the paths of `OPERATOR`, from the engine that ``backend`` has. No answer waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def replies(self) -> dict[str, tuple[str, str, Reply]]:
        """Return for each path its verb, the RPC whose admission it has, and what answers it."""
        return {
            f"{OPERATOR}statistics": ("GET", f"{CONTROL}GetStats", self._show_statistics),
            f"{OPERATOR}requests": ("GET", f"{CONTROL}Explain", self._list_requests),
            f"{OPERATOR}explain": ("GET", f"{CONTROL}Explain", self._explain),
            HTTP_ABORT: ("POST", f"{CONTROL}Abort", self._abort),
        }

    async def _show_statistics(self, call: HttpCall) -> None:
        """Answer with the models, and with the counters and durations as they stand."""
        engine, telemetry = self._backend.engine, self._backend.telemetry()
        statistics = telemetry.statistics
        shown = {
            "time": time.time(),
            "is_draining": engine.is_draining,
            "totals": asdict(statistics.totals),
            "replicas": [
                asdict(entry) | {"state": entry.state.value} for entry in statistics.replicas
            ],
            "models": [_encode_model(model) for model in engine.list_models()],
            "latency": {name: _sum(name, telemetry.replicas) for name in LATENCIES},
        }
        await call.answer(200, encode_json(shown))

    async def _list_requests(self, call: HttpCall) -> None:
        """Answer with the oldest live requests that the client may see, and how many there are."""
        engine = self._backend.engine
        live = [asdict(request) for request in engine.list_live(REQUESTS_MAX, call.only_of)]
        await call.answer(
            200, encode_json({"total": engine.num_live_of(call.only_of), "requests": live})
        )

    async def _explain(self, call: HttpCall) -> None:
        """Answer with what the request does and waits for whose id the query has."""
        query = parse_qs(call.query.decode("latin-1"))
        asked = control_pb2.ExplainRequest(request_id=query.get("request_id", [""])[0])
        explained = self._backend.engine.explain(decode_name(asked, "request_id"), call.only_of)
        await call.answer(200, encode_json(asdict(explained)))

    async def _abort(self, call: HttpCall) -> None:
        """End requests by their ids, and answer with what became of each."""
        fields = Fields(parse_json(await call.read_body(BODY_BYTES_MAX)))
        asked = control_pb2.AbortRequest(request_ids=fields.texts("request_ids", ABORTS_MAX))
        fields.done()
        names = decode_abort(asked)
        outcomes = [one.value for one in self._backend.engine.abort_all(names, call.only_of)]
        results = [
            {"request_id": name, "outcome": outcome}
            for name, outcome in zip(names, outcomes, strict=True)
        ]
        await call.answer(200, encode_json({"results": results}))


def _encode_model(status: ModelStatus) -> dict[str, Any]:
    shown = asdict(status)
    shown |= {"state": status.state.value, "capability": status.capability.value}
    shown["capabilities"] = [one.value for one in status.capabilities]
    shown["replicas"] = [
        asdict(replica) | {"state": replica.state.value} for replica in status.replicas
    ]
    return shown


def _sum(name: str, replicas: Iterable[ReplicaSnapshot]) -> dict[str, Any] | None:
    """Return a histogram of all replicas together; None if none has it."""
    found: list[Distribution] = [
        one.telemetry.distributions[name] for one in replicas if one.telemetry is not None
    ]
    if not found:
        return None
    counts = [sum(column) for column in zip(*(one.counts for one in found), strict=True)]
    return {"bounds": found[0].bounds, "counts": counts}
