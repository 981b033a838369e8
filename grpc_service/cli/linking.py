"""Links torch's largest library in a thread, while Python imports other modules.

Linking takes 0.16 s of torch's import. An import holds Python's lock meanwhile, and a call through
ctypes does not. The system's linker has a lock of its own: an import of another library waits for
it. So this pays if modules without libraries are imported next.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "lib/libtorch_cpu.so"  # below torch's folder


def link_torch() -> threading.Thread | None:
    """Begin to link the library, if torch is installed and not imported yet, and return the thread.
    If linking fails, the import of torch says why."""
    found = None if "torch" in sys.modules else find_spec("torch")
    if found is None or found.origin is None:
        return None
    path = os.fsencode(Path(found.origin).parent / LIBRARY)
    link = ctypes.CDLL(None).dlopen
    link.argtypes, link.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    thread = threading.Thread(target=link, args=(path, os.RTLD_NOW), daemon=True)
    thread.start()
    return thread
