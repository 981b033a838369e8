"""A fake text runner: its tokens are deterministic, its costs and faults come from a script.

It is part of the product: tests, the simulator and users' own tests run the whole engine with it.
Rule 1: this file imports no torch. Rule 2: a token depends on its sequence's own tokens, seed and
choice alone, *as read back from the fake KV pool*. So a wrong block table, or a block that is
shared too early or freed too soon, gives other tokens or raises `KvMismatch`.

Each slot of the fake KV pool holds a digest of all tokens up to its position, and of the images to
which they belong. A state slot (`engine.worker.fakes.states`) holds one such digest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.core.common.steps import RowFailure, RowPhase, StepTimings
from engine.core.common.types import BlockId, EndReason, SequenceId
from engine.core.text.plan import RowResult, StepResult
from engine.core.text.thought import Thought
from engine.core.text.types import TokenLogprob
from engine.settings import TextSteps
from engine.worker.fakes.adapters import FakeAdapters
from engine.worker.fakes.digests import (
    VOCAB_SIZE,
    contents_of,
    digest_after,
    fake_logprob,
    first_digest,
    held_back,
    next_token,
)
from engine.worker.fakes.preprocessor import FakePreprocessor, FakeTower, met_by
from engine.worker.fakes.scripted import ScriptedRunner
from engine.worker.fakes.states import FakeStates
from engine.worker.fakes.tokenizer import EOS
from engine.worker.text.interface import ModelInfo, SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.core.encode.types import EncodePlan
    from engine.core.image_generation.types import ImageGenerationPlan
    from engine.core.text.plan import AdmittedSequence, Row, StepPlan
    from engine.core.text.types import Constraint
    from engine.worker.interface import LoadProgress


class KvMismatch(AssertionError):
    """A row's blocks hold another prefix than its sequence's, which is a bug of the core."""


@dataclass(slots=True)
class FakeScript:
    """The costs, faults, texts and drafts of a fake.

    Costs, in seconds, passed to ``sleep``: a step costs ``step_s``, ``token_s`` for each token, and
    ``step_costs[k]`` more for the k-th step, from 0. ``load_s`` is the cost of a load, ``encode_s``
    of encoding a text of `engine.worker.fakes.tokenizer.LONG_TEXT_CHARS` or more, ``decode_s`` of
    decoding an image; encoding one for a text model costs ``image_s`` for each token of its cost.

    Faults: ``load_error`` is raised by a load, ``step_faults[k]`` by the k-th step before the step
    has any effect. ``row_faults`` maps a sequence to the number of tokens that it samples before
    its row fails, and to the phase of that failure. ``plan_fault`` may return an exception for a
    plan, ``encode_fault`` for the plan of an encoder, ``image_fault`` for the plan of an image
    model, and ``sample_fault`` the phase of a row's failure.

    Text: ``eos_at`` maps a digest to whether the sequence ends there; by default no sequence ends.
    ``words`` are the text of every sequence, one for each token, then its end; without them a
    token's text is its id in angle brackets. ``markers`` are the texts of some ids. A fake ends
    reasoning whose budget is spent. ``chat_template`` is the source of the tokenizer's template;
    ``answer_opening`` is the end of a rendered chat. ``compile`` is called with each
    constraint and may sleep or raise; a fake does not follow constraints. ``adapters`` are the
    contents of adapters by their directories; loading one takes ``adapter_s``.

    Drafts: ``draft`` returns the tokens to offer, right or wrong, for a sequence's tokens, seed and
        choice, by which the right tokens are computed. By default no token is offered.
        ``draft_model`` returns them in the step that verifies them; its tokens cost ``draft_s``
        each.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    load_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    image_s: float = 0.0
    load_error: BaseException | None = None
    step_costs: dict[int, float] = field(default_factory=dict)
    step_faults: dict[int, BaseException] = field(default_factory=dict)
    row_faults: dict[SequenceId, tuple[int, str]] = field(default_factory=dict)
    plan_fault: Callable[[StepPlan], BaseException | None] | None = None
    encode_fault: Callable[[EncodePlan], BaseException | None] | None = None
    image_fault: Callable[[ImageGenerationPlan], BaseException | None] | None = None
    sample_fault: Callable[[], str | None] | None = None
    eos_at: Callable[[int], bool] | None = None
    compile: Callable[[Constraint], None] | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    adapter_s: float = 0.0
    draft: Callable[[Sequence[int], int | None, int], Sequence[int]] | None = None
    draft_model: Callable[[Sequence[int], int | None, int], Sequence[int]] | None = None
    draft_s: float = 0.0
    words: Sequence[str] = ()
    markers: Mapping[int, str] = field(default_factory=dict)
    chat_template: str = ""
    answer_opening: str = ""
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class _FakeSequence:
    """The state of one sequence. The first ``sent`` characters of ``text`` were returned."""

    admitted: AdmittedSequence
    tokens: list[int]
    blocks: list[BlockId]
    state_slot: BlockId | None = None
    text: str = ""
    sent: int = 0
    scored: int = 1  # The number of first prompt tokens that need no log-probability now.
    replayed: str = ""  # The text of a continued choice's earlier tokens, until it is returned.
    ended: RowResult | None = None  # The end of a continued choice that had ended already.
    draft: list[int] = field(default_factory=list)  # The draft offered with the last result.
    contents: dict[int, bytes] = field(init=False)  # The images' digests by prompt position.
    thought: Thought | None = None
    said: str = ""  # The text of the newest token.

    def __post_init__(self) -> None:
        self.contents = contents_of(self.admitted.images)
        if self.admitted.reasoning is not None:
            self.thought = Thought(self.admitted.reasoning, lambda token_id: self.said)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.admitted.prompt)


class FakeRunner(ScriptedRunner["StepPlan", "StepResult"]):
    """Implements `engine.worker.text.interface.TextRunner` without a model.

    ``compiled`` are the constraints that were compiled; the fake does not follow them. With
    ``sees`` it reads images (`engine.worker.fakes.preprocessor`), and ``tower`` counts the encoded
    images. With ``num_states`` it keeps states in that many slots, and drafts nothing. `execute`
    also raises `KvMismatch` if a row's blocks hold another prefix than its sequence's.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 512,
        block_size: int = TextSteps.block_size,
        max_model_len: int = 2048,
        script: FakeScript | None = None,
        memory_bytes: int | None = None,
        sees: bool = False,
        num_states: int = 0,
    ) -> None:
        script = script or FakeScript()
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            device="cpu",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=frozenset({EOS}),
            memory_bytes=num_blocks * block_size if memory_bytes is None else memory_bytes,
            defaults=SamplingDefaults(),
            images=FakePreprocessor(script.decode_s, script.sleep) if sees else None,
            num_states=num_states,
        )
        super().__init__(script, info)
        self.tower = FakeTower()
        self.compiled: set[Constraint] = set()
        self.adapters = FakeAdapters(script)
        self._states = FakeStates(num_states)
        self._kv: list[int] = []
        self._sequences: dict[SequenceId, _FakeSequence] = {}

    def load(self, progress: Callable[[LoadProgress], None]) -> ModelInfo:
        """Load as `ScriptedRunner.load`, with an empty KV pool."""
        info: ModelInfo = super().load(progress)
        self._kv = [-1] * (info.num_blocks * info.block_size)
        return info

    def compile(self, constraint: Constraint) -> int:
        """Add the constraint to ``compiled``, after calling the script's ``compile``."""
        if self.script.compile is not None:
            self.script.compile(constraint)
        self.compiled.add(constraint)
        return len(constraint.source)

    def forget(self, constraint: Constraint) -> None:
        """Remove the constraint from ``compiled``."""
        self.compiled.discard(constraint)

    def close(self) -> None:
        """Drop the KV pool and all sequences."""
        self._kv = []
        self._sequences.clear()

    def _execute(self, plan: StepPlan) -> StepResult:
        script = self.script
        cost = self._spend(plan.num_tokens)
        for released in plan.released:
            del self._sequences[released]
        for admitted in plan.admitted:
            if admitted.constraint is not None and admitted.constraint not in self.compiled:
                raise AssertionError(f"{admitted.sequence} needs a constraint that is not compiled")
            self._sequences[admitted.sequence] = self._admit(admitted)
        self._fail(plan, self.script.plan_fault)
        rows = [self._drafted(row) for row in plan.rows]
        draft_s = script.draft_s * max((row.drafts for row in rows if row.by_model), default=0)
        if draft_s:
            script.sleep(draft_s)
        met = met_by((row, self._sequences[row.sequence].admitted.images) for row in rows)
        if encoding_s := script.image_s * self.tower.encode(met):
            script.sleep(encoding_s)
        for row in rows:
            self._forward(row)
        self._states.write()
        for source, target in plan.copies:
            size = self.info.block_size
            self._kv[target * size : (target + 1) * size] = self._kv[
                source * size : (source + 1) * size
            ]
        results = [result for row in rows for result in self._sample_row(row)]
        timings = StepTimings(forward_s=cost, draft_s=draft_s)
        return StepResult(plan.plan_id, tuple(results), timings)

    # ---- one row

    def _admit(self, admitted: AdmittedSequence) -> _FakeSequence:
        """Return a new sequence. If it continues a choice, its output's text is replayed."""
        seq = _FakeSequence(admitted, list(admitted.prompt), [])
        for token_id in admitted.output:
            seq.tokens.append(token_id)
            choice = self._say(seq, token_id)
            seq.replayed += choice.text
            if choice.finish is not None:
                seq.ended = choice._replace(tokens=(), text="")
        return seq

    def _drafted(self, row: Row) -> Row:
        """Return the row, with the drafts of the script's draft model if the plan asks for them."""
        if not row.by_model or self.script.draft_model is None:
            return row
        seq = self._sequences[row.sequence]
        sampling = seq.admitted.sampling
        draft = self.script.draft_model(seq.tokens, sampling.seed, sampling.choice)
        seq.draft = list(draft[: row.drafts])
        return row._replace(count=1 + len(seq.draft), drafts=len(seq.draft))

    def _slot(self, seq: _FakeSequence, position: int) -> int:
        size = self.info.block_size
        return seq.blocks[position // size] * size + position % size

    def _forward(self, row: Row) -> None:
        """Read the digest before the row's positions and write the digests of the positions.

        Raises:
            KvMismatch: A block holds another prefix than the sequence's, the row has more tokens
                than the sequence, or ends inside an image with `is_whole`.
        """
        seq = self._sequences[row.sequence]
        if row.blocks is not None:
            del seq.blocks[row.blocks.keep :]
            seq.blocks.extend(row.blocks.append)
        if row.start + row.count - row.drafts > len(seq.tokens) or row.drafts > len(seq.draft):
            raise KvMismatch(
                f"{row} is beyond its {len(seq.tokens)} tokens and {len(seq.draft)} drafts"
            )
        if row.drafts and row.start + row.count - row.drafts != len(seq.tokens):
            raise KvMismatch(f"{row} has drafts that do not follow its {len(seq.tokens)} tokens")
        tokens = [*seq.tokens, *seq.draft] if row.drafts else seq.tokens
        self._verify_prefix(seq, row.start)
        end = row.start + row.count
        for image in seq.admitted.images:
            if image.is_whole and image.is_inside(end):
                raise KvMismatch(f"{row} cuts an image that is whole, {image}")
        digest = first_digest(seq.admitted.adapter)
        if row.start:
            digest = self._kv[self._slot(seq, row.start - 1)]
        seq.state_slot = self._states.begin(row, seq.state_slot, digest)
        for position in range(row.start, end):
            digest = digest_after(digest, tokens[position], seq.contents.get(position, b""))
            self._kv[self._slot(seq, position)] = digest
        self._states.put(row, seq.state_slot, digest)
        if row.logits.scores and row.start < seq.scored:
            seq.scored = max(seq.scored, row.start + row.count + 1)

    def _verify_prefix(self, seq: _FakeSequence, start: int) -> None:
        """Check that every block below position ``start`` holds this sequence's own prefix.

        Raises:
            KvMismatch: A block holds another prefix than the sequence's.
        """
        digest, size = first_digest(seq.admitted.adapter), self.info.block_size
        for position in range(start):
            content = seq.contents.get(position, b"")
            digest = digest_after(digest, seq.tokens[position], content)
            is_boundary = position % size == size - 1 or position == start - 1
            if is_boundary and self._kv[self._slot(seq, position)] != digest:
                raise KvMismatch(
                    f"sequence {seq.admitted.sequence} reads foreign KV at position {position}"
                )

    def _sample_row(self, row: Row) -> list[RowResult | RowFailure]:
        parent = self._sequences[row.sequence]
        if parent.ended is not None:
            return [parent.ended]
        if not row.logits.samples:
            return [RowResult(row.sequence)]
        for fork in row.children:
            sampling = replace(parent.admitted.sampling, choice=fork.choice)
            admitted = replace(parent.admitted, sequence=fork.sequence, sampling=sampling)
            self._sequences[fork.sequence] = _FakeSequence(
                admitted, parent.tokens.copy(), list(fork.blocks), fork.state
            )
        ids = [row.sequence, *(fork.sequence for fork in row.children)]
        adapter = parent.admitted.adapter
        if adapter and adapter not in self.adapters.loaded:
            return [RowFailure(id_, RowPhase.ADAPTER, "it was unloaded") for id_ in ids]
        return [self._sample_row_of(self._sequences[i], row) for i in ids]

    def _sample_row_of(self, seq: _FakeSequence, row: Row) -> RowResult | RowFailure:
        """Sample a token, and further tokens while they equal the draft."""
        drafts, seq.draft = seq.draft[: row.drafts], []
        result = self._sample(seq)
        for drafted in drafts:
            if isinstance(result, RowFailure) or result.finish is not None:
                break
            if result.tokens[-1] != drafted:
                break
            more = self._sample(seq)
            if isinstance(more, RowFailure):
                break  # the next step samples this position again
            result = result._replace(
                tokens=result.tokens + more.tokens,
                text=result.text + more.text,
                logprobs=result.logprobs + more.logprobs,
                finish=more.finish,
                matched=more.matched,
                num_reasoning=more.num_reasoning,
            )
        if isinstance(result, RowResult):
            result = result._replace(drafted=row.drafts)
            if result.finish is None:
                has_model = self.script.draft_model is not None and self._may_draft(seq)
                result = result._replace(offered=self._offer(seq), has_model=has_model)
        return result

    def _may_draft(self, seq: _FakeSequence) -> bool:
        return seq.admitted.speculates and not self._states.has_slots

    def _offer(self, seq: _FakeSequence) -> int:
        if self.script.draft is not None and self._may_draft(seq):
            sampling = seq.admitted.sampling
            seq.draft = list(self.script.draft(seq.tokens, sampling.seed, sampling.choice))
        return len(seq.draft)

    def _sample(self, seq: _FakeSequence) -> RowResult | RowFailure:
        fault = self.script.row_faults.get(seq.admitted.sequence)
        if fault is not None and seq.num_output >= fault[0]:
            return RowFailure(seq.admitted.sequence, RowPhase(fault[1]), "scripted")
        phase = self.script.sample_fault() if self.script.sample_fault is not None else None
        if phase is not None:
            return RowFailure(seq.admitted.sequence, RowPhase(phase), "drawn")
        digest = self._kv[self._slot(seq, len(seq.tokens) - 1)]
        sampling = seq.admitted.sampling
        token_id = next_token(digest, sampling.seed, sampling.choice)
        can_end = seq.num_output + 1 >= seq.admitted.stops.min_tokens
        if can_end and self.script.eos_at is not None and self.script.eos_at(digest):
            token_id = EOS
        if can_end and self.script.words and seq.num_output >= len(self.script.words):
            token_id = EOS
        if seq.thought is not None and seq.thought.owed:
            token_id = seq.thought.owed[0]
        prompt_logprobs = self._score_prompt(seq)
        seq.tokens.append(token_id)
        choice = self._say(seq, token_id)
        if sampling.logprobs is not None:
            choice = choice._replace(logprobs=(fake_logprob(token_id, sampling.logprobs),))
        replayed, seq.replayed = seq.replayed, ""
        return choice._replace(prompt_logprobs=prompt_logprobs, replayed=replayed)

    def _score_prompt(self, seq: _FakeSequence) -> tuple[TokenLogprob, ...]:
        """Return the prompt's log-probabilities with the first token of choice 0, if the request
        asks for them.

        Raises:
            KvMismatch: The plans did not score every position of the prompt.
        """
        sampling, prompt = seq.admitted.sampling, seq.admitted.prompt
        if sampling.prompt_logprobs is None or sampling.choice or seq.num_output:
            return ()
        if seq.scored < len(prompt):
            raise KvMismatch(f"of {len(prompt)} prompt tokens only {seq.scored} were scored")
        first = TokenLogprob(prompt[0], f"<{prompt[0]}>", None)
        return (first, *(fake_logprob(i, sampling.prompt_logprobs) for i in prompt[1:]))

    def _say(self, seq: _FakeSequence, token_id: int) -> RowResult:
        """Return the text of a token, and whether and how the token ends the sequence. The rules
        are those of `engine.worker.tokenizing.detokenizer`, written as simply as possible."""
        stops = seq.admitted.stops
        words, at = self.script.words, seq.num_output - 1
        seq.said = words[at] if at < len(words) else f"<{token_id}>"
        seq.said = self.script.markers.get(token_id, seq.said)
        if seq.thought is not None:
            seq.thought.push(token_id)
        if not (token_id == EOS and stops.skip_special):
            seq.text += seq.said
        finish: EndReason | None = None
        matched: str | int | None = None
        end = len(seq.text)
        places = [(seq.text.find(s, max(0, seq.sent)), s) for s in stops.strings]
        hits = [(at + len(s), s) for at, s in places if at >= 0]
        if seq.num_output >= stops.min_tokens and hits:
            stop_end, matched = min(hits)
            end = stop_end if stops.include else stop_end - len(matched)
            finish = EndReason.STOP
        elif token_id in stops.token_ids and seq.num_output >= stops.min_tokens:
            finish, matched = EndReason.STOP, token_id
        elif seq.num_output >= stops.max_tokens:
            finish = EndReason.LENGTH
        else:
            end -= held_back(seq.text[seq.sent :], stops.strings)
        text, seq.sent = seq.text[seq.sent : end], end
        count = 0 if seq.thought is None or finish is None else seq.thought.num_tokens
        return RowResult(
            seq.admitted.sequence,
            (token_id,),
            text,
            finish=finish,
            matched=matched,
            num_reasoning=count,
        )
