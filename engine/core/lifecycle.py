"""The states of a sequence and the only legal ways between them (design D7).

Rule 1: a state changes by `advance` alone, in `Sequence.advance`; no other file writes one.
Rule 2: whether a RUNNING sequence is prefilling or decoding is not a state: it follows from
how many of its tokens are computed.

WAITING   accepted, holds no blocks: new, or preempted and to be recomputed.
RUNNING   holds blocks; a step may compute it.
PARKED    its reader's buffer is full: no step computes it until the reader drains. It holds
          its blocks unless they were taken for others (PREEMPT).
ENDING    its terminal event is out, and a step in flight still uses its blocks.
FINISHED  holds nothing.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    ENDING = "ending"
    FINISHED = "finished"


class Event(Enum):
    START = "start"
    PREEMPT = "preempt"
    PARK = "park"
    UNPARK_RESIDENT = "unpark_resident"
    UNPARK_EVICTED = "unpark_evicted"
    END_IN_STEP = "end_in_step"
    FINISH = "finish"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WAITING: {
        Event.START: State.RUNNING,
        Event.PARK: State.PARKED,
        Event.FINISH: State.FINISHED,
    },
    State.RUNNING: {
        Event.PREEMPT: State.WAITING,
        Event.PARK: State.PARKED,
        Event.END_IN_STEP: State.ENDING,
        Event.FINISH: State.FINISHED,
    },
    State.PARKED: {
        Event.PREEMPT: State.PARKED,
        Event.UNPARK_RESIDENT: State.RUNNING,
        Event.UNPARK_EVICTED: State.WAITING,
        Event.END_IN_STEP: State.ENDING,
        Event.FINISH: State.FINISHED,
    },
    State.ENDING: {Event.FINISH: State.FINISHED},
    State.FINISHED: {},
}


class IllegalTransition(AssertionError):
    """An event arrived in a state that does not allow it: a bug of the caller's."""


def advance(state: State, event: Event) -> State:
    """The state after ``event``.

    Raises:
        IllegalTransition: the table has no such edge; the caller's state is unchanged.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"{event.name} while {state.name}") from None
