"""llama.cpp by llama-cpp-python's low-level calls, with a GGUF file of the same checkpoint.

What is on its clock stands in `tools.lab.peers.llama_api`. This file runs in llama.cpp's own
environment.
"""

from __future__ import annotations

import sys
from functools import partial

import llama_cpp

from tools.lab.peers.asked import answer
from tools.lab.peers.llama_api import LlamaEngine

ERROR_LEVEL = 4  # of ggml's log levels: none, debug, info, warn, error, continued


@llama_cpp.llama_log_callback
def log_errors(level: int, text: bytes, _: object) -> None:
    """Write only errors; the lines of a load would fill a screen."""
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    answer(partial(LlamaEngine, llama_cpp, log_errors))
