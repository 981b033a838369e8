"""The runner of text models: one model, its paged KV cache, its sequences (D3, D8).

Rule 1: a step that raises changes nothing, except that the plan's ``admitted`` sequences are added
and its ``released`` sequences removed; the next plan may repeat both. So `TorchRunner._execute`
computes first and changes state only in `TorchRunner._finish`, which cannot raise. Rule 2: each
step runs one forward, over exactly the plan's tokens.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.core.common.steps import RowFailure, RowPhase, StepTimings
from engine.core.text.plan import DRAFTING_STEP_MAX, Logits, RowResult, StepResult
from engine.errors import EngineBug, ShuttingDown
from engine.worker.failures import describe, is_out_of_memory
from engine.worker.forward import packing
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.load.architectures import context_note
from engine.worker.load.division import Division
from engine.worker.sampling.constraint_compiler import ConstraintCompiler, refusal
from engine.worker.sampling.guides import guide_of
from engine.worker.sampling.sampler import sample
from engine.worker.text.adapters import LoadedAdapters, group_rows
from engine.worker.text.draft_model import measure_draft, open_draft_model, with_drafts
from engine.worker.text.interface import ModelInfo
from engine.worker.text.placed_model import compute, measure, place
from engine.worker.text.scoring import score_batch
from engine.worker.text.sequences import SequenceState, offer_of
from engine.worker.text.step_batch import (
    NO_SCORES,
    Batch,
    Choice,
    Drawn,
    ScoredRow,
    Scores,
    draw,
    failure_of,
)
from engine.worker.text.warmup import warm_up
from engine.worker.torch_runner import InProcessRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.core.common.types import SequenceId
    from engine.core.text.plan import AdmittedSequence, Row, StepPlan
    from engine.core.text.types import Constraint, TokenLogprob
    from engine.worker.forward.adapters import AdapterGroup, AdapterHost
    from engine.worker.forward.attention import AttentionBackend
    from engine.worker.forward.kv_cache import KvCache
    from engine.worker.forward.packing import Ints
    from engine.worker.forward.recurrent import RowState, States
    from engine.worker.interface import Inspection, LoadProgress, RunnerSpec
    from engine.worker.load.loader import LoadedModel
    from engine.worker.sampling.guides import Guide
    from engine.worker.sampling.masks import Mask
    from engine.worker.text.draft_model import DraftModel


class TorchRunner(InProcessRunner["StepPlan", StepResult, ModelInfo]):
    """Implements `engine.worker.text.interface.TextRunner` with torch. If ``backend`` is None, the
    load chooses the attention backend."""

    NEEDS = "weights and KV pool"

    def __init__(self, spec: RunnerSpec, backend: AttentionBackend | None = None) -> None:
        super().__init__(spec)
        self.adapters = LoadedAdapters(spec)
        self._chosen = backend
        self._host: AdapterHost | None = None
        self._division = Division(spec.rank, spec.tp)
        self._backend: AttentionBackend | None = None
        self._model: LoadedModel | None = None
        self._cache: KvCache | None = None
        self._generator: torch.Generator | None = None
        self._grammars: ConstraintCompiler | None = None
        self._sequences: dict[SequenceId, SequenceState] = {}
        self._drafter: DraftModel | None = None
        self._states: States | None = None

    def _inspect(self) -> Inspection:
        spec = self._spec
        sizes = measure(spec, self._division)
        found = sizes.inspection(spec)
        if not spec.draft_model:
            return found
        return replace(found, draft_bytes=measure_draft(spec, sizes.pool))

    def compile(self, constraint: Constraint) -> int:
        """Compile a constraint (`ConstraintCompiler.compile`).

        Raises:
            ShuttingDown: `close` was called. Exception: `ConstraintCompiler.compile` raised it.
        """
        if self._grammars is None:
            raise ShuttingDown("the model was closed")
        return self._grammars.compile(constraint)

    def forget(self, constraint: Constraint) -> None:
        """Drop a compiled constraint."""
        if self._grammars is not None:
            self._grammars.forget(constraint)

    def close(self) -> None:
        """Free the model, the KV pool and all sequences, and end the sandbox. Idempotent."""
        self._model = self._cache = self._generator = self._backend = None
        self._sequences.clear()
        self._host = self._drafter = self._states = None
        self.adapters.close()
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
        super().close()

    # --- loading ----------------------------------------------------------------------------

    def _load(self, progress: Callable[[LoadProgress], None]) -> ModelInfo:
        spec = self._spec
        placed = place(spec, self._division, progress, chosen=self._chosen)
        self._device, self._cache = placed.device, placed.cache
        execution, pool, config = placed.execution, placed.pool, placed.config
        self._model = model = execution.model
        self._backend = execution.backend
        self._host = execution.adapters
        self._states = placed.states
        self.adapters.open(execution.adapters, placed.dtype, placed.device)
        self._connect(model)
        self._generator = torch.Generator(placed.device).manual_seed(spec.seed)
        is_compiled = isinstance(model.module, NativeDecoder)
        with ThreadPoolExecutor(1) as threads:  # the step computes without Python's lock
            self._tokenizer = tokenizing = threads.submit(placed.make_tokenizer)
            warm_up(self._execute, pool, decodes=self._states is not None or not is_compiled)
            tokenizer = tokenizing.result()
        self._grammars = ConstraintCompiler(tokenizer, placed.vocab_size, placed.ends)
        num_bytes = placed.num_bytes(spec)
        if spec.draft_model:
            self._drafter, of_drafts = open_draft_model(spec, placed, tokenizer, progress)
            num_bytes += of_drafts
        return ModelInfo(
            architecture=placed.architecture.name,
            dtype=str(placed.dtype).removeprefix("torch."),
            device=str(placed.device),
            vocab_size=placed.vocab_size,
            max_model_len=pool.max_model_len,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            eos_token_ids=placed.ends,
            memory_bytes=num_bytes,
            defaults=placed.defaults,
            is_demo=placed.is_demo,
            threads=spec.threads,
            context_note=context_note(config, spec.max_model_len, pool.max_model_len),
            quantization=execution.model.quantization,
            kv_dtype=str(placed.cache.dtype).removeprefix("torch."),
            num_states=pool.num_states,
            pool_bytes=pool.num_bytes,
            tool_format=spec.tool_format,
        )

    # Methods that subclasses override: the runners of a divided model's ranks, and of models that
    # read images (`engine.worker.text.rank_runners`, `engine.worker.text.vision.runner`).

    def _connect(self, model: LoadedModel) -> None:
        """Connect the prepared model with other ranks, before its first step."""

    def _images_of(self, rows: Sequence[Row]) -> object:
        """Return the parts of images whose tokens ``rows``, in the batch's order, compute."""
        return None

    def _with_images(self, batch: Batch) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """Return a function that puts the batch's images into a forward's inputs, or None."""
        return None

    # --- one step ---------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        times = [perf_counter()]
        self._forget(plan.released)
        self._admit(plan.admitted)
        rows, draft_s = with_drafts(plan.rows, self._drafter, self._sequences)
        batch = self._pack(rows) if rows else None
        times.append(perf_counter())
        logits = self._forward(batch) if batch else None
        if self._cache is not None:
            self._cache.copy_blocks(plan.copies)
        for matching, mask in batch.masks if batch else ():  # while CUDA computes the forward
            matching.fill(mask)
        times.append(perf_counter())
        drawn = self._choose(rows, batch, logits) if batch and logits is not None else {}
        scores = self._score(batch, logits, drawn) if batch and logits is not None else NO_SCORES
        times.append(perf_counter())
        # A step without rows has no forward: the states of the last one may be of a failed step.
        if self._states is not None and batch:
            self._states.write()
        results = self._finish(rows, batch, drawn, scores) if batch else ()
        times.append(perf_counter())
        prepare_s, *others = [after - before for before, after in pairwise(times)]
        timings = StepTimings(prepare_s - draft_s, *others)
        return StepResult(plan.plan_id, results, replace(timings, draft_s=draft_s))

    def _forget(self, released: Sequence[SequenceId]) -> None:
        for sequence in released:
            self._sequences.pop(sequence, None)
        if self._drafter is not None:
            self._drafter.release(released)

    def _admit(self, admitted: Sequence[AdmittedSequence]) -> None:
        for new in admitted:  # after a failed step, a sequence may be admitted again
            # The states of recurrent layers cannot be taken back behind a draft that is rejected.
            drafts = self._spec.speculation != "off" and self._states is None
            guide = None if self._grammars is None else guide_of(new, self._grammars)
            state = SequenceState.admit(new, guide, drafts=drafts)
            if new.output:
                state.replay(self.tokenizer)
            self._sequences[new.sequence] = state

    def _pack(self, rows: Sequence[Row]) -> Batch:
        """Lay the rows out for the model, sorted by adapter. This changes no state, except that a
        sequence whose adapter was unloaded gets a ``verdict``.

        Raises:
            EngineBug: A row does not fit its sequence.
        """
        ids: list[int] = []
        keep: list[int] = []
        tables: list[Ints] = []
        choices: list[Choice] = []
        scored: list[ScoredRow] = []
        masks: list[tuple[Guide, Mask]] = []
        wholes: list[tuple[int, int]] = []
        planned, adapters = rows, self.adapters.of_rows(rows, self._sequences)
        if adapters:
            rows = sorted(rows, key=lambda row: self._state_of(row).admission.adapter)
        for row in rows:
            state = self._state_of(row)
            drafts = tuple(state.draft[: row.drafts])
            if state.admission.images:
                wholes += state.wholes(row, len(ids))
            ids.extend(state.tokens[row.start : row.start + row.count - row.drafts])
            ids.extend(drafts)
            tables.append(state.table_for(row, self._spec.block_size))
            is_decided = state.verdict is not None
            # A divided model's ranks must keep the same rows, although only rank 0 has verdicts.
            if row.logits is Logits.NONE or (is_decided and self._division.size == 1):
                continue
            kept = row.count if row.logits.scores else 1 + row.drafts
            if row.logits.scores and state.is_scoring:
                scored.append(ScoredRow(row.sequence, row.start, row.count, len(keep)))
            keep.extend(range(len(ids) - kept, len(ids)))
            if not row.logits.samples or is_decided:
                continue
            first = state.sample_row()
            if state.matching is not None and first.mask is not None:
                masks.append((state.matching, first.mask))
            choices.append(Choice(row.sequence, first, len(keep) - 1 - row.drafts, drafts))
            for child in row.children:  # children share the mask of their parent
                own = replace(first, sampling=replace(first.sampling, choice=child.choice))
                choices.append(Choice(child.sequence, own, len(keep) - 1))
        starts = [row.start for row in rows]
        counts = [row.count for row in rows]
        packed = packing.pack(starts, counts, tables, self._spec.block_size, wholes)
        states: tuple[RowState, ...] = ()
        if self._states is not None:
            states = tuple([self._state_of(row).row_state(row) for row in rows])
        kept_tokens = np.array(keep, np.int64)
        groups: tuple[AdapterGroup, ...] = ()
        if adapters:
            groups = group_rows([adapters.get(row.sequence) for row in rows], counts, kept_tokens)
            of_row = {row.sequence: table for row, table in zip(rows, tables, strict=True)}
            tables = [of_row[row.sequence] for row in planned]
        return Batch(
            packed,
            np.array(ids, np.int64),
            tuple(tables),
            kept_tokens,
            tuple(choices),
            tuple(scored),
            tuple(masks),
            groups,
            states,
            self._images_of(rows),
        )

    def _state_of(self, row: Row) -> SequenceState:
        """Return the state of the row's sequence, after checking that the row fits it.

        Raises:
            EngineBug: The row does not fit.
        """
        state = self._sequences.get(row.sequence)
        if state is None:
            raise EngineBug(f"sequence {row.sequence} is planned and not admitted")
        state.require_fit(row)
        return state

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Run the step's forward and return logits [num_kept, vocab] float32."""
        assert self._model is not None
        assert self._cache is not None
        assert self._backend is not None
        if self._states is not None:
            self._states.begin(batch.rows, batch.states)
        return compute(
            self._model.module,
            self._backend,
            self._cache,
            self._device,
            batch.input_ids,
            batch.rows,
            batch.keep,
            self._host.forward if batch.groups and self._host is not None else None,
            batch.groups,
            self._with_images(batch),
        )

    def _choose(
        self, rows: Sequence[Row], batch: Batch, logits: torch.Tensor
    ) -> dict[SequenceId, Drawn]:
        """Return the tokens that each choice gets: its next token and, as long as the tokens equal
        its drafts, those after them. This changes no state."""
        first = self._sample(batch.choices, logits)
        drawn: dict[SequenceId, Drawn] = {
            name: (token,) if isinstance(token, int) else token for name, token in first.items()
        }
        active = [
            (choice, self._sequences[choice.sequence].ahead())
            for choice in batch.choices
            if choice.drafts and first[choice.sequence] == choice.drafts[0]
        ]
        while active:
            next_ones = [
                (Choice(seq.sequence, ahead.sample_row(), seq.logits + 1, seq.drafts[1:]), ahead)
                for seq, ahead in active
                if ahead.push(seq.drafts[0])
            ]
            samples = self._sample([state for state, _ in next_ones], logits) if next_ones else {}
            active = []
            for state, ahead in next_ones:
                token, before = samples[state.sequence], drawn[state.sequence]
                # A failure is dropped: the next step samples this position again.
                if isinstance(token, int) and not isinstance(before, RowFailure):
                    drawn[state.sequence] = (*before, token)
                    if state.drafts and token == state.drafts[0]:
                        active.append((state, ahead))
        return drawn

    def _sample(
        self, choices: Sequence[Choice], logits: torch.Tensor
    ) -> dict[SequenceId, int | RowFailure]:
        """Return a token for each choice, or its failure: its logits are not finite, or no token
        may be sampled. All choices are drawn in one call. If the call fails, each choice is drawn
        alone, so that one choice's failure does not affect the others."""
        drawn: dict[SequenceId, int | RowFailure] = {}
        for choice in choices:
            mask = choice.row.mask
            if mask is not None and mask.trouble:
                drawn[choice.sequence] = refusal(choice.sequence, mask, mask.trouble)
        assert self._generator is not None
        left = [choice for choice in choices if choice.sequence not in drawn]
        if not left:
            return drawn
        try:
            return drawn | draw(left, logits, self._generator, sample)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if len(left) == 1:
                only = left[0]
                return drawn | {only.sequence: failure_of(only, logits[only.logits], error)}
        for choice in left:
            drawn.update(self._sample([choice], logits))
        return drawn

    def _score(
        self,
        batch: Batch,
        logits: torch.Tensor,
        drawn: Mapping[SequenceId, Drawn],
    ) -> Scores:
        """Return the log-probabilities that the step's requests ask for. This changes no state."""
        return score_batch(batch, logits, drawn, self._sequences, self.tokenizer.token_text)

    # --- after the step can no longer fail --------------------------------------------------

    def _finish(
        self,
        rows: Sequence[Row],
        batch: Batch,
        drawn: Mapping[SequenceId, Drawn],
        scores: Scores,
    ) -> tuple[RowResult | RowFailure, ...]:
        """Apply the step to the sequences: block tables, children, tokens, text. Never raises."""
        results: list[RowResult | RowFailure] = []
        may_offer = len(rows) < DRAFTING_STEP_MAX  # larger steps have no room for drafts
        for row, table in zip(rows, batch.tables, strict=True):
            state = self._sequences[row.sequence]
            state.place(table, row.state)
            if row.sequence in scores.prompts:
                state.note_scores(scores.prompts[row.sequence])
            if state.verdict is not None:
                results.append(state.verdict)
                if isinstance(state.verdict, RowFailure):
                    ids = [child.sequence for child in row.children]
                    results += [replace(state.verdict, sequence=id_) for id_ in ids]
                continue
            if not row.logits.samples:
                results.append(RowResult(row.sequence))
                continue
            forks = [(child.sequence, state.fork(child)) for child in row.children]
            num_forced = state.num_forced  # the next offer changes it
            for sequence, own in [(row.sequence, state), *forks]:
                scored = scores.tokens.get(sequence, ())
                result = self._take(sequence, own, drawn[sequence], scored, may_offer=may_offer)
                if row.drafts and isinstance(result, RowResult):
                    forced = min(num_forced, row.drafts)
                    result = result._replace(drafted=row.drafts, forced=forced)
                results.append(result)
        return tuple(results)

    def _take(
        self,
        sequence: SequenceId,
        state: SequenceState,
        tokens: Drawn,
        scored: tuple[TokenLogprob, ...],
        *,
        may_offer: bool,
    ) -> RowResult | RowFailure:
        """Append the tokens to the sequence, up to a token that ends it, and return the row's
        result, with the number of drafts for its next row. This registers a forked child's
        state."""
        if isinstance(tokens, RowFailure):
            return tokens
        logprobs: tuple[TokenLogprob, ...] = ()
        text, count = "", 0
        try:
            if state.is_scoring:
                logprobs = state.tell_scores(self.tokenizer.token_text)
            for token in tokens:
                step = state.advance(token, self.tokenizer)
                text, count = text + step.text, count + 1
                if step.finish is not None:
                    break
        except Exception as error:
            return RowFailure(sequence, RowPhase.TEXT, describe(error))
        self._sequences[sequence] = state
        own, replayed = scored[:count], state.take_replayed()
        offered, has_model = 0, False
        if may_offer and step.finish is None and state.ngram is not None:
            has_model = self._drafter is not None and self._drafter.is_working
            offered = offer_of(state)
        return RowResult(
            sequence,
            tokens[:count],
            text,
            own,
            logprobs,
            step.finish,
            step.matched,
            replayed,
            offered,
            has_model,
            num_reasoning=0 if step.finish is None else state.num_reasoning,
        )
