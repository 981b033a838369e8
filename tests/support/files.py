"""Limits of the files that a test writes."""

import contextlib
import resource


@contextlib.contextmanager
def largest_file(num_bytes):
    """Let no file grow beyond a size: a write that would is cut there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
