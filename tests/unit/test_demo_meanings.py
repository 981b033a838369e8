"""The demo encoders' texts for training and measuring, drawn by seed from separate meanings."""

import random

import pytest

from tools.lab.demo.handwritten import queries, triples
from tools.lab.demo.inflection import ing_of, past_of, plural_of, third_of, with_article
from tools.lab.demo.meaning_notation import lexicon, parse
from tools.lab.demo.meanings import Meaning, differing, draw_meaning
from tools.lab.demo.notation import GrammarError
from tools.lab.demo.searches import (
    HELD_OUT_DOCUMENTS,
    TRAINING_DOCUMENTS,
    first_search,
    held_out_search,
    training_search,
)
from tools.lab.demo.triples import held_out_triple, swap_lesson, training_triple
from tools.lab.demo.which import chosen
from tools.lab.demo.wording import draw_wording, like, say

SEEDS = range(150)


def concept(name: str):
    [found] = [c for c in lexicon().concepts[name.split("/")[0]] if c.name == name]
    return found


def meaning(frame: str, **roles: str) -> Meaning:
    """Return a meaning without details."""
    return Meaning(frame, tuple((role, concept(name)) for role, name in roles.items()))


def test_triples_reproduce_and_differ() -> None:
    triples = [training_triple(1, index) for index in SEEDS]
    assert triples == [training_triple(1, index) for index in SEEDS]
    assert len({t.anchor for t in triples}) > 0.95 * len(triples)
    assert triples[0] != training_triple(2, 0)
    assert [held_out_triple(1, i) for i in SEEDS] == [held_out_triple(1, i) for i in SEEDS]


def test_the_texts_of_a_triple_differ_and_sentences_begin_with_a_capital() -> None:
    for index in SEEDS:
        for triple in (training_triple(1, index), held_out_triple(1, index)):
            assert len(set(triple.texts)) == 3, triple
            for text in triple.texts:
                assert text.lstrip('"')[0].isupper(), text
                assert "{" not in text
                assert "  " not in text


def test_no_training_text_has_a_held_out_meaning() -> None:
    for index in SEEDS:
        for triple in (training_triple(1, index), swap_lesson(1, index)):
            assert not any(m.is_held_out for m in triple.meanings), triple


def test_every_held_out_triple_is_about_a_held_out_combination() -> None:
    for index in SEEDS:
        assert held_out_triple(0, index).meanings[0].is_held_out


def test_held_out_and_training_combinations_are_disjoint_and_both_many() -> None:
    training = {m.key for i in range(1200) for m in training_triple(1, i).meanings}
    held_out = {held_out_triple(0, i).meanings[0].key for i in range(1200)}
    assert not training & held_out
    assert min(len(training), len(held_out)) > 300


def test_a_mirror_frame_is_held_out_in_either_order_of_its_roles() -> None:
    one = meaning("meet", agent="animal/fox", patient="animal/owl")
    other = meaning("meet", agent="animal/owl", patient="animal/fox")
    assert one.key == other.key
    assert one.says("meet", other.core)
    assert other.says("meet", (("patient", concept("animal/fox")),))
    chase = {"agent": "animal/fox", "verb": "deed/chase", "patient": "animal/owl"}
    back = chase | {"agent": chase["patient"], "patient": chase["agent"]}
    assert not meaning("deed", **chase).says("deed", meaning("deed", **back).core)


def test_a_differing_meaning_differs_in_little() -> None:
    rng = random.Random("differing")
    for _ in SEEDS:
        one = draw_meaning(rng)
        other, differs = differing(rng, one)
        assert other != one
        if differs == "contrary":
            assert lexicon().frames[one.frame].unlike == other.frame
            continue
        before, after = dict(one.core + one.details), dict(other.core + other.details)
        changed = {role for role in before if before[role] != after[role]}
        assert len(changed) == (2 if differs == "swap" else 1), (one, other)


def test_a_meaning_that_differs_from_a_wish_does_not_fulfil_it() -> None:
    rng = random.Random("wish")
    for _ in SEEDS:
        one = draw_meaning(rng)
        wanted = one.core[:1]
        other, _ = differing(rng, one, wanted, held_out=False)
        assert not other.says(one.frame, wanted)
        assert not other.is_held_out


def test_the_negative_has_the_words_of_the_first_text_except_the_difference() -> None:
    rng = random.Random("words")
    one = meaning("deed", agent="animal/fox", verb="deed/chase", patient="animal/donkey")
    other = meaning("deed", agent="animal/fox", verb="deed/chase", patient="animal/badger")
    for _ in SEEDS:
        wording = draw_wording(rng, one)
        text, changed = say(one, wording), say(other, like(rng, wording, one, other))
        assert changed.lower().replace("badger", "donkey") == text.lower()
        assert changed != text


def test_every_wording_can_be_said() -> None:
    said: set[tuple[str, str]] = set()
    rng = random.Random("ways")
    for _ in range(8000):
        drawn = draw_meaning(rng)
        said.add((drawn.frame, draw_wording(rng, drawn).way))
    assert said == {(f.name, way) for f in lexicon().frames.values() for way in f.ways}


def test_searches_reproduce_and_their_documents_differ() -> None:
    for index in range(40):
        search = held_out_search(1, index)
        assert search == held_out_search(1, index)
        assert len(set(search.documents)) == HELD_OUT_DOCUMENTS
        for find in (first_search, training_search):
            assert len(set(find(1, index).documents)) == TRAINING_DOCUMENTS
        assert search.query


def test_only_the_first_document_fulfils_the_whole_wish() -> None:
    for index in range(60):
        for find in (first_search, training_search, held_out_search):
            right, *wrong = find(1, index).fulfilled
            assert all(right.values())
            assert not any(all(one.values()) for one in wrong)


def test_handwritten_texts_are_complete_and_come_from_no_grammar() -> None:
    assert len(triples()) >= 30
    assert len(queries()) >= 20
    texts = [text for row in (*triples(), *queries()) for text in row]
    assert len(set(texts)) == len(texts) == 3 * len(triples()) + 4 * len(queries())
    trained = {text for i in range(1000) for text in training_triple(1, i).texts}
    assert not trained & set(texts)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (past_of("chase"), "chased"),
        (past_of("hug"), "hugged"),
        (past_of("cry"), "cried"),
        (past_of("play"), "played"),
        (past_of("visit"), "visited"),
        (ing_of("swim"), "swimming"),
        (ing_of("lie"), "lying"),
        (ing_of("see"), "seeing"),
        (ing_of("take"), "taking"),
        (third_of("catch"), "catches"),
        (third_of("have"), "has"),
        (third_of("go"), "goes"),
        (plural_of("fox"), "foxes"),
        (plural_of("city"), "cities"),
        (plural_of("monkey"), "monkeys"),
        (with_article("owl"), "an owl"),
        (with_article("unicorn"), "a unicorn"),
        (with_article("honest fox"), "an honest fox"),
    ],
)
def test_words_are_inflected(made: str, expected: str) -> None:
    assert made == expected


@pytest.mark.parametrize(
    "text",
    [
        "nouns",
        "things x",
        "  fox",
        "nouns a\n  fox\nnouns a\n  owl",
        "places p\n  river",
        "verbs v\n  run/ran",
        "frame f: agent=nobody\n  {agent} slept",
        "nouns a\n  fox\nframe f: agent=a\n  {patient} slept",
        "nouns a\n  fox\nframe f: agent=a\n  {agent.past}",
        "nouns a\n  fox\nframe f: agent=a\n  {agent} slept\n  ask patient: who slept",
        "nouns a\n  fox\nframe f: agent=a unlike=g\n  {agent} slept",
        "nouns a\n  fox\nframe f walk: agent=a\n  {agent} slept",
    ],
)
def test_malformed_grammars_are_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        parse(text)


def test_a_command_runs_the_named_model_or_the_stories() -> None:
    names = ["stories", "embed"]
    assert chosen(["embed", "--seed", "2"], names) == ("embed", ["--seed", "2"])
    assert chosen(["--seed", "2"], names) == ("stories", ["--seed", "2"])
    assert chosen([], names) == ("stories", [])
    with pytest.raises(SystemExit, match="not a demo model"):
        chosen(["imbed"], names)
