"""Measures what drafts gain and cost: tokens per second with them, against without, in one process.

Two engines of one model take turns, one with `--speculation off`. On q05, whose random weights
repeat nothing, a drafter of the bench replays the output that the engine without drafts gave, with
a drawn acceptance; so the figures show the engine, and not the luck of a text. On the story model
the n-gram drafter itself drafts, over prompts that repeat themselves, answers in a JSON schema, and
plain stories. Both engines give the same tokens, which is checked where a request runs alone. The
engines of the story model are opened `OPENINGS` times.

The shipped draft model drafts for the story model, too: as the engine adapts the number of drafted
tokens to their gain, and with `WITHOUT_ADAPTING` tokens in each step. The latter rows show the
acceptance, and what drafts would cost if the engine did not switch them off.

llama.cpp with its own look-up drafts is measured against llama.cpp without, on the same prompts.

Another row compares unseeded answers with and without drafts by a chi-squared test over tokens 2 to
4, which may be drafted: the statistic divided by its critical value at one in a thousand.

`BENCH_ONLY` is a regular expression that selects rows by name.

A draft of k tokens makes a step longer by the time of k more rows: on the story model, whose step
takes a third of a millisecond, one more row costs a third of a step and seven cost 0.8 of one; on
larger models it is less. So the engine measures how long its own steps take.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.api._generated.blocking import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.text.drafting.draft_lengths import DraftBudget, Lengths
from engine.core.text.step_times import StepTimes
from engine.core.text.types import Constraint, Tokens
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.text import sequences
from engine.worker.tokenizing.tokenizer import load_tokenizer
from tools.lab.bench.checkpoints import checkpoint, story_gguf
from tools.lab.bench.frame import REPEATS, ROOT, Row, repeat_in_turn, row_of
from tools.lab.peers.environments import PEERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from engine.api._generated.blocking import Engine

MEASURES = (
    "engine/core/text",
    "engine/worker/text",
    "engine/worker/text/sequences.py",
    "engine/worker/text/draft_model.py",
    "engine/worker/text/runner.py",
    "engine/kernels",
)

THREADS = 2
STEPS = 96  # tokens of each stream on q05
ACCEPTANCES = (0.0, 0.5, 0.8, 1.0)
BARS = {(1, 0.0): 0.97, (1, 0.8): 1.6, (32, 0.0): 0.98, (32, 0.8): 0.98}  # by batch and acceptance
BAR_REPETITIVE, BAR_JSON, BAR_PLAIN = 1.3, 1.3, 0.97
BAR_MODEL = 0.97
WITHOUT_ADAPTING = 3  # tokens of each draft in the rows "not adapting"
STORY_TOKENS = 200
SAMPLES = 1200
OPENINGS, PAIRS = 5, 6  # of the story model's engines, and pairs of runs, with and without drafts
AT_ONCE = 4  # how many of the samples run at once
CRITICAL = {  # of chi-squared at 0.001
    **{1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88},
    **{10: 29.59, 11: 31.26, 12: 32.91, 13: 34.53, 14: 36.12, 15: 37.70, 16: 39.25, 17: 40.79},
    **{18: 42.31, 19: 43.82, 20: 45.31, 21: 46.80, 22: 48.27, 23: 49.73, 24: 51.18, 25: 52.62},
}
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, '
    '"favourite_colour": {"enum": ["red", "green", "blue"]}, "age_in_years": {"type": "integer", '
    '"maximum": 99, "minimum": 1}, "has_a_dog": {"type": "boolean"}}, "required": ["name", '
    '"favourite_colour", "age_in_years", "has_a_dog"], "additionalProperties": false}'
)
REPETITIVE = (
    "one two three four five. " * 20,
    "red ball, blue ball, green ball. " * 14,
    "Tom ran and ran and ran. " * 16,
)
PLAIN = (
    "Once upon a time there was a small boat.",
    "Lily had a secret.",
    "One day a dog found a bone in the park.",
)
JSON = ("A girl in the park:", "The old man:", "My friend:")


class Replaying:
    """A drafter in place of `NgramDrafter`. ``known`` has the whole output by its prompt; each
    token of a draft is the right one with the probability ``acceptance``."""

    acceptance = 0.0
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # noqa: RUF012 - one bench runs at a time
    random = random.Random(1)

    def draft(self, tokens: Sequence[int], behind: Sequence[int], most: int) -> list[int]:
        """Return the known tokens after ``tokens``, some of them replaced by wrong ones."""
        whole = self.known.get(tuple(tokens[:PROMPT_TOKENS]), ())
        right = whole[len(tokens) : len(tokens) + most]
        draws = self.random
        return [t if draws.random() < self.acceptance else (t + 1) % 1000 for t in right]


PROMPT_TOKENS = 128


def ask(
    engine: Engine, requests: Sequence[GenerateRequest]
) -> tuple[float, list[list[int]], int, int]:
    """Let all requests run at once. Return their tokens per second from the first delivery on,
    their tokens, and how many drafted tokens there were: those accepted, and all."""
    streams = [engine.generate(request) for request in requests]
    found: list[list[int]] = [[] for _ in streams]
    begun, accepted, drafted = 0.0, 0, 0
    for index, stream in enumerate(streams):
        for event in stream:
            if isinstance(event, Tokens):
                begun = begun or time.perf_counter()
                found[index] += event.token_ids
            elif isinstance(event, Finished):
                accepted += event.usage.accepted_tokens
                drafted += event.usage.drafted_tokens
    seconds = time.perf_counter() - begun
    return (sum(map(len, found)) - len(found)) / seconds, found, accepted, drafted


def config_of(model: str, speculation: str, draft_model: str = "", **fields: Any) -> EngineConfig:
    """Return the config of an engine with one model."""
    one = ModelConfig(model, threads=THREADS, speculation=speculation, draft_model=draft_model)
    return EngineConfig(models=(one,), prefix_cache=False, check_level=0, **fields)


@contextmanager
def both(
    model: str, drafter: type | None = None, *, is_turned: bool = False, **fields: Any
) -> Iterator[list[Engine]]:
    """Run two engines, one without drafts and one with them, and yield both in that order. Drafts
    are made by ``drafter`` if it is given. If ``is_turned``, the second engine is opened first."""
    ngram = sequences.NgramDrafter
    with ExitStack() as stack:
        sequences.NgramDrafter = drafter or ngram  # type: ignore[misc,assignment]
        stack.callback(setattr, sequences, "NgramDrafter", ngram)
        kinds = [config_of(model, one, **fields) for one in ("off", "lookup")]
        yield opened(stack, kinds, is_turned=is_turned)


def opened(stack: ExitStack, configs: Sequence[EngineConfig], *, is_turned: bool) -> list[Engine]:
    """Open an engine of each config, in reverse order if ``is_turned``, and return them in the
    order of the configs."""
    step = -1 if is_turned else 1
    return [stack.enter_context(open_engine(config)) for config in configs[::step]][::step]


@dataclass
class Pairs:
    """Tokens per second without drafts (``off``) and with them (``on``), measured in turn. The
    counts are of the last answers with drafts: all tokens, drafted ones and accepted ones."""

    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def ratios(self) -> list[float]:
        """The speed with drafts against that without, of each pair."""
        return [mine / theirs for mine, theirs in zip(self.on, self.off, strict=True)]

    def measure(
        self, engines: Sequence[Engine], requests: Sequence[GenerateRequest], count: int
    ) -> None:
        """Add ``count`` pairs.

        Raises:
            SystemExit: a request that runs alone has other tokens with drafts.
        """
        off, on = repeat_in_turn([partial(ask, engine, requests) for engine in engines], count)
        # In bfloat16, the other rows of a prompt's step may flip a near-tie of its tokens (D10).
        is_alone = len(requests) == 1
        if is_alone and any(mine[1] != theirs[1] for mine, theirs in zip(on, off, strict=True)):
            raise SystemExit("the tokens with drafts differ")
        self.off += [one[0] for one in off]
        self.on += [one[0] for one in on]
        _, found, self.accepted, self.drafted = on[-1]
        self.tokens = sum(map(len, found))

    def rows(self, name: str, bar: float | None = None) -> list[Row]:
        """Return the rows of tokens per second with drafts, and of their ratio to those without."""
        share = self.accepted / max(1, self.drafted)
        note = f"{self.accepted / self.tokens:.0%} of the tokens were drafted, {share:.0%} of "
        note += "drafts accepted"
        return [
            row_of(f"{name}: with drafts", self.on, "tokens/s", better="higher", note=note),
            row_of(f"{name}: against without", self.ratios, "×", bar=bar, better="higher"),
        ]


def of_stories(
    name: str,
    groups: Sequence[Sequence[GenerateRequest]],
    engines: Callable[[bool], AbstractContextManager[list[Engine]]],
    bar: float | None,
) -> Iterator[Row]:
    """Yield the rows of groups of requests to the story model, and that of all of them. Two engines
    of the same config differ by up to 4 % for as long as they live. So several
    are opened with drafts and several without, and the two take turns at being opened first."""
    seen = [Pairs() for _ in groups]
    for opening in range(OPENINGS):
        with engines(opening % 2 == 1) as both_engines:
            for pairs, requests in zip(seen, groups, strict=True):
                pairs.measure(both_engines, requests, PAIRS)
    for index, pairs in enumerate(seen):
        yield from pairs.rows(f"{name} {index + 1}")
    medians = [statistics.median(pairs.ratios) for pairs in seen]
    yield row_of(f"{name}: all", medians, "×", bar=bar, better="higher")


def replayed(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Yield the rows of q05 with the replaying drafter."""
    names = {
        (batch, acceptance): f"q05 B={batch}, acceptance {acceptance:g}"
        for batch in (1, 8, 32)
        for acceptance in ACCEPTANCES
        if batch == 1 or acceptance in (0.0, 0.8)
    }
    if not any(map(wanted.search, names.values())):
        return
    rng = random.Random(4)
    prompts = [tuple(rng.randrange(1000) for _ in range(PROMPT_TOKENS)) for _ in range(32)]
    same = {"max_tokens": STEPS, "ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, **same)
    # With other prompts in a step, rounding may change a greedy token, and then the replayed rest
    # is wrong. So batches sample at a temperature at which only the noise of their seeds decides.
    noisy = [SamplingParams(temperature=100.0, seed=index, **same) for index in range(len(prompts))]
    model = str(checkpoint("q05"))
    with both(model, Replaying, max_model_len=512, kv_cache_memory=512 << 20) as engines:
        for (batch, acceptance), name in names.items():
            if not wanted.search(name):
                continue
            samplings = noisy[:batch] if batch > 1 else [greedy]
            requests = [
                GenerateRequest(token_ids=prompt, sampling=sampling)
                for prompt, sampling in zip(prompts, samplings, strict=False)
            ]
            _, found, _, _ = ask(engines[0], requests)
            Replaying.acceptance = acceptance
            Replaying.known = {
                prompt: (*prompt, *tokens) for prompt, tokens in zip(prompts, found, strict=False)
            }
            pairs = Pairs()
            pairs.measure(engines, requests, REPEATS)
            yield from pairs.rows(name, BARS.get((batch, acceptance)))


def looked_up(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Yield the rows of the n-gram drafter with the story model, one stream at a time."""
    greedy = {"temperature": 0.0, "max_tokens": STORY_TOKENS, "ignore_eos": True}
    drawn = {"temperature": 0.8, "seed": 5, "max_tokens": STORY_TOKENS}
    form = Constraint("json_schema", SCHEMA)
    cases: list[tuple[str, Sequence[str], dict[str, Any], Constraint | None, float]] = [
        ("stories, repetitive prompts", REPETITIVE, greedy, None, BAR_REPETITIVE),
        ("stories, JSON by schema", JSON, drawn, form, BAR_JSON),
        ("stories, plain", PLAIN, drawn | {"ignore_eos": True}, None, BAR_PLAIN),
    ]
    for name, prompts, sampling, constraint, bar in cases:
        if not wanted.search(name):
            continue
        own = SamplingParams(**sampling)
        groups = [
            [GenerateRequest(text=text, sampling=own, constraint=constraint)] for text in prompts
        ]
        yield from of_stories(
            name, groups, lambda is_turned: both("demo-stories", is_turned=is_turned), bar
        )


def of_llama_cpp(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Yield the rows of llama.cpp's own look-up, with the story model in float32."""
    prompts = {
        f"llama.cpp, {kind} {index + 1}": text
        for kind, texts in (("repetitive prompts", REPETITIVE), ("plain stories", PLAIN))
        for index, text in enumerate(texts)
    }
    prompts = {name: text for name, text in prompts.items() if wanted.search(name)}
    file = story_gguf() if prompts else None
    if file is None:
        return
    tokenizer = load_tokenizer(ROOT / "engine" / "demo" / "stories")
    ids = [tokenizer.encode(text) for text in prompts.values()]
    command = [str(PEERS["llama.cpp"].python), "-m", "tools.lab.peers.llama_cpp_drafts"]
    answer = subprocess.run(
        [*command, str(file), str(THREADS), str(STORY_TOKENS)],
        cwd=ROOT,
        input=json.dumps(ids),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for name, one in zip(prompts, json.loads(answer.stdout), strict=True):
        ratios = [
            drafting / plain for drafting, plain in zip(one["with"], one["without"], strict=True)
        ]
        note = "" if one["tokens"] else "the tokens with drafts differ"
        yield row_of(f"{name}: its look-up", one["with"], "tokens/s", better="higher", note=note)
        yield row_of(f"{name}: its look-up against none", ratios, "×", better="higher")


def by_model(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Yield the rows of the shipped draft model, one stream at a time and eight."""
    drawn = {"temperature": 0.8, "seed": 5, "max_tokens": STORY_TOKENS, "ignore_eos": True}
    greedy = drawn | {"temperature": 0.0}
    alone = [[text] for text in PLAIN]
    together = [[*PLAIN, *REPETITIVE, *JSON][:8]]
    cases: list[tuple[str, Sequence[Sequence[str]], dict[str, Any], bool]] = [
        ("draft model, plain stories", alone, drawn, True),
        ("draft model, plain stories, greedily", alone, greedy, True),
        ("draft model, B=8", together, drawn, True),
        ("draft model, not adapting", alone, greedy, False),
    ]
    configs = [config_of("demo-stories", "off"), config_of("demo-stories", "model", "demo-draft")]
    for name, groups, sampling, adapts in cases:
        if not wanted.search(name):
            continue
        own = SamplingParams(**sampling)
        requests = [
            [GenerateRequest(text=text, sampling=own) for text in texts] for texts in groups
        ]

        @contextmanager
        def engines(is_turned: bool) -> Iterator[list[Engine]]:
            with ExitStack() as stack:
                yield opened(stack, configs, is_turned=is_turned)

        with always_drafting() if not adapts else nullcontext():
            yield from of_stories(name, requests, engines, BAR_MODEL if adapts else None)


@contextmanager
def always_drafting() -> Iterator[None]:
    """Let a draft model draft `WITHOUT_ADAPTING` tokens in each step until the block ends."""
    kept = Lengths.best, StepTimes.may_draft, DraftBudget.note
    count = WITHOUT_ADAPTING
    Lengths.best = lambda self, most, *_: (min(most, count), 2.0 if self.is_model else 0.0)  # type: ignore[method-assign,assignment]
    StepTimes.may_draft = lambda *_: True  # type: ignore[method-assign,assignment]
    DraftBudget.note = lambda *_: None  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Lengths.best, StepTimes.may_draft, DraftBudget.note = kept  # type: ignore[method-assign]


def distribution(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Yield the row of the chi-squared test."""
    name = "unseeded: chi-squared against its critical value"
    if not wanted.search(name):
        return
    sampling = SamplingParams(temperature=1.0, top_k=12, max_tokens=8, ignore_eos=True)
    request = GenerateRequest(text=REPETITIVE[0], sampling=sampling)
    with both("demo-stories") as engines:
        counts = []
        drafted = 0
        for engine in engines:
            found = Counter[tuple[int, ...]]()
            for _ in range(SAMPLES // AT_ONCE):
                _, tokens, accepted, _ = ask(engine, [request] * AT_ONCE)
                found.update(tuple(one[1:4]) for one in tokens)
                drafted += accepted
            counts.append(found)
    yield Row(name, chi_squared(*counts), "of the bar", 1.0, n=SAMPLES,
              note=f"{drafted} drafted tokens were accepted")  # fmt: skip


def chi_squared(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """Return the statistic of two samples of equal size, divided by its critical value. Outcomes
    beyond the 25 commonest count as one."""
    common = [outcome for outcome, _ in (one + other).most_common(25)]
    pairs = [(one[outcome], other[outcome]) for outcome in common]
    rest = tuple(sum(counts.values()) - sum(pair[side] for pair in pairs)
                 for side, counts in enumerate((one, other)))  # fmt: skip
    pairs = [pair for pair in (*pairs, rest) if sum(pair) >= 10]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    return statistic / CRITICAL[max(1, min(25, len(pairs) - 1))]


def run() -> Iterator[Row]:
    """Yield the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    for part in (looked_up, of_llama_cpp, by_model, distribution, replayed):
        yield from part(wanted)
