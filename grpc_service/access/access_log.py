"""The access log: one line for each call, with its status, its duration and what it used.

Rule: a line holds numbers and names, and nothing of a prompt or an answer. Calls that
probes make every few seconds, such as health, are logged at DEBUG, all others at INFO.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from engine import logs
from grpc_service.access.policy import HTTP_ABORT, HTTP_USES, USES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpc_service.access.rpc_record import CallRecord

log = logging.getLogger("triolet.access")

SUMS = {"prompt_tokens", "cached_tokens", "tokens_done", "reasoning_tokens"}


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
    otherwise how long it waited and how long it ran. Of a call with several requests the tokens are
    the sums, the first of all tokens counts, and the phases are those of the one that ended first.
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
    for other in call.others:
        _add(fields, other)
    return fields


def _add(fields: dict[str, str | int | float], other: Mapping[str, str | int | float]) -> None:
    """Add what another request of the call has used."""
    for name in SUMS & other.keys():
        fields[name] = int(fields.get(name, 0)) + int(other[name])
    if "first_s" in other:
        fields["first_s"] = min(float(fields.get("first_s", math.inf)), float(other["first_s"]))
    if "finish" in other:
        before = f"{fields['finish']}," if "finish" in fields else ""
        fields["finish"] = f"{before}{other['finish']}"
    if "reason" in other:
        fields.setdefault("reason", other["reason"])
