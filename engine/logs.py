"""Log lines that say which request they are about, for a person or for a machine.

Rule 1: prompt and output text is never logged. Rule 2: a request's own task sets `request_id`
once; lines written for a request elsewhere pass ``extra={"request_id": …}``. Rule 3: what a line
counts or measures goes into ``extra={"fields": {…}}`` too, where a machine finds it by name.
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
    """A client's own id as a log may show it: one short line, whatever it holds."""
    cut = given[:ID_CHARS_MAX]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


class RequestIdFilter(logging.Filter):
    """Gives every record a ``request_id``: its own, or the running task's, or ``-``."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = request_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, request_id, message; ``fields`` by their own
    names; a traceback as ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = dict(getattr(record, "fields", {}))
        said |= {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)


def configure(level: str | int = "INFO", style: str = "auto") -> None:
    """Send all log lines to standard error; called once by the server. ``style`` human or json;
    auto: for a person where standard error is a terminal, else for a machine."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    is_json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # hpack tells every header at DEBUG, and so every key
    for noisy in ("transformers", "grpc", "hpack", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
