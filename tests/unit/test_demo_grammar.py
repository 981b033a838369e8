"""The demo model's grammar and its parser agree on what is a sentence and what is not."""

import random
import re

import pytest

from tools.lab.demo.corpus import (
    document,
    named_prompt,
    request_and_story,
    strange_name,
    training_stories,
)
from tools.lab.demo.grammar import (
    OPTIONAL_SHARE,
    STORIES,
    _choices,
    count_derivations,
    story_from_seed,
    write_story,
)
from tools.lab.demo.notation import GrammarError, Tables, _add_entry, load, split_sentences
from tools.lab.demo.parser import story_parser

SEEDS = range(40)


def test_every_written_sentence_parses() -> None:
    parser = story_parser()
    for seed in SEEDS:
        for sentence in story_from_seed(seed).sentences:
            assert parser.accepts_sentence(sentence), f"seed {seed}: {sentence}"


def test_every_written_story_parses_as_a_whole() -> None:
    parser = story_parser()
    for seed in SEEDS:
        assert parser.accepts_story(story_from_seed(seed).text), f"seed {seed}"


def test_every_plot_parses_as_a_whole() -> None:
    for plot in load(STORIES).plots:
        story = write_story(random.Random(f"plot/{plot}"), plot=plot)
        assert story_parser().accepts_story(story.text), story.text


def test_splitting_a_story_gives_back_its_sentences() -> None:
    for seed in SEEDS:
        story = story_from_seed(seed)
        assert tuple(split_sentences(story.text)) == story.sentences, f"seed {seed}"


def test_swapping_two_neighbouring_words_is_refused() -> None:
    parser = story_parser()
    for seed in SEEDS:
        rng = random.Random(f"swap/{seed}")
        words = rng.choice(story_from_seed(seed).sentences).split()
        places = [i for i in range(len(words) - 1) if words[i] != words[i + 1]]
        at = rng.choice(places)
        words[at], words[at + 1] = words[at + 1], words[at]
        assert not parser.accepts_sentence(" ".join(words)), f"seed {seed}: {' '.join(words)}"


@pytest.mark.parametrize(
    "sentence",
    [
        "",
        "The end",
        "The end. ",
        "Once upon a time there was a old owl named Mina.",
        "Once upon a time there was a brave girl named Otto.",
        "Once upon a time there was a brave fox named Qqq.",
        "Mina loved reading books and drawing pictures.",
        "From that day on, Mina and Mina were the best of friends.",
        "Mina had a red ball, and he took it everywhere.",
        "Mina had a red spaceship, and she took it everywhere.",
    ],
)
def test_parser_refuses(sentence: str) -> None:
    assert not story_parser().accepts_sentence(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "The end.",
        "Once upon a time there was an old owl named Mina.",
        "Once upon a time there was a brave boy named Otto.",
        "Mina had a red ball, and she took it everywhere.",
        '"Why are you so sad?" asked Otto.',
        '"I have lost my red ball," said Mina.',
    ],
)
def test_parser_accepts(sentence: str) -> None:
    assert story_parser().accepts_sentence(sentence)


def test_a_story_with_a_stranger_in_it_is_refused_although_its_sentences_are_not() -> None:
    story = story_from_seed(3)
    changed = story.text.replace(story.hero, "Mina" if story.hero != "Mina" else "Ada", 1)
    assert not story_parser().accepts_story(changed)


def test_seeds_reproduce_and_differ() -> None:
    texts = [story_from_seed(seed).text for seed in SEEDS]
    assert texts == [story_from_seed(seed).text for seed in SEEDS]
    assert len(set(texts)) == len(texts)


def test_grammar_derives_a_million_stories() -> None:
    assert count_derivations() >= 10**6


def test_counting_choices_agrees_with_listing_them() -> None:
    tables = Tables()
    _add_entry(tables, "list spot: here | there | far away", [])
    _add_entry(tables, "list thing: ball | kite", [])
    _add_entry(tables, "role toy: thing", [])
    _add_entry(tables, "beat look", ["{He} looked {spot} and {spot} for the {toy}."])
    assert _choices(tables, tables.beats["look"][0]) == (frozenset({"hero", "toy"}), 3 * 3)


def test_stories_have_the_promised_length() -> None:
    words = [len(story_from_seed(seed).text.split()) for seed in range(200)]
    assert min(words) >= 60
    assert max(words) <= 180
    assert 0 < OPTIONAL_SHARE < 1


def test_hero_recurs_after_the_prompt() -> None:
    for seed in SEEDS:
        prompt, hero = named_prompt(seed)
        assert hero in prompt
        assert prompt.count(".") <= 2


def test_strange_names_are_words_with_the_wanted_ending() -> None:
    rng = random.Random("strange")
    for _ in range(200):
        assert re.fullmatch("[A-Z][a-z]*a", strange_name(rng, ending="a"))


def test_a_strange_hero_is_named_in_every_place_of_the_document() -> None:
    documents = [document(1, index) for index in range(60)]
    strange = [d for d in documents if d.strange]
    assert 0 < len(strange) < len(documents) / 2
    for d in strange:
        assert d.strange in d.stories[0]
        assert not d.messages or d.stories[0] in [m["content"] for m in d.messages]


def test_no_name_is_both_hers_and_his() -> None:
    lists = load(STORIES).lists
    assert not set(lists["she"]) & set(lists["he"])


def test_an_answer_keeps_what_the_request_named() -> None:
    for seed in SEEDS:
        request, story = request_and_story(random.Random(f"request/{seed}"))
        for role in ("hero", "friend", "far", "skill"):
            value = story.values.get(role, "")
            if value and re.search(rf"\b{value}\b", request):
                assert value in story.text, f"seed {seed}: {request}"


def test_documents_reproduce_and_list_their_stories() -> None:
    assert [document(1, i) for i in SEEDS] == [document(1, i) for i in SEEDS]
    assert document(1, 0) != document(2, 0)
    told = list(training_stories(1, len(SEEDS)))
    assert told == [story for i in SEEDS for story in document(1, i).stories]


@pytest.mark.parametrize("line", ["lists x: a | b", "beat", "plot p q"])
def test_malformed_lines_are_refused(line: str) -> None:
    with pytest.raises(GrammarError):
        _add_entry(Tables(), line, [])
