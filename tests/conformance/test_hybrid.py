"""Models with recurrent layers, scheduled by the real core, give transformers' tokens.

Prompts come in chunks, begin from the snapshots of shared prefixes, fork into choices, are
preempted and are parked. With a planted fault in how states are kept, the comparison fails.
"""

import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import SchedulerConfig
from engine.core.common.credit import Credit
from engine.core.common.events import ReaderDrained, StepDone, Submit
from engine.core.common.types import RequestId
from engine.core.text.memory import snapshots
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Request, Sampling, Stops, Tokens
from engine.errors import SpawnFailed
from engine.worker.forward.recurrent import CompiledStates, RecurrentLayers
from engine.worker.text.sequences import SequenceState
from tests.support.adapters import places_of, write_by_hand
from tests.support.model_zoo import COMPILED, REFERENCE, load_runner, prompt_of
from tests.support.parity import Tally

HYBRIDS = ["lfm2", "qwen3_5", "qwen3_next", "granite, hybrid", "bamba", "falcon_h1"]
# One model for each kind of recurrent layer, as states do not depend on the model otherwise.
KINDS = [
    name if name in ("lfm2", "qwen3_5", "falcon_h1") else pytest.param(name, marks=pytest.mark.full)
    for name in HYBRIDS
]
NUM_NEW = 12


@dataclass
class Answer:
    """One choice of a request, in the form that `tests.support.parity.Oracle` takes."""

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    failure: object = None

    @property
    def tokens(self):
        return [*self.prompt, *self.output]


class World:
    """A scheduler that drives a loaded runner, with few blocks and few state slots."""

    def __init__(self, loaded, **fields):
        info = loaded.info
        config = {
            "num_blocks": 40, "max_num_seqs": 6, "num_states": 10, "max_num_batched_tokens": 70,
            "step_time_target_s": 0.0, "inter_token_target_s": 0.0,
        } | fields  # fmt: skip
        self.runner = loaded.runner
        self.scheduler = Scheduler(
            SchedulerConfig(block_size=info.block_size, max_model_len=256, **config)
        )
        self.answers = {}
        self.credits = {}
        self.plans = []
        self.now = 0.0

    def submit(self, prompt, *, n=1, num_new=NUM_NEW, slots=1000, **fields):
        """Submit a greedy request, whose reader takes all that it gets after each step."""
        name, credit = RequestId(f"r{len(self.credits)}"), Credit(slots)
        request = Request(
            name, tuple(prompt), Sampling(temperature=0.0), Stops(num_new), self.now, n, **fields
        )
        self.credits[name] = credit
        for choice in range(n):
            self.answers[name, choice] = Answer(tuple(prompt))
        self._take(self.scheduler.apply(Submit(request, credit), self.now))

    def step(self):
        """Do one step, and return whether there was something to compute."""
        plan, events = self.scheduler.plan(self.now)
        self._take(events)
        if plan is None:
            return False
        self.plans.append(plan)
        self.scheduler.prepare(self.now)
        self.now += 0.01
        self._take(self.scheduler.apply(StepDone(self.runner.execute(plan)), self.now))
        self.scheduler.check()
        return True

    def read(self):
        """Let every reader take all its messages."""
        for name, credit in self.credits.items():
            if credit.release(credit.filled):
                self._take(self.scheduler.apply(ReaderDrained(name), self.now))

    def run(self):
        """Step until all requests have ended."""
        while self.step() or self.scheduler.statistics().parked:
            self.read()
        assert self.scheduler.is_idle

    def _take(self, events):
        for event in events:
            if isinstance(event, Tokens):
                self.answers[event.request_id, event.choice].output.extend(event.token_ids)


def run_world(loaded, seed=3, count=14):
    """Run requests that share prefixes, some with several choices, in a crowded pool."""
    rng = random.Random(seed)
    world = World(loaded)
    stems = [prompt_of(rng, length) for length in (16, 50, 100)]
    left = count
    while left or not world.scheduler.is_idle:
        if left and rng.random() < 0.4:
            left -= 1
            prompt = rng.choice(stems)[: rng.choice([16, 33, 50, 100])]
            prompt = prompt + prompt_of(rng, rng.choice([1, 7, 16, 40]))
            world.submit(prompt, n=rng.choice([1, 1, 1, 3]), slots=rng.choice([3, 1000]))
        world.step()
        if rng.random() < 0.7:
            world.read()
    return world


def compare(loaded, world):
    """Return the tally of a world's answers."""
    tally = Tally()
    assert all(len(one.output) == NUM_NEW for one in world.answers.values())
    loaded.oracle.compare(world.answers.values(), tally)
    return tally


@pytest.mark.parametrize(
    ("name", "way"), [*((name, COMPILED) for name in HYBRIDS), ("lfm2", REFERENCE)]
)
def test_snapshots_forks_and_preemptions_give_transformers_own_tokens(zoo, name, way):
    loaded = zoo.load(name, way)
    world = run_world(loaded)
    compare(loaded, world).check()
    said = world.scheduler.statistics()
    assert said.preemptions > 0
    assert said.prefix_hits > 0
    rows = [row for plan in world.plans for row in plan.rows]
    assert any(row.children for row in rows)
    assert any(row.start and row.logits.samples and row.count > 1 for row in rows)  # a last chunk
    assert any(row.state is not None and row.state.source is not None for row in rows)
    assert any(len({row.count for row in plan.rows}) > 2 for plan in world.plans)


@pytest.mark.parametrize("name", KINDS)
def test_an_equal_prompt_computes_only_what_is_behind_its_last_border(zoo, name):
    loaded, prompt = zoo.load(name), prompt_of(random.Random(1), 100)
    world = World(loaded)
    for _ in range(2):
        world.submit(prompt)
        world.run()
    assert [(row.start, row.count) for plan in world.plans for row in plan.rows][-NUM_NEW] == (
        96, 4,
    )  # fmt: skip
    compare(loaded, world).check()


@pytest.mark.parametrize("name", KINDS)
def test_a_hit_ends_where_there_is_a_snapshot_and_the_next_one_where_prefixes_part(zoo, name):
    """Blocks of 48 shared tokens are cached, but the only snapshot is behind 96 tokens: the second
    prompt computes its prefix again, and leaves a snapshot behind 48 for the third."""
    rng = random.Random(2)
    loaded, stem = zoo.load(name), prompt_of(rng, 50)
    world = World(loaded)
    cached = []
    for _ in range(3):
        world.submit(stem + prompt_of(rng, 50))
        world.run()
        cached.append(world.scheduler.statistics().prefix_hits)
    assert cached == [0, 0, 48]
    compare(loaded, world).check()


# --- planted faults: each must give wrong tokens ----------------------------------------------


def assert_red(zoo, name):
    """Check that parity fails."""
    loaded = zoo.load(name)
    assert any(compare(loaded, run_world(loaded, seed, 8)).wrong for seed in range(3, 11))


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_not_carried_over_a_chunks_border_is_noticed(zoo, monkeypatch, name):
    stock = SequenceState.row_state

    def row_state(self, row):
        found = stock(self, row)
        return replace(found, source=None) if row.count > 1 else found

    monkeypatch.setattr(SequenceState, "row_state", row_state)
    assert_red(zoo, name)


@pytest.mark.parametrize("name", KINDS)
def test_a_state_of_another_row_is_noticed(zoo, monkeypatch, name):
    def turning(stock):
        def begin(self, rows, states):
            sources = [one.source for one in states if one.source is not None]
            turned = iter(sources[1:] + sources[:1])
            stock(self, rows, [
                one if one.source is None else replace(one, source=next(turned)) for one in states
            ])  # fmt: skip

        return begin

    for kind in (RecurrentLayers, CompiledStates):
        monkeypatch.setattr(kind, "begin", turning(kind.begin))
    assert_red(zoo, name)


@pytest.mark.parametrize("name", KINDS)
def test_a_snapshot_that_is_restored_at_the_wrong_border_is_noticed(zoo, monkeypatch, name):
    stock = snapshots.publish

    def publish(ledger, seq, row, *, is_computed):
        earlier = row._replace(start=max(0, row.start - ledger.config.block_size))
        is_long = earlier.start + row.count >= ledger.config.block_size
        stock(ledger, seq, earlier if is_long else row, is_computed=is_computed)

    monkeypatch.setattr(snapshots, "publish", publish)
    assert_red(zoo, name)


@pytest.mark.parametrize("name", KINDS)
def test_a_choice_that_forks_without_its_parents_state_is_noticed(zoo, monkeypatch, name):
    stock = SequenceState.row_state

    def row_state(self, row):
        found = stock(self, row)
        return replace(found, targets=found.targets[:1]) if row.children else found

    monkeypatch.setattr(SequenceState, "row_state", row_state)
    assert_red(zoo, name)


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_written_before_the_step_has_succeeded_is_noticed(zoo, name):
    """A step that fails after its forward pass and is executed again gives the same tokens. Between
    the two tries a step without rows is executed, as if a sequence had been cancelled."""
    loaded = zoo.load(name)
    world = World(loaded)
    world.submit(prompt_of(random.Random(5), 60))
    execute = loaded.runner.execute

    def choose(*_arguments):
        raise RuntimeError("planted")

    def execute_twice(plan):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loaded.runner, "_choose", choose)
            with pytest.raises(RuntimeError, match="planted"):
                execute(plan)
        execute(plan._replace(rows=(), admitted=(), copies=()))
        return execute(plan)

    world.runner = SimpleNamespace(execute=execute_twice)
    world.run()
    compare(loaded, world).check()


def test_states_that_memory_is_lacking_for_change_in_no_layer(zoo):
    """A step fails while it gathers the states of its last layer, and is executed again. Red if the
    states of earlier layers are written by then: these layers would process the tokens twice."""
    loaded = zoo.load("lfm2", REFERENCE)
    world = World(loaded)
    world.submit(prompt_of(random.Random(5), 60))
    layers, execute = loaded.runner._states, loaded.runner.execute
    num_tensors = sum(len(list(one.tensors())) for one in layers._states.values())
    write, select = layers.write, torch.Tensor.index_select
    num_left = 0

    def lack(*args):
        nonlocal num_left
        num_left -= 1
        if not num_left:
            raise RuntimeError("planted")
        return select(*args)

    def write_and_lack():
        nonlocal num_left
        num_left = num_tensors
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "index_select", lack)
            write()

    def execute_twice(plan):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layers, "write", write_and_lack)
            with pytest.raises(RuntimeError, match="planted"):
                execute(plan)
        return execute(plan)

    world.runner = SimpleNamespace(execute=execute_twice)
    world.run()
    compare(loaded, world).check()


@pytest.mark.parametrize(
    ("name", "way"), [("lfm2", REFERENCE), ("qwen3_5", COMPILED), ("falcon_h1", COMPILED)]
)
def test_an_adapter_of_a_stock_recurrent_layer_is_refused_and_one_of_the_others_is_not(
    zoo, tmp_path, name, way
):
    loaded, base = zoo.load(name, way), zoo.directory(name)
    targets = ("in_proj", "in_proj_qkv", "in_proj_qkvz")
    assert places_of(base, targets)
    own = write_by_hand(tmp_path / "own", base, targets=targets)
    said = "no linear layer of the base model that an adapter may change; those are .*q_proj"
    with pytest.raises(SpawnFailed, match=said):
        loaded.runner.adapters.load(str(own))
    other = write_by_hand(tmp_path / "other", base, targets=("q_proj",))
    loaded.runner.adapters.unload(loaded.runner.adapters.load(str(other)).digest)


@pytest.mark.parametrize("name", KINDS)
def test_a_draft_model_is_refused_beside_states_whichever_model_has_them(zoo, name):
    for model, draft in ((name, "llama"), ("llama", name)):
        draft_model = str(zoo.directory(draft))
        with pytest.raises(SpawnFailed, match="recurrent layers, whose states cannot be taken"):
            load_runner(zoo.directory(model), speculation="model", draft_model=draft_model)
