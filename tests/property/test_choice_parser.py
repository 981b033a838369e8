"""The events of a parsed choice: one for each of the core's, with the calls' ids and places."""

import pytest

from engine.core.text.types import Tokens
from engine.requests.text.answers.choice_parser import ChoiceParser
from tests.property.test_dialects import cut, form_of
from tests.support.dialect_turns import FAMILIES, draw

SEVERAL = [name for name, family in FAMILIES.items() if family.most_calls > 1]


def taken(parser, pieces):
    """Return the events of an answer that comes in these pieces."""
    last = len(pieces) - 1
    events = [
        Tokens("r1", 0, (number,), piece, is_last=number == last)
        for number, piece in enumerate(pieces)
    ]
    return [parser.take(event) for event in events]


def calls_of(events):
    """Return the calls: their places, ids and names, and their arguments, of which parts that have
    no name are joined by the place."""
    calls = {}
    for call in (call for event in events for call in event.tool_calls):
        if call.name:
            assert call.position not in calls
            calls[call.position] = [call.call_id, call.name, ""]
        calls[call.position][2] += call.arguments_json
    return calls


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "as generated"])
@pytest.mark.parametrize("name", SEVERAL)
def test_each_event_becomes_one_and_the_calls_have_places_and_ids(name, streams):
    family = FAMILIES[name]
    for seed in range(20):
        functions, turn = draw(family, seed)
        form = form_of(family, functions, streams=streams)
        pieces = cut(family.write(turn), seed)
        events = taken(ChoiceParser(form, "r1/0"), pieces)
        assert [event.token_ids for event in events] == [(n,) for n in range(len(pieces))]
        assert "".join(event.text for event in events) == turn.text
        assert "".join(event.reasoning for event in events) == turn.reasoning
        calls = calls_of(events)
        assert list(calls) == list(range(len(turn.calls)))
        assert [called for _, called, _ in calls.values()] == [called for called, _ in turn.calls]
        ids = [call_id for call_id, _, _ in calls.values()]
        if family.dialect not in ("mistral", "mistral-ids", "kimi-k2"):  # whose models write ids
            assert len(set(ids)) == len(ids)
            assert all(len(one) == 9 and one.isalnum() for one in ids)
            others = calls_of(taken(ChoiceParser(form, "r1/1"), pieces))
            assert not set(ids) & {call_id for call_id, _, _ in others.values()}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "as generated"])
@pytest.mark.parametrize("name", SEVERAL)
def test_what_the_client_has_is_skipped_and_the_rest_goes_on(name, streams):
    family = FAMILIES[name]
    for seed in range(8):
        functions, turn = draw(family, seed)
        form = form_of(family, functions, streams=streams)
        written = family.write(turn)
        whole = taken(ChoiceParser(form, "r1/0"), written)
        for at in range(0, len(written), 7):
            parser = ChoiceParser(form, "r1/0")
            parser.skip(written[: at // 2])
            parser.skip(written[at // 2 : at])
            assert [
                (event.text, event.reasoning, event.tool_calls)
                for event in taken(parser, written[at:])
            ] == [(event.text, event.reasoning, event.tool_calls) for event in whole[at:]]
