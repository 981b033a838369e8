"""Which turns of a chat to leave out when it outgrows the model's context.

Rule 1: pure: whoever counts tokens, and however he waits for that, drives `fit`. Rule 2: what is
kept is kept whole and in order: the system messages at the beginning, the first turn, which is
mostly the task, and as many of the last turns as fit. The first turn goes when nothing else is
left to go; the last never does.

Once something must go, more goes than must: half the context stays free for the turns to come. If
each turn made the next drop one, no turn would find its prefix in the cache.
A turn is a user's message and all that follows it up to the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    Message = Mapping[str, Any]


def limits(max_model_len: int, max_tokens: int | None) -> tuple[int, int]:
    """The most tokens that a chat may have before it is shortened, and to how many: an answer of
    ``max_tokens`` (a quarter of the context) has room then, but never more than half of it."""
    room = max_model_len // 4 if max_tokens is None else max_tokens
    most = max_model_len - min(room, max_model_len // 2)
    return most, min(most, max_model_len // 2)


def fit(
    messages: Sequence[Message], most: int, target: int
) -> Generator[tuple[Message, ...], int, tuple[int, ...]]:
    """Yields chats to be counted, is sent their numbers of tokens, and returns the indices of the
    messages to leave out: none if the chat has at most ``most`` tokens, else the fewest turns that
    leave at most ``target``. The last chat counted need not be the one that is left.

    Counts about log2 of the turns times. If even the shortest has more, that one is returned.
    """
    if (yield tuple(messages)) <= most:
        return ()
    options = _options(messages)
    low, high = 0, len(options) - 1  # the last option is taken unseen
    while low < high:
        middle = (low + high) // 2
        if (yield without(messages, options[middle])) <= target:
            high = middle
        else:
            low = middle + 1
    return options[low] if options else ()


def without(messages: Sequence[Message], dropped: Sequence[int]) -> tuple[Message, ...]:
    """The messages but those at ``dropped``."""
    gone = set(dropped)
    return tuple([one for index, one in enumerate(messages) if index not in gone])


def _options(messages: Sequence[Message]) -> list[tuple[int, ...]]:
    """What may be left out, each time more: the turns after the first, oldest first, then the
    first; the last turn never."""
    starts = [index for index, one in enumerate(messages) if one.get("role") == "user"]
    if len(starts) < 2:
        return []
    first, second, last = starts[0], starts[1], starts[-1]
    options = [tuple(range(second, start)) for start in starts[2:]]
    return [*options, tuple(range(first, last))]
