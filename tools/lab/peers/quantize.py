"""Quantises a GGUF file by llama.cpp's own quantiser.

    PYTHON -m tools.lab.peers.quantize KIND FROM TO     (in llama.cpp's environment)

Rows whose length is no multiple of a format's block get llama.cpp's fallback: with Q4_K_M, widths
that 256 does not divide are stored as Q5_0 or Q8_0.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

from tools.lab.peers.llama_cpp import log_errors

KINDS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS")


def quantize(kind: str, source: str, target: str) -> None:
    """Write ``target`` from ``source``."""
    assert kind in KINDS, kind
    llama_cpp.llama_log_set(log_errors, ctypes.c_void_p())
    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    failed = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(wanted))
    if failed:
        raise SystemExit(f"llama.cpp could not make {target}: it says {failed}")


if __name__ == "__main__":
    quantize(*sys.argv[1:])
