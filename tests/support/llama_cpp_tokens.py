"""Asks llama.cpp for the tokens of drawn texts, and writes them as a file of the tests.

    PYTHON -m tests.support.llama_cpp_tokens FILE     (in llama.cpp's environment)

The environment is the one that ``python -m tools.lab.peers install llama.cpp`` makes. FILE is
tests/conformance/llama_cpp_tokens.json; it is to be written anew when a case or a text changes.
"""

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

from tests.support.gguf_files import write_file
from tests.support.gguf_vocabularies import cases, digest

ROOM = 4096
ERROR_LEVEL = 4  # of ggml's log levels: none, debug, info, warn, error, continued


@llama_cpp.llama_log_callback
def log_errors(level: int, text: bytes, _: object) -> None:
    """Write only errors."""
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


class LlamaCppVocabulary:
    """A vocabulary that llama.cpp has loaded from a file without weights."""

    def __init__(self, path: Path) -> None:
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        assert self._model, f"llama.cpp cannot load {path}"
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, markers in it among them."""
        data, found = text.encode(), (llama_cpp.llama_token * ROOM)()
        count = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), found, ROOM, True, True)
        assert count >= 0
        return list(found[:count])

    def ends(self) -> list[int]:
        """Return the ids at which an answer ends."""
        count = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        return [i for i in range(count) if llama_cpp.llama_vocab_is_eog(self._vocabulary, i)]

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)


def main() -> None:
    llama_cpp.llama_log_set(log_errors, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    written: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for name, (metadata, texts) in cases().items():
            write_file(path, metadata, {})
            vocabulary = LlamaCppVocabulary(path)
            tokens = "".join(digest(vocabulary.encode(text)) for text in texts)
            written[name] = {"tokens": tokens, "ends": vocabulary.ends()}
            vocabulary.close()
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in written.items())
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
