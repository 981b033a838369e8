"""The shipped embedding model and cross-encoder, loaded by sentence-transformers.

Both models reach their bars on a part of the held-out texts. `python -m tools.lab.measure_demo
embed` measures all of them.
"""

import json

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.core.common.types import PlanId, SequenceId
from engine.core.encode.types import EncodeOptions, EncodePlan, EncodeRow
from engine.worker.factory import make_runner
from engine.worker.load.resolve import resolve
from tools.lab.demo import measure_embed, measure_rerank
from tools.lab.demo.figures import SIZE_BYTES_MAX, missed_bars, size_of
from tools.lab.demo.searches import held_out_search
from tools.lab.demo.triples import held_out_triple

EMBED, RERANK = resolve("demo-embed"), resolve("demo-rerank")
TRIPLES, SEARCHES = 600, 100
STRANGE = (
    "",
    " ",
    "Zorblax qwfpgj",
    "日本語のテキスト",
    "🦊🐢",
    "Ünïcödé ẞ ﬁ",
    "\x00\u200b\n\t",
    "é" * 3000,
)


@pytest.fixture(scope="module")
def embedder():
    """Return the shipped embedding model, loaded by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(EMBED.directory), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def reranker():
    """Return the shipped cross-encoder, loaded by sentence-transformers."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(RERANK.directory), device="cpu", local_files_only=True)


@pytest.mark.parametrize("source", [EMBED, RERANK], ids=lambda source: source.name)
def test_a_demo_encoder_is_a_small_folder_with_a_card_and_its_trainings_numbers(source):
    assert source.is_demo
    assert size_of(source.directory) < SIZE_BYTES_MAX
    files = {path.name for path in source.directory.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "training.json"} <= files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]
    facts = json.loads((source.directory / "training.json").read_text(encoding="utf-8"))
    assert facts["seed"] >= 0
    card = (source.directory / "README.md").read_text(encoding="utf-8")
    assert "## What it can't do" in card


def test_both_are_float32_and_take_texts_of_at_least_128_tokens(embedder, reranker):
    for model in (embedder, reranker):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert model.max_seq_length >= 128


def test_embeddings_have_length_one_and_every_text_has_one(embedder):
    vectors = embedder.encode(list(STRANGE))
    assert vectors.shape == (len(STRANGE), embedder.get_embedding_dimension())
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert len({vector.tobytes() for vector in vectors[2:]}) == len(STRANGE) - 2
    unknown = embedder.tokenizer.unk_token_id
    assert not any(unknown in ids for ids in embedder.tokenizer(list(STRANGE))["input_ids"])


def test_scores_are_probabilities_for_every_text(reranker):
    scores = reranker.predict([(text, other) for text in STRANGE for other in STRANGE])
    assert np.isfinite(scores).all()
    assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.slow
def test_the_embedding_model_prefers_held_out_paraphrases_to_texts_with_the_same_words(embedder):
    held_out = [held_out_triple(0, index) for index in range(TRIPLES)]
    texts = [t.texts for t in held_out]
    share = np.mean(measure_embed.right(embedder, texts))
    assert share >= measure_embed.BARS["held_out_right"], f"{share} of {TRIPLES}, seed 0"


def test_the_cross_encoder_ranks_the_answer_first_of_ten(reranker):
    held_out = [held_out_search(0, index) for index in range(SEARCHES)]
    best = measure_rerank.best_documents(reranker, held_out)
    share = np.mean([found == 0 for found in best])
    assert share >= measure_rerank.BARS["held_out_first"], f"{share} of {SEARCHES}, seed 0"


def test_neighbours_in_a_batch_do_not_change_an_embedding(embedder):
    texts = [held_out_triple(1, index).anchor for index in range(20)]
    together = embedder.encode(texts)
    alone = np.stack([embedder.encode(text) for text in texts])
    assert np.abs(together - alone).max() < 1e-5


def engine_values(name, inputs_of):
    """Return what the engine's own runner computes from the inputs that its tokenizer makes."""
    model = ModelConfig(name)
    runner = make_runner(model, EngineConfig(models=(model,)))
    assert runner.load(lambda progress: None).is_demo
    inputs = [one.input for one in inputs_of(runner.encoder_tokenizer)]
    order = sorted(range(len(inputs)), key=lambda i: len(inputs[i].token_ids))
    rows = tuple(EncodeRow(SequenceId(i), inputs[i], EncodeOptions()) for i in order)
    made = {
        row.sequence: np.array(row.values)
        for row in runner.execute(EncodePlan(PlanId(1), rows)).rows
    }
    runner.close()
    return np.stack([made[i] for i in range(len(inputs))])


def test_the_engine_finds_both_by_id_and_computes_what_the_library_does(embedder, reranker):
    texts = [held_out_triple(2, index).anchor for index in range(20)]
    vectors = engine_values("demo-embed", lambda tokenizer: tokenizer.encode_texts(texts, ""))
    assert np.abs(vectors - embedder.encode(texts)).max() < 1e-5
    search = held_out_search(2, 0)
    documents = list(search.documents)
    scores = engine_values("demo-rerank", lambda t: t.encode_pairs(search.query, documents))
    expected = reranker.predict([(search.query, document) for document in documents])
    assert np.abs(scores[:, 0] - expected).max() < 1e-5


def test_a_missed_bar_is_reported():
    figures = {"held_out_right": 0.9, "size_bytes": SIZE_BYTES_MAX + 1}
    assert len(missed_bars(figures, measure_embed.BARS)) == 2
    assert not missed_bars({"held_out_right": 0.96, "size_bytes": 1}, measure_embed.BARS)
