"""Log lines that name the request they are about, as text for a person or JSON for a program.

Rule 1: prompts and output are never logged. Rule 2: a request's own task sets `request_id` once;
code that logs for a request in another task passes ``extra={"request_id": …}``. Rule 3: the numbers
of a line are also passed in ``extra={"fields": {…}}``, so that the JSON has them by name.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

request_id: ContextVar[str] = ContextVar("request_id", default="-")

FORMAT = "%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s"
ID_CHARS_MAX = 128


def printable(given: str) -> str:
    """Return an id that a client chose in a form for log lines: short, and without line breaks or
    control characters."""
    cut = given[:ID_CHARS_MAX]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


class RequestIdFilter(logging.Filter):
    """Gives every log record a ``request_id``: that of ``extra``, or that of the running task, or
    ``-``."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the record's ``request_id``; keep every record."""
        if not hasattr(record, "request_id"):
            record.request_id = request_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line: time (UTC), level, logger, request_id and message, the
    values of ``fields``, and a traceback as ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        values: dict[str, object] = dict(getattr(record, "fields", {}))
        values |= {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False, default=str)


def configure(level: str | int = "INFO", style: str = "auto") -> None:
    """Send all log lines to standard error. The server calls this once. ``style`` is human, json or
    auto, which is human if standard error is a terminal and json otherwise."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    is_json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # at DEBUG, hpack logs every header and with it every API key
    for noisy in ("transformers", "grpc", "hpack", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
