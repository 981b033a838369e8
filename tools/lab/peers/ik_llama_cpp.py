"""ik_llama.cpp by the functions that ik-llama-cpp-python binds, with a GGUF file.

What is on its clock stands in `tools.lab.peers.llama_api`. This file runs in ik_llama.cpp's own
environment. The package's wheel is built for AVX2, without VNNI. There ik_llama.cpp's flash
attention fails an assertion on long prompts, so it is off, as the package itself has it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

from ik_llama_cpp import _ctypes_api as bound

from tools.lab.peers.asked import answer
from tools.lab.peers.llama_api import LlamaEngine

ERROR_LEVEL = 4  # of ggml's log levels: none, debug, info, warn, error, continued
LIBRARY = bound._lib
REMOVE = LIBRARY.llama_kv_cache_seq_rm  # these three are in the library, and the package has not
LOGITS = LIBRARY.llama_get_logits  # bound them
SET_LOG = LIBRARY.llama_log_set
LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
REMOVE.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
REMOVE.restype = ctypes.c_bool
LOGITS.argtypes, LOGITS.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
SET_LOG.argtypes, SET_LOG.restype = [LOG, ctypes.c_void_p], None


@LOG
def log_errors(level: int, text: bytes, _: object) -> None:
    """Write only errors; the lines of a load would fill a screen."""
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


def context_params() -> Any:
    """Return the default parameters of a context, without flash attention."""
    found = bound.llama_context_default_params()
    found.flash_attn = False
    return found


# The fork has no object for a context's memory: its functions take the context.
API = SimpleNamespace(
    llama_backend_init=bound.llama_backend_init,
    llama_batch_init=bound.llama_batch_init,
    llama_context_default_params=context_params,
    llama_decode=bound.llama_decode,
    llama_get_logits=LOGITS,
    llama_get_memory=lambda context: context,
    llama_init_from_model=bound.llama_init_from_model,
    llama_log_set=SET_LOG,
    llama_memory_clear=lambda context, _: bound.llama_kv_cache_clear(context),
    llama_memory_seq_rm=REMOVE,
    llama_model_default_params=bound.llama_model_default_params,
    llama_model_load_from_file=bound.llama_model_load_from_file,
)

if __name__ == "__main__":
    answer(partial(LlamaEngine, API, log_errors))
