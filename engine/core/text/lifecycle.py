"""The states of a sequence, and the legal transitions between them (D7).

Rule 1: a state changes by `Sequence.advance` alone, which calls `advance`. Rule 2: whether a
RUNNING sequence is prefilling or decoding is not a state: it follows from how many of its tokens
are computed.

WAITING   accepted, holds no blocks: new, or preempted and to be recomputed.
RUNNING   holds blocks; a step may compute it.
PARKED    its reader's buffer is full, or its client is away and others go first: no step computes
          it until that changes. It holds its blocks unless they were taken for others (PREEMPT).
ENDING    its `Finished` event was emitted, and a step in flight still uses its blocks.
FINISHED  holds no blocks and no seat.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """What a sequence is doing."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    ENDING = "ending"
    FINISHED = "finished"


class Event(Enum):
    """What changes a sequence's state."""

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
    """An event came in a state that does not allow it: a bug of the caller."""


def advance(state: State, event: Event) -> State:
    """Return the state after ``event``.

    Raises:
        IllegalTransition: The table has no such edge.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"{event.name} while {state.name}") from None
