"""Sparse vectors, a vector for each token, and scores by comparing these, against the classes of
sentence-transformers.

Each text is computed alone and in a batch; both must be the library's values to 1e-5.
"""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from engine.api._generated import blocking
from engine.config import EngineConfig, ModelConfig
from engine.core.common.steps import RowFailure
from engine.core.common.types import PlanId, SequenceId
from engine.core.encode.types import EncodeOptions, EncodePlan, EncodeRow
from engine.errors import InvalidRequest, SpawnFailed
from engine.requests.encode.values import Embedding, EmbedRequest
from engine.status import Capability
from engine.worker.encode.outputs import QUERIES_KEPT
from engine.worker.encode.runner import groups
from tests.checkpoints.encode import (
    EXPANSION,
    PRESETS,
    make_embedder,
    make_multi_vector_embedder,
    make_pylate,
    make_sparse_embedder,
    make_stanford,
)
from tests.conformance.test_encoders import (
    PROMPTS,
    QUERY,
    TEXTS,
    drop_tensor,
    edit_json,
    edit_tensors,
    load,
)
from tests.support import encoder_zoo as zoo


def run(runner, inputs, options=None):
    """Return the results of inputs in their order, all in one plan."""
    options = options or EncodeOptions()
    order = sorted(range(len(inputs)), key=lambda at: inputs[at].num_tokens)
    rows = tuple(EncodeRow(SequenceId(at), inputs[at], options) for at in order)
    results = {one.sequence: one for one in runner.execute(EncodePlan(PlanId(1), rows)).rows}
    return [results[at] for at in range(len(inputs))]


def results_of(runner, inputs, *, alone, options=None):
    """Return the results of tokenised inputs, each computed alone or all in one plan."""
    inputs = [one.input for one in inputs]
    parts = [[one] for one in inputs] if alone else [inputs]
    return [result for part in parts for result in run(runner, part, options)]


def scores(runner, *, alone=False):
    """Return the scores of all texts for the query."""
    pairs = runner.encoder_tokenizer.encode_pairs(QUERY, TEXTS)
    return np.array([one.values[0] for one in results_of(runner, pairs, alone=alone)])


# ---- sparse vectors

SPARSE = {
    "max": {},
    "sum": {"pooling": "sum"},
    "log1p twice": {"activation": "log1p_relu"},
    "at most 7 weights": {"most": 7},
    "prompts": {"prompts": PROMPTS | {"document": "document: "}},
}


def sparse(runner, *, prompt_name="", alone=False, **options):
    """Return the sparse vectors of all texts as rows of an array."""
    inputs = runner.encoder_tokenizer.encode_texts(TEXTS, prompt_name)
    found = results_of(runner, inputs, alone=alone, options=EncodeOptions(**options))
    made = np.zeros((len(TEXTS), 600), dtype=np.float32)
    for row, one in zip(made, found, strict=True):
        assert list(one.indices) == sorted(set(one.indices))
        assert len(one.indices) == len(one.values)
        assert min(one.values, default=np.inf) > options.get("threshold", 0.0)
        row[list(one.indices)] = one.values
    return made


@pytest.fixture(scope="module", params=SPARSE)
def splade(request, tmp_path_factory):
    """Return a sparse encoder's name, its runner, and the library's own model."""
    from sentence_transformers import SparseEncoder

    directory = tmp_path_factory.mktemp("splade")
    make_sparse_embedder(directory, **SPARSE[request.param])
    runner, info = load(directory)
    assert (info.kind, info.dimensions) == (Capability.SPARSE_EMBEDDING, 600)
    yield request.param, runner, SparseEncoder(str(directory), device="cpu")
    runner.close()


def theirs(oracle, **options):
    """Return the library's sparse vectors of all texts, each computed alone."""
    one = {"convert_to_sparse_tensor": False} | options
    return np.stack([oracle.encode([text], **one)[0].numpy() for text in TEXTS])


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_sparse_vectors_are_the_librarys(splade, alone):
    name, runner, oracle = splade
    want = theirs(oracle)
    np.testing.assert_allclose(sparse(runner, alone=alone), want, atol=1e-5)
    counts = np.count_nonzero(want, axis=1)
    assert counts.max() == 7 if name == "at most 7 weights" else 10 < counts.min() < 590
    if name == "prompts":
        want = theirs(oracle, prompt_name="query")
        np.testing.assert_allclose(sparse(runner, prompt_name="query"), want, atol=1e-5)
        assert np.abs(want - theirs(oracle)).max() > 1e-3


@pytest.mark.parametrize("top_k", [1, 5, 1000])
def test_the_greatest_weights_are_the_librarys(splade, top_k):
    """A request's number replaces the model's, also a smaller one."""
    _, runner, oracle = splade
    want = theirs(oracle, max_active_dims=top_k)
    np.testing.assert_allclose(sparse(runner, top_k=top_k), want, atol=1e-5)
    ranked = np.sort(want[want > 0])
    middle = len(ranked) // 2 + np.diff(ranked[len(ranked) // 2 :][:5]).argmax()
    threshold = float(ranked[middle : middle + 2].mean())  # far from every weight
    got = sparse(runner, top_k=top_k, threshold=threshold)
    np.testing.assert_allclose(got, np.where(want > threshold, want, 0), atol=1e-5)


@pytest.mark.parametrize("own", [None, 3])
def test_of_equal_weights_the_lower_indices_go_first(tmp_path, own):
    """The number is the request's, or the model's own."""
    make_sparse_embedder(tmp_path, most=own)

    def level(weights):
        for name, tensor in weights.items():
            if "LayerNorm.weight" in name:
                tensor.fill_(0.0)
        weights["cls.predictions.bias"].fill_(1.0)

    edit_tensors(level)(tmp_path)
    runner, _ = load(tmp_path)
    [one] = run(
        runner,
        [runner.encoder_tokenizer.encode_texts(["a"], "")[0].input],
        EncodeOptions(top_k=600),
    )
    assert len(one.values) > 3
    assert len(set(one.values)) == 1, "else the next line checks nothing"
    options = EncodeOptions(top_k=None if own else 3)
    [one] = run(runner, [runner.encoder_tokenizer.encode_texts(["a"], "")[0].input], options)
    assert list(one.indices) == [0, 1, 2]


def similarities(oracle):
    """Return the library's scores of all texts for the query."""
    dense = {"convert_to_sparse_tensor": False}
    query, documents = oracle.encode_query([QUERY], **dense), oracle.encode_document(TEXTS, **dense)
    return oracle.similarity(query, documents)[0].numpy()


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_scores_of_sparse_vectors_are_the_librarys(splade, alone):
    _, runner, oracle = splade
    want = similarities(oracle)
    got = scores(runner, alone=alone)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert list(np.argsort(-got)) == list(np.argsort(-want))


def test_each_query_of_a_plan_is_computed_once(splade, monkeypatch):
    """There are more than are kept, in turns that a small cache cannot follow."""
    _, runner, _ = splade
    pairs = runner.encoder_tokenizer.encode_pairs
    queries = [f"wind {number}" for number in range(3 * QUERIES_KEPT)]
    inputs = [pairs(query, [text])[0].input for text in TEXTS[:3] for query in queries]
    computed, features = [], runner._features

    def counted(inputs):
        computed.extend(inputs)
        return features(inputs)

    monkeypatch.setattr(runner, "_features", counted)
    together = run(runner, inputs)
    assert len(computed) == len(inputs) + len(queries)
    computed.clear()
    run(runner, inputs[:QUERIES_KEPT])
    run(runner, inputs[:QUERIES_KEPT])
    assert len(computed) == 2 * QUERIES_KEPT, "the last step's are kept"
    alone = run(runner, [inputs[0]])[0]
    np.testing.assert_allclose(together[0].values, alone.values, rtol=1e-5)


def test_padding_that_counts_is_seen(splade):
    _, runner, oracle = splade
    want, features = theirs(oracle), runner._features

    def unmasked(inputs):
        made = features(inputs)
        made["attention_mask"] = made["attention_mask"].new_ones(made["attention_mask"].shape)
        return made

    runner._features = unmasked
    try:
        assert np.abs(sparse(runner) - want).max() > 1e-3
    finally:
        runner._features = features


def test_a_query_without_its_prompt_is_seen(tmp_path):
    from sentence_transformers import SparseEncoder

    make_sparse_embedder(tmp_path, prompts=PROMPTS)
    runner, _ = load(tmp_path)
    oracle = SparseEncoder(str(tmp_path), device="cpu")
    want = similarities(oracle)
    np.testing.assert_allclose(scores(runner), want, rtol=1e-5)
    runner.encoder_tokenizer._query = ""
    assert np.abs(scores(runner) - want).max() > 1e-3


def test_a_masked_model_without_modules_is_one_if_the_operator_says_so(tmp_path):
    from sentence_transformers import SparseEncoder

    zoo.write(tmp_path, zoo.POSITIONED["DistilBert"], "ForMaskedLM")
    runner, info = load(tmp_path, capability="sparse-embedding")
    assert info.kind is Capability.SPARSE_EMBEDDING
    want = theirs(SparseEncoder(str(tmp_path), device="cpu"))
    np.testing.assert_allclose(sparse(runner), want, atol=1e-5)


def test_a_weight_that_is_not_finite_fails_its_row_alone(tmp_path):
    make_sparse_embedder(tmp_path)
    name = "bert.embeddings.position_embeddings.weight"
    edit_tensors(lambda w: w[name][50].fill_(3e38))(tmp_path)
    runner, _ = load(tmp_path)
    tokenizer = runner.encoder_tokenizer
    good, bad = (one.input for one in tokenizer.encode_texts([TEXTS[0], TEXTS[-1]], ""))
    found = run(runner, [bad, good._replace(query=bad), good])
    assert [isinstance(one, RowFailure) for one in found] == [True, True, False]


def test_both_texts_of_a_pair_are_cut_alone_and_tell_their_lengths(splade):
    _, runner, _ = splade
    [pair] = runner.encoder_tokenizer.encode_pairs("wind " * 70, ["rain " * 80])
    assert len(pair.input.token_ids) == len(pair.input.query.token_ids) == 64
    assert pair.full_tokens > 80
    assert pair.full_query > 70
    with pytest.raises(InvalidRequest) as caught:
        runner.encoder_tokenizer.encode_pairs("\ud800", ["a"])
    assert [one.field for one in caught.value.violations] == ["query"]


def modules_of(*names):
    """Return a change of a model's list of modules to these of sentence-transformers."""

    listed = [{"path": "", "type": f"sentence_transformers.{name}"} for name in names]
    return lambda directory: (directory / "modules.json").write_text(json.dumps(listed))


REFUSED = {
    "an autoencoder": (
        modules_of("Transformer", "SparseAutoEncoder"),
        "its module SparseAutoEncoder, which makes sparse vectors, is not served",
    ),
    "static weights": (
        modules_of("SparseStaticEmbedding"),
        "its module SparseStaticEmbedding, which makes sparse vectors, is not served",
    ),
    "a router": (modules_of("Router"), "names a module of type .*Router"),
    "no pooling": (modules_of("Transformer"), "has no SpladePooling"),
    "no head": (
        drop_tensor("cls.predictions.transform.dense.weight"),
        r"lacks the tensor cls\.predictions\.transform\.dense\.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_sparse_encoder_is_refused_in_one_sentence(tmp_path, name):
    change, sentence = REFUSED[name]
    make_sparse_embedder(tmp_path)
    change(tmp_path)
    with pytest.raises(SpawnFailed, match=sentence):
        load(tmp_path)


def test_an_embedding_model_that_is_said_to_be_sparse_is_refused(tmp_path):
    make_embedder(tmp_path)
    with pytest.raises(SpawnFailed, match="choose a checkpoint that SparseEncoder saved"):
        load(tmp_path, capability="sparse-embedding")


def test_forwards_with_weights_of_a_vocabulary_have_few_tokens(splade):
    """A row alone may have more; the others share a forward as long as they fit."""
    lengths = [10] * 200 + [30] * 3 + [1100]
    parts = [range(*part.indices(len(lengths))) for part in groups(lengths, 1024)]
    assert sorted(at for part in parts for at in part) == list(range(len(lengths)))
    assert [len(part) for part in parts] == [1, 5, 102, 96]
    assert PRESETS["tiny"].max_len == 64


# ---- a vector for each token

PUNCTUATION = ".,!?'-"
LATE = {"query": "question: ", "document": "text: "}


def pooled(directory, **fields):
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    return make_multi_vector_embedder(directory, more=[HierarchicalTokenPooling(2.0)], **fields)


def masked_last(directory):
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    mask = MultiVectorMask(skiplist_words=list(PUNCTUATION))
    return make_multi_vector_embedder(directory, more=[mask])


def colbert(**fields):
    return lambda directory: make_multi_vector_embedder(directory, **fields)


def expanding(**fields):
    return colbert(settings={"query_expansion": EXPANSION | fields}, skipped=PUNCTUATION)


COLBERT = {
    "plain": colbert(),
    "not normalised": colbert(normalize=False),
    "prompts": colbert(prompts=LATE),
    "limits": colbert(settings={"query_length": 6, "document_length": 11}),
    "a mask of punctuation": colbert(skipped=PUNCTUATION),
    "expansion": expanding(),
    "expansion that is attended to": expanding(attend=True),
    "expansion of short queries alone": expanding(strategy="min"),
    "expansion by another token": expanding(token="[SEP]"),
    "the mean of the similarities": colbert(similarity="meanmaxsim"),
    "tokens in clusters": pooled,
    "documents in clusters, and queries not normalised": partial(pooled, normalize=False),
    "a mask behind the normalisation": masked_last,
    "PyLate's": make_pylate,
    "PyLate's, attended to": lambda directory: make_pylate(
        directory, attend_to_expansion_tokens=True, query_length=12, document_length=20
    ),
    "PyLate's, without expansion": lambda directory: make_pylate(
        directory, do_query_expansion=False, skiplist_words=[]
    ),
    "Stanford's": make_stanford,
}


@pytest.fixture(scope="module", params=COLBERT)
def late(request, tmp_path_factory):
    """Return a model's name, its runner, and the library's own model."""
    from sentence_transformers import MultiVectorEncoder

    directory = tmp_path_factory.mktemp("late")
    COLBERT[request.param](directory)
    runner, info = load(directory)
    assert (info.kind, info.dimensions) == (Capability.MULTI_VECTOR_EMBEDDING, 8)
    if request.param == "limits":
        assert (info.query_len, info.document_len) == (6, 11)
    yield request.param, runner, MultiVectorEncoder(str(directory), device="cpu")
    runner.close()


def matrices(runner, *, prompt_name="", alone=False, **options):
    """Return the vectors of all texts, a matrix for each."""
    inputs = runner.encoder_tokenizer.encode_texts(TEXTS, prompt_name)
    found = results_of(runner, inputs, alone=alone, options=EncodeOptions(**options))
    return [np.array(one.values).reshape(one.rows, -1) for one in found]


def check_matrices(got, want, atol=1e-5):
    assert [one.shape for one in got] == [one.shape for one in want]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


def alone_by(encode, **options):
    """Return the library's matrices of all texts, each computed alone."""
    return [encode([text], convert_to_numpy=True, **options)[0] for text in TEXTS]


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_the_vectors_of_each_token_are_the_librarys(late, alone):
    name, runner, oracle = late
    documents, queries = alone_by(oracle.encode_document), alone_by(oracle.encode_query)
    check_matrices(matrices(runner, alone=alone), documents)
    check_matrices(matrices(runner, alone=alone, prompt_name="document"), documents)
    check_matrices(matrices(runner, alone=alone, prompt_name="query"), queries)
    if "expansion" in name and "short" not in name and "without" not in name:
        assert {len(one) for one in queries} == {16}
    if name == "a mask of punctuation":
        assert len(documents[3]) == len(queries[3]) - 1, "an exclamation mark"


def test_vectors_of_tokens_are_cut_scaled_and_quantised(late):
    from sentence_transformers.util import quantize_embeddings

    name, runner, _ = late
    plain = matrices(runner, dimensions=5, normalize=False)
    scaled = matrices(runner, dimensions=5, normalize=True)
    for one, other in zip(plain, scaled, strict=True):
        lengths = np.linalg.norm(one, axis=1, keepdims=True)
        np.testing.assert_allclose(one / lengths, other, atol=1e-5)
    if name != "not normalised":
        check_matrices(matrices(runner, dimensions=5), scaled)
    own = matrices(runner, dimensions=5, prompt_name="query")
    scales = "not normalised" not in name
    check_matrices(own, matrices(runner, dimensions=5, prompt_name="query", normalize=scales))
    ranges = np.stack([np.full(5, -0.5), np.full(5, 0.5)]).astype(np.float32)
    for precision in ("int8", "uint8", "binary", "ubinary"):
        own = {"ranges": ranges.tobytes()} if "int8" in precision else {}
        got = matrices(runner, dimensions=5, normalize=True, precision=precision, **own)
        want = quantize_embeddings(scaled, precision, ranges=ranges)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("fields", "roles"),
    [
        ({"normalize": False}, {"document"}),
        ({}, {"document", "query"}),
    ],
)
def test_a_scaling_that_a_module_does_is_not_left_out(tmp_path, fields, roles):
    """Red if a request gets vectors of length 1 that it did not want."""
    pooled(tmp_path, **fields)
    texts = ("a small dog and a large cat",)
    with blocking.open_engine(EngineConfig(models=(ModelConfig(str(tmp_path)),))) as engine:
        for role in ("document", "query"):
            asked = {"inputs": texts, "kind": "multi-vector", "normalize": False}
            request = EmbedRequest(prompt_name=role, **asked)
            if role in roles:
                told = f"^normalize: is false, and the model scales vectors of a {role}"
                with pytest.raises(InvalidRequest, match=told), engine.embed(request) as stream:
                    list(stream)
                continue
            with engine.embed(request) as stream:
                [one] = [event for event in stream if isinstance(event, Embedding)]
            rows = np.array(one.values).reshape(one.rows, -1)
            assert np.abs(np.linalg.norm(rows, axis=1) - 1).min() > 1e-3


def test_each_of_several_scalings_is_left_out(tmp_path):
    from sentence_transformers.base.modules import Normalize

    twice = [Normalize(module_input_name="token_embeddings")]
    make_multi_vector_embedder(tmp_path, more=twice)
    runner, info = load(tmp_path)
    assert info.must_scale == ()
    for one in matrices(runner, normalize=False):
        assert np.abs(np.linalg.norm(one, axis=1) - 1).min() > 1e-3
    runner.close()


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_scores_by_late_interaction_are_the_librarys(late, alone):
    _, runner, oracle = late
    queries = oracle.encode_query([QUERY])
    want = np.array([oracle.similarity(queries, oracle.encode_document([t])).item() for t in TEXTS])
    got = scores(runner, alone=alone)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert list(np.argsort(-got)) == list(np.argsort(-want))
    assert np.ptp(want) > 1e-3


def test_queries_and_documents_share_a_step(late):
    """A step has both; each is treated as what it is."""
    _, runner, _ = late
    tokenizer = runner.encoder_tokenizer
    queries, documents = (tokenizer.encode_texts(TEXTS, name) for name in ("query", "document"))
    both = [one.input for pair in zip(queries, documents, strict=True) for one in pair]
    together = run(runner, both)
    apart = [one for at in range(0, len(both), 2) for one in run(runner, both[at : at + 2])]
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one.values, other.values, atol=1e-5)
        assert one.rows == other.rows


LATE_FAULTS = {
    "queries are documents": (
        "expansion",
        lambda r: setattr(r.encoder_tokenizer, "_expansion", None),
    ),
    "all attend to the expansion": (
        "expansion",
        lambda r: setattr(r, "_expansion", replace(r._expansion, attends=True)),
    ),
    "no mask": ("a mask of punctuation", lambda r: r._output.modules.pop()),
    "no projection": ("plain", lambda r: r._output.modules.pop(1)),
}


@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_a_fault_in_the_vectors_of_tokens_is_seen(tmp_path, fault):
    from sentence_transformers import MultiVectorEncoder

    name, plant = LATE_FAULTS[fault]
    COLBERT[name](tmp_path)
    runner, _ = load(tmp_path)
    oracle = MultiVectorEncoder(str(tmp_path), device="cpu")

    def check():
        check_matrices(matrices(runner, prompt_name="query"), alone_by(oracle.encode_query))
        check_matrices(matrices(runner), alone_by(oracle.encode_document))

    check()
    plant(runner)
    with pytest.raises(AssertionError):
        check()
    runner.close()


def test_a_text_without_vectors_has_none_and_is_scored_as_the_library_does(tmp_path):
    from sentence_transformers import MultiVectorEncoder

    make_multi_vector_embedder(tmp_path, skipped=PUNCTUATION)
    edit_json(
        tmp_path / "2_MultiVectorMask" / "config.json",
        lambda c: c["skiplist_words"].extend(["[CLS]", "[SEP]"]),
    )
    runner, _ = load(tmp_path)
    tokenizer = runner.encoder_tokenizer
    inputs = [one.input for one in tokenizer.encode_texts([".,!", "a dog"], "")]
    assert [one.rows for one in run(runner, inputs)] == [0, 2]
    oracle = MultiVectorEncoder(str(tmp_path), device="cpu")
    documents = oracle.encode_document([".,!", "a dog"])
    want = oracle.similarity(oracle.encode_query([QUERY]), documents)[0].tolist()
    pairs = [one.input for one in tokenizer.encode_pairs(QUERY, [".,!", "a dog"])]
    got = [one.values[0] for one in run(runner, pairs)]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def expanded_by_a_new_token(directory):
    """Let a model expand queries by a token that only its tokenizer has."""

    def add(tokenizer):
        tokenizer["added_tokens"].append(
            tokenizer["added_tokens"][-1] | {"id": 600, "content": "[N]"}
        )

    edit_json(directory / "tokenizer.json", add)
    edit_json(
        directory / "sentence_bert_config.json", lambda c: c["query_expansion"].update(token="[N]")
    )


def templated(template):
    """Return a change that gives a model a chat template, by which it reads every text."""

    def change(directory):
        (directory / "chat_template.jinja").write_text(template)
        edit_json(
            directory / "sentence_bert_config.json",
            lambda c: c["modality_config"].update(
                message=c["modality_config"]["text"] | {"format": "flat"}
            ),
        )

    return change


LATE_REFUSED = {
    "a function of somebody's own": (
        colbert(), modules_of("Transformer", "LambdaTokenPooling"),
        "its module LambdaTokenPooling, which makes a vector for each token, is not served",
    ),
    "PyLate's module in another model": (
        make_embedder,
        lambda d: edit_json(
            d / "modules.json", lambda m: m[1].update(type="pylate.models.Dense.Dense")
        ),
        "names a module of type 'pylate.models.Dense.Dense'",
    ),
    "no projection": (
        make_stanford, drop_tensor("linear.weight"), r"lacks the tensor linear\.weight",
    ),
    "an expansion longer than the model": (
        expanding(length=65), lambda _: None, "expands queries to 65 tokens, of at most 64",
    ),
    "an expansion by a token without an embedding": (
        expanding(), expanded_by_a_new_token, "of the id 600, outside the vocabulary of 600",
    ),
    "a query whose vectors are not finite": (
        expanding(attend=True, length=40),
        edit_tensors(lambda w: w["embeddings.position_embeddings.weight"][39].fill_(3e38)),
        "its results are not finite numbers",
    ),
    "a chat template of queries and documents": (
        colbert(), templated("{{ messages[0].content }}{% if task == 'query' %}a{% endif %}"),
        "has the variable 'task'",
    ),
    "expansion and a chat template": (
        expanding(), templated("{{ messages[0].content }}"),
        "expands queries and reads them by a chat template",
    ),
    "a processor's own forms of queries": (
        colbert(),
        lambda d: edit_json(
            d / "sentence_bert_config.json", lambda c: c.update(transformer_task="retrieval")
        ),
        "has the transformer_task 'retrieval'",
    ),
    "pickled weights": (
        make_stanford,
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "its weights are pickled",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE_REFUSED)
def test_a_model_of_several_vectors_is_refused_in_one_sentence(tmp_path, name):
    make, change, sentence = LATE_REFUSED[name]
    make(tmp_path)
    change(tmp_path)
    with pytest.raises(SpawnFailed, match=sentence):
        load(tmp_path)
