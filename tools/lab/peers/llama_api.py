"""An engine of llama.cpp's C interface, for llama.cpp and for forks of it, with a GGUF file.

On the clock: filling the batch, ``llama_decode``, and the argmax over the logits by numpy
(llama.cpp's samplers copy the vocabulary for every row, which would cost more). There is no
scheduler and no text. This file runs in the engine's own environment. It makes a context for each
number of sequences and length.
"""

from __future__ import annotations

import ctypes
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS_AT_ONCE = 2048
CONTEXT_STEP = 256  # llama.cpp pads a context to a multiple of it
ROOM = 256


class LlamaEngine:
    """A `tools.lab.peers.asked.Engine`. ``api`` has the functions of llama.cpp's llama.h as
    attributes, and ``log`` is a callback for its messages."""

    def __init__(self, api: Any, log: Any, settings: dict[str, Any]) -> None:
        self._api = api
        self._threads: int = settings["threads"]
        self._vocab: int = settings["vocab"]
        api.llama_log_set(log, ctypes.c_void_p())
        api.llama_backend_init()
        path = settings["gguf"].encode()
        self._model = api.llama_model_load_from_file(path, api.llama_model_default_params())
        assert self._model, f"{settings['gguf']} cannot be loaded"
        self._batch = api.llama_batch_init(TOKENS_AT_ONCE, 0, 1)
        self._contexts: dict[tuple[int, int], Any] = {}
        self._kept: dict[tuple[int, int], list[list[int]]] = {}

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Measure a decode, as `tools.lab.peers.asked.Engine` says."""
        assert steps < ROOM
        length = len(prompts[0])
        key = (len(prompts), length)
        context = self._context(*key)
        memory = self._api.llama_get_memory(context)
        is_kept = self._kept.get(key) == prompts and all(
            self._api.llama_memory_seq_rm(memory, sequence, length - 1, -1)
            for sequence in range(len(prompts))
        )  # the states of a recurrent model cannot be taken back to an earlier token
        if not is_kept:
            self._api.llama_memory_clear(memory, False)
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
        self._api.llama_memory_clear(self._api.llama_get_memory(context), False)
        self._kept.pop(key, None)
        start = time.perf_counter()
        first = self._fill(context, prompts)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "first": first}

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits behind each token of a text, [len(tokens), vocab] float32."""
        context = self._context(1, len(tokens))
        self._api.llama_memory_clear(self._api.llama_get_memory(context), False)
        for place, token in enumerate(tokens):
            self._put(place, token, place, 0, True)
        return self._computed(context, len(tokens), len(tokens)).copy()

    def _context(self, sequences: int, length: int) -> Any:
        """Return a context with room for a number of sequences of a length."""
        key = (sequences, length)
        if key not in self._contexts:
            wanted = self._api.llama_context_default_params()
            room = -(-(length + ROOM) // CONTEXT_STEP) * CONTEXT_STEP
            wanted.n_ctx = sequences * room
            wanted.n_seq_max = sequences
            wanted.n_batch = TOKENS_AT_ONCE
            wanted.n_threads = wanted.n_threads_batch = self._threads
            self._contexts[key] = self._api.llama_init_from_model(self._model, wanted)
            assert self._contexts[key], "no context can be made"
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
        """Compute the batch and return the most likely token of each row that is kept."""
        found: list[int] = self._computed(context, num_tokens, num_kept).argmax(-1).tolist()
        return found

    def _computed(self, context: Any, num_tokens: int, num_kept: int) -> np.ndarray:
        """Compute the batch and return the logits of the rows that are kept, [num_kept, vocab]
        float32. The next batch overwrites them."""
        self._batch.n_tokens = num_tokens
        failed = self._api.llama_decode(context, self._batch)
        assert failed == 0, f"llama_decode says {failed}"
        if not num_kept:
            return np.empty((0, self._vocab), np.float32)
        logits = self._api.llama_get_logits(context)
        return np.ctypeslib.as_array(logits, shape=(num_kept, self._vocab))
