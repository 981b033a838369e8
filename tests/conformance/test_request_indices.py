"""Every field of a request that is an index, or becomes one, at its bounds and far outside them.

The requests go to a compiled model whose embedding fills its panels, so that the next id would be
read outside its memory. Each request is answered, or refused by the field at fault, and a request
beside it gets its own tokens. `test_kernel_sources.py` runs this file under the sanitizers.
"""

from contextlib import contextmanager

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.api._generated.blocking import open_engine
from engine.config import AdapterConfig, EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.text.types import Constraint, Tokens
from engine.errors import InvalidRequest, StepFailed
from engine.requests.text import prepare as prepare_text
from engine.requests.text.chat_values import Chat
from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.values import MAX_CHOICES, MAX_LOGPROBS, GenerateRequest
from tests.checkpoints.text import Shape, make
from tests.support.adapters import write_by_hand
from tests.support.added_tokens import add_token

ROWS = 528  # rows of the embedding, which fill its panels
LENGTH = 48  # the context: tokens of prompt and output together
PROMPT = (5, 6, 7, 8)
FAR = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1)
MATE = GenerateRequest(
    token_ids=(9, 10, 11), sampling={"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
)


def around(*bounds):
    """Return the numbers at bounds, on both sides of them, and far behind."""
    near = {bound + step for bound in bounds for step in (-1, 0, 1)}
    return st.sampled_from([*sorted(near), *FAR])


IDS, ID_RANGE = around(0, ROWS - 1), (0, ROWS - 1)
# The sources of a prompt, and the other fields: for each the values to try, the valid range, a
# function from a value to request fields, and the field's path.
PROMPTS = {
    "token_ids": (IDS, ID_RANGE, lambda v: {"token_ids": (5, v, 6)}, "token_ids.ids[1]"),
    "length": (
        st.sampled_from([1, 2, LENGTH - 2, LENGTH - 1, LENGTH, LENGTH + 1]),
        (1, LENGTH - 1),
        lambda v: {"token_ids": (5,) * v},
        "input",
    ),
    "text": (
        around(ROWS).filter(lambda v: v < ROWS + 2),
        ID_RANGE,
        lambda v: {"text": f"a <row {v}> b"},
        "text",
    ),
    "chat": (
        around(ROWS).filter(lambda v: v < ROWS + 2),
        ID_RANGE,
        lambda v: {"chat": Chat([{"role": "user", "content": f"<row {v}>"}])},
        "chat",
    ),
}
FIELDS = {
    "nothing": (st.just(0), (0, 0), lambda v: {}, ""),
    "continuation": (
        IDS,
        ID_RANGE,
        lambda v: {"continuation": Continuation((ContinuedChoice((5, v)),))},
        "continuation.choices[0].token_ids[1]",
    ),
    "continued choices": (
        st.sampled_from([1, 2, 3]),
        (1, 2),
        lambda v: {"n": 2, "continuation": Continuation((ContinuedChoice((5,)),) * v)},
        "continuation.choices",
    ),
    "stop_token_ids": (
        IDS,
        ID_RANGE,
        lambda v: {"sampling": {"stop_token_ids": (v,)}},
        "sampling.stop_token_ids[0]",
    ),
    "allowed_token_ids": (
        IDS,
        ID_RANGE,
        lambda v: {"sampling": {"allowed_token_ids": (5, v)}},
        "sampling.allowed_token_ids[1]",
    ),
    "banned_token_ids": (
        IDS,
        ID_RANGE,
        lambda v: {"sampling": {"banned_token_ids": (v,)}},
        "sampling.banned_token_ids[0]",
    ),
    "logit_bias": (
        IDS,
        ID_RANGE,
        lambda v: {"sampling": {"logit_bias": {v: 5.0}}},
        "sampling.logit_bias[{}]",
    ),
    "bad_words": (  # a bad word that cannot be sampled is ignored
        around(ROWS).filter(lambda v: v < ROWS + 2),
        (0, ROWS + 1),
        lambda v: {"sampling": {"bad_words": (f"<row {v}>",)}},
        "",
    ),
    "constraint": (  # other tokens can write the constraint's text
        around(ROWS).filter(lambda v: v < ROWS + 2),
        (0, ROWS + 1),
        lambda v: {"constraint": Constraint("choice", f"<row {v}>\0b")},
        "",
    ),
    "top_k": (around(0, ROWS), (-1, 2**64), lambda v: {"sampling": {"top_k": v}}, ""),
    "top_k, drawn": (
        around(0, ROWS),
        (-1, 2**64),
        lambda v: {"sampling": {"top_k": v, "temperature": 1.0, "seed": 3}},
        "",
    ),
    "seed": (
        st.sampled_from([0, 1, *FAR, 2**64 - 1]),
        (0, 2**64),
        lambda v: {"sampling": {"seed": v, "temperature": 1.0}},
        "",
    ),
    "max_tokens": (
        around(1, LENGTH - len(PROMPT)),
        (1, 2**64),
        lambda v: {"sampling": {"max_tokens": v}},
        "sampling.max_tokens",
    ),
    "logprobs": (
        around(0, MAX_LOGPROBS),
        (0, MAX_LOGPROBS),
        lambda v: {"output": {"logprobs": v}},
        "output.logprobs",
    ),
    "prompt_logprobs": (
        around(0, MAX_LOGPROBS),
        (0, MAX_LOGPROBS),
        lambda v: {"output": {"prompt_logprobs": v}},
        "output.prompt_logprobs",
    ),
    "n": (around(1, MAX_CHOICES), (1, MAX_CHOICES), lambda v: {"n": v}, "n"),
    "truncate_to": (
        around(1, LENGTH),
        (1, 2**64),
        lambda v: {"prompt": {"truncate_to": v, "truncate_left": False}},
        "prompt.truncate_to",
    ),
    "adapter": (st.sampled_from(["m", "m:a"]), None, lambda v: {"model": v}, ""),
}


def choices(table):
    """Return a strategy for the name of a table's row and one of its values."""
    rows = [st.tuples(st.just(name), row[0]) for name, row in table.items()]
    return st.one_of(rows)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Yield an engine of a compiled model with an adapter, whose tokenizer has two tokens more."""
    root = tmp_path_factory.mktemp("indices")
    shape = Shape(vocab=ROWS, max_len=LENGTH)
    base = make(root / "m", "llama", shape)
    add_token(base, f"<row {ROWS}>", ROWS, special=False)
    add_token(base, f"<row {ROWS + 1}>", ROWS + 1, special=False)
    adapter = AdapterConfig("a", str(write_by_hand(root / "a", base)))
    model = ModelConfig(str(base), "m", threads=1, adapters=(adapter,))
    known = {"kv_cache_memory": 1 << 21, "check_level": 2, "spawn_timeout_s": 250.0}
    with open_engine(EngineConfig(models=(model,), **known)) as eng:
        yield eng


def finished(events):
    """Return the tokens of events, such as the rest of a stream."""
    return [token for one in events if isinstance(one, Tokens) for token in one.token_ids]


@pytest.fixture(scope="module")
def alone(engine):
    """Return the tokens that `MATE` gets alone."""
    return finished(engine.generate(MATE))


def merged(*parts):
    """Return the fields of a request: dicts are merged, other fields are replaced by later ones."""
    found = {"model": "m", "sampling": {"max_tokens": 3, "temperature": 0.0}}
    for part in parts:
        for name, value in part.items():
            is_table = isinstance(value, dict) and name in found
            found[name] = found[name] | value if is_table else value
    return found


def wrong_path(table, name, value):
    """Return the path of a field whose value is outside its range, "" if the value is valid."""
    inside, path = table[name][1], table[name][3]
    if inside is None or inside[0] <= value <= inside[1]:
        return ""
    return path.format(value)


def told(engine, *parts):
    """Return the events of a request, and the fields by which it is refused."""
    try:
        return list(engine.generate(GenerateRequest(**merged(*parts)))), set()
    except InvalidRequest as error:
        return [], {one.field for one in error.violations}


@contextmanager
def mate_of(engine, alone):
    """Run `MATE` beside the block, and check that it gets its own tokens."""
    mate = iter(engine.generate(MATE))
    next(mate)
    yield
    assert finished(mate) == alone


def check(engine, alone, prompt, field):
    """Send a request with these two fields beside a mate, and check both answers."""
    is_full = prompt[0] == "length" and prompt[1] > LENGTH - 4  # no continuation would fit
    assume(not (is_full and field[0].startswith("continu")))
    wrong = {wrong_path(PROMPTS, *prompt), wrong_path(FIELDS, *field)} - {""}
    cut = field[1] if field[0] == "truncate_to" and field[1] > 0 else LENGTH
    if cut < LENGTH:  # tokens that are cut off are not read
        wrong -= {"input"}
    if cut <= 2:  # the last two tokens of these prompts are in range
        wrong -= {"text", "chat"}
    if cut == 1:
        wrong -= {"token_ids.ids[1]"}
    with mate_of(engine, alone):
        events, refused = told(
            engine, PROMPTS[prompt[0]][2](prompt[1]), FIELDS[field[0]][2](field[1])
        )
    if wrong:
        assert refused
        assert refused <= wrong
    else:
        assert not refused
        assert isinstance(events[-1], Finished)


@settings(max_examples=60)
@given(prompt=choices(PROMPTS), field=choices(FIELDS))
def test_a_drawn_index_is_answered_or_refused_by_its_field(engine, alone, prompt, field):
    check(engine, alone, prompt, field)


@pytest.mark.full
@settings(max_examples=2000)
@given(prompt=choices(PROMPTS), field=choices(FIELDS))
def test_many_drawn_indices_are_answered_or_refused_by_their_fields(engine, alone, prompt, field):
    check(engine, alone, prompt, field)


# ---- without the engine's check of a request's ids


@pytest.mark.parametrize("name", ["token_ids", "text", "chat"])
@pytest.mark.parametrize("value", [ROWS, ROWS + 1, 2**32 - 1])
def test_an_id_that_is_not_looked_at_fails_its_request_alone(
    engine, alone, monkeypatch, name, value
):
    """Without the engine's checks, the kernels make the row NaN, and it gets no token."""
    for look in ("check_ids", "check_text"):
        monkeypatch.setattr(prepare_text, look, lambda *_args, **_fields: None)
    if name != "token_ids" and value > ROWS + 1:
        value = ROWS
    with mate_of(engine, alone), pytest.raises(StepFailed):
        told(engine, PROMPTS[name][2](value))
