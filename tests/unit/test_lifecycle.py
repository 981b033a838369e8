"""A sequence changes its state only by the transition table (D7), which reaches every state."""

import pytest

from engine.core.text.lifecycle import TRANSITIONS, Event, IllegalTransition, State, advance

LEGAL = [(state, event) for state, edges in TRANSITIONS.items() for event in edges]
ILLEGAL = [(s, e) for s in State for e in Event if (s, e) not in LEGAL]


@pytest.mark.parametrize(("state", "event"), LEGAL)
def test_a_legal_event_leads_where_the_table_says(state, event):
    assert advance(state, event) is TRANSITIONS[state][event]


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_every_other_event_is_refused(state, event):
    with pytest.raises(IllegalTransition, match=f"{event.name} while {state.name}"):
        advance(state, event)


def test_every_live_state_can_finish_and_finished_is_final():
    assert all(Event.FINISH in TRANSITIONS[s] for s in State if s is not State.FINISHED)
    assert TRANSITIONS[State.FINISHED] == {}


def test_every_state_is_reached():
    reached = {target for edges in TRANSITIONS.values() for target in edges.values()}
    assert reached | {State.WAITING} == set(State)
