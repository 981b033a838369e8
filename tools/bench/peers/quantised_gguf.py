"""Writes a GGUF file of quantised weights by llama.cpp's own quantiser, in its environment.

The arguments are the file, the new file, and a type of llama.cpp such as Q4_0.
"""

from __future__ import annotations

import sys

import llama_cpp


def write(source: str, to: str, kind: str) -> None:
    """Quantise ``source`` into ``to``; ``kind`` is Q8_0, Q4_0 or another type of llama.cpp."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    code = llama_cpp.llama_model_quantize(source.encode(), to.encode(), params)
    if code:
        raise SystemExit(f"llama.cpp's quantiser failed with {code}")


if __name__ == "__main__":
    write(*sys.argv[1:])
