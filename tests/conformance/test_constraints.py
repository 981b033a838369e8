"""A random model's answer at temperature 1.5 follows its constraint, or begins such an answer.

Answers are judged by other libraries: `jsonschema` and `re` for answers that stopped, llguidance on
a fresh matcher and the `regex` library's partial match for answers that were cut by length.
"""

import contextlib
import json
import random
import re
import signal
import threading
from contextlib import closing
from dataclasses import replace

import jsonschema
import pytest
import regex
import torch
import trio
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished, PauseMode
from engine.core.common.types import EndReason
from engine.core.text.types import Constraint, Sampling, Tokens
from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.values import GenerateRequest, OutputOptions, SamplingParams
from engine.worker.sampling import sampler
from engine.worker.sampling.constraint_compiler import WHITESPACE, ConstraintCompiler
from engine.worker.sampling.masks import Mask, apply_batch
from engine.worker.sampling.sampler import SampleRow, sample
from engine.worker.tokenizing.tokenizer import HfTokenizer, load_tokenizer
from tests.support import toy_tokenizers
from tests.support.forms import drawn, regexes, schema_constraint, schemas
from tests.support.grammar_walks import walk
from tests.support.margins import gumbel_margin
from tests.support.wire import wait_until

MAX_TOKENS = 250
STOPPED_SHARE_MIN = 0.9
MARGIN = 1e-4  # perturbed scores closer than this may be swapped by float noise (D10)
LONG_S = 100.0  # for waits that end earlier
END = 0  # the token that ends a text of the tiny models


def config_of(llama, **fields):
    base = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "check_level": 2}
    return EngineConfig(models=(ModelConfig(str(llama.directory)),), **(base | fields))


def request_of(constraint, **sampling):
    """Return a request with this constraint, sampled at temperature 1.5."""
    fields = {"temperature": 1.5, "max_tokens": MAX_TOKENS, "seed": 1} | sampling
    return GenerateRequest(
        token_ids=(20, 21, 22), constraint=constraint, sampling=SamplingParams(**fields)
    )


class Answer:
    """The tokens and the end of one choice."""

    def __init__(self):
        self.tokens, self.text, self.reason, self.matched = [], "", None, None


async def answer(engine, request):
    """Return the answers to a request, by choice, or the request's error."""
    found = [Answer() for _ in range(request.n or 1)]
    try:
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    found[event.choice].tokens += event.token_ids
                    found[event.choice].text += event.text
                elif isinstance(event, Finished):
                    one = found[event.choice]
                    one.reason, one.matched = event.reason, event.matched
    except InvalidRequest as error:
        return error
    return found


def ask(config, requests, *, one_by_one=False):
    """Return the answers to all requests, and the engine's totals."""
    found = {}

    async def main():
        async with open_engine(config) as engine:

            async def run(index):
                found[index] = await answer(engine, requests[index])

            if one_by_one:
                for index in range(len(requests)):
                    await run(index)
            else:
                engine.pause(PauseMode.KEEP)  # until all are compiled, so that they run together
                async with trio.open_nursery() as nursery:
                    for index in range(len(requests)):
                        nursery.start_soon(run, index)
                    await queued(engine, lambda: len(requests) - len(found))
                    engine.resume()
            totals.append(engine.statistics().totals)

    totals = []
    trio.run(main)
    return [found[index] for index in range(len(requests))], totals[0]


async def queued(engine, count):
    """Wait until ``count`` requests wait in the queue."""
    while True:
        if engine.statistics().totals.waiting >= count():
            return
        await trio.sleep(0.005)


def ask_one(llama, request):
    [found], _ = ask(config_of(llama), [request])
    return found


# ---- every form ------------------------------------------------------------------------------


def is_legal_prefix(llama, grammar, tokens):
    """Return whether a fresh matcher with llguidance's defaults accepts every token."""
    tokenizer = LLTokenizer((llama.directory / "tokenizer.json").read_text(), eos_token=END)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and not matcher.is_error()


def check_schema(llama, schema, one):
    """Check an answer against its JSON schema, or its beginning if it was cut."""
    if one.reason is EndReason.STOP:
        jsonschema.Draft202012Validator(schema).validate(json.loads(one.text))
    else:
        options = {"whitespace_pattern": WHITESPACE}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        assert is_legal_prefix(llama, grammar, one.tokens)


def check_regex(llama, pattern, one):
    """Check an answer against its regular expression, or its beginning if it was cut."""
    if one.reason is EndReason.STOP:
        assert re.fullmatch(pattern, one.text), (pattern, one.text)
    else:
        whole = one.text.rstrip("\ufffd")  # without a character that was cut
        assert regex.fullmatch(pattern, whole, partial=True), (pattern, whole)
        assert is_legal_prefix(llama, LLMatcher.grammar_from_regex(pattern), one.tokens)


KINDS = {
    "schemas": (schemas, schema_constraint, check_schema),
    "regexes": (regexes, lambda pattern: Constraint("regex", pattern), check_regex),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_forms", [30, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [MAX_TOKENS, 4])
def test_a_stopped_answer_has_its_form_and_a_cut_one_begins_it(
    llama, kind, max_tokens, num_forms, capsys
):
    strategy, constraint_of, check = KINDS[kind]
    forms = drawn(strategy, num_forms)
    asked = [request_of(constraint_of(form), seed=9, max_tokens=max_tokens) for form in forms]
    found, totals = ask(config_of(llama), asked)
    assert totals.step_rows_total > 4 * totals.step_count, "they were not in one batch"
    for form, [one] in zip(forms, found, strict=True):
        assert one.reason in (EndReason.STOP, EndReason.LENGTH)
        check(llama, form, one)
    stopped = sum(one.reason is EndReason.STOP for [one] in found)
    with capsys.disabled():
        print(f"\n{kind}, {max_tokens} tokens at most: {stopped} of {num_forms} stopped", end="")
    if max_tokens == MAX_TOKENS:
        assert stopped >= STOPPED_SHARE_MIN * num_forms
    else:
        assert stopped < num_forms


OTHERS = {
    "json_object": (Constraint("json_object", ""), lambda text: type(json.loads(text)) is dict),
    "choice": (
        Constraint("choice", 'yes\0no\0a "b" \\ c\0é漢\n\t\0'),
        lambda text: text in ("yes", "no", 'a "b" \\ c', "é漢\n\t", ""),
    ),
    "lark": (
        Constraint("lark", 'start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{1,5}/ | start'),
        lambda text: re.fullmatch(r"<[a-z,<>]+>", text) and text.count("<") == text.count(">"),
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_answers_of_the_other_kinds_have_their_form(llama, kind):
    constraint, is_right = OTHERS[kind]
    asked = [request_of(constraint, seed=seed) for seed in range(16)]
    found, _ = ask(config_of(llama), asked)
    ended = [one for [one] in found if one.reason is EndReason.STOP]
    assert len(ended) >= (4 if kind == "json_object" else 15)
    assert len({one.text for one in ended}) > 1
    for one in ended:
        assert is_right(one.text), one.text


# ---- with everything else --------------------------------------------------------------------

WORD = Constraint("regex", "[a-d]{3,12}(?:-[a-d]{1,6}){0,3}")
COMBINED = {
    "greedy": {"temperature": 0.0},
    "unseeded": {"seed": None},
    "limits": {"top_k": 5, "top_p": 0.9, "min_p": 0.02},
    "typical": {"typical_p": 0.6},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "bias": {"logit_bias": {END: 5.0, 100: 90.0}},
    "bans": {"banned_token_ids": tuple(range(300, 500)), "bad_words": ("ab", "ca")},
    "min_tokens": {"min_tokens": 6},
    "ignore_eos": {"ignore_eos": True},
}


@pytest.mark.parametrize("name", COMBINED)
def test_a_form_holds_beside_every_other_setting(llama, name):
    request = replace(request_of(WORD, **COMBINED[name]), n=5)
    choices = ask_one(llama, replace(request, output=OutputOptions(logprobs=2)))
    for one in choices:
        assert one.reason is EndReason.STOP
        assert re.fullmatch(WORD.source, one.text), one.text
        if name == "min_tokens":
            assert len(one.tokens) >= 6 or one.matched is None
        if name == "ignore_eos":
            assert one.matched is None
            assert END not in one.tokens
        if name == "bans":
            assert not {*one.tokens} & {*range(300, 500)}
    assert name == "greedy" or len({one.text for one in choices}) > 1


def test_the_end_is_one_more_token_only_where_the_form_may_go_on(llama):
    done = ask_one(llama, request_of(Constraint("regex", "abc")))[0]
    assert (done.reason, done.matched, done.text) == (EndReason.STOP, None, "abc")
    assert END not in done.tokens
    open_ended = Constraint("regex", "a+")
    [one] = ask_one(llama, request_of(open_ended, logit_bias={END: 50.0}))
    assert (one.reason, one.matched, one.tokens[-1]) == (EndReason.STOP, END, END)
    assert one.text == "a" * (len(one.tokens) - 1) or re.fullmatch("a+", one.text)


def test_a_form_that_is_complete_ends_before_min_tokens_and_on_the_last_token(llama):
    two = Constraint("choice", "a\0b")
    for settings in ({"min_tokens": 9}, {"max_tokens": 1}, {"ignore_eos": True}):
        [one] = ask_one(llama, request_of(two, **settings))
        assert (one.reason, one.matched) == (EndReason.STOP, None)
        assert one.text in ("a", "b")


def test_the_end_is_taken_if_nothing_else_is_left_even_if_the_request_bans_it(llama):
    """After the first `a` the request allows no next token, and the constraint may end."""
    a = llama.runner.tokenizer.encode("a")[0]
    open_ended = Constraint("regex", "a|ab")
    for settings in (
        {"allowed_token_ids": (a,), "ignore_eos": True},
        {"allowed_token_ids": (a,), "banned_token_ids": (END,)},
        {"allowed_token_ids": (a,), "min_tokens": 5},
    ):
        [one] = ask_one(llama, request_of(open_ended, **settings))
        assert (one.reason, one.text, one.matched) == (EndReason.STOP, "a", END)


def test_settings_that_leave_no_token_end_the_request_and_name_the_constraint(llama):
    b = llama.runner.tokenizer.encode("b")[0]
    stuck = request_of(Constraint("regex", "bbb|bc"), allowed_token_ids=(b,))
    fine = request_of(Constraint("regex", "b{3}"), allowed_token_ids=(b,))
    bad = request_of(Constraint("regex", "c"), allowed_token_ids=(b,))
    found, _ = ask(config_of(llama), [stuck, fine, bad, fine])
    assert isinstance(found[2], InvalidRequest)
    assert [violation.field for violation in found[2].violations] == ["constraint"]
    assert "leave no token" in str(found[2])
    for [one] in (found[0], found[1], found[3]):
        assert (one.reason, one.text) == (EndReason.STOP, "bbb")


def test_a_stop_string_ends_a_form_before_it_is_complete(llama):
    [one] = ask_one(llama, request_of(Constraint("regex", "[ab]{9,20}x"), stop=("a",)))
    assert (one.reason, one.matched) == (EndReason.STOP, "a")
    assert {*one.text} <= {"b"}


# ---- the schedule changes nothing ------------------------------------------------------------


def equivalence_requests():
    rng = random.Random(3)
    forms = [
        schema_constraint({"type": "array", "items": one, "minItems": 4, "maxItems": 6})
        for one in drawn(schemas, 8, number=1)
    ]
    forms += [Constraint("regex", f"(?:{one}){{5,9}}") for one in drawn(regexes, 4, number=1)]
    forms += [WORD, Constraint("regex", "(?:[a-z]{1,9} ){10,30}"), Constraint("json_object", "")]
    made = []
    for index in range(32):
        prompt = tuple(rng.randrange(1, 512) for _ in range(rng.randint(1, 40)))
        sampling = SamplingParams(
            temperature=1.5,
            seed=index,
            max_tokens=60,
            top_p=0.95 if index % 3 == 0 else None,
            repetition_penalty=1.2 if index % 4 == 0 else None,
        )
        form = forms[index % len(forms)]
        made.append(GenerateRequest(token_ids=prompt, sampling=sampling, constraint=form, n=1))
    return made


def certain_length(llama, request, tokens):
    """Return the number of tokens before the first draw that float noise could change."""
    logits, _ = llama.oracle.next_logits([*request.token_ids, *tokens])
    llama.runner.compile(request.constraint)
    grammar = llama.runner._grammars.start(request.constraint)
    params = request.sampling
    sampling = Sampling(temperature=1.5, seed=params.seed, top_p=params.top_p or 1.0)
    for position, token in enumerate(tokens):
        mask = grammar.new_mask()
        grammar.fill(mask)
        assert mask.allows(token)
        row = SampleRow(sampling, position, mask=mask)
        own = logits[len(request.token_ids) - 1 + position]
        if params.repetition_penalty is None and gumbel_margin(own[None], [row])[0] < MARGIN:
            return position
        grammar.push(token)
    return len(tokens)


SCHEDULES = {
    "a batch of 32": {},
    "preempted": {"max_model_len": 128, "kv_cache_memory": 200_000},
    "chunked, plans not prepared": {"max_num_batched_tokens": 48, "prepared_plans": False},
    "prefix-cached": {"prefix_cache": True},
}


@pytest.fixture(scope="module")
def alone(llama):
    asked = equivalence_requests()
    found, _ = ask(config_of(llama, prefix_cache=False), asked, one_by_one=True)
    lengths = [certain_length(llama, r, a.tokens) for r, [a] in zip(asked, found, strict=True)]
    skipped = sum(len(a.tokens) - n for [a], n in zip(found, lengths, strict=True))
    assert skipped < 0.02 * sum(len(a.tokens) for [a] in found)
    return asked, found, lengths


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_seeded_output_in_a_form_does_not_depend_on_the_schedule(llama, alone, schedule):
    asked, expected, lengths = alone
    config = config_of(llama, **({"prefix_cache": False} | SCHEDULES[schedule]))
    found, totals = ask(config, asked * 2 if schedule == "prefix-cached" else asked)
    assert schedule != "preempted" or totals.preemptions > 4
    assert schedule != "prefix-cached" or totals.prefix_hits > 0
    for index, [one] in enumerate(found):
        [other], length = expected[index % 32], lengths[index % 32]
        assert one.tokens[:length] == other.tokens[:length], f"request {index}"
        if length == len(other.tokens):
            assert (one.text, one.reason, one.matched) == (other.text, other.reason, other.matched)


def test_choices_are_those_of_requests_of_their_own(llama):
    """Three choices equal the first three of six, and all follow the constraint."""
    form = Constraint("regex", "(?:[a-z]{1,9} ){3,6}")
    many = ask_one(llama, replace(request_of(form, seed=4), n=6))
    assert len({tuple(one.tokens) for one in many}) == 6
    assert all(re.fullmatch(form.source, one.text) for one in many)
    again = ask_one(llama, replace(request_of(form, seed=4), n=3))
    assert [one.tokens for one in again] == [one.tokens for one in many[:3]]


# ---- masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [31, 512, 49_152])
def test_both_ways_of_sampling_apply_a_mask_alike(monkeypatch, vocab):
    generator = torch.Generator().manual_seed(vocab)
    rng = random.Random(vocab)
    words = (vocab + 31) // 32 + 1  # masks may be a little larger than the model's vocabulary
    masks = []
    for index in range(9):
        mask = Mask(words, (vocab - 1, vocab + 5))
        mask.words[:] = [rng.randrange(-(2**31), 2**31) for _ in range(words)]
        if index == 4:
            mask.words[:] = 0
            mask.words[(vocab - 1) >> 5] = (
                1 << ((vocab - 1) & 31) if (vocab - 1) % 32 != 31 else -(2**31)
            )
        masks.append(None if index in (1, 7) else mask)
    logits = torch.randn(9, vocab, generator=generator) * 3
    logits[4, vocab - 1] = -torch.inf  # the mask allows only the end, which the request bans
    wanted = logits.clone().numpy()
    for mask, row in zip(masks, wanted, strict=True):
        if mask is not None:
            mask.apply(row)
            for token in range(0, vocab, 7):
                assert (row[token] > -torch.inf) <= mask.allows(token)
    got = logits.clone()
    apply_batch(got, masks)
    assert torch.equal(got, torch.from_numpy(wanted))
    assert wanted[4].argmax() == vocab - 1
    samplings = [Sampling(0.0), Sampling(1.3, seed=2), Sampling(0.7, top_p=0.5, seed=5)]
    rows = [SampleRow(samplings[i % 3], i, mask=mask) for i, mask in enumerate(masks)]
    drawn_ids = []
    for way in (True, False):
        monkeypatch.setattr(sampler, "_is_by_rows", lambda _, way=way: way)
        drawn_ids.append(sample(logits, rows, torch.Generator()))
    assert drawn_ids[0] == drawn_ids[1]
    assert all(m is None or m.allows(t) for m, t in zip(masks, drawn_ids[0], strict=True))


# ---- compiling -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars(llama):
    """Yield a compiler of constraints with the tiny model's tokenizer."""
    tokenizer = load_tokenizer(llama.directory)
    with closing(ConstraintCompiler(tokenizer, 512, frozenset({END}))) as one:
        yield one


def chain(length):
    """Return a grammar of ``length`` rules, each of which is the next one."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "a"'


def doubling(length):
    """Return a grammar of ``length`` rules, each of which doubles the text's length."""
    terms = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(length))
    return f'start: T0\n{terms}\nT{length}: "a"'


REFUSED = {
    "a group left open": (Constraint("regex", "a(b"), "unclosed group"),
    "look-ahead": (Constraint("regex", "(?=a)b"), "look-around"),
    "a back-reference": (Constraint("regex", r"(a)\1"), "backreferences"),
    "an unknown name": (Constraint("lark", "start: FOO"), "FOO"),
    "no JSON": (Constraint("json_schema", '{"type":'), "not JSON"),
    "JSON that closes more than it opened": (Constraint("json_schema", '{}, "x": {}'), "not JSON"),
    "no schema": (Constraint("json_schema", "[1]"), "must be an object"),
    "an unknown type": (Constraint("json_schema", '{"type": "foo"}'), "foo"),
    "an unsatisfiable schema": (
        Constraint("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
        "minimum",
    ),
    "a keyword that is not supported": (
        Constraint("json_schema", '{"type": "array", "uniqueItems": true}'),
        "uniqueItems",
    ),
    "half a character": (Constraint("regex", "a\ud800"), "surrogates"),
    "a choice of half a character": (Constraint("choice", "a\ud800"), "surrogates"),
    "false": (Constraint("json_schema", "false"), ""),
    "a reference to another document": (
        Constraint("json_schema", '{"$ref": "https://example.com/schema"}'),
        "registry",
    ),
    "nested JSON": (Constraint("json_schema", "[" * 30_000), "JSON"),
    "a chain that overflows the stack": (Constraint("lark", chain(5000)), "too deeply"),
    "an exponential terminal": (Constraint("lark", doubling(2000)), "compile"),
    "an enormous expression": (Constraint("regex", "((a{100}){100}){100}"), ""),
    "a minute of work": (
        Constraint(
            "json_schema",
            json.dumps({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(1500)]}),
        ),
        "compile",
    ),
    "nothing at all": (Constraint("lark", "start: r\nr: r r"), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_constraint_that_cannot_be_compiled_is_refused_by_field_in_bounded_time(grammars, name):
    constraint, said = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(constraint)
    [violation] = caught.value.violations
    assert violation.field == constraint.field
    assert said in violation.description
    assert 0 < len(violation.description) <= 320
    assert "\n" not in violation.description
    assert grammars.compile(Constraint("regex", "fine[0-9]")) > 0


USED = {
    "a thousand properties": json.dumps(
        {
            "type": "object",
            "properties": {
                f"property{i}": {"type": "string", "maxLength": 99, "pattern": "^[a-z]+-[0-9]{3}$"}
                for i in range(600)
            },
            "required": [f"property{i}" for i in range(600)],
        }
    ),
    "definitions that refer to each other": json.dumps(
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": ["string", "number", "null"]},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["value"],
                }
            },
        }
    ),
    "forty levels": '{"type": "array", "items": ' * 40 + "{}" + "}" * 40,
    "anything": "true",
}


@pytest.mark.parametrize("name", USED)
def test_common_schemas_compile(grammars, name):
    assert grammars.compile(Constraint("json_schema", USED[name])) > 0


def test_ten_thousand_choices_compile(grammars):
    choices = "\0".join(f"w{i * 7919 % 100_003}" for i in range(9000))
    assert grammars.compile(Constraint("choice", choices)) > 0


def test_a_constraint_that_is_not_compiled_fails_its_row_and_no_step(grammars):
    lost = grammars.start(Constraint("regex", "never compiled"))
    for one in (lost, lost.fork()):
        mask = one.new_mask()
        one.fill(mask)
        assert "not compiled" in mask.trouble


def test_the_sandbox_process_of_constraints_may_die_and_is_replaced(llama):
    with closing(ConstraintCompiler(load_tokenizer(llama.directory), 512, frozenset({END}))) as own:
        own.compile(Constraint("regex", "a"))
        [process] = own._sandbox._all
        process._process.kill()
        process._process.wait()
        own.compile(Constraint("regex", "b"))
        [other] = own._sandbox._all
        assert other is not process
    assert not other.is_alive
    own.close()


def test_a_constraint_waits_for_no_process_of_the_sandbox_that_is_busy(llama, monkeypatch):
    monkeypatch.setattr("engine.worker.sampling.constraint_sandbox.ANSWER_LIMIT_S", LONG_S)
    tokenizer = load_tokenizer(llama.directory)
    with contextlib.closing(ConstraintCompiler(tokenizer, 512, frozenset({END}))) as own:
        own.compile(Constraint("regex", "a"))
        [process] = own._sandbox._all
        process._process.send_signal(signal.SIGSTOP)
        other = threading.Thread(target=own.compile, args=[Constraint("regex", "b")])
        other.start()
        wait_until(lambda: not own._sandbox._idle)
        own.compile(Constraint("regex", "c"))
        assert other.is_alive()
        process._process.send_signal(signal.SIGCONT)
        other.join(LONG_S)
        assert not other.is_alive()


# ---- tokenizers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toy_tokenizers.ALL)
def test_every_common_kind_of_tokenizer_writes_the_requested_form(name):
    tokenizer = HfTokenizer(toy_tokenizers.ALL[name]())
    with closing(ConstraintCompiler(tokenizer, tokenizer.vocab_size + 40, frozenset({3}))) as own:
        constraint = schema_constraint(
            {
                "type": "array",
                "items": {"enum": ["é漢", " lead", "x y"]},
                "minItems": 2,
                "maxItems": 3,
            }
        )
        own.compile(constraint)
        for seed in range(6):
            text = tokenizer.decode(walk(own.start(constraint), seed))
            assert 2 <= len(json.loads(text)) <= 3
            assert {*json.loads(text)} <= {"é漢", " lead", "x y"}


def test_a_tokenizer_that_llguidance_cannot_use_is_unsupported_each_time():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own = ConstraintCompiler(HfTokenizer(words), 3, frozenset({2}))
    for _ in range(2):
        with pytest.raises(Unsupported, match="tokenizer") as caught:
            own.compile(Constraint("regex", "a"))
        assert caught.value.field == "constraint"
    own.close()


SPELLED = "green </think>"  # has the text of an added token
WITH_MARKERS = {
    "choice": (Constraint("choice", SPELLED), SPELLED),
    "regex": (Constraint("regex", "green <\\/think>"), SPELLED),
    "lark": (Constraint("lark", f'start: "{SPELLED}"'), SPELLED),
    "tools": (Constraint("tools", f'start: %json {{"const": "{SPELLED}"}}'), f'"{SPELLED}"'),
    "json_schema": (Constraint("json_schema", r'{"const": "green \u003c/think>"}'), f'"{SPELLED}"'),
    "pattern": (
        Constraint("json_schema", r'{"type": "string", "pattern": "^green <\\/think>$"}'),
        f'"{SPELLED}"',
    ),
    "behind": (Constraint("choice", SPELLED, lead='start: "so: " @form\n'), f"so: {SPELLED}"),
}


@pytest.mark.parametrize("name", WITH_MARKERS)
def test_a_form_may_have_the_text_of_an_added_token(marked, name):
    """Red if a step fails in the middle of such a text."""
    tokenizer, grammars = marked
    constraint, text = WITH_MARKERS[name]
    grammars.compile(constraint)
    for seed in range(4):
        tokens = walk(grammars.start(constraint), seed)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
        assert tokenizer.added_id_of("</think>") not in tokens
    grammars.forget(constraint)


def test_added_tokens_that_are_plain_text_leave_a_form_its_forced_tokens():
    """Red if the line breaks, spaces and words among a vocabulary's added tokens forbid forcing."""
    plain = ["\n", "\n\n", "   ", "widget"]
    backend = toy_tokenizers.byte_level()
    backend.add_tokens([AddedToken(one, normalized=False) for one in plain])
    tokenizer = HfTokenizer(backend)
    text = "a\nb\n\nc   d widget"
    with closing(ConstraintCompiler(tokenizer, tokenizer.vocab_size, frozenset({3}))) as own:
        constraint = Constraint("choice", text)
        own.compile(constraint)
        assert tokenizer.decode(own.start(constraint).forced()) == text
        assert tokenizer.decode(walk(own.start(constraint), 0)) == text
