"""Each kind of encoder in docs/features.md against sentence-transformers, with planted faults.

The library computes each text alone; we compute it alone and in a batch of various lengths.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from engine.core.encode.types import EncodeInput, EncodeOptions
from engine.errors import InvalidRequest, SpawnFailed
from engine.status import Capability
from engine.worker.encode.input_template import InputTemplate
from engine.worker.encode.tokenizer import TEXTS_AT_ONCE
from tests.conformance.test_encoders import PAIRS, QUERY, TEXTS, drop_tensor, embed, execute, load
from tests.support import encoder_zoo as zoo

FEATURES = Path(__file__).parents[2] / "docs" / "features.md"


def distance(got, want):
    """Return the greatest distance of two lists of vectors, as one minus their cosine."""
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    return float((1 - (got * want).sum(axis=1) / lengths).max())


@pytest.mark.parametrize("name", zoo.EMBEDDERS)
def test_vectors_are_the_librarys_and_another_pooling_is_seen(name, tmp_path):
    from sentence_transformers import SentenceTransformer

    kind = zoo.EMBEDDERS[name]
    zoo.write_embedder(tmp_path, kind)
    oracle = SentenceTransformer(str(tmp_path), device="cpu")
    runner, _ = load(tmp_path)
    for prompt in ("query", "document"):
        want = np.stack([oracle.encode([text], prompt_name=prompt)[0] for text in TEXTS])
        for alone in (False, True):
            got = embed(runner, TEXTS, prompt_name=prompt, alone=alone)
            assert got.shape == want.shape
            assert distance(got, want) <= 1e-5
    wrong = "cls" if kind.pooling == "lasttoken" else "lasttoken"
    runner._output.modules[1].pooling_mode = wrong
    assert distance(embed(runner, TEXTS, prompt_name="document"), want) > 1e-3
    runner.close()


def scores(runner, *, alone, raw=True):
    """Return the runner's scores of all pairs, computed alone or in one batch."""
    inputs = [one.input for one in runner.encoder_tokenizer.encode_pairs(QUERY, TEXTS)]
    options = EncodeOptions(raw_scores=raw)
    parts = [[one] for one in inputs] if alone else [inputs]
    return np.concatenate(
        [v for part in parts for v in execute(runner, part, [options] * len(part))]
    )


def check_scores(directory):
    """Compare a reranker's scores with the library's. Return its runner and the scores."""
    import torch
    from sentence_transformers import CrossEncoder

    oracle = CrossEncoder(str(directory), device="cpu")
    runner, info = load(directory)
    assert info.kind is Capability.RERANK
    for raw in (False, True):
        own = {"activation_fn": torch.nn.Identity()} if raw else {}
        want = np.concatenate([oracle.predict([pair], **own) for pair in PAIRS])
        for alone in (False, True):
            np.testing.assert_allclose(scores(runner, alone=alone, raw=raw), want, atol=1e-4)
    assert np.ptp(want) > 1e-2
    return runner, want


@pytest.mark.parametrize("name", zoo.CLASSIFIERS)
def test_classifiers_scores_are_the_librarys_and_another_padding_is_seen(name, tmp_path):
    zoo.write(tmp_path, zoo.CLASSIFIERS[name], "ForSequenceClassification", num_labels=1)
    runner, want = check_scores(tmp_path)
    if zoo.CLASSIFIERS[name].ends:
        runner._pad_id = 7
    else:
        runner._pads_left, runner._features_of = False, runner._features
        runner._features = lambda inputs: {
            key: one.new_ones(one.shape) if key == "attention_mask" else one
            for key, one in runner._features_of(inputs).items()
        }
    assert np.abs(scores(runner, alone=False) - want).max() > 1e-3
    runner.close()


@pytest.mark.parametrize("name", zoo.GENERATORS)
def test_generators_scores_are_the_librarys_and_another_side_of_padding_is_seen(name, tmp_path):
    zoo.write_generator(tmp_path, zoo.GENERATORS[name])
    runner, want = check_scores(tmp_path)
    runner._pads_left = False
    assert np.abs(scores(runner, alone=False) - want).max() > 1e-3
    runner.close()


PADDINGS = {"Bert": (0,), "Roberta": (0, 5), "MPNet": (1,)}


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        pytest.param(name, padding, marks=[] if name in PADDINGS else pytest.mark.full)
        for name in zoo.POSITIONED
        for padding in PADDINGS.get(name, (1,))
    ],
)
def test_the_longest_input_is_what_transformers_can_compute(name, padding, tmp_path):
    """RoBERTa has 514 positions, of which two belong to no token (TEI#28)."""
    import torch
    from transformers import AutoModelForSequenceClassification

    sizes = {"max_position_embeddings": 34, "pad_token_id": padding, "num_labels": 1}
    zoo.write(tmp_path, zoo.POSITIONED[name], "ForSequenceClassification", **sizes)
    zoo.edit_json(tmp_path / "tokenizer_config.json", model_max_length=1000)
    oracle = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    values = {}
    for length in range(26, 40):
        ids = [20 + place % 7 for place in range(length)]
        try:
            with torch.no_grad():
                values[length] = oracle(torch.tensor([ids])).logits.item()
        except (IndexError, RuntimeError):
            break
    runner, info = load(tmp_path)
    assert info.max_model_len == max(values)
    [pair] = runner.encoder_tokenizer.encode_pairs("wind " * 50, ["rain " * 50])
    assert pair.full_tokens > len(pair.input.token_ids) == info.max_model_len
    longest = EncodeInput(tuple(20 + place % 7 for place in range(info.max_model_len)))
    [got] = execute(runner, [longest], [EncodeOptions(raw_scores=True)])
    assert got.item() == pytest.approx(values[info.max_model_len], abs=1e-4)
    runner.close()


def test_a_cut_input_without_its_templates_end_is_seen(tmp_path, monkeypatch):
    zoo.write_generator(tmp_path, zoo.GENERATORS["Qwen3-Reranker"])
    runner, want = check_scores(tmp_path)
    monkeypatch.setattr(InputTemplate, "end", lambda *_: ())
    wrong = np.abs(scores(runner, alone=True) - want) > 1e-3
    assert wrong.any()
    assert not wrong[0], "a short pair is not cut"
    runner.close()


def test_positions_that_count_padding_are_seen(tmp_path):
    zoo.write_generator(tmp_path, zoo.GENERATORS["Rerankers with learnt positions"])
    runner, want = check_scores(tmp_path)
    features = runner._features

    def without_positions(inputs):
        made = features(inputs)
        del made["position_ids"]
        return made

    runner._features = without_positions
    assert np.abs(scores(runner, alone=False) - want).max() > 1e-3
    runner.close()


def test_a_document_that_looks_like_an_image_is_a_text(tmp_path):
    zoo.write_generator(tmp_path, zoo.GENERATORS["Qwen3-Reranker"])
    runner, _ = load(tmp_path)
    [one] = runner.encoder_tokenizer.encode_pairs("a dog", ["https://example.org/dog.png"])
    assert one.full_tokens > 20
    runner.close()


def test_a_checkpoint_with_code_of_its_own_is_loaded_without_it(tmp_path):
    zoo.write_embedder(tmp_path, zoo.EMBEDDERS["Nomic"])
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('this was run')")
    zoo.edit_config(tmp_path, auto_map={"AutoModel": "modeling_own.Own"})
    runner, info = load(tmp_path)
    assert info.architecture == "NomicBertModel"
    runner.close()


# ---- refusals


def generator(**fields):
    """Return a writer of a reranker that generates, with another chat template."""

    def write(directory):
        zoo.write_generator(directory, zoo.GENERATORS["Qwen3-Reranker"])
        (directory / "chat_template.jinja").write_text(fields["template"])

    return write


def classifier_without_padding(directory):
    kind = zoo.CLASSIFIERS["Qwen3-Reranker, converted"]
    zoo.write(directory, kind, "ForSequenceClassification", num_labels=1)
    zoo.edit_config(directory, pad_token_id=None)


def embedder(name, **fields):
    """Return a writer of an embedding model with another config."""

    def write(directory):
        zoo.write_embedder(directory, zoo.EMBEDDERS[name])
        zoo.edit_config(directory, **fields)

    return write


def embedder_with(template):
    """Return a writer of an embedding model with another chat template."""

    def write(directory):
        zoo.write_embedder(directory, zoo.EMBEDDERS["Decoders with a chat template"])
        (directory / "chat_template.jinja").write_text(template)

    return write


def nomic_without_a_tensor(directory):
    zoo.write_embedder(directory, zoo.EMBEDDERS["Nomic"])
    drop_tensor("encoder.layers.1.attn.Wqkv.weight")(directory)


def with_text_settings(directory):
    zoo.write_embedder(directory, zoo.EMBEDDERS["ModernBERT"])
    path = directory / "sentence_bert_config.json"
    settings = json.loads(path.read_text()) | {"processing_kwargs": {"text": {"max_length": 9}}}
    path.write_text(json.dumps(settings))


OWN_CODE = (
    "is none of transformers' and needs the checkpoint's own code, which is never run; choose"
)
REFUSED = {
    "a template without a place for a text": (
        embedder_with("{{ raise_exception('no') }}"), "no place for a text; choose a checkpoint",
    ),
    "GTE in its first form": (
        embedder("GTE", model_type="new"), f"{OWN_CODE} a checkpoint whose model type is 'gte'",
    ),
    "Jina 3 in its first form": (
        embedder("Jina 3", model_type="xlm-roberta-flash"),
        f"{OWN_CODE} a checkpoint whose model type is 'jina_embeddings_v3'",
    ),
    "another model with code of its own": (
        embedder("GTE", model_type="their_own"),
        f"{OWN_CODE} a checkpoint whose model type transformers has",
    ),
    "a template without places": (
        generator(template=zoo.CHAT_TEMPLATE), "no place for a query and a document; choose",
    ),
    "a template that refuses": (
        generator(template="{{ raise_exception('no') }}"), "no place for a query and a document",
    ),
    "a classifier without padding": (classifier_without_padding, "has no pad_token_id"),
    "a fused tensor is missing": (nomic_without_a_tensor, r"lacks the tensor \S*1\.attn\.Wqkv"),
    "texts are read otherwise": (
        with_text_settings, r"processing_kwargs\.text, which changes .* not supported; choose",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_encoder_is_refused_in_one_sentence(name, tmp_path):
    write, sentence = REFUSED[name]
    write(tmp_path)
    with pytest.raises(SpawnFailed, match=sentence):
        load(tmp_path)


def test_a_document_that_the_template_refuses_is_named(tmp_path):
    guard = "{% if 'bad' in messages[-1].content %}{{ raise_exception('a bad one') }}{% endif %}"
    generator(template=guard + zoo.PAIRS_TEMPLATE)(tmp_path)
    runner, _ = load(tmp_path)
    documents = [*["good"] * TEXTS_AT_ONCE, "bad"]
    with pytest.raises(InvalidRequest, match=f"^{TEXTS_AT_ONCE}: .*a bad one"):
        runner.encoder_tokenizer.encode_pairs("who", documents)
    assert len(runner.encoder_tokenizer.encode_pairs("who", documents[:-1])) == TEXTS_AT_ONCE
    runner.close()


def test_a_text_model_that_is_said_to_rank_is_refused_with_what_to_take(tmp_path):
    zoo.write(tmp_path, zoo.GENERATORS["Rerankers without a template"], "ForCausalLM")
    with pytest.raises(SpawnFailed, match="neither a classifier nor a LogitScore; choose"):
        load(tmp_path, capability="rerank")


def test_the_table_in_the_docs_has_each_kind_once():
    page = FEATURES.read_text().partition("## Encoders\n")[2]
    names = re.findall(r"^\| (?!encoder|---)([^|]+?) \| (?:embeds|ranks)", page, re.MULTILINE)
    rankers = ["BERT rerankers", *zoo.CLASSIFIERS, *zoo.GENERATORS]
    assert names == ["BERT and its kin", *zoo.EMBEDDERS, *rankers]
