"""The one line that each RPC leaves in the log: how it ended, how long it took, what it used.

Rule: numbers and names only, none of a prompt or an answer. Health and reflection, which probes
call every few seconds, are told at DEBUG, everything else at INFO.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine import logs
from grpc_service.access import OURS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpc_service.rpc import Rpc

log = logging.getLogger("triolet.access")


def write(rpc: Rpc, fields: Mapping[str, str | int | float]) -> None:
    """Tell of a call that has ended; ``fields`` as `fields_of` gives them."""
    level = logging.INFO if rpc.method.startswith(OURS) else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    shown = " ".join(
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in fields.items()
        if name not in ("method", "code")
    )
    extra = {"request_id": logs.printable(rpc.told_id), "fields": fields}
    log.log(level, "%s %s %s", rpc.method, fields["code"], shown, extra=extra)


def fields_of(rpc: Rpc, code: str, peer: str, seconds: float) -> dict[str, str | int | float]:
    """What the line says, by name; times in seconds. Phases are there for requests that reached
    the engine: all of them where it finished, else how long it waited and how long it ran."""
    fields: dict[str, str | int | float] = {
        "method": rpc.method,
        "code": code,
        "elapsed_s": seconds,
        "peer": peer,
    }
    if rpc.quota is not None:
        fields["key"] = rpc.quota.name
    if rpc.generation is not None:
        fields |= rpc.generation.account(seconds)
    return fields
