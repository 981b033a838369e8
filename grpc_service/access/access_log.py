"""The access log: one line for each call, with its status, its duration and what it used.

Rule: a line holds numbers and names, and nothing of a prompt or an answer. Calls that
probes make every few seconds, such as health, are logged at DEBUG, all others at INFO.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine import logs
from grpc_service.access.policy import HTTP_ABORT, HTTP_USES, USES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpc_service.access.rpc_record import CallRecord

log = logging.getLogger("triolet.access")


def write(call: CallRecord, fields: Mapping[str, str | int | float]) -> None:
    """Log a call that has ended; ``fields`` are those of `fields_of`."""
    level = (
        logging.INFO if call.method.startswith((*USES, HTTP_USES, HTTP_ABORT)) else logging.DEBUG
    )
    if not log.isEnabledFor(level):
        return
    shown = " ".join(
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in fields.items()
        if name not in ("method", "code")
    )
    extra = {"request_id": logs.printable(call.logged_id), "fields": fields}
    log.log(level, "%s %s %s", call.method, fields["code"], shown, extra=extra)


def fields_of(call: CallRecord, code: str, seconds: float) -> dict[str, str | int | float]:
    """Return the fields of the line, by name, with times in seconds.

    A request that reached the engine has the times of its phases: of all phases if it finished, and
    otherwise how long it waited and how long it ran.
    """
    fields: dict[str, str | int | float] = {
        "method": call.method,
        "code": code,
        "elapsed_s": seconds,
        "peer": call.peer,
    }
    if call.quota is not None:
        fields["key"] = call.quota.name
    if call.stream is not None:
        fields |= call.stream.account(seconds)
    return fields
