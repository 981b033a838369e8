"""Bugs that are planted in the makers of grammars and in the parser of choices are found by the
tests of these."""

import pytest

from engine.requests.text.answers import structural_tags
from engine.requests.text.answers.choice_parser import ChoiceParser
from engine.requests.text.answers.reasoning_grammar import with_escaped_slashes
from engine.requests.text.answers.structural_tags import _Grammar as Tags
from engine.requests.text.answers.value_grammar import ValueGrammar as Values
from tests.conformance import test_structural_tags as tags
from tests.conformance import test_tool_choice as choice
from tests.property import test_choice_parser as parsing
from tests.simulator.mutants import Mutant, planted
from tests.support.grammar_walks import MARKERS, compiler_of, tokenizer_with

OF_VALUES = [
    Mutant("a string is not bounded", Values._contents, 'if least or most != ""', "if False"),
    Mutant("a pattern is only a part", Values._contents, '"" if pattern.startswith("^") else', ""),
    Mutant("a string may look like a number", Values._text, "if is_mixed:", "if False:"),
    Mutant("values of other types are listed", Values._values_of, "if is_of(value, types)", ""),
    Mutant("a listed value has no quotes", Values._constant, "if value else", "if not value else"),
    Mutant("what is required may be missing", Values.parameters, "if key in", "if key not in"),
    Mutant("a required member is left out", Values._members, "not in schema", "in schema"),
    Mutant("a list is too long", Values._array, "most - 1", "most"),
    Mutant("a list is too short", Values._array, "least - 1", "least - 2"),
    Mutant("a number is any", Values._typed, '"type": kind, **own}', '"type": kind}'),
    Mutant(
        "types of alternatives overlap", Values._branches_of, "if not types <= own:", "if False:"
    ),
    Mutant("an alternative of another type", Values._branches_of, "not types & own", "False"),
    Mutant(
        "keywords beside a reference",
        Values._value,
        'self._check_keys(schema, NOTES | {"$ref"}, beside="$ref")',
        "pass",
    ),
    Mutant("keywords are dropped", Values._check_keys, "if key not in allowed", "if False"),
    Mutant("a word is cut", Values._typed, '"True" | "False"', '"Tru" | "False"'),
]
OF_TAGS = [
    Mutant("a text is another", Tags._const_string, '"value"', '"type"'),
    Mutant("a schema is any", Tags._json_schema, '"json_schema", {}', '"schema", {}'),
    Mutant("slashes end a pattern", with_escaped_slashes, r'r"\/"', '"/"', owner=structural_tags),
    Mutant("text has what it excludes", Tags._any_text, "*excluded, ", ""),
    Mutant(
        "a sequence loses its last",
        Tags._sequence,
        "elements[-1], depth, end",
        "elements[0], depth, end",
    ),
    Mutant("only one alternative", Tags._or, "' | '", "' '"),
    Mutant("a part is repeated by another sign", Tags._repeated, "{sign}", "+"),
    Mutant("a tag has no end", Tags._tag, "{content} ({closing})", "{content}"),
    Mutant("a trigger is written twice", Tags._tag, ".removeprefix(begun)", ""),
    Mutant("a trigger may stand in the text", Tags._triggered_tags, "*triggers, ", ""),
    Mutant("no tag is needed", Tags._triggered_tags, "'+' if", "'*' if"),
    Mutant(
        "more than the first tag", Tags._triggered_tags, 'part.get("stop_after_first")', "False"
    ),
    Mutant(
        "tags without a separator", Tags._tags_with_separator, "({separator} {one})*", "({one})*"
    ),
    Mutant("a marker is spelled", Tags._literal, "self._find_id) for", "lambda _: None) for"),
]
OF_CHOICES = [
    Mutant("the end is not flushed", ChoiceParser.take, "if event.is_last:", "if False:"),
    Mutant("calls share a place", ChoiceParser._delta, "self._num_calls + 1", "self._num_calls"),
    Mutant(
        "a part goes on with the next call",
        ChoiceParser._delta,
        "self._num_calls - 1, ",
        "self._num_calls, ",
    ),
    Mutant("calls share an id", ChoiceParser._delta, "/{position}", ""),
    Mutant("choices share their ids", ChoiceParser._delta, "{self._name}/", ""),
    Mutant(
        "the model's id is dropped",
        ChoiceParser._delta,
        "call.call_id or digest",
        "call.call_id and digest",
    ),
    Mutant("skipped calls are not counted", ChoiceParser.skip, "self._num_calls +=", "unused ="),
    Mutant("skipped parts are counted", ChoiceParser.skip, "bool(call.name)", "True"),
    Mutant("reasoning is dropped", ChoiceParser.take, "parts.reasoning, calls", '"", calls'),
]


@pytest.fixture(scope="module")
def marked():
    """Yield tokenizers with their compilers of constraints: markers are tokens, or not."""
    tokenizers = [tokenizer_with(MARKERS), tokenizer_with(())]
    pairs = [(tokenizer, compiler_of(tokenizer)) for tokenizer in tokenizers]
    yield pairs
    for _, grammars in pairs:
        grammars.close()


def judge_values(marked, _):
    """Run the tests of arguments that are written one by one, or in a notation."""
    for name in ("qwen3-coder", "pythonic", "gemma"):
        for what in choice.EXACT:
            choice.test_a_value_has_what_its_schema_asks_for(marked, name, what)
        for what in choice.BESIDE:
            choice.test_keywords_beside_each_other_are_enforced_or_refused(marked, name, what)
    for name in ("Qwen3-Coder", "LFM2.5", "FunctionGemma"):
        choice.test_drawn_schemas_are_kept_in_every_dialect(marked, name)
    for own, what in ({"type": "string", "format": "date"}, "format"), ({"allOf": []}, "allOf"):
        choice.test_what_a_dialect_cannot_enforce_is_refused_by_name("gemma", own, what)


def judge_tags(*pairs):
    """Run the tests of structural tags."""
    for marked in pairs:
        for name in tags.CASES:
            tags.test_a_structural_tag_allows_what_it_describes_and_nothing_else(marked, name)


def judge_choices(*_):
    """Run the tests of the events of a choice."""
    for streams in (False, True):
        for name in ("Qwen 3", "Kimi K2", "GLM 4.7"):
            parsing.test_each_event_becomes_one_and_the_calls_have_places_and_ids(name, streams)
            parsing.test_what_the_client_has_is_skipped_and_the_rest_goes_on(name, streams)


CASES = [
    pytest.param(mutant, judge, id=mutant.title)
    for mutants, judge in (
        (OF_VALUES, judge_values),
        (OF_TAGS, judge_tags),
        (OF_CHOICES, judge_choices),
    )
    for mutant in mutants
]


@pytest.mark.slow
@pytest.mark.timeout(60)  # a grammar without an end is a bug that is found, too
@pytest.mark.parametrize(("mutant", "judge"), CASES)
def test_a_planted_bug_is_found(marked, mutant, judge):
    with planted(mutant), pytest.raises((Exception, pytest.fail.Exception)):
        judge(*marked)
