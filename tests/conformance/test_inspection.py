"""`triolet inspect`: a model that is not loaded is described as its load finds it, also by the
headers alone, and what cannot be served gets the server's sentence."""

import dataclasses
import json
import os
from contextlib import closing
from types import SimpleNamespace

import huggingface_hub.constants
import pytest

from engine.config import AdapterConfig, EngineConfig, ModelConfig
from engine.status import Capability
from engine.worker import inspection
from engine.worker.factory import make_runner
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.inspection import Fit, inspect
from engine.worker.load.resolve import Source, resolve
from tests.checkpoints import encode, image_generation, text, vision
from tests.support.adapters import write_by_hand
from tests.support.estimates import measured
from tests.support.gguf_files import Q4_0, Q4_K, write_file, write_model
from tests.support.hub import hub_on_this_machine
from tests.support.rank_threads import RankThreads

WIDE = text.Shape(layers=2, hidden=256, heads=4, kv_heads=2, mlp=512, vocab=2000, max_len=256)
POOL = 4 << 20


def look(model, **settings):
    """Return the report of a model; the settings are the engine's or the model's."""
    own = {field.name for field in dataclasses.fields(ModelConfig)}
    config = ModelConfig(str(model), **{k: v for k, v in settings.items() if k in own})
    others = {k: v for k, v in settings.items() if k not in own}
    engine = EngineConfig(models=(config,), **{"kv_cache_memory": POOL} | others)
    return inspect(config, engine)


def load(model, **fields):
    """Return a runner that has loaded a model, and its info."""
    config = ModelConfig(str(model), **fields)
    runner = make_runner(config, EngineConfig(models=(config,), kv_cache_memory=POOL))
    return runner, runner.load(lambda progress: None)


# ---- as the load finds it


def plain(path):
    """Write a Llama in bfloat16."""
    return text.make(path, "llama", WIDE, dtype="bfloat16")


def both_ends(path):
    """Write a Llama whose file has the tied head a second time."""
    from safetensors.torch import load_file, save_file

    plain(path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def mixed_gguf(path):
    """Write a GGUF file in which values are Q6_K beside queries and keys in Q4_K."""
    path.mkdir(exist_ok=True)
    return write_model(text.make(path / "plain", "llama", WIDE), path / "model.gguf", Q4_K)


def gguf_in_parts(path):
    """Write a GGUF model in three files, of which the first has only the metadata."""
    path.mkdir(exist_ok=True)
    made = text.make(path / "plain", "llama", WIDE)
    return write_model(made, path / "model.gguf", Q4_0, parts=(0, 7))


def unusual(path):
    """Write a Llama whose config no skeleton knows, and that runs compiled nevertheless."""
    plain(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"a_new_field": 1}))
    return path


def narrow(path):
    """Write a Llama whose heads are too narrow for the kernels."""
    return text.make(path, "llama", text.Shape(hidden=32, heads=4, kv_heads=4), dtype="bfloat16")


def other_activation(path):
    """Write a Llama whose activation the kernels do not have."""
    return text.make(path, "llama", WIDE, dtype="bfloat16", extra={"hidden_act": "relu"})


TEXTS = {
    "float": (plain, {}),
    "float32": (plain, {"dtype": "float32"}),
    "rounded": (plain, {"quantization": "int4"}),
    "a tied head twice": (both_ends, {}),
    "GGUF of several types": (mixed_gguf, {}),
    "GGUF in parts": (gguf_in_parts, {}),
    "a config without a skeleton": (unusual, {}),
    "an activation without a kernel": (other_activation, {}),
    "heads that are too narrow": (narrow, {}),
    "no compiled form": (lambda path: text.make(path, "gpt2", WIDE), {}),
    "a pool of int8": (plain, {"kv_cache_dtype": "int8"}),
    "recurrent layers": (lambda path: text.make(path, "lfm2", WIDE, dtype="bfloat16"), {}),
}


@pytest.mark.parametrize(("make", "fields"), TEXTS.values(), ids=TEXTS)
def test_a_text_model_is_described_as_its_load_finds_it(tmp_path, make, fields):
    model = make(tmp_path / "model")
    report = look(model, **fields)
    found = report.found
    assert (report.refusal, report.capability) == ("", Capability.TEXT_TO_TEXT)
    runner, info = load(model, **fields)
    with closing(runner):
        placed = runner._model
        assert found.weight_bytes == pytest.approx(placed.num_bytes, rel=0.03)
        assert (found.kv.num_bytes, found.kv.dtype) == (info.kv_bytes, info.kv_dtype)
        is_compiled = isinstance(placed.module, NativeDecoder)
        assert found.execution.startswith("compiled") == is_compiled
        assert found.load_bytes < info.memory_bytes
        assert (found.architecture, found.dtype, found.device, found.max_model_len) == (
            (info.architecture, info.dtype, info.device, info.max_model_len)
        )


OTHERS = {
    Capability.TEXT_EMBEDDING: encode.make_embedder,
    Capability.RERANK: encode.make_reranker,
    Capability.SPARSE_EMBEDDING: encode.make_sparse_embedder,
    Capability.MULTI_VECTOR_EMBEDDING: encode.make_multi_vector_embedder,
    Capability.IMAGE_EMBEDDING: encode.make_image_embedder,
    Capability.VISION: vision.make,
    Capability.TEXT_TO_IMAGE: image_generation.make,
}


@pytest.mark.parametrize("capability", OTHERS, ids=lambda kind: kind.value)
def test_every_kind_of_model_is_described_as_its_load_finds_it(tmp_path, capability):
    OTHERS[capability](tmp_path / "model")
    report = look(tmp_path / "model")
    assert (report.refusal, report.capability) == ("", capability)
    runner, info = load(tmp_path / "model")
    with closing(runner):
        found = report.found
        assert info.capability is capability
        assert (found.dtype, found.device) == (info.dtype, info.device)
        assert found.num_bytes == pytest.approx(info.memory_bytes, rel=0.05)
        assert found.architecture == info.architecture
    assert 0 < found.weight_bytes <= found.file_bytes
    assert found.stored == "safetensors (F32)"


LARGE = text.Shape(layers=8, hidden=768, heads=12, kv_heads=12, mlp=2048, vocab=8192, max_len=256)
ENCODER = encode.Shape(layers=6, hidden=768, heads=12, mlp=3072, vocab=30522, max_len=64)
SIGHT = {"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}


def large_text(path, *, is_small):
    """Write a Llama in bfloat16."""
    return text.make(path, "llama", WIDE if is_small else LARGE, dtype="bfloat16")


def large_gguf(path, *, is_small):
    """Write a Llama as a GGUF file of Q4_K and Q6_K."""
    text.make(path, "llama", WIDE if is_small else LARGE)
    return write_model(path, path / "model.gguf", Q4_K)


def large_sight(path, *, is_small):
    """Write a model that reads images."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {} if is_small else SIGHT.items():
            patch.setitem(vision.TEXT, name, value)
        return vision.make(path)


def encoder_by(make):
    """Return a function that writes an encoder."""
    return lambda path, *, is_small: make(path, shape=encode.Shape() if is_small else ENCODER)


def large_drawing(path, *, is_small):
    """Write a model that draws."""
    return image_generation.make(path, width=16 if is_small else 256)


KINDS = {
    "text": (large_text, ()),
    "text in float32": (large_text, ("dtype=float32",)),
    "text in 4 bits": (large_text, ("quantization=int4",)),
    "GGUF": (large_gguf, ()),
    "vision": (large_sight, ()),
    "embedding": (encoder_by(encode.make_embedder), ()),
    "rerank": (encoder_by(encode.make_reranker), ()),
    "image embedding": (encoder_by(encode.make_image_embedder), ()),
    "drawing": (large_drawing, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "fields"), KINDS.values(), ids=KINDS)
def test_what_a_load_takes_is_known_before_to_a_twentieth(tmp_path, make, fields):
    """Measured in a process of its own, with the KV pool written."""
    small, large = (make(tmp_path / str(size), is_small=size) for size in (True, False))
    told, taken = measured("load_memory", small, large, *fields)
    assert taken == pytest.approx(told, rel=0.05), (told >> 20, taken >> 20)


def test_how_many_sequences_fit_depends_on_their_length_and_on_the_limit(tmp_path):
    model = text.make(tmp_path / "m", "llama", dataclasses.replace(WIDE, max_len=4096))
    few = look(model, memory_limit=64 << 20, max_num_seqs=1000, max_num_batched_tokens=1001)
    kv, others = few.found.kv, few.found.num_bytes - few.found.kv.num_bytes
    assert [fit.num_tokens for fit in few.fits] == [2048, 4096]
    for fit in few.fits:
        each = kv.bytes_per_token * fit.num_tokens
        count = ((64 << 20) - others) // each
        assert fit == Fit(fit.num_tokens, count, count * each)
        assert count > 1
        # A pool of this size is what a server can have, and one of one sequence more is not.
        fields = {"max_num_seqs": 1000, "max_num_batched_tokens": 1001, "memory_limit": 64 << 20}
        assert not look(model, kv_cache_memory=fit.kv_bytes, **fields).refusal
        refused = look(model, kv_cache_memory=fit.kv_bytes + each, **fields)
        assert "and models may use 64 MiB (--memory-limit)" in refused.refusal
    assert [fit.num_sequences for fit in look(model, max_num_seqs=3).fits] == [3, 3]


def test_a_draft_model_counts(tmp_path):
    model = plain(tmp_path / "m")
    with_drafts = look(model, draft_model=str(model)).found
    assert with_drafts.draft_bytes > look(model).found.weight_bytes
    assert with_drafts.num_bytes == look(model).found.num_bytes + with_drafts.draft_bytes


DEEP = text.Shape(layers=4, hidden=256, heads=8, kv_heads=4, mlp=1024, vocab=512, max_len=256)


@pytest.mark.parametrize("arch", ["llama", "olmo2"])
def test_a_divided_model_is_described_as_its_ranks_load_it(tmp_path, arch):
    """OLMo 2's ranks do not run compiled."""
    model = text.make(tmp_path / "m", arch, DEEP, dtype="bfloat16")
    whole, found = look(model).found, look(model, tp=2).found
    ranks = RankThreads(model, kv_bytes=POOL)
    try:
        infos = ranks.on_each(lambda one: one.load(lambda progress: None))
        weights = sum(one._model.num_bytes for one in ranks.ranks)
    finally:
        ranks.close()
    assert found.weight_bytes == pytest.approx(weights, rel=0.03)
    assert whole.weight_bytes < found.weight_bytes < 1.5 * whole.weight_bytes
    assert found.kv.num_bytes == sum(info.kv_bytes for info in infos)
    assert found.kv.bytes_per_token == whole.kv.bytes_per_token
    assert found.tokenizer_bytes == 2 * whole.tokenizer_bytes
    assert found.execution.startswith("compiled") == (arch == "llama")
    assert found.process_bytes > 2 * whole.process_bytes == 0
    parts = found.load_bytes - found.process_bytes
    assert parts == found.weight_bytes + found.tokenizer_bytes + found.kv.num_bytes


def test_a_divided_model_takes_so_much_as_its_processes_reserve(tmp_path, monkeypatch):
    """Beside what they import, which is less than what this process has."""
    model = text.make(tmp_path / "m", "llama", DEEP)
    config = ModelConfig(str(model), tp=2)
    engine = EngineConfig(models=(config,), kv_cache_memory=POOL)
    with closing(make_runner(config, engine)) as runner:
        estimate = runner.estimate().num_bytes
    monkeypatch.setattr(inspection, "own_bytes", lambda: 100 << 20)
    found = inspect(config, engine).found
    assert found.process_bytes == 200 << 20
    assert found.num_bytes == pytest.approx(estimate, rel=0.3)


def test_a_model_that_cannot_be_divided_is_refused(tmp_path):
    model = text.make(tmp_path / "m", "llama", dataclasses.replace(DEEP, kv_heads=1))
    assert look(model, tp=2).refusal.startswith("its 1 key-value heads (num_key_value_heads)")
    file = mixed_gguf(tmp_path / "g")
    assert "such weights are not divided among processes" in look(file, tp=2).refusal


@pytest.mark.parametrize("make", [plain, other_activation])
def test_adapters_count_as_they_are_loaded_and_reserved(tmp_path, make):
    """Compiled, and as hooks of a stock module."""
    model = make(tmp_path / "m")
    directories = [write_by_hand(tmp_path / str(rank), model, rank=rank) for rank in (16, 32)]
    adapters = tuple(AdapterConfig(f"a{n}", str(path)) for n, path in enumerate(directories))
    without, found = look(model).found, look(model, adapters=adapters).found
    runner, _ = load(model)
    with closing(runner):
        reserved = sum(runner.adapters.measure(str(path)) for path in directories)
        digests = [runner.adapters.load(str(path)).digest for path in directories]
        placed = sum(runner.adapters.find(digest).num_bytes for digest in digests)
    assert found.adapter_bytes == pytest.approx(placed, rel=0.05)
    assert found.load_bytes == without.load_bytes + found.adapter_bytes
    assert reserved <= found.num_bytes - without.num_bytes <= 2 * reserved


def test_an_adapter_that_is_not_served_is_named(tmp_path):
    missing = (AdapterConfig("sql", str(tmp_path / "nothing")),)
    report = look(plain(tmp_path / "m"), adapters=missing)
    assert report.refusal == "the adapter sql: its directory does not exist"
    assert report.detail == str(tmp_path / "nothing")
    encoder = encode.make_embedder(tmp_path / "e")
    told = "the adapter sql: only models that generate text take adapters"
    assert look(encoder, adapters=missing).refusal == told


# ---- what is not served


def empty_file(path):
    """Write a GGUF file without content."""
    path.mkdir()
    (path / "model.gguf").touch()
    return path / "model.gguf"


def text_file(path):
    """Write a file that is no model."""
    path.mkdir()
    (path / "model.txt").write_text("no model")
    return path / "model.txt"


def half_a_header(path):
    """Write the first bytes of a GGUF file."""
    path.mkdir()
    (path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    return path / "model.gguf"


def second_part(path):
    """Write the second part of a GGUF model, without the first."""
    path.mkdir()
    metadata = {"split.no": 1, "split.count": 2, "split.tensors.count": 3}
    tensors = {"blk.0.attn_norm.weight": (0, (4,), b"\0" * 16)}
    write_file(path / "model-00002-of-00002.gguf", metadata, tensors)
    return path / "model-00002-of-00002.gguf"


def without_a_model(path):
    """Write a directory that has other files."""
    path.mkdir()
    (path / "notes.txt").write_text("no model")
    return path


def without_weights(path):
    """Write a checkpoint that lacks its weights."""
    (plain(path) / "model.safetensors").unlink()
    return path


def cut_short(path):
    """Write a checkpoint whose weights end early."""
    os.truncate(plain(path) / "model.safetensors", 5000)
    return path


def a_list(path):
    """Write a checkpoint whose config is a list."""
    (plain(path) / "config.json").write_text("[1]")
    return path


GARBAGE = {
    empty_file: "its file is empty",
    text_file: "it is a file, and a model is a directory or a GGUF file",
    half_a_header: "model.gguf is not a GGUF file that can be read",
    second_part: "of its 2 parts, model-00001-of-00002.gguf is missing; download all parts into "
    "one directory",
    without_a_model: "it has no config.json",
    lambda path: path.mkdir() or path: "its directory is empty",
    lambda path: path: "there is no such directory",
    without_weights: "it has no weights (model.safetensors)",
    cut_short: "its weight file model.safetensors is cut short or is not a safetensors file",
    a_list: "its config.json is not a JSON object",
}


@pytest.mark.parametrize(("make", "sentence"), GARBAGE.items(), ids=range(len(GARBAGE)))
def test_what_is_no_model_is_refused_in_the_sentence_of_a_load(tmp_path, make, sentence):
    report = look(make(tmp_path / "model"))
    assert (report.refusal, report.found, report.fits) == (sentence, None, ())


def test_what_a_load_would_refuse_is_refused(tmp_path):
    model = plain(tmp_path / "m")
    assert look(model, max_model_len=512).refusal.startswith("max_model_len 512 is more than")
    assert look(model, kv_cache_memory=100).refusal.startswith("the KV pool of 100 bytes holds 0")
    told = "int8 weights need the compiled decoder, and GPT2LMHeadModel has no compiled form"
    assert look(text.make(tmp_path / "g", "gpt2"), quantization="int8").refusal == told
    assert look(model, capability=Capability.VISION).refusal.startswith("it is said to have")


# ---- the Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Yield a Hub, with an empty cache."""
    with hub_on_this_machine(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def sharded(path):
    """Write a Llama in three files."""
    return text.make(path, "llama", WIDE, dtype="bfloat16", max_shard_size="600KB")


HUB = {"text": sharded, **{kind.value: make for kind, make in OTHERS.items()}}


@pytest.mark.parametrize("make", HUB.values(), ids=HUB)
def test_of_a_hub_model_only_small_files_and_headers_are_fetched(hub, tmp_path, make):
    """And they say the same as the model itself, down to the byte, except that the length of a
    header is not kept."""
    make(tmp_path / "model")
    hub.models["org/model"] = tmp_path / "model"
    whole, sketch = look(tmp_path / "model"), look("org/model")
    headers = abs(whole.found.file_bytes - sketch.found.file_bytes)
    assert headers < 0.1 * whole.found.file_bytes
    own = dataclasses.replace(sketch.found, file_bytes=whole.found.file_bytes)
    assert (own, sketch.capability, sketch.refusal) == (whole.found, whole.capability, "")
    weights = {name: count for name, count in hub.sent.items() if name.endswith(".safetensors")}
    assert weights
    assert not [name for name in hub.sent if "tokenizer" in name]
    assert max(weights.values()) <= 100_001, "the Hub's client reads so much for a header"
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "the cache gets no weights"


def test_a_model_that_is_partly_in_the_cache_is_looked_at(hub, tmp_path):
    """Only what is missing is fetched, and a later download is not taken for complete."""
    model = sharded(tmp_path / "model")
    hub.models["org/model"] = model
    first, *others = sorted(path.name for path in model.glob("*.safetensors"))
    assert len(others) > 1
    for name in ("config.json", first):
        huggingface_hub.hf_hub_download("org/model", name)
    hub.sent.clear()
    sketch = look("org/model").found
    assert hub.sent["config.json"] == hub.sent[first] == 0
    assert all(hub.sent[name] for name in others)
    assert sketch.weight_bytes == look(model).found.weight_bytes
    runner, _ = load("org/model")
    with closing(runner):
        assert all((resolve("org/model").directory / name).is_file() for name in others)


def test_a_cached_model_needs_no_network(hub, tmp_path, monkeypatch):
    hub.models["org/model"] = sharded(tmp_path / "model")
    assert isinstance(resolve("org/model"), Source)
    hub.sent.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert look("org/model").found == look(tmp_path / "model").found
    assert not hub.sent


def test_offline_a_model_that_is_not_wholly_cached_is_refused(hub, tmp_path, monkeypatch):
    hub.models["org/model"] = sharded(tmp_path / "model")
    huggingface_hub.hf_hub_download("org/model", "config.json")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("org/model", "org/other"):
        report = look(name)
        assert report.refusal == (
            "there is no directory of this name, it is not in the Hugging Face cache, and the Hub "
            "cannot be reached"
        )
        assert report.found is None


def test_an_unknown_id_is_refused_with_the_hubs_status(hub):
    told = "there is no directory of this name, and the Hugging Face Hub does not give it"
    assert look("org/nothing").refusal == f"{told} (status 404)"


BAD_REPOSITORIES = {
    "no weights": ({"config.json": b"{}"}, "its repository has no safetensors weights"),
    "only a GGUF file": ({"m.gguf": b"GGUF"}, "its repository has no safetensors weights"),
    "no header": (
        {"config.json": b"{}", "model.safetensors": b"no header"},
        "its weight file model.safetensors is not a safetensors file",
    ),
}


@pytest.mark.parametrize(("files", "sentence"), BAD_REPOSITORIES.values(), ids=BAD_REPOSITORIES)
def test_a_repository_that_is_no_model_is_refused(hub, tmp_path, files, sentence):
    directory = tmp_path / "model"
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    hub.models["org/model"] = directory
    assert look("org/model").refusal == sentence


def test_a_header_from_the_hub_is_not_trusted(hub, tmp_path):
    """Its offsets would be a file of more bytes than any disk, or leave a hole."""
    model = plain(tmp_path / "model")
    hub.models["org/model"] = model
    for first, last in ((0, 1 << 62), (100, 108)):
        tensor = {"dtype": "F32", "shape": [2], "data_offsets": [first, last]}
        header = json.dumps({"model.norm.weight": tensor}).encode()
        data = len(header).to_bytes(8, "little") + header
        (model / "model.safetensors").write_bytes(data)
        assert "model.safetensors" in look("org/model").refusal


def test_a_name_that_leads_out_of_the_directory_is_refused(hub, tmp_path, monkeypatch):
    from huggingface_hub import HfApi

    names = ("model.safetensors", "1_/../../x.json")
    listed = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: listed)
    assert look("org/model").refusal.endswith("whose name leads out of its directory")


def test_nothing_of_the_weights_is_read(tmp_path, monkeypatch):
    """A file of which only the header is there is described in the same way."""
    model = plain(tmp_path / "m")
    before = look(model)
    path = model / "model.safetensors"
    size, length = path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, 8 + length)
    os.truncate(path, size)
    assert look(model) == before


def test_a_file_names_its_types_those_of_most_bytes_first(tmp_path):
    shape = dataclasses.replace(WIDE, layers=8)
    text.make(tmp_path / "plain", "llama", shape)
    file = write_model(tmp_path / "plain", tmp_path / "m.gguf", Q4_0)
    found = look(file).found
    assert found.stored == "GGUF (Q4_0, Q8_0, F32)"
    assert found.file_bytes == file.stat().st_size
