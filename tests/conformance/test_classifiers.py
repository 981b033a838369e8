"""Classifiers of texts and of tokens against transformers' pipelines, in float32.

Each input is computed alone and in a batch; both must have the pipeline's labels and spans, and its
scores to 1e-5.
"""

import itertools

import numpy as np
import pytest

from engine.core.common.steps import RowFailure
from engine.core.encode.types import (
    ACTIVATIONS,
    AGGREGATIONS,
    GROUPED,
    EncodeInput,
    EncodeOptions,
    name_of_group,
)
from engine.errors import InvalidRequest, SpawnFailed
from engine.status import Capability
from engine.worker.encode import classifier, labels
from engine.worker.encode.tokenizer import Spans
from tests.checkpoints.encode import WORDS, make_embedder, make_reranker
from tests.conformance.test_encoders import TEXTS, edit_tensors, load
from tests.conformance.test_vector_kinds import results_of
from tests.support import encoder_zoo as zoo

HYPOTHESIS = "there is a road to the moon"
MOODS = ["joy", "anger", "fear"]
NAMES = ["O", "B-person", "I-person", "B-place", "I-place", "other"]
SEQUENCE = "ForSequenceClassification"
# The kinds of classifiers of texts, and fields of their configs.
KINDS = {
    "BERT": (zoo.Kind("Bert"), {"num_labels": 3}),
    "several labels at once": (
        zoo.Kind("Bert"), {"num_labels": 3, "problem_type": "multi_label_classification"},
    ),
    "one label": (zoo.Kind("Bert"), {"num_labels": 1}),
    "regression": (zoo.Kind("Bert"), {"num_labels": 1, "problem_type": "regression"}),
    "two labels without names": (zoo.Kind("DistilBert"), {"num_labels": 2}),
    "RoBERTa": (zoo.EMBEDDERS["RoBERTa and its kin"], {"num_labels": 3}),
    "DeBERTa": (zoo.POSITIONED["DebertaV2"], {"num_labels": 3}),
    "ModernBERT": (zoo.CLASSIFIERS["ModernBERT rerankers"], {"num_labels": 3}),
    "a decoder": (zoo.CLASSIFIERS["Qwen3-Reranker, converted"], {"num_labels": 3}),
    "a reward model": (zoo.Kind("Llama", ends=True), {"num_labels": 1}),
}  # fmt: skip


def names_of(names):
    """Return the fields of a config with the names of labels."""
    by_id = dict(enumerate(names))
    return {"id2label": by_id, "label2id": {name: label for label, name in by_id.items()}}


def write_classifier(directory, name):
    """Write a classifier of texts."""
    kind, fields = KINDS[name]
    number = fields["num_labels"]
    own = names_of(MOODS[:number]) if number != 2 else {}
    if kind.name == "Llama":
        kind = zoo.Kind("Llama", {"eos_token_id": 3, "bos_token_id": 2}, ends=True)
    zoo.write(directory, kind, SEQUENCE, **fields, **own)


def oracle_of(directory, task):
    """Return transformers' pipeline."""
    import transformers

    return transformers.pipeline(task, model=str(directory), device="cpu")


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """Return the name of a kind, its runner and info, and the pipeline."""
    directory = tmp_path_factory.mktemp("classifier")
    write_classifier(directory, request.param)
    runner, info = load(directory)
    yield request.param, runner, info, oracle_of(directory, "text-classification")
    runner.close()


def classified(runner, info, inputs, *, alone=False, **options):
    """Return the labels of tokenised inputs with their scores, the best first."""
    options = EncodeOptions(**{"activation": ""} | options)
    return [
        [(info.labels[label], score) for label, score in zip(one.indices, one.values, strict=True)]
        for one in results_of(runner, inputs, alone=alone, options=options)
    ]


def check_labels(got, want):
    """Check labels with scores against the pipeline's, of which neighbours must differ."""
    for own, theirs in zip(got, want, strict=True):
        assert [name for name, _ in own] == [each["label"] for each in theirs]
        scores = [each["score"] for each in theirs]
        np.testing.assert_allclose([score for _, score in own], scores, atol=1e-5)
        assert np.abs(np.diff(scores)).min(initial=1) > 1e-4, "the order is chance"


def pairs_of(runner):
    """Return each text before the hypothesis, as tokenised pairs."""
    return [runner.encoder_tokenizer.encode_pairs(text, [HYPOTHESIS])[0] for text in TEXTS]


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_labels_of_texts_are_the_pipelines(model, alone):
    name, runner, info, oracle = model
    want = oracle(TEXTS, top_k=None, truncation=True)
    inputs = runner.encoder_tokenizer.encode_texts(TEXTS, "")
    check_labels(classified(runner, info, inputs, alone=alone), want)
    best = {(one[0]["label"], round(one[0]["score"], 3)) for one in want}
    assert len(best) > 3, "texts with similar scores prove nothing"
    assert info.kind is (
        Capability.RERANK if KINDS[name][1]["num_labels"] == 1 else Capability.TEXT_CLASSIFICATION
    )


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_labels_of_pairs_are_the_pipelines(model, alone):
    _, runner, info, oracle = model
    pairs = [{"text": text, "text_pair": HYPOTHESIS} for text in TEXTS]
    want = [oracle(pair, top_k=None, truncation=True) for pair in pairs]
    check_labels(classified(runner, info, pairs_of(runner), alone=alone), want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_the_pipelines(model, activation):
    _, runner, info, oracle = model
    want = oracle(TEXTS, top_k=2, truncation=True, function_to_apply=activation)
    inputs = runner.encoder_tokenizer.encode_texts(TEXTS, "")
    check_labels(classified(runner, info, inputs, activation=activation, top_k=2), want)


def test_token_ids_are_used_as_they_are(model):
    _, runner, _, oracle = model
    ids = tuple(runner.encoder_tokenizer.encode_texts([TEXTS[1]], "")[0].input.token_ids)
    [got] = results_of(
        runner,
        [runner.encoder_tokenizer.encode_texts(["x"], "")[0]._replace(input=EncodeInput(ids))],
        alone=True,
        options=EncodeOptions(activation=""),
    )
    want = oracle(TEXTS[1], top_k=None)
    assert list(got.values) == pytest.approx([one["score"] for one in want], abs=1e-5)


def test_a_reranker_scores_and_classifies_in_one_step(tmp_path):
    """The activation of its scores is not that of its label."""
    make_reranker(tmp_path, activation="torch.nn.modules.linear.Identity")
    runner, info = load(tmp_path)
    pairs = pairs_of(runner)
    [scores, *_] = [results_of(runner, pairs, alone=False, options=EncodeOptions())]
    labelled = classified(runner, info, pairs)
    for raw, [(name, score)] in zip(scores, labelled, strict=True):
        assert name == "LABEL_0"
        assert score == pytest.approx(1 / (1 + np.exp(-raw.values[0])), abs=1e-6)
    runner.close()


def test_a_reranker_with_a_template_says_that_it_reads_pairs(tmp_path):
    zoo.write_generator(tmp_path, zoo.GENERATORS["Qwen3-Reranker"])
    runner, info = load(tmp_path)
    assert (info.reads_pairs, info.labels) == (True, (classifier.ONE_SCORE,))
    scores = classified(runner, info, pairs_of(runner), activation="none")
    raw = results_of(runner, pairs_of(runner), alone=False, options=EncodeOptions(raw_scores=True))
    assert [one[0][1] for one in scores] == [one.values[0] for one in raw]
    runner.close()


# ---- tokens


def byte_tokenizer():
    """Return a byte-level tokenizer, whose tokens do not show where words begin."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([WORDS], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=zoo.LENGTH, **names)


TAGGERS = {
    "BERT": zoo.Kind("Bert"),
    "RoBERTa": zoo.EMBEDDERS["RoBERTa and its kin"],
    "ModernBERT": zoo.CLASSIFIERS["ModernBERT rerankers"],
    "a decoder": zoo.CLASSIFIERS["Qwen3-Reranker, converted"],
    "bytes": zoo.Kind("Bert"),
}
TAGGED = [
    *TEXTS,
    "",
    "unquestionably, the Queen of snowfire (gold) met a 漢 child-king; [SEP] then über-old fish?",
    "wxyz wind'snow stars\tand moons  dogs",
]


def write_tagger(directory, name):
    """Write a classifier of tokens that gives every label to some."""
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    zoo.write(directory, TAGGERS[name], "ForTokenClassification", **names_of(NAMES))
    if name == "bytes":
        byte_tokenizer().save_pretrained(str(directory))
    model = AutoModelForTokenClassification.from_pretrained(directory).eval()
    read = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = [
            model(**read(text, return_tensors="pt", truncation=True)).logits[0] for text in TAGGED
        ]
        head = getattr(model, "classifier", None) or model.score
        head.bias -= torch.cat(logits).mean(dim=0)
    model.save_pretrained(directory)


@pytest.fixture(scope="module", params=TAGGERS)
def tagger(request, tmp_path_factory):
    """Return the name of a kind, its runner and info, and the pipeline."""
    directory = tmp_path_factory.mktemp("tagger")
    write_tagger(directory, request.param)
    runner, info = load(directory)
    assert info.kind is Capability.TOKEN_CLASSIFICATION
    yield request.param, runner, info, oracle_of(directory, "token-classification")
    runner.close()


def tagged(runner, info, aggregation, *, alone=False):
    """Return the entities of all texts: the name, the score, the first character and the end."""
    inputs = runner.encoder_tokenizer.encode_texts(TAGGED, "")
    options = EncodeOptions(aggregation=aggregation)
    names = info.labels
    if aggregation in GROUPED:
        names = [name_of_group(name) for name in names]
    return [
        [
            (names[label], score, start, end)
            for label, score, start, end in zip(
                one.indices, one.values, one.spans[::2], one.spans[1::2], strict=True
            )
        ]
        for one in results_of(runner, inputs, alone=alone, options=options)
    ]


def check_entities(got, oracle, aggregation):
    """Check entities against the pipeline's."""
    for text, own in zip(TAGGED, got, strict=True):
        theirs = oracle(text, aggregation_strategy=aggregation)
        name = "entity" if aggregation == "none" else "entity_group"
        want = [(one[name], one["start"], one["end"]) for one in theirs]
        assert [(label, start, end) for label, _, start, end in own] == want
        scores = [one["score"] for one in theirs]
        np.testing.assert_allclose([score for _, score, *_ in own], scores, atol=1e-5)


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_entities_are_the_pipelines(tagger, aggregation, alone):
    _, runner, info, oracle = tagger
    check_entities(tagged(runner, info, aggregation, alone=alone), oracle, aggregation)


def test_the_aggregations_differ(tagger):
    _, runner, info, _ = tagger
    found = {aggregation: tagged(runner, info, aggregation) for aggregation in AGGREGATIONS}
    for one, other in itertools.combinations(AGGREGATIONS, 2):
        assert found[one] != found[other], (one, other)
    for aggregation in GROUPED:
        rows = [row for text in found[aggregation] for row in text]
        assert {name for name, *_ in rows} == {"person", "place", "other"}
        assert max(end - start for _, _, start, end in rows) > 8, "no entity has several tokens"


# ---- planted faults


FAULTS = {
    "words": (Spans, "_is_inside", lambda self, *args: False, {"first", "average", "max"}),
    "the first label of a run": (labels, "BEGIN", "never", set(GROUPED)),
    "tokens outside": (labels, "OUTSIDE", "never", set(AGGREGATIONS)),
    "softmax": (
        labels, "activated", lambda logits, _: 1 / (1 + np.exp(-logits)), set(AGGREGATIONS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_entities_is_seen(fault, tmp_path, monkeypatch):
    write_tagger(tmp_path, "BERT")
    runner, info = load(tmp_path)
    oracle = oracle_of(tmp_path, "token-classification")
    owner, name, value, seen = FAULTS[fault]
    monkeypatch.setattr(owner, name, value)
    for aggregation in AGGREGATIONS:
        found = tagged(runner, info, aggregation)
        if aggregation in seen:
            with pytest.raises(AssertionError):
                check_entities(found, oracle, aggregation)
        else:
            check_entities(found, oracle, aggregation)
    runner.close()


def test_padding_that_counts_is_seen(model):
    name, runner, info, oracle = model
    if KINDS[name][0].ends:
        return check_padding_of_a_decoder(runner, info, oracle)
    features = runner._features

    def unmasked(inputs):
        made = features(inputs)
        made["attention_mask"] = made["attention_mask"] * 0 + 1
        return made

    runner._features = unmasked
    try:
        inputs = runner.encoder_tokenizer.encode_texts(TEXTS, "")
        with pytest.raises(AssertionError):
            check_labels(
                classified(runner, info, inputs), oracle(TEXTS, top_k=None, truncation=True)
            )
    finally:
        runner._features = features


def check_padding_of_a_decoder(runner, info, oracle):
    """A decoder's score is read at the last token that is not the padding's."""
    config = oracle.model.config.pad_token_id, runner._pad_id
    assert config[0] == config[1]
    runner._pad_id = 7
    try:
        inputs = runner.encoder_tokenizer.encode_texts(TEXTS, "")
        with pytest.raises(AssertionError):
            check_labels(
                classified(runner, info, inputs), oracle(TEXTS, top_k=None, truncation=True)
            )
    finally:
        runner._pad_id = config[1]


def test_the_wrong_default_activation_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.worker.encode.outputs.activation_of", lambda config: "softmax")
    write_classifier(tmp_path, "several labels at once")
    runner, info = load(tmp_path)
    want = oracle_of(tmp_path, "text-classification")(TEXTS, top_k=None, truncation=True)
    with pytest.raises(AssertionError):
        check_labels(
            classified(runner, info, runner.encoder_tokenizer.encode_texts(TEXTS, "")), want
        )
    runner.close()


# ---- files and bad numbers


@pytest.mark.parametrize("task", ["text", "token"])
def test_an_input_whose_logits_are_not_finite_fails_alone(task, tmp_path):
    if task == "text":
        write_classifier(tmp_path, "BERT")
    else:
        write_tagger(tmp_path, "BERT")

    def overflow(weights):
        weights["bert.embeddings.word_embeddings.weight"][20] = 3e38

    edit_tensors(overflow)(tmp_path)
    runner, _ = load(tmp_path)
    options = EncodeOptions(activation="") if task == "text" else EncodeOptions(aggregation="none")
    spoiled = runner.encoder_tokenizer.encode_texts(["x"], "")[0]
    inputs = [
        spoiled._replace(input=spoiled.input._replace(token_ids=(2, 20, 3))),
        *runner.encoder_tokenizer.encode_texts(["wind", "snow"], ""),
    ]
    results = results_of(runner, inputs, alone=False, options=options)
    assert [isinstance(one, RowFailure) for one in results] == [True, False, False]
    assert "not finite" in str(results[0])
    runner.close()


def edited(write, name, **fields):
    """Return a writer of a classifier with another config."""

    def make(directory):
        write(directory, name)
        zoo.edit_config(directory, **fields)

    return make


REFUSED = {
    "a label without a name": (
        edited(write_classifier, "BERT", id2label={"0": "a", "1": "b", "3": "c"}),
        None, "no name of the label 2 in id2label",
    ),
    "no labels": (edited(write_classifier, "BERT", id2label={}), None, "has no labels"),
    "names that are no Unicode": (
        edited(write_tagger, "BERT", id2label={str(n): "\ud800" for n in range(6)}),
        None, "not valid Unicode",
    ),
    "names that are too long": (
        edited(write_classifier, "BERT", id2label={str(n): "x" * 400_000 for n in range(3)}),
        None, "its 3 labels take 1200048 bytes, of at most 1048576",
    ),
    "a decoder without padding": (
        edited(write_classifier, "a decoder", pad_token_id=None), None, "has no pad_token_id",
    ),
    "several labels that are said to rank": (
        edited(write_classifier, "BERT"), Capability.RERANK, "has 3 labels in the place of one",
    ),
    "an embedder that is said to classify": (
        lambda directory: make_embedder(directory),
        Capability.TEXT_CLASSIFICATION, "choose a checkpoint whose class ends with",
    ),
    "a tagger that is said to classify texts": (
        edited(write_tagger, "BERT"), Capability.TEXT_CLASSIFICATION, "its files show token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_classifier_is_refused_in_one_sentence(name, tmp_path):
    write, capability, sentence = REFUSED[name]
    write(tmp_path)
    with pytest.raises(SpawnFailed, match=sentence):
        load(tmp_path, capability=capability)


def test_a_missing_head_is_seen(tmp_path):
    from safetensors.torch import load_file, save_file

    write_tagger(tmp_path, "BERT")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if "classifier" not in n}, tmp_path / "model.safetensors"
    )
    with pytest.raises(SpawnFailed, match=r"lacks the tensor classifier\."):
        load(tmp_path)


def test_a_multi_label_model_that_crossencoder_saved_classifies(tmp_path):
    from sentence_transformers import CrossEncoder

    base = tmp_path / "base"
    write_classifier(base, "BERT")
    CrossEncoder(str(base), device="cpu").save_pretrained(str(tmp_path / "saved"))
    runner, info = load(tmp_path / "saved")
    assert (info.kind, info.labels) == (Capability.TEXT_CLASSIFICATION, tuple(MOODS))
    runner.close()


def test_one_label_may_be_said_to_classify(tmp_path):
    write_classifier(tmp_path, "a reward model")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    runner, info = load(tmp_path, capability=Capability.TEXT_CLASSIFICATION)
    assert info.kind is Capability.TEXT_CLASSIFICATION
    assert not info.reads_pairs
    want = oracle_of(tmp_path, "text-classification")(TEXTS, top_k=None, truncation=True)
    check_labels(classified(runner, info, runner.encoder_tokenizer.encode_texts(TEXTS, "")), want)
    runner.close()


def test_half_a_surrogate_pair_is_named(tmp_path):
    write_tagger(tmp_path, "BERT")
    runner, _ = load(tmp_path)
    with pytest.raises(InvalidRequest, match=r"^1: is not valid Unicode"):
        runner.encoder_tokenizer.encode_texts(["a", "\ud800"], "")
    runner.close()
