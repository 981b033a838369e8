"""Requests over the whole table of parameters, for comparing answers with and without drafts."""

import random
from collections import Counter

import pytest
from hypothesis import strategies as st

from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.text.drafting.draft_lengths import DraftBudget, Lengths
from engine.core.text.step_times import StepTimes
from engine.core.text.types import Constraint, Tokens
from engine.errors import InvalidRequest
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.text import draft_model, sequences

TOLERANCE = 1e-4
END = 0
PROMPT = tuple(random.Random(3).randrange(1, 512) for _ in range(21))


KNOWN: list[tuple[int, ...]] = []  # prompts with their right outputs


class Replaying:
    """A drafter in place of `NgramDrafter` that knows the right outputs. Each of its tokens is
    right with the probability ``acceptance``."""

    acceptance = 0.8
    random = random.Random(1)

    def draft(self, tokens, behind, most):
        """Return the tokens that follow, if a known output begins like this."""
        begun = (*tokens, *behind)
        for whole in KNOWN:
            if whole[: len(begun)] == begun:
                right = whole[len(begun) : len(begun) + most]
                draws = self.random
                return [t if draws.random() < self.acceptance else (t + 1) % 512 for t in right]
        return []


class Resting:
    """A drafter in place of `NgramDrafter` that finds nothing."""

    def draft(self, tokens, behind, most):
        """Return nothing."""
        return []


class Lying(draft_model.DraftModel):
    """A draft model each of whose tokens is right with the probability ``acceptance``."""

    acceptance = 0.8
    random = random.Random(1)

    def _sample(self, ready, logits):
        drawn = super()._sample(ready, logits)
        return [self._lied(one, token) for one, token in zip(ready, drawn, strict=True)]

    def _lied(self, one, token):
        """Return the token, or with the probability 1 - ``acceptance`` another allowed one."""
        if token is None or self.random.random() < self.acceptance:
            return token
        lie, matching = 60 + token % 7, one.ahead.matching
        return lie if matching is None or matching.allows(lie) else token


def draft_by(patch, drafter):
    """Have an engine draft wherever it can, by one drafter that is right at random. Return the
    drafter's name. Measured step times are ignored: on a busy machine nothing would be drafted."""
    if drafter == "lookup":
        patch.setattr(sequences, "NgramDrafter", Replaying)
        patch.setattr(StepTimes, "note", lambda *_: None)
    else:  # a draft model: four tokens each time, however often they are right
        patch.setattr(sequences, "NgramDrafter", Resting)
        patch.setattr(Lengths, "best", lambda _, most, *costs: (min(most, 4), 2.0))
        patch.setattr(StepTimes, "may_draft", lambda *_: True)
        patch.setattr(DraftBudget, "note", lambda *_: None)
        patch.setattr(draft_model, "DraftModel", Lying)
    return drafter


def know(requests, outputs, acceptance):
    """Let the drafters know the right outputs, and draft by them with this probability."""
    KNOWN[:] = [(*r.token_ids, *ids) for r, ids in zip(requests, outputs, strict=True)]
    Replaying.acceptance = Lying.acceptance = acceptance


def compare(plain, drafting, request, *, acceptance=0.8):
    """Check that both engines answer alike; return the numbers of drafted and accepted tokens."""
    wanted, scores, _ = ask(plain, request)
    know([request] * len(wanted[0]), wanted[0].values(), acceptance)
    got, got_scores, drafted = ask(drafting, request)
    assert_alike(wanted, scores, got, got_scores)
    return drafted


def config_of(directory, speculation, *, draft_model="", runner="thread", **fields):
    """Return the config of an engine of one model in float32."""
    model = ModelConfig(
        str(directory),
        dtype="float32",
        threads=1,
        speculation=speculation,
        draft_model=draft_model,
        runner=runner,
    )
    known = {"max_model_len": 128, "kv_cache_memory": 1 << 22, "check_level": 2}
    known |= {"spawn_timeout_s": 250.0}  # the default is too short for a load on a busy machine
    return EngineConfig(models=(model,), **known | fields)


def ask(engine, request):
    """Return for each choice its tokens, text and end, and why the request failed if it did; each
    choice's log-probabilities; and how many tokens were drafted and accepted."""
    ids, texts, ends, scores, drafted = {}, Counter(), {}, {}, Counter()
    for choice in range(request.n or 1):
        ids[choice], texts[choice], scores[choice] = [], "", []
    failure = ""
    events = iter(engine.generate(request))
    while True:
        try:
            event = next(events)
        except StopIteration:
            break
        except InvalidRequest as error:  # the settings leave no token
            failure = str(error)
            break
        if isinstance(event, Tokens):
            ids[event.choice] += event.token_ids
            texts[event.choice] += event.text
            scores[event.choice] += event.logprobs
            assert len(event.logprobs) in (0, len(event.token_ids))
        elif isinstance(event, Finished):
            ends[event.choice] = (event.reason, event.matched)
            drafted["accepted"] += event.usage.accepted_tokens
            drafted["drafted"] += event.usage.drafted_tokens
    return (ids, texts, ends, failure), scores, drafted


def crowd():
    """Return eight requests of different lengths, some of which begin alike."""
    rng = random.Random(4)
    return [
        GenerateRequest(
            token_ids=PROMPT[: 4 + index] + tuple(rng.randrange(1, 512) for _ in range(9)),
            sampling=SamplingParams(seed=index, max_tokens=60, ignore_eos=True, temperature=0.9),
        )
        for index in range(8)
    ]


def ask_together(engine, requests):
    """Run the requests at once. Return the tokens of each, and how many drafts were accepted."""
    events = [list(stream) for stream in [engine.generate(request) for request in requests]]
    tokens = [
        [token for one in told if isinstance(one, Tokens) for token in one.token_ids]
        for told in events
    ]
    return tokens, sum(told[-1].usage.accepted_tokens for told in events)


def drafts_of(engine):
    """Return what each drafter of a blocking engine's only replica has drafted."""
    return engine._caller.ask(lambda own: own.telemetry().replicas[0].drafts)


def assert_alike(wanted, scores, got, got_scores):
    """Check that two results of `ask` are alike, the first one without drafts."""
    assert got[3] == wanted[3]
    if not wanted[3]:
        assert got == wanted
    # Where one choice fails, the others end with it, and drafts may have brought them further.
    for choice, ids in wanted[0].items():
        both = min(len(ids), len(got[0][choice]))
        assert got[0][choice][:both] == ids[:both]
        for one, other in zip(scores[choice], got_scores[choice], strict=not wanted[3]):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
            ranks = [a.token_id for a in one.alternatives]
            assert ranks == [a.token_id for a in other.alternatives]


BYTES = tuple(range(257))
SAMPLING = {
    "temperature": [None, 0.0, 0.6, 1.6],
    "top_k": [None, 9],
    "top_p": [None, 0.75],
    "min_p": [None, 0.08],
    "typical_p": [None, 0.8],
    "repetition_penalty": [None, 1.4, 0.8],
    "presence_penalty": [None, 1.1, -0.5],
    "frequency_penalty": [None, 0.6, -1.5],
    "seed": [7, 2**64 - 1, 0],
    "max_tokens": [40, 2, 17],
    "min_tokens": [None, 0, 2],
    "ignore_eos": [None, True],
    "stop": [(), ("e",), ("zz", "a", " t"), ("aa", "bab", "qu")],
    "stop_token_ids": [(), tuple(range(2, 80, 3))],
    "include_stop": [None, True],
    "logit_bias": [{}, {END: 4.0, 70: 3.5}],
    "allowed_token_ids": [(), BYTES],
    "banned_token_ids": [(), tuple(range(300, 420))],
    "bad_words": [(), ("e", "the", "an")],
}
CONSTRAINTS = [
    None,
    Constraint("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}'),
    Constraint("regex", "[a-z ]{4,60}"),
    Constraint("lark", 'start: "<" /[a-e]+/ ">"'),
    Constraint("choice", "boat\0bottle\0lamp"),
]
# A constraint's output may need any byte, so constraints go with requests that ban none.
ROWS = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in SAMPLING.items()}
    | {
        "constraint": st.sampled_from(CONSTRAINTS),
        "n": st.sampled_from([None, 3]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, 2]),
        "acceptance": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    }
)


def request_of(row):
    """Return the request of a row."""
    sampling = {name: row[name] for name in SAMPLING}
    if row["constraint"] is not None:  # the constraint's output needs its letters
        sampling |= {"banned_token_ids": (), "bad_words": ()}
    return GenerateRequest(
        token_ids=PROMPT,
        sampling=SamplingParams(**sampling),
        constraint=row["constraint"],
        n=row["n"],
        output={"logprobs": row["logprobs"], "prompt_logprobs": row["prompt_logprobs"]},
    )
