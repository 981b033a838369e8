"""A small model that drafts for a larger one of the same tokenizer (D27).

It drafts inside the step that verifies its tokens, at most as many as the core has planned. It
samples with the request's own noise, edits and constraint, so that it draws the larger model's
tokens wherever the probabilities of both models are nearly the same.

Rule 1: a draft changes no state of a sequence, and no generator that other code draws from. Rule 2:
before it drafts, the model computes the keys and values of the tokens that its cache lacks ("reads"
them), such as a prompt's, at most `READ_MAX` in a step; drafts begin once no such token is left.
Rule 3: if the model fails, nothing is drafted any more, and the step goes on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.core.text.plan import DRAFTING_STEP_MAX
from engine.worker.forward import packing
from engine.worker.forward.kv_cache import size_pool, token_bytes
from engine.worker.load.division import Division
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import short_name
from engine.worker.sampling.sampler import NothingToSample, sample
from engine.worker.text.draft_cache import DraftCache
from engine.worker.text.placed_model import compute, measure, place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.core.common.types import SequenceId
    from engine.core.text.plan import Row
    from engine.worker.forward.kv_cache import PoolSize
    from engine.worker.forward.packing import Ints, PackedRows
    from engine.worker.interface import LoadProgress, RunnerSpec
    from engine.worker.load.architectures import LayerShape
    from engine.worker.text.draft_cache import Resident
    from engine.worker.text.placed_model import PlacedModel
    from engine.worker.text.sequences import Ahead, SequenceState
    from engine.worker.tokenizing.tokenizer import HfTokenizer

# The most tokens that the draft model reads in a step. If it has a quarter of the larger model's
# size, they take as long as 64 tokens of the larger one.
READ_MAX = 256
# The draft model's KV cache has 1 / CACHE_PART of the bytes of the larger model's (not tuned), or
# more if one sequence needs that. It should hold a step's sequences, at most `DRAFTING_STEP_MAX`.
CACHE_PART = 4

log = logging.getLogger(__name__)


class Drafted(NamedTuple):
    """A sequence's draft. A constraint forces its first ``num_forced`` tokens."""

    tokens: list[int]
    num_forced: int


@dataclass(slots=True)
class Writing:
    """A sequence that drafts in this step, at most ``most`` tokens. ``unread`` are the tokens that
    the model reads next. A constraint forces the first ``num_forced`` tokens of ``draft``."""

    sequence: SequenceId
    most: int
    ends: frozenset[int]  # ids that would end the sequence
    ahead: Ahead
    place: Resident
    unread: list[int]
    draft: list[int] = field(default_factory=list)
    num_forced: int = 0


class DraftModel:
    """The draft model of one runner, with its KV cache. ``width`` is the number of ids that the
    larger model's logits have."""

    def __init__(self, spec: RunnerSpec, placed: PlacedModel, width: int) -> None:
        self._placed = placed
        self._width = width
        self._places = DraftCache(placed.pool.num_blocks, placed.pool.block_size)
        self._generator = torch.Generator(placed.device).manual_seed(spec.seed)
        self.is_working = True

    def warm_up(self) -> None:
        """Compute one token, so that every kernel and every weight has been used once."""
        table, keep = np.zeros(1, np.int64), np.zeros(1, np.int64)
        rows = packing.pack([0], [1], [table], self._placed.pool.block_size)
        self._compute(rows, np.zeros(1, np.int64), keep)

    def release(self, sequences: Sequence[SequenceId]) -> None:
        """Mark sequences that have ended; their blocks may be freed."""
        self._places.release(sequences)

    def draft(self, wanted: Sequence[tuple[Row, SequenceState]]) -> dict[SequenceId, Drafted]:
        """Return a draft for each sequence, at most as long as its row's ``drafts``. A sequence
        without blocks gets no entry. Never raises (Rule 3)."""
        if not self.is_working:
            return {}
        try:
            self._places.begin()
            begun = [self._begin(row, state) for row, state in wanted]
            reading = [writing for writing in begun if writing is not None and writing.unread]
            while reading:
                reading = self._read(reading)
        except Exception:
            log.exception("the draft model failed; from now on it drafts nothing")
            self.is_working = False
            return {}
        return {w.sequence: Drafted(w.draft, w.num_forced) for w in begun if w is not None}

    def _begin(self, row: Row, state: SequenceState) -> Writing | None:
        """Return the row's `Writing`, with the tokens to read; None if there is no room for it."""
        ahead, ends = state.ahead(), state.admission.stops.token_ids
        place, copies = self._places.open(row.sequence, state.tokens)
        self._placed.cache.copy_blocks(copies)  # type: ignore[arg-type]
        room = self._placed.pool.max_model_len - len(state.tokens)
        most = min(row.drafts, room)
        if most < 1 or not self._places.try_grow(place, len(state.tokens) + most):
            return None
        forced = state.forced(most)
        unread = state.tokens[len(place.tokens) :] + forced
        writing = Writing(row.sequence, most, ends, ahead, place, unread, forced, len(forced))
        goes_on = all(ahead.push(token) for token in forced)
        if not goes_on or len(forced) == most:
            writing.unread = []
        return writing

    def _read(self, writings: Sequence[Writing]) -> list[Writing]:
        """Let the model read the unread tokens in one forward, and draft a token for each sequence
        that has no more of them. Return the sequences that are to draft another token."""
        starts: list[int] = []
        parts: list[list[int]] = []
        keep: list[int] = []
        ready: list[Writing] = []
        reading: list[Writing] = []
        left = READ_MAX
        for own in writings:
            part, rest = own.unread[:left], own.unread[left:]
            if not part:
                continue
            left -= len(part)
            reading.append(own)
            starts.append(len(own.place.tokens))
            parts.append(part)
            if rest:
                own.draft, own.num_forced = [], 0  # no draft yet, as unread tokens remain
                continue
            keep.append(sum(map(len, parts)) - 1)
            ready.append(own)
        logits = self._forward(reading, starts, parts, keep)
        for writing, part in zip(reading, parts, strict=True):
            writing.place.tokens += part
        return self._take(ready, logits)

    def _forward(
        self,
        reading: Sequence[Writing],
        starts: list[int],
        parts: list[list[int]],
        keep: list[int],
    ) -> torch.Tensor:
        """Return the logits after the tokens ``keep``, [len(keep), width] float32."""
        placed = self._placed
        tables = [np.array(writing.place.blocks, np.int64) for writing in reading]
        counts = [len(part) for part in parts]
        rows = packing.pack(starts, counts, tables, placed.pool.block_size)
        ids = np.array([token for part in parts for token in part], np.int64)
        ids[ids >= placed.vocab_size] = 0  # ids without an embedding: drafts get worse, not wrong
        logits = self._compute(rows, ids, np.array(keep, np.int64))[:, : self._width]
        missing = self._width - logits.shape[1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits

    def _compute(self, rows: PackedRows, ids: Ints, keep: Ints) -> torch.Tensor:
        placed, execution = self._placed, self._placed.execution
        module, backend = execution.model.module, execution.backend
        return compute(module, backend, placed.cache, placed.device, ids, rows, keep)

    def _take(self, ready: list[Writing], logits: torch.Tensor) -> list[Writing]:
        """Draft a token for each sequence, and return those that are to draft another token."""
        unfinished = []
        for writing, token in zip(ready, self._sample(ready, logits), strict=True):
            if token is None or token in writing.ends:
                continue
            writing.draft.append(token)
            if len(writing.draft) < writing.most and writing.ahead.push(token):
                writing.unread = [token]
                unfinished.append(writing)
        return unfinished

    def _sample(self, ready: list[Writing], logits: torch.Tensor) -> list[int | None]:
        """Return a token for each sequence, as the larger model would sample it from these logits;
        None where no token may be sampled."""
        rows = [writing.ahead.sample_row() for writing in ready]
        sampled: list[int | None] = [None] * len(ready)
        left = [i for i, row in enumerate(rows) if row.mask is None or not row.mask.trouble]
        while left:
            try:
                tokens = sample(logits[left].contiguous(), [rows[i] for i in left], self._generator)
            except NothingToSample as error:
                del left[error.row]
                continue
            for index, token in zip(left, tokens, strict=True):
                sampled[index] = token
            break
        return sampled


def with_drafts(
    rows: tuple[Row, ...], model: DraftModel | None, states: Mapping[SequenceId, SequenceState]
) -> tuple[tuple[Row, ...], float]:
    """Let the draft model draft for the rows that are to verify its drafts, and put the drafts into
    the sequences' ``states``. Return the plan's rows, with as many tokens as were drafted, and the
    seconds that this took. No failure of the draft model fails the step."""
    wanted = [row for row in rows if row.by_model and row.sequence in states]
    if not wanted or model is None:
        return rows, 0.0
    begun = perf_counter()
    drafts = model.draft([(row, states[row.sequence]) for row in wanted])
    narrowed = {}
    for row in wanted:
        state, drafted = states[row.sequence], drafts.get(row.sequence, Drafted([], 0))
        state.draft, state.num_forced = drafted
        size = len(drafted.tokens)
        narrowed[row.sequence] = row._replace(count=row.count - row.drafts + size, drafts=size)
    narrowed_rows = tuple([narrowed.get(row.sequence, row) for row in rows])
    return narrowed_rows, perf_counter() - begun


# ---- loading


def _spec_of(spec: RunnerSpec) -> RunnerSpec:
    """Return the spec of a runner's draft model, from the runner's."""
    return replace(
        spec,
        model=spec.draft_model,
        revision="",
        draft_model="",
        speculation="off",
        quantization="none",
        max_model_len=None,
        max_num_seqs=DRAFTING_STEP_MAX,
        max_num_batched_tokens=READ_MAX,
    )


def _size_pool(
    larger: PoolSize,
    spec: RunnerSpec,
    shapes: Sequence[LayerShape],
    dtype: torch.dtype,
    limit: int,
    bytes_per_state: int = 0,
    weight_bytes: int = 0,
) -> PoolSize:
    """Return the size of the draft model's KV cache, where ``larger`` is that of the larger model.
    It holds at least one sequence of the longest length that both models have.

    Raises:
        Refusal: One of the models has recurrent layers.
    """
    if bytes_per_state or larger.num_states:
        who = "it" if bytes_per_state else "the model that it would draft for"
        raise Refusal(
            f"{who} has recurrent layers, whose states cannot be taken back behind a draft that is "
            "rejected; leave --draft-model out"
        )
    limit = min(limit, larger.max_model_len)
    blocks = -(-limit // spec.block_size)
    size = blocks * spec.block_size * token_bytes(shapes, dtype)
    own = replace(spec, kv_bytes=max(size, larger.num_bytes // CACHE_PART), max_model_len=limit)
    return size_pool(own, shapes, dtype, limit)


def measure_draft(spec: RunnerSpec, larger: PoolSize) -> int:
    """Return how many bytes the draft model will need beside the larger model's pool.

    Raises:
        Refusal: Its small files show that it cannot be served.
    """
    try:
        own = _spec_of(spec)
        sizes = measure(own, Division(), partial(_size_pool, larger))
        return sizes.inspection(own).num_bytes
    except Refusal as refusal:
        raise _as_draft(spec, refusal) from refusal


def open_draft_model(
    spec: RunnerSpec,
    larger: PlacedModel,
    tokenizer: HfTokenizer,
    progress: Callable[[LoadProgress], None],
) -> tuple[DraftModel, int]:
    """Load the runner's draft model, and return it with the bytes that it takes. ``tokenizer`` is
    the larger model's.

    Raises:
        Refusal: The draft model is not served, or has another vocabulary than the larger one.
    """
    own = _spec_of(spec)
    try:
        placed = place(own, Division(), progress, sizing=partial(_size_pool, larger.pool))
    except Refusal as refusal:
        raise _as_draft(spec, refusal) from refusal
    theirs, mine = tokenizer.backend, placed.make_tokenizer().backend
    if theirs.get_vocab(with_added_tokens=True) != mine.get_vocab(with_added_tokens=True):
        raise Refusal(
            f"the draft model {short_name(spec.draft_model)} has another vocabulary than "
            f"{short_name(spec.model)}; give a --draft-model of the same tokenizer"
        )
    model = DraftModel(own, placed, larger.vocab_size)
    model.warm_up()
    return model, placed.num_bytes(own)


def _as_draft(spec: RunnerSpec, refusal: Refusal) -> Refusal:
    """Return the refusal with the draft model's name in front."""
    why = refusal.spawn_failed()
    return Refusal(f"the draft model {short_name(spec.draft_model)}: {why}", detail=str(why))
