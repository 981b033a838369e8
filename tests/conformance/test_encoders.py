"""The encoder runner against sentence-transformers' own `encode` and `predict`, in float32.

Each input is computed alone and in a batch; both must be the library's values to 1e-5.
"""

import json

import numpy as np
import pytest

from engine.config import EngineConfig, ModelConfig
from engine.core.common.steps import RowFailure
from engine.core.common.types import PlanId, SequenceId
from engine.core.encode.types import EncodeInput, EncodeOptions, EncodePlan, EncodeRow
from engine.errors import InvalidRequest, SpawnFailed
from engine.status import Capability
from engine.worker.encode.runner import groups
from engine.worker.factory import make_runner
from tests.checkpoints.encode import make_embedder, make_reranker
from tests.support.adapters import change_tensors

TEXTS = [
    "the dog",
    "a cat and the river of gold, which was very long after the rain",
    "x",
    "The Queen said: there is no road to the moon!",
    "fish " * 9,
    " spaces  before and after ",
    "wind and snow " * 50,  # longer than the model's maximum
]
PROMPTS = {"query": "search query: ", "passage": "passage: "}
MODELS = {
    "mean": {},
    "cls": {"pooling": "cls"},
    "last token": {"pooling": "lasttoken"},
    "max": {"pooling": "max"},
    "normalised": {"normalize": True},
    "cls, normalised": {"pooling": "cls", "normalize": True},
    "dense": {"dense": 16},
    "dense, normalised": {"dense": 48, "normalize": True},
    "prompts": {"prompts": PROMPTS},
    "a default prompt": {"prompts": PROMPTS, "default_prompt": "passage"},
    "prompts left out of the mean": {"prompts": PROMPTS, "include_prompt": False},
}


def load(directory, **fields):
    model = ModelConfig(str(directory), **fields)
    runner = make_runner(model, EngineConfig(models=(model,)))
    return runner, runner.load(lambda progress: None)


def execute(runner, inputs, options):
    """Return the values of inputs in their order, all in one plan."""
    order = sorted(range(len(inputs)), key=lambda i: len(inputs[i].token_ids))
    rows = tuple(EncodeRow(SequenceId(i), inputs[i], options[i]) for i in order)
    result = runner.execute(EncodePlan(PlanId(1), rows))
    assert [row.sequence for row in result.rows] == order
    made = {
        row.sequence: np.frombuffer(row.values, np.float16)
        if options[row.sequence].precision == "float16"
        else np.array(row.values)
        for row in result.rows
    }
    return [made[i] for i in range(len(inputs))]


def embed(runner, texts, *, prompt_name="", alone=False, **options):
    """Return the vectors of texts, computed in one plan or each alone."""
    inputs = [one.input for one in runner.encoder_tokenizer.encode_texts(texts, prompt_name)]
    if alone:
        return np.stack([execute(runner, [one], [EncodeOptions(**options)])[0] for one in inputs])
    return np.stack(execute(runner, inputs, [EncodeOptions(**options)] * len(inputs)))


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """Return a model's name, its runner and info, and the library's own model."""
    from sentence_transformers import SentenceTransformer

    directory = tmp_path_factory.mktemp("encoder")
    make_embedder(directory, **MODELS[request.param])
    runner, info = load(directory)
    yield request.param, runner, info, SentenceTransformer(str(directory), device="cpu")
    runner.close()


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_vectors_are_the_librarys(model, alone):
    _, runner, info, oracle = model
    want = oracle.encode(TEXTS)
    got = embed(runner, TEXTS, alone=alone)
    assert got.shape == (len(TEXTS), info.dimensions)
    np.testing.assert_allclose(got, want, atol=1e-5)
    apart = np.abs(want[:, None] - want[None]).max(axis=2)[~np.eye(len(TEXTS), dtype=bool)]
    assert apart.min() > 1e-3, "texts with similar vectors prove nothing"


@pytest.mark.parametrize("dimensions", [None, 1, 7, 16])
def test_dimensions_and_normalisation_are_the_librarys(model, dimensions):
    """A model that normalises does so after the vector is cut to ``dimensions``, as the library
    does with ``truncate_dim`` and ``normalize_embeddings`` (TEI#676)."""
    name, runner, _, oracle = model
    for normalize in (None, True):
        scales = normalize or "normalised" in name
        want = oracle.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=scales)
        got = embed(runner, TEXTS, dimensions=dimensions, normalize=normalize)
        np.testing.assert_allclose(got, want, atol=1e-5)
        if scales:
            np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


def test_a_models_own_normalisation_can_be_left_out(model):
    name, runner, _, oracle = model
    got = embed(runner, TEXTS, normalize=False)
    lengths = np.linalg.norm(got, axis=1)
    if "normalised" in name:
        assert np.abs(lengths - 1).min() > 0.01
        np.testing.assert_allclose(got / lengths[:, None], oracle.encode(TEXTS), atol=1e-5)
    else:
        np.testing.assert_allclose(got, oracle.encode(TEXTS), atol=1e-5)


PRECISIONS = ["float32", "float16", "int8", "uint8", "binary", "ubinary"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dimensions", [None, 13])
def test_precisions_are_the_librarys(model, precision, dimensions):
    """Of the same vectors, every number is; of the library's own, those beside the border of two
    parts may be in the other one."""
    from sentence_transformers.util import quantize_embeddings

    name, runner, _, oracle = model
    cut = {"dimensions": dimensions}
    floats, scales = embed(runner, TEXTS, **cut), "normalised" in name
    theirs = oracle.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=scales)
    ranges = np.stack([theirs[:4].min(axis=0), theirs[:4].max(axis=0)])  # others are outside
    ranges[1, 0] = ranges[0, 0]  # an empty one
    options = {"precision": precision} | cut
    if "int8" in precision:
        options["ranges"] = ranges.astype(np.float32).tobytes()
    got = embed(runner, TEXTS, **options)
    if precision == "float16":  # not a precision of the library's function
        np.testing.assert_array_equal(got, floats.astype(np.float16))
        return
    want = quantize_embeddings(floats, precision, ranges=ranges)
    np.testing.assert_array_equal(got, want)
    alone = embed(runner, TEXTS, alone=True, **options)
    want = quantize_embeddings(theirs, precision, ranges=ranges)
    for found in (got, alone):
        if "int8" in precision:
            assert np.abs(found[:, 1:].astype(int) - want[:, 1:]).max() <= 1
        elif "binary" in precision:
            bits = np.unpackbits((found.astype(int) ^ want).astype(np.uint8), axis=1)
            assert bits.sum() <= np.count_nonzero(np.abs(theirs) < 1e-5)
        else:
            np.testing.assert_allclose(found, want, atol=1e-5)


def test_a_models_ranges_are_read_from_its_folder(tmp_path):
    make_embedder(tmp_path)
    assert load(tmp_path)[1].ranges == b""
    ranges = np.stack([np.full(32, -1.0), np.arange(32.0)]).astype(np.float32)
    file = tmp_path / "embedding_ranges.json"
    file.write_text(json.dumps({"low": ranges[0].tolist(), "high": ranges[1].tolist()}))
    assert load(tmp_path)[1].ranges == ranges.tobytes()
    wrong = [([0.0] * 31, [1.0] * 31), ([1.0] * 32, [0.0] * 32), ([0.0] * 32, ["x"] * 32)]
    wrong.append(([-2e38] * 32, [2e38] * 32))  # float32 cannot hold the widths
    for low, high in wrong:
        file.write_text(json.dumps({"low": low, "high": high}))
        with pytest.raises(SpawnFailed, match=r"embedding_ranges\.json is not of the form"):
            load(tmp_path)


def test_a_number_that_float16_cannot_hold_fails_its_row(tmp_path):
    make_embedder(tmp_path, dense=16)
    edit_tensors(lambda w: w["linear.bias"].fill_(1e3), "2_Dense/model.safetensors")(tmp_path)
    edit_json(
        tmp_path / "2_Dense" / "config.json",
        lambda c: c.update(activation_function="torch.nn.modules.linear.Identity"),
    )
    edit_tensors(lambda w: w["linear.weight"].mul_(1e6), "2_Dense/model.safetensors")(tmp_path)
    runner, _ = load(tmp_path)
    [one, _] = [one.input for one in runner.encoder_tokenizer.encode_texts(TEXTS[:2], "")]
    options = [EncodeOptions(precision="float16"), EncodeOptions()]
    rows = tuple(EncodeRow(SequenceId(i), one, option) for i, option in enumerate(options))
    result = runner.execute(EncodePlan(PlanId(1), rows))
    assert [isinstance(row, RowFailure) for row in result.rows] == [True, False]
    assert result.rows[0].violation.field == "precision"


def test_prompts_are_the_librarys(model):
    name, runner, info, oracle = model
    if "prompt" not in name:
        assert set(info.prompt_names) == {"query", "document"}  # the library's empty defaults
        return
    for prompt_name in PROMPTS:
        want = oracle.encode(TEXTS, prompt_name=prompt_name)
        np.testing.assert_allclose(embed(runner, TEXTS, prompt_name=prompt_name), want, atol=1e-5)
    assert np.abs(want - oracle.encode(TEXTS, prompt_name="query")).max() > 1e-3


def test_each_row_of_a_step_has_its_own_options(model):
    name, runner, _, oracle = model
    options = [
        EncodeOptions(),
        EncodeOptions(dimensions=5),
        EncodeOptions(normalize=True),
        EncodeOptions(dimensions=3, normalize=True),
    ]
    inputs = [one.input for one in runner.encoder_tokenizer.encode_texts(TEXTS[:4], "")]
    got = execute(runner, inputs, options)
    for place, one in enumerate(options):
        scales = one.normalize or "normalised" in name
        want = oracle.encode(TEXTS[place], truncate_dim=one.dimensions, normalize_embeddings=scales)
        np.testing.assert_allclose(got[place], want, atol=1e-5)


def test_a_cut_inputs_result_has_its_full_length(model):
    _, runner, info, oracle = model
    [short, long] = runner.encoder_tokenizer.encode_texts(["the dog", TEXTS[-1]], "")
    assert short.full_tokens == len(short.input.token_ids)
    assert long.full_tokens > info.max_model_len == len(long.input.token_ids) == 64
    assert oracle.max_seq_length == 64


# ---- cross-encoders

QUERY = "which river was gold?"
PAIRS = [(QUERY, text) for text in TEXTS]


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity", "torch.nn.Tanh"])
@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_scores_are_the_librarys(tmp_path, activation, alone):
    import torch
    from sentence_transformers import CrossEncoder

    make_reranker(tmp_path, activation=activation)
    oracle = CrossEncoder(str(tmp_path), device="cpu")
    runner, info = load(tmp_path)
    assert info.kind is Capability.RERANK
    inputs = [one.input for one in runner.encoder_tokenizer.encode_pairs(QUERY, TEXTS)]
    for raw in (False, True):
        options = EncodeOptions(raw_scores=raw)
        parts = [[one] for one in inputs] if alone else [inputs]
        got = [v for part in parts for v in execute(runner, part, [options] * len(part))]
        own = {"activation_fn": torch.nn.Identity()} if raw else {}
        want = oracle.predict(PAIRS, **own)
        np.testing.assert_allclose(np.concatenate(got), want, atol=1e-5)
        assert np.ptp(want) > 1e-3


def test_a_cross_encoder_that_the_library_saved_is_recognised(tmp_path):
    from sentence_transformers import CrossEncoder

    make_reranker(tmp_path / "base")
    oracle = CrossEncoder(str(tmp_path / "base"), device="cpu")
    oracle.save_pretrained(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "modules.json").is_file(), "else the next line checks nothing"
    runner, info = load(tmp_path / "saved")
    assert info.kind is Capability.RERANK
    inputs = [one.input for one in runner.encoder_tokenizer.encode_pairs(QUERY, TEXTS)]
    got = np.concatenate(execute(runner, inputs, [EncodeOptions()] * len(inputs)))
    np.testing.assert_allclose(got, oracle.predict(PAIRS), atol=1e-5)


# ---- failures


def test_a_row_that_is_not_finite_fails_alone(tmp_path):
    make_embedder(tmp_path)
    edit_tensors(lambda w: w["embeddings.word_embeddings.weight"][599].fill_(3e38))(tmp_path)
    runner, _ = load(tmp_path)
    rows = tuple(
        EncodeRow(SequenceId(i), EncodeInput((2, token, 3)), EncodeOptions())
        for i, token in enumerate((5, 599, 6))
    )
    result = runner.execute(EncodePlan(PlanId(1), rows))
    assert [isinstance(row, RowFailure) for row in result.rows] == [False, True, False]
    assert result.rows[1].phase == "encode"
    alone = runner.execute(EncodePlan(PlanId(2), rows[:1])).rows[0]
    np.testing.assert_allclose(alone.values, result.rows[0].values, atol=1e-5)


def test_a_text_that_is_no_unicode_is_named_by_its_index(tmp_path):
    make_embedder(tmp_path)
    runner, _ = load(tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        runner.encoder_tokenizer.encode_texts(["a", "\ud800", "b", "\udfff"], "")
    assert [one.field for one in caught.value.violations] == ["1", "3"]


def edit_json(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(edit, file="model.safetensors"):
    """Return a change of a model's folder that edits its tensors."""
    return lambda directory: change_tensors(directory / file, edit)


def drop_tensor(name):
    return edit_tensors(lambda weights: weights.pop(name))


def pickle_instead(folder):
    """Return a change of a model's folder that leaves only pickled weights."""

    def change(directory):
        (directory / folder / "model.safetensors").rename(directory / folder / "pytorch_model.bin")

    return change


def modules(change):
    """Return a change of a model's list of modules."""
    return lambda directory: edit_json(directory / "modules.json", change)


BROKEN = {
    "a module of somebody's own": (
        modules(lambda m: m[1].update(type="os.system")), "names a module of type 'os.system'",
    ),
    "a module that is not let through": (
        modules(lambda m: m[1].update(type="sentence_transformers.models.CLIPModel")),
        "names a module of type",
    ),
    "a path outside": (
        modules(lambda m: m[1].update(path="../1_Pooling")), "points outside the model's directory",
    ),
    "no pooling": (modules(lambda m: m.pop(1)), "has no Pooling"),
    "modules that are no list": (
        lambda d: (d / "modules.json").write_text("{}"), "is not a list of modules",
    ),
    "pickled weights": (pickle_instead(""), "its weights are pickled"),
    "pickled weights of a layer": (pickle_instead("2_Dense"), "its weights are pickled"),
    "a missing weight": (
        drop_tensor("encoder.layer.1.output.dense.weight"),
        "lacks the tensor encoder.layer.1.output.dense.weight",
    ),
    "a NaN": (
        edit_tensors(lambda w: w["embeddings.word_embeddings.weight"].fill_(float("nan"))),
        "its tensor embeddings.word_embeddings.weight in model.safetensors holds NaN",
    ),
    "an activation of somebody's own": (
        lambda d: edit_json(
            d / "2_Dense" / "config.json", lambda c: c.update(activation_function="os.abort")
        ),
        "is not one of torch.nn",
    ),
    "an adapter": (lambda d: (d / "adapter_config.json").write_text("{}"), "it is an adapter"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_an_unsupported_encoder_is_refused_in_one_sentence(tmp_path, name):
    change, sentence = BROKEN[name]
    make_embedder(tmp_path, dense=16)
    change(tmp_path)
    with pytest.raises(SpawnFailed, match=sentence) as caught:
        load(tmp_path)
    assert str(tmp_path.parent) not in str(caught.value)


def test_a_classifier_without_its_head_is_not_filled_at_random(tmp_path):
    make_reranker(tmp_path)
    drop_tensor("classifier.weight")(tmp_path)
    with pytest.raises(SpawnFailed, match=r"lacks the tensor classifier\.weight"):
        load(tmp_path)


# ---- groups


def test_groups_cover_every_row_once_and_separate_very_different_lengths():
    lengths = [4] * 10 + [5] * 10 + [60] * 3 + [64]
    parts = [range(*part.indices(len(lengths))) for part in groups(lengths)]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert [len(part) for part in parts] == [4, 20]
    assert list(groups([7])) == [slice(0, 1)]
