"""An id outside the vocabulary is found, and named by its field and its token."""

import pytest

from engine.core.common.vocabulary import check_ids, check_text, first_outside
from engine.errors import InvalidRequest


class Letters:
    """A tokenizer whose token with id n is n letters."""

    def decode(self, token_ids, *, skip_special_tokens=True):
        assert not skip_special_tokens
        return "".join("x" * one for one in token_ids)


@pytest.mark.parametrize(
    ("ids", "index"),
    [((), None), ((0, 99), None), ((0, 100), 1), ((-1, 100), 0), ((5, 6, 100, -1), 2)],
)
def test_the_first_id_outside_is_found(ids, index):
    assert first_outside(ids, 100) == index


def test_ids_are_named_by_their_place_in_the_field():
    check_ids("prompt_ids", (0, 99), 100)
    with pytest.raises(InvalidRequest) as caught:
        check_ids("prompt_ids", (0, 100, 101), 100, first=7)
    (violation,) = caught.value.violations
    assert violation.field == "prompt_ids[8]"
    assert violation.description == "is 100, outside the vocabulary of 100"


@pytest.mark.parametrize(
    ("token", "shown"), [(60, "x" * 60), (61, "x" * 59 + "…"), (70, "x" * 59 + "…")]
)
def test_a_texts_token_is_shown_up_to_a_length(token, shown):
    check_text("text", (0, 49), 50, Letters())
    with pytest.raises(InvalidRequest) as caught:
        check_text("text", (0, token, 99), 50, Letters())
    (violation,) = caught.value.violations
    assert violation.field == "text"
    what = f"has the token {shown!r} with the id {token}, outside the vocabulary of 50"
    assert violation.description == what
