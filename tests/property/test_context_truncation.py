"""What truncation keeps of a chat that outgrew its context."""

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.requests.text.truncation import choose_dropped, truncation_limits, without_messages

roles = st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=14)


def truncate(messages, most, target):
    """Return the dropped indices, and how often tokens were counted."""
    search, count = choose_dropped(messages, most, target), 0
    asked = next(search)
    while True:
        count += 1
        try:
            asked = search.send(sum(message["tokens"] for message in asked))
        except StopIteration as done:
            return done.value, count


@given(
    system=st.integers(0, 2),
    given_roles=roles,
    tokens=st.lists(st.integers(1, 50), min_size=17, max_size=17),
    most=st.integers(1, 300),
    share=st.floats(0.1, 1.0),
)
def test_truncation_keeps_the_beginning_and_the_end_and_drops_no_more_than_it_says(
    system, given_roles, tokens, most, share
):
    named = ["system"] * system + ["user"] * bool(given_roles) + given_roles + ["user"]
    messages = [{"role": role, "tokens": count} for role, count in zip(named, tokens, strict=False)]
    target = max(1, int(most * share))
    dropped, counts = truncate(messages, most, target)
    kept = without_messages(messages, dropped)
    total, left = (sum(one["tokens"] for one in some) for some in (messages, kept))
    assert kept[-1] is messages[-1]
    assert kept[:system] == tuple(messages[:system])
    assert counts <= 2 + math.log2(len(messages) + 1)
    assert list(dropped) == list(range(dropped[0], dropped[-1] + 1)) if dropped else True
    if total <= most:
        assert not dropped
        return
    starts = [index for index, one in enumerate(messages) if one["role"] == "user"]
    if len(starts) < 2:
        assert not dropped
        return
    assert dropped[0] in starts  # only whole turns are dropped
    assert dropped[-1] + 1 in starts
    keeps_first = starts[0] not in dropped
    first_turn = sum(one["tokens"] for one in messages[: starts[1]])
    if keeps_first:
        assert left <= target
        fewer = [index for index in dropped if index < starts[starts.index(dropped[-1] + 1) - 1]]
        assert sum(one["tokens"] for one in without_messages(messages, fewer)) > target
    else:  # keeping the first turn would leave more than ``target``
        last_turn = sum(one["tokens"] for one in messages[starts[-1] :])
        assert first_turn + last_turn > target or len(starts) == 2


def test_an_answer_has_room_after_truncation():
    assert truncation_limits(2048, None) == (1536, 1024)
    assert truncation_limits(2048, 100) == (1948, 1024)
    assert truncation_limits(2048, 5000) == (1024, 1024)
