"""What a key's requests may take: choices, KV blocks, tokens and seconds of tokenizers a minute;
and the file's defaults. `tests/simulation/test_minute_limits.py` draws the times of tokenizers."""

import pytest

from engine.errors import ConfigError, Overloaded
from engine.requests.quota import Quota, UseLimits
from grpc_service.access.keys import KeyRing

KEY = "a-key-of-some-length-"


def keys_of(tmp_path, *lines):
    path = tmp_path / "keys"
    path.write_text("\n".join(lines) + "\n")
    return KeyRing(str(path))


def holder_of(keys, number):
    return keys.find(f"{KEY}{number}".encode())


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
def test_a_line_of_defaults_counts_for_every_line_that_sets_nothing_else(tmp_path, first):
    lines = [f"ann {KEY}1", f"ben {KEY}2 max_choices=2 weight=3", f"ops {KEY}3 role=operator"]
    own = "*  max_choices=8 max_tokens_per_minute=900 max_kv_blocks=7 max_requests=5 weight=2"
    own += " max_tokenizer_seconds_per_minute=2.5"
    keys = keys_of(tmp_path, *([own, *lines] if first else [*lines, own]))
    ann, ben, ops = (holder_of(keys, number) for number in (1, 2, 3))
    assert ann.limits == ops.limits == UseLimits(8, 900, 7, 2.5)
    assert ben.limits == UseLimits(2, 900, 7, 2.5)
    assert (ann.max_requests, ann.weight, ben.weight) == (5, 2, 3)
    assert not ann.is_operator
    assert ops.is_operator


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("* role=operator", "line 1: role= and delegate= are for a key's own line"),
        ("* delegate=true", "line 1: role= and delegate= are for a key's own line"),
        ("* max_choices=0", "line 1: max_choices= must be a number of at least 1"),
        ("* nonsense=1", "line 1: after the key come"),
        (f"eve {KEY}9 max_tokens_per_minute=x", "line 1: max_tokens_per_minute= must be a number"),
        *[
            (f"* max_tokenizer_seconds_per_minute={wrong}", "must be a number above 0, such as 2.5")
            for wrong in ("0", "0.0", "-1", "inf", "nan", "1e3", "", "x", ".5")
        ],
        (f"eve {KEY}9 max_kv_blocks=-1", "line 1: max_kv_blocks= must be a number"),
    ],
)
def test_a_wrong_limit_is_named_with_its_line(tmp_path, line, told):
    with pytest.raises(ConfigError, match=told):
        keys_of(tmp_path, line, f"ann {KEY}1")


def test_choices_count_from_a_requests_start_to_its_end():
    quota = Quota("ann")
    quota.limits = UseLimits(max_choices=4)
    quota.begin(3, 0.0)
    with pytest.raises(Overloaded, match="runs 3 of at most 4 choices, and this request has 2"):
        quota.begin(2, 0.0)
    quota.begin(1, 0.0)
    quota.end(3)
    quota.begin(3, 0.0)
    assert quota.num_choices == 4


def test_the_tokens_of_a_minute_come_back_in_a_minute():
    quota = Quota("ann")
    quota.limits = UseLimits(max_tokens_per_minute=60)
    quota.begin(1, 0.0)
    quota.spend(90, 0.0)
    with pytest.raises(Overloaded, match="has used its 60 tokens a minute") as refused:
        quota.begin(1, 0.0)
    assert refused.value.retry_after_s == 30.0
    with pytest.raises(Overloaded):
        quota.begin(1, 29.0)
    quota.begin(1, 30.1)
    quota.spend(20, 30.1)  # 59.9 of the first are left
    with pytest.raises(Overloaded) as refused:
        quota.begin(1, 30.1)
    assert 19.0 < refused.value.retry_after_s < 20.0
    quota.begin(1, 1000.0)
    assert quota.num_choices == 3


def test_a_holder_without_limits_saves_nothing_up_and_owes_nothing():
    quota = Quota("ann")
    quota.spend(10**9, 0.0)
    quota.begin(10**6, 0.0)
    quota.limits = UseLimits(max_tokens_per_minute=1)
    quota.begin(1, 0.0)


def test_blocks_are_given_back_and_one_request_may_exceed_the_limit_alone():
    quota = Quota("ann")
    quota.limits = UseLimits(max_kv_blocks=10)
    with quota.holding_blocks(12):
        with (
            pytest.raises(Overloaded, match="may need 12 KV blocks of at most 10, and this one 1"),
            quota.holding_blocks(1),
        ):
            raise AssertionError
        assert quota.num_blocks == 12
    with (
        quota.holding_blocks(4),
        quota.holding_blocks(6),
        pytest.raises(Overloaded),
        quota.holding_blocks(1),
    ):
        raise AssertionError
    assert quota.num_blocks == 0
