"""llama.cpp by llama-cpp-python's low-level calls, with a GGUF file of the same checkpoint.

On the clock: filling the batch, ``llama_decode``, and the argmax over the logits by numpy
(llama.cpp's samplers copy the vocabulary for every row, which would cost more). There is no
scheduler and no text. This file runs in llama.cpp's own environment. It makes a context for each
number of sequences and length.
"""

from __future__ import annotations

import ctypes
import sys
import time
from itertools import pairwise
from typing import Any

import llama_cpp
import numpy as np

from tools.lab.peers.asked import answer

TOKENS_AT_ONCE = 2048
CONTEXT_STEP = 256  # llama.cpp pads a context to a multiple of it
ROOM = 256
ERROR_LEVEL = 4  # of ggml's log levels: none, debug, info, warn, error, continued


@llama_cpp.llama_log_callback
def log_errors(level: int, text: bytes, _: object) -> None:
    """Write only errors; the lines of a load would fill a screen."""
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


class LlamaCppEngine:
    """A `tools.lab.peers.asked.Engine`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._threads: int = settings["threads"]
        self._vocab: int = settings["vocab"]
        llama_cpp.llama_log_set(log_errors, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        path = settings["gguf"].encode()
        self._model = llama_cpp.llama_model_load_from_file(
            path, llama_cpp.llama_model_default_params()
        )
        assert self._model, f"llama.cpp cannot load {settings['gguf']}"
        self._batch = llama_cpp.llama_batch_init(TOKENS_AT_ONCE, 0, 1)
        self._contexts: dict[tuple[int, int], Any] = {}
        self._kept: dict[tuple[int, int], list[list[int]]] = {}

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Measure a decode, as `tools.lab.peers.asked.Engine` says."""
        assert steps < ROOM
        length = len(prompts[0])
        key = (len(prompts), length)
        context = self._context(*key)
        memory = llama_cpp.llama_get_memory(context)
        is_kept = self._kept.get(key) == prompts and all(
            llama_cpp.llama_memory_seq_rm(memory, sequence, length - 1, -1)
            for sequence in range(len(prompts))
        )  # the states of a recurrent model cannot be taken back to an earlier token
        if not is_kept:
            llama_cpp.llama_memory_clear(memory, False)
            self._fill(context, [prompt[:-1] for prompt in prompts])
            self._kept[key] = prompts
        first = tokens = self._next(context, [prompt[-1] for prompt in prompts], length - 1)
        times = [time.perf_counter()]
        for step in range(steps):
            tokens = self._next(context, tokens, length + step)
            times.append(time.perf_counter())
        return {
            "seconds": times[-1] - times[0],
            "step_s": [after - before for before, after in pairwise(times)],
            "first": first,
            "last": tokens,
        }

    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Measure a prefill, as `tools.lab.peers.asked.Engine` says."""
        key = (len(prompts), len(prompts[0]))
        context = self._context(*key)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        self._kept.pop(key, None)
        start = time.perf_counter()
        first = self._fill(context, prompts)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "first": first}

    def _context(self, sequences: int, length: int) -> Any:
        """Return a context with room for a number of sequences of a length."""
        key = (sequences, length)
        if key not in self._contexts:
            wanted = llama_cpp.llama_context_default_params()
            room = -(-(length + ROOM) // CONTEXT_STEP) * CONTEXT_STEP
            wanted.n_ctx = sequences * room
            wanted.n_seq_max = sequences
            wanted.n_batch = TOKENS_AT_ONCE
            wanted.n_threads = wanted.n_threads_batch = self._threads
            self._contexts[key] = llama_cpp.llama_init_from_model(self._model, wanted)
            assert self._contexts[key], "llama.cpp cannot make a context"
        return self._contexts[key]

    def _fill(self, context: Any, prompts: list[list[int]]) -> list[int]:
        """Compute whole prompts, 2,048 tokens at a time, and return the next token of each."""
        flat = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        found: list[int] = []
        for start in range(0, len(flat), TOKENS_AT_ONCE):
            part = flat[start : start + TOKENS_AT_ONCE]
            for index, (token, place, sequence, is_last) in enumerate(part):
                self._put(index, token, place, sequence, is_last)
            kept = sum(is_last for *_, is_last in part)
            found += self._decode(context, len(part), kept)
        return found

    def _next(self, context: Any, tokens: list[int], place: int) -> list[int]:
        """Compute one token of each sequence, all at the same position, and return the next."""
        for sequence, token in enumerate(tokens):
            self._put(sequence, token, place, sequence, True)
        return self._decode(context, len(tokens), len(tokens))

    def _put(self, index: int, token: int, place: int, sequence: int, is_last: bool) -> None:
        batch = self._batch
        batch.token[index] = token
        batch.pos[index] = place
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = is_last

    def _decode(self, context: Any, num_tokens: int, num_kept: int) -> list[int]:
        self._batch.n_tokens = num_tokens
        failed = llama_cpp.llama_decode(context, self._batch)
        assert failed == 0, f"llama_decode says {failed}"
        if not num_kept:
            return []
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(context), shape=(num_kept, self._vocab)
        )
        return logits.argmax(-1).tolist()


if __name__ == "__main__":
    answer(LlamaCppEngine)
