"""Which turns of a chat to leave out when it outgrows the model's context.

A turn is a user's message and every message that follows it up to the next user's message.

Rule 1: this module is pure. The caller of `choose_dropped` counts the tokens, and may wait for the
counts in any way. Rule 2: messages that are kept stay whole and in order: the system messages at
the beginning, the first turn (which usually states the task), and as many of the last turns as
fit. The first turn is dropped only after all turns between it and the last, which is never dropped.

Once a turn must be dropped, more are dropped than necessary, so that half of the context is free
for the turns to come. If each new turn dropped one old turn, no prompt would find its prefix in the
cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    Message = Mapping[str, Any]


def truncation_limits(max_model_len: int, max_tokens: int | None) -> tuple[int, int]:
    """Return the two limits of `choose_dropped` in tokens: ``most`` and ``target``.

    Both leave room for an answer of ``max_tokens`` (None: a quarter of the context), but reserve
    no more than half of the context for it.
    """
    room = max_model_len // 4 if max_tokens is None else max_tokens
    most = max_model_len - min(room, max_model_len // 2)
    return most, min(most, max_model_len // 2)


def choose_dropped(
    messages: Sequence[Message], most: int, target: int
) -> Generator[tuple[Message, ...], int, tuple[int, ...]]:
    """Search for the fewest turns to drop, by bisection.

    The generator yields chats whose tokens the caller counts and sends back. It returns the indices
    of the dropped messages: none if the whole chat has at most ``most`` tokens, otherwise those of
    the fewest turns whose absence leaves at most ``target`` tokens. If even the shortest possible
    chat has more tokens, the indices that lead to the shortest one are returned.

    The number of chats counted is about log2 of the number of turns. The chat counted last need not
    be the one that remains.
    """
    if (yield tuple(messages)) <= most:
        return ()
    options = _droppable(messages)
    low, high = 0, len(options) - 1  # the last option is accepted without being counted
    while low < high:
        middle = (low + high) // 2
        if (yield without_messages(messages, options[middle])) <= target:
            high = middle
        else:
            low = middle + 1
    return options[low] if options else ()


def without_messages(messages: Sequence[Message], dropped: Sequence[int]) -> tuple[Message, ...]:
    """Return the messages except those at the indices ``dropped``."""
    gone = set(dropped)
    return tuple([message for index, message in enumerate(messages) if index not in gone])


def _droppable(messages: Sequence[Message]) -> list[tuple[int, ...]]:
    """Return what may be dropped, from the fewest messages to the most.

    The turns after the first go oldest first, then the first turn goes too.
    """
    starts = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if len(starts) < 2:
        return []
    first, second, last = starts[0], starts[1], starts[-1]
    options = [tuple(range(second, start)) for start in starts[2:]]
    return [*options, tuple(range(first, last))]
