"""Log lines that say which request they are about.

Rule 1: prompt and output text is never logged. Rule 2: a request's own task sets `request_id`
once; lines written for a request elsewhere pass ``extra={"request_id": …}``.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")

FORMAT = "%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s"


class RequestIdFilter(logging.Filter):
    """Gives every record a ``request_id``: its own, or the running task's, or ``-``."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = request_id.get()
        return True


def configure(level: str = "INFO") -> None:
    """Send all log lines to standard error in one format; called once by the server."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("transformers", "grpc", "asyncio", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
