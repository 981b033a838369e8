"""The access log: one line for each RPC, with its status, its duration and what it used.

Rule: a line holds numbers and names, and nothing of a prompt or an answer. Calls that
probes make every few seconds, such as health, are logged at DEBUG, all others at INFO.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine import logs
from grpc_service.access.policy import USES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpc_service.access.rpc_record import Rpc

log = logging.getLogger("triolet.access")


def write(rpc: Rpc, fields: Mapping[str, str | int | float]) -> None:
    """Log a call that has ended; ``fields`` are those of `fields_of`."""
    level = logging.INFO if rpc.call.method.startswith(USES) else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    shown = " ".join(
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in fields.items()
        if name not in ("method", "code")
    )
    extra = {"request_id": logs.printable(rpc.logged_id), "fields": fields}
    log.log(level, "%s %s %s", rpc.call.method, fields["code"], shown, extra=extra)


def fields_of(rpc: Rpc, code: str, seconds: float) -> dict[str, str | int | float]:
    """Return the fields of a call's log line, by name, with times in seconds.

    A request that reached the engine has the times of its phases: of all phases if it finished, and
    otherwise how long it waited and how long it ran.
    """
    fields: dict[str, str | int | float] = {
        "method": rpc.call.method,
        "code": code,
        "elapsed_s": seconds,
        "peer": rpc.call.peer,
    }
    if rpc.quota is not None:
        fields["key"] = rpc.quota.name
    if rpc.stream is not None:
        fields |= rpc.stream.account(seconds)
    return fields
