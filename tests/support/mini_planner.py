"""A planner of a few lines, to drive a `TorchRunner` by hand.

It keeps the contract of `engine.core.text.plan` and nothing else: it has no queue and no policy.
Blocks are handed out in a shuffled order, so that a test fails if a table is read in any other
order. ``chunks`` bounds how many prompt tokens of one sequence a step computes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.core.common.steps import RowFailure
from engine.core.common.types import BlockId, PlanId, SequenceId
from engine.core.text.plan import (
    AdmittedSequence,
    BlockDelta,
    ChildFork,
    Logits,
    Row,
    StateDelta,
    StepPlan,
    StepResult,
)
from engine.core.text.types import PromptImage, Sampling, Stops, TokenLogprob
from engine.worker.text.interface import ModelInfo, TextRunner

GREEDY = Sampling(temperature=0.0)


@dataclass(slots=True)
class Planned:
    """What the planner knows of a sequence."""

    id: SequenceId
    prompt: tuple[int, ...]
    num_new: int
    sampling: Sampling
    tokens: list[int]
    blocks: list[BlockId] = field(default_factory=list)
    sent: int = 0  # length of the block table that the worker has
    keep: int = 0  # length of that table's part that stays valid in the next row
    computed: int = 0
    choices: int = 1
    images: tuple[PromptImage, ...] = ()
    text: str = ""
    failure: RowFailure | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    state: BlockId | None = None  # the sequence's state slot, if the model has states

    @property
    def output(self) -> list[int]:
        """Return the tokens that were sampled."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        """Return whether the sequence has all its tokens."""
        return self.failure is not None or len(self.output) >= self.num_new


class MiniPlanner:
    """Plan steps over the sequences that were added, and give the steps to a loaded runner."""

    def __init__(
        self, runner: TextRunner, info: ModelInfo, *, seed: int = 0, chunks: int = 64
    ) -> None:
        self.runner = runner
        self.info = info
        self.chunks = chunks
        self.random = random.Random(seed)
        self.free = [BlockId(i) for i in range(info.num_blocks)]
        self.random.shuffle(self.free)
        self.free_states = [BlockId(i) for i in range(info.num_states)]
        self.random.shuffle(self.free_states)
        self.sequences: dict[SequenceId, Planned] = {}
        self.plans: list[StepPlan] = []
        self._admitted: list[AdmittedSequence] = []
        self._released: list[SequenceId] = []
        self._next_id = 0

    def add(
        self,
        prompt: Sequence[int],
        num_new: int = 64,
        *,
        sampling: Sampling = GREEDY,
        stops: Stops | None = None,
        choices: int = 1,
        images: Sequence[PromptImage] = (),
    ) -> Planned:
        """Add a sequence, which is admitted with the first step that has a row of it."""
        one = self._planned(tuple(prompt), num_new, sampling)
        one.choices, one.images = choices, tuple(images)
        # One token more than asked for, so that the worker never ends the sequence first.
        stops = stops or Stops(max_tokens=num_new + 1)
        self._admitted.append(
            AdmittedSequence(one.id, one.prompt, sampling, stops, images=one.images)
        )
        return one

    def _planned(self, prompt: tuple[int, ...], num_new: int, sampling: Sampling) -> Planned:
        sequence = SequenceId(self._next_id)
        self._next_id += 1
        one = Planned(sequence, prompt, num_new, sampling, list(prompt))
        self.sequences[sequence] = one
        return one

    def run(self) -> None:
        """Step until every sequence has its tokens, and give all blocks back."""
        while live := [one for one in self.sequences.values() if not one.is_done]:
            self.step(live)
        for one in list(self.sequences.values()):
            self.release(one)
        self.runner.execute(self._plan((), ()))

    def step(self, live: Sequence[Planned]) -> StepResult:
        """Run one step with a row for each sequence in ``live``."""
        copies: list[tuple[BlockId, BlockId]] = []
        forks: dict[SequenceId, list[Planned]] = {}
        rows = tuple(self._row(one, copies, forks) for one in live)
        result = self.runner.execute(self._plan(rows, tuple(copies)))
        results = {entry.sequence: entry for entry in result.rows}
        for row in rows:
            for one in (self.sequences[row.sequence], *forks.get(row.sequence, ())):
                entry = results[one.id]
                one.sent = len(one.blocks)
                one.keep = one.sent
                one.computed = row.start + row.count
                if isinstance(entry, RowFailure):
                    one.failure = entry
                else:
                    one.tokens.extend(entry.tokens)
                    one.text += entry.text
                    one.logprobs.extend(entry.logprobs)
                    one.prompt_logprobs.extend(entry.prompt_logprobs)
        return result

    def preempt(self, one: Planned) -> None:
        """Take the sequence's blocks; it is computed again from its first token."""
        self.free.extend(one.blocks)
        self.random.shuffle(self.free)
        one.blocks, one.computed, one.keep = [], 0, 0
        self._drop_state(one)

    def release(self, one: Planned) -> None:
        """Give the sequence's blocks back."""
        shared = {b for other in self.sequences.values() if other is not one for b in other.blocks}
        self.free.extend(b for b in one.blocks if b not in shared)
        one.blocks = []
        self._drop_state(one)
        del self.sequences[one.id]
        self._released.append(one.id)

    def _drop_state(self, one: Planned) -> None:
        if one.state is not None:
            self.free_states.append(one.state)
            self.random.shuffle(self.free_states)
            one.state = None

    def _take_state(self, one: Planned) -> BlockId | None:
        if one.state is None and self.info.num_states:
            one.state = self.free_states.pop()
        return one.state

    def _plan(self, rows: tuple[Row, ...], copies: tuple[tuple[BlockId, BlockId], ...]) -> StepPlan:
        plan = StepPlan(
            PlanId(len(self.plans)), rows, copies, tuple(self._admitted), tuple(self._released)
        )
        self._admitted.clear()
        self._released.clear()
        self.plans.append(plan)
        return plan

    def _count(self, one: Planned, left: int) -> int:
        """Draw how many tokens the next row computes; an image with `is_whole` stays whole."""
        if left == 1:
            return 1
        end = one.computed + min(left, self.random.randint(1, self.chunks))
        for image in one.images:
            if image.is_whole and image.is_inside(end):
                borders = [image.start, image.end] if image.start > one.computed else [image.end]
                end = self.random.choice(borders)
        return end - one.computed

    def _row(
        self,
        one: Planned,
        copies: list[tuple[BlockId, BlockId]],
        forks: dict[SequenceId, list[Planned]],
    ) -> Row:
        left = len(one.tokens) - one.computed
        count = self._count(one, left)
        end = one.computed + count
        self._grow(one, end)
        is_last = end == len(one.tokens)
        children: tuple[ChildFork, ...] = ()
        if is_last and one.choices > 1:
            children = self._fork(one, copies, forks)
        asked = one.sampling.prompt_logprobs is not None
        if asked and not one.output and one.computed < len(one.prompt) - 1:
            logits = Logits.ALL if is_last else Logits.PROMPT
        else:
            logits = Logits.LAST if is_last else Logits.NONE
        delta = BlockDelta(one.keep, tuple(one.blocks[one.keep :]))
        slot = self._take_state(one)
        state = None if slot is None else StateDelta(slot)
        return Row(one.id, one.computed, count, delta, logits, children, state=state)

    def _grow(self, one: Planned, end: int) -> None:
        while len(one.blocks) * self.info.block_size < end:
            one.blocks.append(self.free.pop())

    def _fork(
        self,
        one: Planned,
        copies: list[tuple[BlockId, BlockId]],
        forks: dict[SequenceId, list[Planned]],
    ) -> tuple[ChildFork, ...]:
        """Fork the sequence: children share the prompt's full blocks, and copy its last."""
        children = []
        for choice in range(1, one.choices):
            child = self._planned(one.prompt, one.num_new, replace(one.sampling, choice=choice))
            full = len(one.prompt) // self.info.block_size
            child.blocks = one.blocks[:full]
            if full < len(one.blocks):
                child.blocks.append(self.free.pop())
                copies.append((one.blocks[full], child.blocks[full]))
            forks.setdefault(one.id, []).append(child)
            state = self._take_state(child)
            children.append(ChildFork(child.id, choice, tuple(child.blocks), state))
        one.choices = 1
        return tuple(children)
