"""What a model's generation_config.json decides, and what the log says of fields without effect."""

import json
import logging
from types import SimpleNamespace

import pytest

from engine.worker.load.generation_config import read_generation
from engine.worker.load.resolve import Source

CONFIG = SimpleNamespace(vocab_size=100, eos_token_id=None)


@pytest.fixture
def read(tmp_path, caplog):
    """Return a function that reads a file with these fields, and returns the defaults."""
    caplog.set_level(logging.INFO)

    def read_file(**fields):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        return read_generation(Source(tmp_path, "some-org/tiny"), CONFIG)[0]

    return read_file


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),  # as in transformers
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"temperature": 0.7}, 0.7),
        ({}, None),
    ],
)
def test_do_sample_false_is_greedy(read, fields, temperature):
    assert read(**fields).temperature == temperature


def test_max_new_tokens_is_the_default_of_max_tokens(read):
    assert read(max_new_tokens=64).max_tokens == 64
    assert read(max_new_tokens=None).max_tokens is None


def test_fields_that_are_not_followed_are_named_in_one_line(read, caplog):
    read(max_length=50, num_beams=4, no_repeat_ngram_size=3, max_new_tokens=9, temperature=0.5)
    [line] = caplog.messages
    assert line == (
        "some-org/tiny: its generation_config.json has fields that are not followed: max_length, "
        "no_repeat_ngram_size, num_beams"
    )


def test_fields_that_change_no_answer_are_not_named(read, caplog):
    followed = {"temperature": 0.5, "do_sample": True, "eos_token_id": 3, "min_p": 0.1}
    about_itself = {"transformers_version": "5.0", "_from_model_config": True, "pad_token_id": 0}
    switched_off = {"num_beams": 1, "no_repeat_ngram_size": 0, "early_stopping": False}
    read(**followed, **about_itself, **switched_off, forced_eos_token_id=None, use_cache=True)
    assert caplog.messages == []


def test_a_model_without_the_file_has_no_defaults(tmp_path, caplog):
    defaults, ends = read_generation(Source(tmp_path, "tiny"), CONFIG)
    assert (defaults.temperature, defaults.max_tokens, ends) == (None, None, frozenset())
    assert caplog.messages == []
