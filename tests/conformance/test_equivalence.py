"""Whatever the schedule, the tokens are the same (D9, D10).

On a real CPU model in float32: alone == batched == chunked == preempted == prefix-cached == without
prepared plans == divided among two processes, with chunks, preemptions and cached prefixes.

Where a position's two best scores (with the noise of a seeded request) are closer than 1e-4,
rounding decides which token is best. An output is compared up to its first such position; the share
of positions lost in this way is printed and must stay below 0.1 %.
"""

import random
from dataclasses import fields

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Sampling, Tokens
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.factory import runner_spec
from engine.worker.load.architectures import layer_shapes
from engine.worker.load.loader import read_config
from engine.worker.load.resolve import resolve
from engine.worker.sampling.sampler import SampleRow
from tests.support.margins import gumbel_margin
from tests.support.rank_threads import RankThreads

DEMO = resolve("demo-stories").directory

MARGIN = 1e-4  # scores closer than this may be swapped by rounding (D10)
SKIPPED_SHARE_MAX = 0.001
NUM_REQUESTS = 32
MAX_TOKENS = 40
BASE = {"models": (ModelConfig("demo-stories"),), "check_level": 2, "prefix_cache": False}
# A model divided among two ranks, with chunks, preemptions and cached prefixes.
DIVIDED = {
    "models": (ModelConfig("demo-stories", tp=2, threads=1),),
    **{"max_num_seqs": 16, "max_num_batched_tokens": 24},
    **{"max_model_len": 192, "kv_cache_memory": 0, "prefix_cache": True},
}


def rank_threads(model, config):
    """Return a runner whose ranks are threads, which start faster than processes."""
    spec = runner_spec(model, config)
    return RankThreads(
        DEMO, **{f.name: getattr(spec, f.name) for f in fields(spec) if f.name in RANK_FIELDS}
    )


RANK_FIELDS = ("block_size", "kv_bytes", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
SCHEDULES = {
    "batched": {},
    "chunked": {"max_num_seqs": 16, "max_num_batched_tokens": 24},
    "preempted": {"max_model_len": 192, "kv_cache_memory": 0},
    "prefix-cached": {"prefix_cache": True},
    "plans not prepared": {"prepared_plans": False},
    "divided": DIVIDED | {"make_runner": rank_threads},
    "divided, in processes": DIVIDED,
}
LONG = ("divided", "divided, in processes")


def requests(seeded):
    """Return the requests whose tokens are compared."""
    rng = random.Random(5)
    shared = tuple(rng.randint(10, 900) for _ in range(48))
    made = []
    for index in range(NUM_REQUESTS):
        own = tuple(rng.randint(10, 900) for _ in range(rng.randint(1, 90)))
        prompt = shared + own if index % 2 else own
        sampling = SamplingParams(
            temperature=0.9 if seeded else 0.0,
            top_p=0.95 if seeded and index % 3 == 0 else None,
            seed=100 + index if seeded else None,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        )
        made.append(GenerateRequest(token_ids=prompt, sampling=sampling))
    return made


def tight_kv_bytes():
    """Return the bytes of a KV pool for 2.2 sequences of 192 tokens, so that most are preempted."""
    _, config = read_config(DEMO)
    per_token = 2 * 4 * sum(s.num_kv_heads * s.head_dim for s in layer_shapes(config))
    return int(per_token * 192 * 2.2)


async def outputs(config, wanted, *, one_by_one=False, twice=False):
    """Return the tokens of each request, and the engine's totals at the end."""
    found = {}

    make = {key: config.pop(key) for key in ("make_runner",) if key in config}
    async with open_engine(EngineConfig(**config), **make) as engine:

        async def run(index, request):
            async with engine.generate(request) as stream:
                tokens = [e.token_ids async for e in stream if isinstance(e, Tokens)]
            found[index] = [token for step in tokens for token in step]

        for _ in range(2 if twice else 1):
            async with trio.open_nursery() as nursery:
                for index, request in enumerate(wanted):
                    if one_by_one:
                        await run(index, request)
                    else:
                        nursery.start_soon(run, index, request)
        totals = engine.statistics().totals
    return [found[index] for index in range(len(wanted))], totals


def certain_lengths(wanted, found):
    """Return how many positions are before each output's first near-tie, and the number of
    near-ties."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    lengths, unsure = [], 0
    for request, tokens in zip(wanted, found, strict=True):
        ids = torch.tensor([[*request.token_ids, *tokens]])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(request.token_ids) - 1 : -1]
        params = request.sampling
        sampling = Sampling(
            temperature=params.temperature, top_p=params.top_p or 1.0, seed=params.seed
        )
        rows = [SampleRow(sampling, position, frozenset()) for position in range(len(tokens))]
        close = [i for i, lead in enumerate(gumbel_margin(logits, rows)) if lead < MARGIN]
        unsure += len(close)
        lengths.append(close[0] if close else len(tokens))
    return lengths, unsure


@pytest.fixture(scope="module", params=[False, True], ids=["greedy", "seeded"])
def reference(request):
    """Return requests, the tokens that each gets alone, and how many of these are certain."""
    wanted = requests(request.param)
    found, _ = trio.run(lambda: outputs(BASE, wanted, one_by_one=True))
    lengths, unsure = certain_lengths(wanted, found)
    share = unsure / (NUM_REQUESTS * MAX_TOKENS)
    print(f"\n{'seeded' if request.param else 'greedy'}: {unsure} near-ties, share {share:.4%}")
    assert share < SKIPPED_SHARE_MAX
    return wanted, found, lengths


@pytest.mark.parametrize(
    "schedule", [pytest.param(one, marks=[pytest.mark.full] * (one in LONG)) for one in SCHEDULES]
)
def test_the_schedule_does_not_change_a_token(reference, schedule):
    wanted, expected, lengths = reference
    config = {**BASE, **SCHEDULES[schedule]}
    if "kv_cache_memory" in config:
        config["kv_cache_memory"] = tight_kv_bytes()
    twice = config["prefix_cache"]
    found, totals = trio.run(lambda: outputs(config, wanted, twice=twice))
    assert "kv_cache_memory" not in config or totals.preemptions > NUM_REQUESTS / 8
    assert schedule != "prefix-cached" or totals.prefix_hits > 16 * NUM_REQUESTS
    assert totals.step_rows_total > 3 * totals.step_count
    for index, length in enumerate(lengths):
        assert found[index][:length] == expected[index][:length], f"request {index}"
