"""A model that is divided among two ranks gives the tokens of the whole model (D29).

The ranks are threads here (`tests.support.rank_threads`); `test_rank_processes.py` runs them as
processes. Each rank has one thread of OpenMP. Tokens are compared as in `test_parity.py`, whose
planted faults show that the comparison can fail.
"""

import gc
import importlib
import random
from contextlib import closing
from dataclasses import replace

import pytest

from engine.core.text.plan import StepResult
from engine.core.text.types import Constraint, Sampling, Stops
from engine.errors import EngineBug, SpawnFailed
from engine.status import Capability
from engine.worker.factory import runner_of
from engine.worker.forward.collectives import Ranks
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.interface import RunnerSpec
from engine.worker.load import division
from engine.worker.load.architectures import SERVED
from engine.worker.load.division import DividedCheckpoint, Division
from engine.worker.load.recurrent import RECURRENT
from engine.worker.skeleton.division_plans import PLANS, Style, style_of
from tests.checkpoints.text import Shape, make
from tests.conformance.test_parity import run_alone, run_packed
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import COMPILED, REFERENCE, ZOO, Loaded, prompt_of
from tests.support.parity import Tally
from tests.support.process_fakes import drive
from tests.support.rank_threads import RankThreads

NO_PLAN = ("gpt2", "gpt2, layer-scaled", "opt", "opt, projected", "gpt_neox",
           "gpt_neox, in sequence", "hunyuan", "hunyuan, alpha", "phi, normed heads",
           "gpt_oss", "lfm2", "qwen3_next", "qwen3_5", "granite, hybrid",
           "granite, hybrid, no positions", "bamba", "falcon_h1")  # fmt: skip
DIVIDED = [name for name in ZOO if name not in NO_PLAN]
SHARE_MOST = 0.52  # a rank's share of a model's layers and of its KV pool
ESTIMATE_OFF_MOST = 0.05


@pytest.fixture(scope="module")
def divided(zoo):
    """Yield a function that returns an entry of the zoo with its model divided."""
    loaded = {}

    def load(name, way=COMPILED):
        if (name, way) not in loaded:
            directory = zoo.directory(name)
            runner = RankThreads(directory, way=way)
            loaded[name, way] = Loaded(directory, runner, runner.load(), zoo.oracle(name))
        return loaded[name, way]

    yield load
    gc.freeze()  # each close runs the garbage collector
    for one in loaded.values():
        one.runner.close()
    gc.unfreeze()


# ---- the plans ---------------------------------------------------------------------------------

# transformers' names of our styles. Where transformers gathers the ranks' results, so that each
# rank goes on with all heads, our ranks go on with their own heads.
STYLES = {
    "colwise": Style.COLUMNS,
    "colwise_gather_output": Style.COLUMNS,
    "packed_colwise": Style.PAIR,
    "rowwise": Style.ROWS,
    "rowwise_split_input": Style.ROWS,
    "moe_tp_experts": Style.SUM,
}
WITHOUT_EFFECT = ("replicated_with_grad_allreduce",)  # styles without effect on a forward pass
QUERY_KEY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
OWN = {
    "Phi3ForCausalLM": {"self_attn.qkv_proj": Style.QKV, "mlp.gate_up_proj": Style.PAIR},
    "GlmForCausalLM": {"mlp.gate_up_proj": Style.PAIR},
    "Glm4ForCausalLM": {"mlp.gate_up_proj": Style.PAIR},
    "CohereForCausalLM": dict.fromkeys(QUERY_KEY_NORMS, Style.COLUMNS),  # one row per head
    "Olmo2ForCausalLM": dict.fromkeys(QUERY_KEY_NORMS, Style.NORM),
    "Olmo3ForCausalLM": dict.fromkeys(QUERY_KEY_NORMS, Style.NORM),
}
NOT_DIVIDED = ("GPTNeoXForCausalLM", *RECURRENT)  # without a plan in `PLANS`, or by D32


@pytest.mark.parametrize("name", SERVED)
def test_the_plans_are_those_of_transformers(name):
    served = SERVED[name]
    package = f"transformers.models.{served.module}.configuration_{served.module}"
    named = getattr(importlib.import_module(package), served.config).base_model_tp_plan or {}
    wanted = {
        path.removeprefix("layers.*."): STYLES[style]
        for path, style in named.items()
        if style not in WITHOUT_EFFECT
    }
    if name in NOT_DIVIDED:
        wanted = {}
    assert PLANS.get(name, {}) == (wanted | OWN.get(name, {}) if wanted else {})


# ---- the tokens --------------------------------------------------------------------------------


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_give_the_tokens_of_the_whole_model(divided, name):
    """Sequences run alone and together, in chunks, with preemptions, as in `test_parity.py`."""
    loaded = divided(name)
    tally = Tally()
    loaded.oracle.compare(run_alone(loaded, (1, 17, 200), 24), tally)
    packed, _ = run_packed(loaded, 24, count=6)
    loaded.oracle.compare(packed, tally)
    tally.check()


@pytest.mark.full
@pytest.mark.parametrize("way", [COMPILED, REFERENCE])
@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_give_many_tokens_of_the_whole_model_in_both_ways(divided, name, way):
    loaded = divided(name, way)
    tally = Tally()
    loaded.oracle.compare(run_alone(loaded, (1, 16, 17, 500), 64), tally)
    packed, _ = run_packed(loaded, 64)
    loaded.oracle.compare(packed, tally)
    tally.check()


@pytest.mark.slow
def test_stock_modules_give_them_too(divided):
    for name in ("llama", "phi3", "gemma2"):
        loaded = divided(name, REFERENCE)
        tally = Tally()
        loaded.oracle.compare(run_packed(loaded, 12, count=4)[0], tally)
        tally.check()


def test_a_rank_runs_compiled_unless_its_norms_are_those_of_all_heads(divided):
    for name in ("llama", "phi3", "gemma3", "qwen3_moe"):
        ranks = divided(name).runner.ranks
        assert all(isinstance(rank._model.module, NativeDecoder) for rank in ranks)
    for rank in divided("olmo2").runner.ranks:
        assert not isinstance(rank._model.module, NativeDecoder)


@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_the_whole_model(zoo, tmp_path):
    shape = Shape(heads=8, kv_heads=4)
    directory = make(tmp_path / "four", "llama", shape)
    whole = zoo.load("llama")
    oracle = type(whole.oracle)(str(directory))
    with closing(RankThreads(directory, size=4)) as runner:
        loaded = Loaded(directory, runner, runner.load(), oracle)
        tally = Tally()
        oracle.compare(run_packed(loaded, 12, count=4)[0], tally)
        tally.check()


def tokens_of(steps):
    found = {}
    for _, result in steps:
        assert isinstance(result, StepResult)
        for row in result.rows:
            found.setdefault(row.sequence, []).extend(row.tokens)
    return found


def test_sampling_scores_forks_and_constraints_are_those_of_the_whole_model(divided, zoo):
    """Seeded and greedy requests, several choices, log-probabilities of prompts and answers."""
    form = Constraint("regex", "[a-z ]{1,40}")
    whole, parts = zoo.load("llama").runner, divided("llama").runner
    for constraint in (None, form):
        own, apart = (drive(one, constraint=constraint) for one in (whole, parts))
        seeded = {
            new.sequence
            for plan, _ in own
            for new in plan.admitted
            if new.sampling.seed is not None or new.sampling.is_greedy
        }
        here, there = tokens_of(own), tokens_of(apart)
        assert seeded
        assert {one: here[one] for one in seeded} == {one: there[one] for one in seeded}
        assert any(row.prompt_logprobs for _, result in apart for row in result.rows)


# ---- planted faults ----------------------------------------------------------------------------


def assert_red(loaded):
    tally = Tally()
    loaded.oracle.compare(run_packed(loaded, 16, count=4)[0], tally)
    with pytest.raises(AssertionError):
        tally.check()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "olmo2", "starcoder2"])
def test_a_missing_sum_over_the_ranks_is_noticed(divided, monkeypatch, name):
    loaded = divided(name)
    stock, calls = Ranks.add_up, {}

    def add_up(ranks, tensor):
        calls[ranks] = calls.get(ranks, 0) + 1
        if calls[ranks] % 3:
            stock(ranks, tensor)

    monkeypatch.setattr(Ranks, "add_up", add_up)
    assert_red(loaded)


def check_noticed(whole, read, monkeypatch):
    """Check that ranks give other tokens if they read their parts of the model by ``read``."""
    monkeypatch.setattr(DividedCheckpoint, "read", read)
    with closing(RankThreads(whole.directory)) as runner:
        assert_red(Loaded(whole.directory, runner, runner.load(), whole.oracle))


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
def test_a_swapped_slice_is_noticed(zoo, monkeypatch, part):
    whole = zoo.load("llama, untied, biases")
    stock = DividedCheckpoint.read

    def read(checkpoint, name):
        if f"1.self_attn.{part}." not in name and f"1.mlp.{part}." not in name:
            return stock(checkpoint, name)
        own = checkpoint._division
        checkpoint._division = replace(own, rank=own.size - 1 - own.rank)
        try:
            return stock(checkpoint, name)
        finally:
            checkpoint._division = own

    check_noticed(whole, read, monkeypatch)


def test_a_bias_that_every_rank_adds_is_noticed(zoo, monkeypatch):
    whole = zoo.load("llama, untied, biases")
    stock = DividedCheckpoint.read

    def read(checkpoint, name):
        is_sum = style_of(name, "LlamaForCausalLM") is Style.ROWS and name.endswith("bias")
        return checkpoint._whole.read(name) if is_sum else stock(checkpoint, name)

    check_noticed(whole, read, monkeypatch)


# ---- memory ------------------------------------------------------------------------------------

DEEP = Shape(layers=8, hidden=256, heads=8, kv_heads=4, mlp=1024, vocab=512, tied=True)


def layer_bytes(checkpoint):
    return sum(one.num_bytes for name, one in checkpoint.tensors.items() if ".layers." in name)


@pytest.mark.parametrize("arch", ["llama", "phi3", "olmo2", "qwen3_moe"])
def test_layers_and_keys_take_half_on_each_rank_and_a_rank_what_it_estimated(
    tmp_path, monkeypatch, arch
):
    directory = make(tmp_path, arch, DEEP)
    seen = []
    stock = division.DividedCheckpoint.__init__

    def init(checkpoint, whole, *rest):
        stock(checkpoint, whole, *rest)
        seen.append(layer_bytes(checkpoint) / layer_bytes(whole))

    monkeypatch.setattr(division.DividedCheckpoint, "__init__", init)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_bytes": 1 << 24}
    whole = runner_of(RunnerSpec(str(directory), threads=1, **limits), Capability.TEXT_TO_TEXT)
    runner = RankThreads(directory, **limits)
    try:
        info = whole.load(lambda progress: None)
        estimates = runner.on_each(lambda one: one.estimate())
        infos = runner.on_each(lambda one: one.load(lambda progress: None))
        assert seen
        assert max(seen) <= SHARE_MOST
        for estimate, own in zip(estimates, infos, strict=True):
            assert abs(own.memory_bytes / estimate.num_bytes - 1) <= ESTIMATE_OFF_MOST
            assert own.num_blocks == info.num_blocks
        for rank in runner.ranks:
            parts = [cache_bytes(one._cache) for one in (rank, whole)]
            assert parts[0] <= SHARE_MOST * parts[1]
            tied = DEEP.vocab * DEEP.hidden * 4  # bytes of the embedding, which is not divided
            assert rank._model.num_bytes - tied <= SHARE_MOST * (whole._model.num_bytes - tied)
    finally:
        runner.close()
        whole.close()


def cache_bytes(cache):
    """Return the bytes of a KV pool."""
    return sum(one.numel() * one.element_size() for one in (*cache.keys, *cache.values))


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "shape", "extra", "size", "text"),
    [
        ("llama", Shape(), {}, 4, r"its 2 key-value heads \(num_key_value_heads\) cannot be div"),
        ("llama", Shape(heads=6, kv_heads=3, hidden=96), {}, 2, "its 3 key-value heads"),
        ("llama", Shape(heads=3, kv_heads=3, hidden=96), {}, 2, "its 3 attention heads"),
        ("llama", Shape(mlp=129), {}, 2, "its 129 columns of an MLP"),
        (
            "qwen3_moe",
            Shape(hidden=96, heads=3, kv_heads=3, mlp=132),
            {},
            3,
            r"its 64 columns of an expert \(moe_intermediate_size\)",
        ),
        ("gpt2", Shape(), {}, 2, "GPT2LMHeadModel has no plan for tensor parallelism"),
        ("opt", Shape(), {}, 2, "OPTForCausalLM has no plan for tensor parallelism"),
        ("phi", Shape(), {"qk_layernorm": True}, 2, r"the normed heads \(qk_layernorm\) of Phi"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(tmp_path, arch, shape, extra, size, text):
    directory = make(tmp_path, arch, shape, extra=extra)
    spec = RunnerSpec(str(directory), threads=1, kv_bytes=1 << 22, tp=size)
    for call in (lambda one: one.estimate(), lambda one: one.load(lambda progress: None)):
        with pytest.raises(SpawnFailed, match=text):
            call(runner_of(spec, None))


def test_an_encoder_and_a_device_without_ranks_are_refused():
    spec = RunnerSpec("demo-embed", tp=2)
    with pytest.raises(SpawnFailed, match="text-embedding models are not divided"):
        runner_of(spec, None)
    with pytest.raises(SpawnFailed, match="the device 'cuda"):
        runner_of(RunnerSpec("demo-stories", device="cuda", tp=2), None).estimate()


def test_quantised_weights_are_not_divided(zoo):
    class Small(DividedCheckpoint):
        quantization = "Q8_0"

        def __init__(self):
            self.tensors = {}

    config = type("Config", (), {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8})
    with pytest.raises(division.Refusal, match="quantised already"):
        DividedCheckpoint(Small(), Division(0, 2), SERVED["LlamaForCausalLM"], config)


# ---- steps that fail ---------------------------------------------------------------------------


def test_a_step_that_the_first_rank_cannot_sample_can_be_executed_again(divided, monkeypatch):
    """Invariant I14, for a step that fails on one of two ranks."""
    loaded = divided("llama")
    planner = MiniPlanner(loaded.runner, loaded.info, seed=4)
    one = planner.add(prompt_of(random.Random(2), 40), 8)
    while not one.output:
        planner.step([one])
    leader = loaded.runner.ranks[0]
    with monkeypatch.context() as patch:
        patch.setattr(leader, "_sample", lambda choices, logits: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            planner.step([one])
    begun = {rank.num_collectives for rank in loaded.runner.ranks}
    assert len(begun) == 1
    planner.run()
    tally = Tally()
    loaded.oracle.compare([one], tally)
    tally.check()


def test_followers_learn_that_the_first_rank_could_not_sample(divided, monkeypatch):
    loaded = divided("llama")
    planner = MiniPlanner(loaded.runner, loaded.info, seed=4)
    one = planner.add(prompt_of(random.Random(2), 40), 8)
    while not one.output:
        planner.step([one])
    raised = []
    follower = loaded.runner.ranks[1]
    stock = follower.execute

    def execute(plan):
        try:
            return stock(plan)
        except EngineBug as error:
            raised.append(error)
            raise

    with monkeypatch.context() as patch:
        patch.setattr(loaded.runner.ranks[0], "_sample", lambda choices, logits: 1 / 0)
        patch.setattr(follower, "execute", execute)
        with pytest.raises(ZeroDivisionError):
            planner.step([one])
    assert "could not sample" in raised[0].log_detail
    planner.run()


def test_a_continued_choice_that_cannot_go_on_does_not_part_the_ranks(divided):
    """Only the first rank has constraints, and finds that a continued answer breaks one. All ranks
    compute forwards of the same shapes nevertheless."""
    loaded = divided("llama")
    runner, info = loaded.runner, loaded.info
    form = Constraint("choice", "yes\0no")
    runner.compile(form)
    planner = MiniPlanner(runner, info, seed=9)
    good = planner.add(prompt_of(random.Random(1), 30), 6)
    bad = planner.add(prompt_of(random.Random(3), 30), 6)
    planner._admitted[-1] = replace(
        planner._admitted[-1],
        constraint=form,
        output=(7, 7),
        stops=Stops(max_tokens=9),
        sampling=Sampling(temperature=0.0),
    )
    bad.tokens += (7, 7)
    while not good.is_done:
        planner.step([one for one in (good, bad) if not one.is_done])
    assert bad.failure is not None
    tally = Tally()
    loaded.oracle.compare([good], tally)
    tally.check()
    planner.release(good)
    planner.release(bad)
    planner.run()
