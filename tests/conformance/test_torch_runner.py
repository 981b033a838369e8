"""`TorchRunner` keeps the contract of `engine.core.text.plan`.

A row's failure is a value, a step that raises changes nothing, and sequences are right under forks,
preemption, prefixes, and any number of threads.
"""

import pickle
import random
import threading
from dataclasses import replace

import pytest
import torch

from engine.core.common.steps import RowFailure
from engine.core.common.types import BlockId, EndReason, PlanId, SequenceId
from engine.core.text.plan import (
    AdmittedSequence,
    BlockDelta,
    Logits,
    Row,
    RowResult,
    StepPlan,
)
from engine.core.text.types import Sampling, Stops
from engine.errors import EngineBug
from engine.worker.interface import RunnerSpec
from engine.worker.text import runner as runner_module
from engine.worker.text import sequences
from engine.worker.text.runner import TorchRunner, is_out_of_memory
from tests.checkpoints.text import Shape, make
from tests.support.mini_planner import GREEDY, MiniPlanner
from tests.support.model_zoo import WAYS, load_runner, seeded_prompt
from tools.lab.bench.quantized_weights import BAR_PEAK, BARS_MEMORY
from tools.lab.bench.quantized_weights import in_process as measured

LENGTHS = (5, 16, 33, 80)


@pytest.fixture(params=WAYS)
def loaded(zoo, request):
    """Return the tiny Llama model, compiled and by transformers' modules."""
    return zoo.load("llama", request.param)


def alone(loaded, prompt, num_new=24, sampling=GREEDY):
    """Return the output of a prompt that runs alone."""
    planner = MiniPlanner(loaded.runner, loaded.info, seed=1)
    one = planner.add(prompt, num_new, sampling=sampling)
    planner.run()
    return one.output


def one_row_plan(sequence=1, prompt=(5, 6, 7), *, logits=Logits.LAST, stops=None, **row):
    """Return a plan that admits one sequence and computes one row of it."""
    new = AdmittedSequence(SequenceId(sequence), prompt, GREEDY, stops or Stops(max_tokens=9), None)
    blocks = BlockDelta(0, (BlockId(3),))
    fields = {"start": 0, "count": len(prompt), "blocks": blocks, "logits": logits} | row
    return StepPlan(PlanId(0), (Row(SequenceId(sequence), **fields),), admitted=(new,))


def release(loaded, *ids):
    """Let the runner forget sequences."""
    loaded.runner.execute(StepPlan(PlanId(9), (), released=tuple(SequenceId(i) for i in ids)))


# --- a step that raises changes nothing ------------------------------------------------------


STAGES = {
    "preparing": lambda r: (runner_module.packing, "pack"),
    "the forward": lambda r: (r._model.module, "forward"),
    "copies": lambda r: (r._cache, "copy_blocks"),
    "drawing": lambda r: (runner_module.TorchRunner, "_sample"),
}


@pytest.mark.parametrize("where", STAGES)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_step_that_raises_can_be_executed_again(loaded, monkeypatch, where, at):
    """Any stage of any step may be interrupted; the output is the same."""
    prompts = [seeded_prompt(n) for n in LENGTHS]
    wanted = [alone(loaded, prompt, 6) for prompt in prompts]
    planner = MiniPlanner(loaded.runner, loaded.info, seed=2)
    done = [planner.add(prompt, 6) for prompt in prompts]
    stock, count = loaded.runner.execute, 0

    def execute(plan):
        nonlocal count
        count += 1
        if count == at + 1:
            with monkeypatch.context() as broken:
                broken.setattr(*STAGES[where](loaded.runner), fail)
                with pytest.raises(ZeroDivisionError):
                    stock(plan)
            return stock(plan._replace(admitted=(), released=()))
        return stock(plan)

    monkeypatch.setattr(loaded.runner, "execute", execute)
    planner.run()
    assert [one.output for one in done] == wanted


def fail(*_args, **_fields):
    """Raise an error."""
    raise ZeroDivisionError("planted")


def test_a_plan_executed_twice_with_its_admissions_gives_the_same(loaded, monkeypatch):
    plan = one_row_plan()
    wanted = loaded.runner.execute(plan).rows
    release(loaded, 1)
    with monkeypatch.context() as broken:
        broken.setattr(loaded.runner._cache, "copy_blocks", fail)
        with pytest.raises(ZeroDivisionError):
            loaded.runner.execute(plan)
    assert loaded.runner.execute(plan).rows == wanted
    release(loaded, 1)
    release(loaded, 1)  # a sequence may be forgotten twice


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        RuntimeError("MPS backend out of memory"),
    ],
)
def test_out_of_memory_is_memory_error(loaded, monkeypatch, error):
    def run_out(*_args, **_fields):
        raise error

    assert is_out_of_memory(error)
    monkeypatch.setattr(loaded.runner._model.module, "forward", run_out)
    with pytest.raises(MemoryError):
        loaded.runner.execute(one_row_plan())
    release(loaded, 1)


def test_out_of_memory_while_drawing_fails_the_step_and_no_row(loaded, monkeypatch):
    def run_out(*_args):
        raise MemoryError

    monkeypatch.setattr(runner_module, "sample", run_out)
    with pytest.raises(MemoryError):
        loaded.runner.execute(one_row_plan())
    release(loaded, 1)


BUGS = {
    "unknown sequence": (one_row_plan(), {"admitted": ()}),
    "beyond the tokens": (one_row_plan(count=4), {}),
    "no tokens": (one_row_plan(count=0), {}),
    "sampled before the last token": (one_row_plan(count=2), {}),
    "keeps blocks it never had": (one_row_plan(blocks=BlockDelta(2)), {}),
    "no block for its tokens": (one_row_plan(blocks=BlockDelta(0)), {}),
}


@pytest.mark.parametrize(("plan", "change"), BUGS.values(), ids=BUGS)
def test_a_plan_that_breaks_the_contract_is_an_engine_bug(loaded, plan, change):
    with pytest.raises(EngineBug):
        loaded.runner.execute(plan._replace(**change))
    release(loaded, 1)


# --- one row's failure is a value ------------------------------------------------------------


def test_logits_that_are_not_finite_fail_their_row_only(loaded):
    planner = MiniPlanner(loaded.runner, loaded.info, seed=2)
    done = [planner.add([token], 4) for token in (7, 8, 9, 10)]
    wanted = [alone(loaded, one.prompt, 4) for one in done]

    def poison(_module, _inputs, output):
        output.logits[0, 2, 7] = float("nan")

    hook = loaded.runner._model.module.register_forward_hook(poison)
    planner.step(done)
    hook.remove()
    assert done[2].failure is not None
    assert done[2].failure.phase == "sample"
    assert "not finite" in done[2].failure.detail
    planner.run()
    assert [one.output for one in done] == [[] if i == 2 else w for i, w in enumerate(wanted)]


def test_a_row_that_cannot_be_drawn_fails_alone(loaded):
    """No token is allowed: min_tokens bans all stop tokens, which are all ids."""
    nothing = Sampling(temperature=0.0, allowed_token_ids=())
    planner = MiniPlanner(loaded.runner, loaded.info, seed=2)
    all_ids = frozenset(range(512))
    bad = planner.add([4], 4, sampling=nothing, stops=Stops(9, min_tokens=4, token_ids=all_ids))
    good = planner.add([4], 4)
    planner.run()
    assert good.output == alone(loaded, [4], 4)
    assert bad.failure is not None
    assert bad.failure.phase == "sample"


def test_a_text_that_fails_ends_only_its_row(loaded, monkeypatch):
    wanted = alone(loaded, [4], 4)
    stock = sequences.TextState.push
    planner = MiniPlanner(loaded.runner, loaded.info, seed=2)
    good, bad = planner.add([4], 4), planner.add([4], 4)

    def push(state, token, **fields):
        if state._stops.max_tokens == 77:
            raise UnicodeError("planted")
        return stock(state, token, **fields)

    bad_state = replace(planner._admitted[1], stops=Stops(max_tokens=77))
    planner._admitted[1] = bad_state
    monkeypatch.setattr(sequences.TextState, "push", push)
    planner.run()
    assert good.output == wanted
    assert bad.failure == RowFailure(bad.id, "text", "UnicodeError: planted")


# --- forks, preemption, prefixes, isolation --------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_children_share_the_prompt_and_go_their_own_way(loaded, length):
    """Each of n choices has the tokens of a single request with the same seed and choice index."""
    prompt = seeded_prompt(length)
    sampling = Sampling(temperature=1.2, seed=7)
    planner = MiniPlanner(loaded.runner, loaded.info, seed=4)
    planner.add(prompt, 24, sampling=sampling, choices=3)
    while any(not one.is_done for one in planner.sequences.values()):
        planner.step([one for one in planner.sequences.values() if not one.is_done])
    outputs = [one.output for one in planner.sequences.values()]
    planner.run()
    wanted = [alone(loaded, prompt, 24, replace(sampling, choice=i)) for i in range(3)]
    assert outputs == wanted
    assert len({tuple(output) for output in outputs}) == 3


def test_a_results_rows_follow_the_plan_with_children_after_their_parent(loaded):
    planner = MiniPlanner(loaded.runner, loaded.info, seed=4, chunks=1)
    first = planner.add([3], 2, choices=3)
    second = planner.add([4], 2)
    result = planner.step([first, second])
    assert [entry.sequence for entry in result.rows] == [first.id, SequenceId(2), 3, second.id]
    planner.run()


def test_text_and_ends_come_with_the_tokens(loaded):
    tokenizer = loaded.runner.tokenizer
    output = alone(loaded, seeded_prompt(16), 12)
    planner = MiniPlanner(loaded.runner, loaded.info, seed=1)
    one = planner.add(seeded_prompt(16), 12, stops=Stops(max_tokens=12))
    ends = []
    while not one.is_done:
        ends += planner.step([one]).rows
    planner.run()
    assert one.output == output
    assert one.text == tokenizer.decode(output)
    last = ends[-1]
    assert isinstance(last, RowResult)
    assert last.finish is EndReason.LENGTH
    stopped = planner.add(seeded_prompt(16), 99, stops=Stops(99, token_ids=frozenset({output[5]})))
    while True:
        entry = planner.step([stopped]).rows[0]
        if entry.finish is not None:
            break
    assert (entry.finish, entry.matched) == (EndReason.STOP, output[5])
    assert len(stopped.output) == output.index(output[5]) + 1
    planner.release(stopped)


def test_an_unfinished_prompt_gives_no_token(loaded):
    prompt = tuple(seeded_prompt(16))
    plan = one_row_plan(2, prompt, logits=Logits.NONE, count=9)
    assert loaded.runner.execute(plan).rows == (RowResult(SequenceId(2)),)
    release(loaded, 2)


def test_logits_all_samples_as_logits_last_does(loaded):
    prompt = tuple(seeded_prompt(16))
    rows = []
    for logits in (Logits.LAST, Logits.ALL):
        rows.append(loaded.runner.execute(one_row_plan(2, prompt, logits=logits)).rows)
        release(loaded, 2)
    assert rows[0] == rows[1]


def test_a_cached_prefix_is_not_computed_again(loaded):
    """A row may start behind positions that another sequence has computed in the shared blocks."""
    prompt = seeded_prompt(40)
    wanted = alone(loaded, prompt, 5)
    planner = MiniPlanner(loaded.runner, loaded.info, seed=6)
    first = planner.add(prompt, 5)
    while not first.is_done:
        planner.step([first])
    second = planner.add(prompt, 5)
    second.blocks, second.computed = first.blocks[:2], 32
    while not second.is_done:
        planner.step([second])
    assert second.output == wanted
    planner.run()


def fill_cache(loaded, value):
    """Fill the whole cache with a value."""
    cache = loaded.runner._cache
    with torch.inference_mode():
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "starcoder2"])
def test_nan_left_in_a_block_never_reaches_another_sequence(zoo, name, way):
    loaded = zoo.load(name, way)
    wanted = [alone(loaded, seeded_prompt(n), 8) for n in LENGTHS]
    fill_cache(loaded, float("nan"))
    planner = MiniPlanner(loaded.runner, loaded.info, seed=8)
    done = [planner.add(seeded_prompt(n), 8) for n in LENGTHS]
    planner.run()
    fill_cache(loaded, 0.0)
    assert [one.output for one in done] == wanted


def test_seeded_output_survives_batching_and_preemption(loaded):
    sampling = Sampling(temperature=1.0, seed=3, top_p=0.95)
    wanted = [alone(loaded, seeded_prompt(n), 16, sampling) for n in LENGTHS]
    planner = MiniPlanner(loaded.runner, loaded.info, seed=9)
    done = [planner.add(seeded_prompt(n), 16, sampling=sampling) for n in LENGTHS]
    rng = random.Random(1)
    while live := [one for one in done if not one.is_done]:
        planner.step(live)
        if rng.random() < 0.3:
            planner.preempt(rng.choice(live))
    planner.run()
    assert [one.output for one in done] == wanted


EDITED = {
    "repetition": Sampling(0.0, repetition_penalty=1.6),
    "presence and frequency": Sampling(0.0, presence_penalty=0.4, frequency_penalty=0.3),
    "bias and bans": Sampling(0.0, logit_bias=((9, 0.4),), banned_token_ids=(7, 415, 428)),
    "bad words": Sampling(0.0, bad_words=tuple((i, i) for i in range(512))),
    "all, drawn": Sampling(
        0.9,
        seed=5,
        typical_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        allowed_token_ids=tuple(range(0, 512, 3)),
        bad_words=((3, 6), (9,)),
    ),
}


@pytest.mark.parametrize("name", EDITED)
def test_edited_logits_survive_batching_preemption_and_forks(loaded, name):
    """A choice's penalties count only its own output, even after a preemption or fork."""
    sampling = EDITED[name]
    wanted = [alone(loaded, seeded_prompt(n), 20, sampling) for n in LENGTHS]
    assert wanted != [alone(loaded, seeded_prompt(n), 20) for n in LENGTHS], (
        "the edit has an effect"
    )
    planner = MiniPlanner(loaded.runner, loaded.info, seed=9)
    done = [planner.add(seeded_prompt(n), 20, sampling=sampling) for n in LENGTHS]
    planner.add(seeded_prompt(33), 20, sampling=sampling, choices=3)
    rng = random.Random(1)
    while live := [one for one in planner.sequences.values() if not one.is_done]:
        planner.step(live)
        if rng.random() < 0.3:
            planner.preempt(rng.choice([one for one in done if one in live] or done))
    assert [one.output for one in done] == wanted
    choices = [one.output for one in planner.sequences.values() if one not in done]
    drawn = [alone(loaded, seeded_prompt(33), 20, replace(sampling, choice=i)) for i in range(3)]
    assert choices == drawn
    planner.run()


GENERATED = {
    "repetition": ({"repetition_penalty": 1.6}, EDITED["repetition"]),
    "bad words": ({"bad_words_ids": [[i, i] for i in range(512)]}, EDITED["bad words"]),
    "bias and bans": (
        {"sequence_bias": {(9,): 0.4}, "suppress_tokens": [7, 415, 428]},
        EDITED["bias and bans"],
    ),
}


@pytest.mark.parametrize("name", GENERATED)
def test_edited_greedy_output_is_that_of_transformers_generate(loaded, name):
    fields, sampling = GENERATED[name]
    prompt = seeded_prompt(33)
    output = loaded.oracle.model.generate(
        torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, **fields
    )
    banned = Stops(max_tokens=21, min_tokens=20, token_ids=frozenset(loaded.info.eos_token_ids))
    planner = MiniPlanner(loaded.runner, loaded.info, seed=1)
    one = planner.add(prompt, 20, sampling=sampling, stops=banned)
    planner.run()
    assert one.output == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("block_size", [1, 8, 32, 1024])
def test_the_block_size_does_not_matter(zoo, block_size):
    stock = zoo.load("mistral")
    wanted = [alone(stock, seeded_prompt(n), 8) for n in LENGTHS]
    runner, info = load_runner(stock.directory, block_size=block_size)
    planner = MiniPlanner(runner, info, seed=9)
    done = [planner.add(seeded_prompt(n), 8) for n in LENGTHS]
    planner.run()
    assert info.block_size == block_size
    assert [one.output for one in done] == wanted


# --- threads, values, life -------------------------------------------------------------------


def test_every_call_may_come_from_another_thread(loaded):
    wanted = alone(loaded, seeded_prompt(33), 6)
    planner = MiniPlanner(loaded.runner, loaded.info, seed=1)
    one = planner.add(seeded_prompt(33), 6)
    states = []

    def step():
        torch.set_num_threads(2)  # another model's step may leave this setting
        planner.step([one])
        states.append((torch.get_num_threads(), torch.is_inference_mode_enabled()))

    while not one.is_done:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    planner.run()
    assert one.output == wanted
    assert set(states) == {(1, False)}


def test_plans_results_and_specs_pickle(loaded):
    plan = one_row_plan()
    assert pickle.loads(pickle.dumps(plan)) == plan
    result = loaded.runner.execute(plan)
    release(loaded, 1)
    assert pickle.loads(pickle.dumps(result)) == result
    assert pickle.loads(pickle.dumps(loaded.info)) == loaded.info


def test_timings_say_where_a_step_went(loaded):
    timings = loaded.runner.execute(one_row_plan()).timings
    release(loaded, 1)
    parts = (timings.prepare_s, timings.forward_s, timings.sample_s, timings.text_s)
    assert all(part > 0 for part in parts)


def test_close_gives_everything_back_and_may_be_called_twice(zoo):
    directory = zoo.directory("llama")
    runner = TorchRunner(RunnerSpec(str(directory), kv_bytes=1 << 20, threads=1))
    with pytest.raises(EngineBug):
        _ = runner.tokenizer
    info = runner.load(lambda _progress: None)
    runner.execute(one_row_plan())
    runner.close()
    runner.close()
    assert runner._model is None
    assert not runner._sequences
    assert runner.load(lambda _progress: None) == info


def test_loading_leaves_no_sequence_behind(zoo):
    runner, info = load_runner(zoo.directory("gpt2"))
    assert not runner._sequences
    assert info.vocab_size == 512
    assert info.memory_bytes > info.num_blocks * 16 * 2 * 64 * 4 * 3


@pytest.mark.full
def test_a_load_of_quantized_weights_never_holds_the_float_weights(tmp_path):
    """The bench's measure of a process's allocated memory is compared."""
    directory = make(tmp_path, "llama", Shape(8, 768, 12, 4, 3072, 8000, 256), dtype="bfloat16")
    plain, int8, int4 = (measured(directory, one) for one in ("none", "int8", "int4"))
    assert int8["end"] <= BARS_MEMORY["bfloat16 int8"] * plain["end"]
    assert int4["end"] <= BARS_MEMORY["bfloat16 int4"] * plain["end"]
    for one in (int8, int4):
        assert one["peak"] <= BAR_PEAK * one["end"]
