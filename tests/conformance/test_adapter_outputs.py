"""Options of requests to models with adapters: drafts, log-probabilities, several seeded choices;
also quantized base weights, and replicas in processes of their own.

Tokens and logits are compared with those of peft's unmerged model.
"""

import itertools
import json
import os
import random
import re
import signal

import pytest
import torch
import trio

from engine.api.engine import open_engine
from engine.config import AdapterConfig, EngineConfig, ModelConfig, WorkerConfig
from engine.core.common.events import Finished
from engine.core.text.step_times import StepTimes
from engine.core.text.types import Tokens
from engine.requests.text.values import GenerateRequest, OutputOptions, SamplingParams, Started
from engine.status import ModelState
from engine.worker.load.adapter_config import read_form
from engine.worker.text import sequences
from tests.conformance.test_adapter_serving import (
    NEW,
    prompts,
    wanted_of,
    written_by_ranks,
)
from tests.conformance.test_adapters import COUNTS, Adapted
from tests.support.adapters import ATTENTION, LINEARS, peft_model, write_by_hand
from tests.support.draft_rows import Replaying

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft warns
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

RANKS = {"a": 4, "b": 33}
LIMIT_S = 240


@pytest.fixture(scope="module")
def base(zoo):
    return zoo.directory("llama")


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """Return the directories of two adapters, by their names."""
    return written_by_ranks(tmp_path_factory.mktemp("adapters"), base, RANKS)


@pytest.fixture(scope="module")
def wanted(base, written):
    """Return peft's tokens after each of four prompts, by the names of the models."""
    return wanted_of(base, written, prompts(4))


def config_of(base, written, *, workers=(), **fields):
    adapters = tuple(AdapterConfig(name, str(path)) for name, path in written.items())
    model = ModelConfig(
        str(base), name="base", dtype="float32", threads=1, adapters=adapters, workers=workers
    )
    return EngineConfig(models=(model,), check_level=2, **fields)


async def answer(engine, name, prompt, *, n=1, output=None, **sampling):
    """Return the tokens of each choice, the log-probabilities of the prompt and of the tokens, and
    the usage of the last choice."""
    sampling = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True} | sampling
    request = GenerateRequest(
        token_ids=prompt,
        model=name,
        n=n,
        sampling=SamplingParams(**sampling),
        output=output or OutputOptions(),
    )
    tokens, scored, own, usage = [[] for _ in range(n)], [], [], None
    async with engine.generate(request) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                tokens[event.choice] += event.token_ids
                own += event.logprobs
            elif isinstance(event, Started):
                scored += event.prompt_logprobs
            elif isinstance(event, Finished):
                usage = event.usage
    return [tuple(one) for one in tokens], scored, own, usage


@pytest.mark.slow
def test_drafts_change_no_token_of_any_adapter(base, written, wanted, monkeypatch):
    """The drafter proposes tokens from the outputs of all models, so that a draft for one adapter
    may be another adapter's output."""
    known = [(*prompt, *new) for found in wanted.values() for prompt, new in found.items()]
    random.Random(4).shuffle(known)
    monkeypatch.setattr("tests.support.draft_rows.KNOWN", known)
    monkeypatch.setattr(Replaying, "acceptance", 0.8)
    monkeypatch.setattr(sequences, "NgramDrafter", Replaying)
    monkeypatch.setattr(StepTimes, "note", lambda *_: None)  # so that drafts are always used
    drafted = {name: [0, 0] for name in wanted}  # numbers of drafted and of accepted tokens

    async def ask(engine, name, prompt):
        [tokens], _, _, usage = await answer(engine, name, prompt)
        assert tokens == wanted[name][prompt]
        drafted[name][0] += usage.drafted_tokens
        drafted[name][1] += usage.accepted_tokens

    async def main():
        async with open_engine(config_of(base, written)) as engine:
            await engine.wait_ready("base:a")
            with trio.fail_after(LIMIT_S):
                for prompt in prompts(4):  # large steps seldom draft
                    async with trio.open_nursery() as nursery:
                        for name in wanted:
                            nursery.start_soon(ask, engine, name, prompt)

    trio.run(main)
    assert all(accepted for _, accepted in drafted.values()), drafted
    assert sum(map(sum, drafted.values())) > 2 * sum(accepted for _, accepted in drafted.values())


def test_log_probabilities_are_those_of_peft(base, written):
    """Both the prompt's and new tokens' log-probabilities, in chunks and beside other models."""
    prompt = prompts(2)[1]
    found = {}

    async def ask(engine, name):
        output = OutputOptions(prompt_logprobs=0, logprobs=0)
        found[name] = await answer(engine, name, prompt, output=output)

    async def main():
        fields = {"max_num_seqs": 16, "max_num_batched_tokens": 24}
        async with open_engine(config_of(base, written, **fields)) as engine:
            await engine.wait_ready("base:a")
            with trio.fail_after(LIMIT_S):
                async with trio.open_nursery() as nursery:
                    for name in ("base", "base:a", "base:b"):
                        nursery.start_soon(ask, engine, name)

    trio.run(main)
    differing = set()
    for name, ([tokens], scored, own, _) in found.items():
        directory = written.get(name.removeprefix("base:"))
        ids = torch.tensor([[*prompt, *tokens]])
        with peft_model(base, directory) as model:
            right = model(ids).logits[0, :-1].log_softmax(-1)
        right = right.gather(1, ids[0, 1:, None])[:, 0]
        got = torch.tensor([one.logprob for one in [*scored[1:], *own]])
        assert got.shape == right.shape
        assert float((got - right).abs().max()) < 1e-3
        differing.add(round(float(right.sum()), 2))
    assert len(differing) == 3


def test_seeded_choices_are_the_same_alone_and_beside_other_models(base, written):
    """Each of a request's choices is drawn from the probabilities of the request's adapter."""
    prompt, names = prompts(2)[1], ("base", "base:a", "base:b")
    alone, together = {}, {}

    async def ask(engine, name, into):
        into[name], _, _, _ = await answer(engine, name, prompt, n=3, temperature=0.8, seed=5)

    async def main():
        async with open_engine(config_of(base, written, prefix_cache=False)) as engine:
            await engine.wait_ready("base:a")
            with trio.fail_after(LIMIT_S):
                for name in names:
                    await ask(engine, name, alone)
                async with trio.open_nursery() as nursery:
                    for name in names:
                        nursery.start_soon(ask, engine, name, together)

    trio.run(main)
    assert alone == together
    assert len({choice for choices in alone.values() for choice in choices}) == 9


# ---- formats


# How far the logits that an adapter adds may be from the same in float32: rounding the base's
# weights changes the inputs of the adapter. Measured: 0, 0.04, 0.07 and 0.49.
BOUNDS = {
    ("none", torch.float32): 1e-5,
    ("none", torch.bfloat16): 0.1,
    ("int8", torch.float32): 0.2,
    ("int8", torch.bfloat16): 0.2,
    ("int4", torch.float32): 0.7,
    ("int4", torch.bfloat16): 0.7,
}


@pytest.mark.parametrize(("quantization", "dtype"), BOUNDS)
def test_an_adapter_of_every_layer_adds_what_it_adds_in_float32(base, dtype, quantization):
    """The base's weights have each format. The comparison fails if the adapter's part for one kind
    of layers is missing, or if its scale is doubled."""
    rows = len(COUNTS)
    directory = base.parent / "formats"

    def added(model, **fields):
        write_by_hand(directory, base, seed=1, rank=16, **fields)
        placed = model.place(directory)
        return torch.cat(model.logits([placed] * rows)) - torch.cat(model.logits([None] * rows))

    def distance(found):
        return float((found - right).norm() / right.norm())

    right = added(Adapted(base))
    model = Adapted(base, dtype=dtype, quantization=quantization)
    bound = BOUNDS[quantization, dtype]
    assert distance(added(model)) < bound
    for missing in ("v_proj", "o_proj", "up_proj", "down_proj"):
        targets = [name for name in LINEARS if name != missing]
        assert distance(added(model, targets=targets)) > bound, missing
    assert distance(added(model, fields={"lora_alpha": 64})) > bound


# ---- names of layers


NAMED = [
    *(f"model.layers.{i}.self_attn.{name}" for i in (0, 1, 11) for name in ATTENTION),
    *(f"model.layers.{i}.mlp.{name}" for i in (0, 1, 11) for name in LINEARS[4:]),
    *("lm_head", "model.layers.1.mlp.experts.0.down_proj", "transformer.h.1.attn.c_attn"),
]
RANK_KEYS = (
    *("q_proj", "self_attn.q_proj", "model.layers.1.self_attn.q_proj", "layers.1", ".*"),
    *(
        "q_proj|k_proj",
        "^model.layers.1.mlp.up_proj",
        r"layers\.(0|11)\..*_proj",
        "_proj",
        "(k|v)_proj$",
    ),
    *(
        r".*\.1\..*",
        "layers.1.mlp.",
        "h.1.attn.c_attn",
        "[qk]_proj",
        "lm_head",
        r"\d+.mlp.down_proj",
    ),
)
FORMS = (
    {"target_modules": ["q_proj", "mlp.up_proj"]},
    {"target_modules": ["proj", "model.layers.1.mlp.down_proj"], "layers_to_transform": [0]},
    {"target_modules": "q_proj"},
    {"target_modules": r".*\.(0|1)\.(self_attn|mlp)\.[a-z]*_proj"},
    {"target_modules": list(LINEARS), "layers_to_transform": 1},
    {"target_modules": list(LINEARS), "layers_to_transform": [1, 11], "layers_pattern": "layers"},
    {"target_modules": ["down_proj"], "layers_to_transform": [0], "layers_pattern": "experts"},
    {
        "target_modules": ["c_attn", "q_proj"],
        "layers_to_transform": 1,
        "layers_pattern": ["x", "h"],
    },
    {"target_modules": list(LINEARS), "exclude_modules": ["q_proj", "layers.1.mlp.up_proj"]},
    {"target_modules": list(LINEARS), "exclude_modules": r".*layers\.1\..*"},
)


def test_layers_and_patterns_are_matched_as_by_peft():
    """Which layers an adapter changes, and which of several rank patterns applies, is as in
    peft."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    def form_of(**fields):
        return read_form(json.dumps({"peft_type": "LORA", "r": 8} | fields).encode())

    for fields in FORMS:
        form, config = form_of(**fields), LoraConfig(**fields)
        for name in NAMED:
            wanted = check_target_module_exists(config, name)
            assert form.has(name, "") == (wanted is True or isinstance(wanted, re.Match)), name
    for keys in itertools.permutations(RANK_KEYS, 2):
        pattern = {key: 20 + number for number, key in enumerate(keys)}
        form = form_of(target_modules=["q_proj"], rank_pattern=pattern)
        for name in NAMED:
            assert form.rank_of(name) == pattern.get(get_pattern_key(keys, name), 8), (keys, name)


# ---- processes


@pytest.mark.slow
async def test_replicas_in_processes_have_every_adapter_also_after_a_death(base, written, wanted):
    """Replicas get the adapters of the configuration and those that the operator has loaded."""
    own = {"a": written["a"]}
    workers = (WorkerConfig(count=2, runner="process"),)

    async def check(engine):
        for prompt in prompts(4):
            for name, found in wanted.items():
                [tokens], _, _, _ = await answer(engine, name, prompt)
                assert tokens == found[prompt]

    config = config_of(base, own, workers=workers, routing="round-robin")
    async with open_engine(config) as engine:
        with trio.fail_after(LIMIT_S):
            await engine.load_model("base")
            whole = engine.statistics().totals.memory_reserved
            status = await engine.adapters.load("base:b", written["b"])
            each = status.memory_bytes
            assert engine.statistics().totals.memory_reserved == whole + each
            await check(engine)
            entry = engine.registry.entries["base"]
            lost = entry.replicas[0]
            os.kill(lost.process.process.pid, signal.SIGKILL)
            while lost in entry.replicas or len(entry.ready) < 2:  # noqa: ASYNC110
                await trio.sleep(0.05)
            assert engine.get_model("base:b").state is ModelState.READY
            assert engine.get_model("base:b").memory_bytes == each
            await check(engine)
            await engine.adapters.unload("base:b")
