"""How a load that failed is reported: to each request that waited for it, and in the log."""

from __future__ import annotations

import logging

from engine.errors import (
    EngineBug,
    MemoryExhausted,
    NoWorkers,
    ShuttingDown,
    SpawnFailed,
    TrioletError,
    WorkerLost,
)

log = logging.getLogger(__name__)

# Errors of a load that a request gets by their own class. Every other error becomes SpawnFailed.
_KEPT_CAUSES = (MemoryExhausted, ShuttingDown, NoWorkers, WorkerLost)


def error_for_request(model: str, cause: BaseException | None, hint: str = "") -> TrioletError:
    """Return a new error for one request, chained to the cause of a failed load.

    ``hint`` is appended to the message of a SpawnFailed. The text of a cause that is not a
    `TrioletError` stays in the log.
    """
    if isinstance(cause, EngineBug):
        return EngineBug(cause.log_detail)
    kind: type[TrioletError] = type(cause) if isinstance(cause, _KEPT_CAUSES) else SpawnFailed
    text = reason(cause).removeprefix(kind.prefix)
    if kind is SpawnFailed:
        text = f"{model}: {text}" + (f"; {hint}" if hint else "")
    retry_after_s = cause.retry_after_s if isinstance(cause, TrioletError) else None
    error = kind(text, retry_after_s=retry_after_s)
    error.__cause__ = cause
    return error


def reason(cause: BaseException | None) -> str:
    """Return why a load failed, as text to follow the model's name. The text of a cause that is not
    a `TrioletError` stays in the log."""
    if not isinstance(cause, TrioletError):
        return "its loading failed; the reason was logged"
    return str(cause).removeprefix(SpawnFailed.prefix)


def log_failed_load(model: str, error: Exception) -> None:
    """Log why a replica did not load, with the detail that only the operator may see; the log
    record has it in ``detail``, too. A load that was given up, because the model is being unloaded
    or the server is ending, has not failed and is not logged."""
    _log(f"a worker of {model}", error)


def log_failed_adapter(name: str, error: Exception) -> None:
    """Log why an adapter did not load with a replica, as `log_failed_load`."""
    _log(f"the adapter {name}", error)


def _log(what: str, error: Exception) -> None:
    if isinstance(error, ShuttingDown | NoWorkers):
        return
    is_known = isinstance(error, TrioletError)
    detail = " ".join(error.log_detail.split()) if isinstance(error, TrioletError) else ""
    shown, extra = f" [{detail}]" if detail else "", {"detail": detail}
    text = reason(error) if is_known else f"{type(error).__name__}: {error}"
    log.warning("%s did not load: %s%s", what, text, shown, extra=extra)
