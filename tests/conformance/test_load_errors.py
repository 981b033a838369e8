"""Every failure of a load is a `SpawnFailed` of one sentence, and nothing is kept."""

import json
import os
import pwd
import shutil
import tempfile

import huggingface_hub.constants
import pytest
import torch
from safetensors import safe_open

from engine.errors import SpawnFailed
from engine.worker import factory, failures
from engine.worker.interface import LoadProgress, RunnerSpec
from engine.worker.load import checkpoint, resolve
from engine.worker.text import placed_model as runner_module
from engine.worker.text.runner import TorchRunner
from tests.checkpoints.text import make
from tests.support.adapters import change_tensors
from tests.support.encoder_zoo import edit_config
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import REFERENCE, WAYS, load_runner


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Return a good checkpoint; tests copy it and break the copy."""
    return make(tmp_path_factory.mktemp("stock") / "good")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return a good checkpoint in several files."""
    return make(tmp_path_factory.mktemp("sharded") / "good", max_shard_size="200KB")


def edit_weights(directory, change):
    change_tensors(directory / "model.safetensors", change)


def empty(directory):
    for path in directory.iterdir():
        path.unlink()


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garble(directory):
    (directory / "model.safetensors").write_bytes(b"not a header" * 40)


def pickle_only(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def unlink(name):
    return lambda directory: (directory / name).unlink()


def write(name, text):
    """Return a change that overwrites a file."""
    return lambda directory: (directory / name).write_text(text)


def config(**fields):
    return lambda directory: edit_config(directory, **fields)


def weights(change):
    return lambda directory: edit_weights(directory, change)


EXTRA_NAME = "model.layers.0.self_attn.sinks"
BREAKERS = {
    "empty directory": (empty, "its directory is empty"),
    "no config": (unlink("config.json"), "it has no config.json"),
    "config is not JSON": (write("config.json", "{"), "config.json is not valid JSON at line 1"),
    "config is a list": (write("config.json", "[]"), "config.json is not a JSON object"),
    "unknown architecture": (config(architectures=["NoSuchLM"]), "NoSuchLM is not served"),
    "a word for a number": (config(hidden_size="wide"), "not valid for LlamaForCausalLM"),
    "heads that do not divide": (config(num_attention_heads=5), "config"),
    "no weights": (unlink("model.safetensors"), "it has no weights (model.safetensors)"),
    "pickled weights": (pickle_only, "its weights are pickled (pytorch_model.bin)"),
    "truncated weights": (truncate, "model.safetensors is cut short or is not a safetensors"),
    "garbled weights": (garble, "model.safetensors is cut short or is not a safetensors"),
    "missing tensor": (
        weights(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "lacks the tensor model.layers.1.mlp.up_proj.weight",
    ),
    "missing embedding of a tied pair": (
        weights(lambda t: t.pop("model.embed_tokens.weight")),
        "lacks the tensor model.embed_tokens.weight and 1 more",
    ),
    "tensor of another shape": (
        weights(lambda t: t.update({"model.norm.weight": torch.zeros(63)})),
        "model.norm.weight has the shape [63], and the config asks for [64]",
    ),
    "tensor nobody uses": (
        weights(lambda t: t.update({EXTRA_NAME: torch.zeros(4)})),
        f"a tensor that the architecture does not use, {EXTRA_NAME}",
    ),
    "more layers than weights": (config(num_hidden_layers=4), "lacks the tensor model.layers.3"),
    "quantised tensors": (
        weights(lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})),
        "model.norm.weight is stored as I8",
    ),
    "a NaN that the first step meets": (
        weights(lambda t: t["model.norm.weight"].__setitem__(3, float("nan"))),
        "its tensor model.norm.weight in model.safetensors holds NaN; the file is damaged, or",
    ),
    "an infinity that no first step meets": (
        weights(lambda t: t["model.embed_tokens.weight"].__setitem__((77, 0), float("-inf"))),
        "its tensor model.embed_tokens.weight in model.safetensors holds infinity",
    ),
    "weights that are finite and results that are not": (
        weights(lambda t: t["model.norm.weight"].fill_(3e38)),
        "its first step gave no token (its results are not finite numbers)",
    ),
    "no tokenizer": (unlink("tokenizer.json"), "no tokenizer.json"),
    "broken tokenizer": (
        write("tokenizer.json", "{"),
        "tokenizer.json is damaged, or of a newer kind",
    ),
    "broken generation config": (write("generation_config.json", "{"), "not valid JSON"),
    "temperature out of range": (
        write("generation_config.json", '{"temperature": -1}'),
        "generation_config.json has temperature = -1, which is out of range",
    ),
    "greedy by another kind": (
        write("generation_config.json", '{"do_sample": "no"}'),
        "generation_config.json has do_sample = 'no', which is neither true nor false",
    ),
    "no new tokens": (
        write("generation_config.json", '{"max_new_tokens": 0}'),
        "generation_config.json has max_new_tokens = 0, which is out of range",
    ),
    "end token of another kind": (
        write("generation_config.json", '{"eos_token_id": "end"}'),
        "eos_token_id is 'end'",
    ),
}


def failure(directory, **fields):
    """Return a load's error. Check that the runner keeps nothing and that clients may see the
    text."""
    runner = TorchRunner(RunnerSpec(str(directory), **({"kv_bytes": 1 << 22} | fields)))
    with pytest.raises(SpawnFailed) as failed:
        runner.load(lambda _progress: None)
    assert runner._model is None
    assert runner._cache is None
    said = str(failed.value)
    assert said.startswith("Worker spawn failed: ")
    assert "\n" not in said
    assert "unexpected" not in said
    assert str(directory.parent) not in said
    return said


@pytest.mark.parametrize(("breaker", "sentence"), BREAKERS.values(), ids=BREAKERS)
def test_a_broken_checkpoint_is_refused(stock, tmp_path, breaker, sentence):
    directory = tmp_path / "broken"
    shutil.copytree(stock, directory)
    breaker(directory)
    assert sentence in failure(directory)


def test_a_missing_directory_is_refused(tmp_path):
    assert failure(tmp_path / "nowhere").endswith("spawn failed: there is no such directory")


def test_a_file_is_refused(stock):
    assert "it is a file, and a model is a directory" in failure(stock / "model.safetensors")


def test_a_missing_shard_is_refused(sharded, tmp_path):
    directory = tmp_path / "broken"
    shutil.copytree(sharded, directory)
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"its weight file {shard.name} is missing" in failure(directory)


def test_an_index_that_leaves_the_directory_is_refused(sharded, tmp_path):
    directory = tmp_path / "broken"
    shutil.copytree(sharded, directory)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (directory / resolve.INDEX_NAME).write_text(json.dumps(index))
    assert "points outside the model's directory" in failure(directory)


def test_a_sharded_checkpoint_loads(sharded):
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    runner, _ = load_runner(sharded)
    runner.close()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dtype": "int4"}, "the dtype 'int4' is not one of auto, float32, bfloat16, float16"),
        (
            {"device": "abacus"},
            "there is no kind of device called 'abacus'; --device takes auto, cpu, cuda, cuda:N",
        ),
        ({"device": "xpu"}, "the device 'xpu' is not served; --device takes auto, cpu, cuda"),
        ({"device": "cuda:99"}, "; --device auto picks one that is"),
        ({"max_model_len": 1025}, "1025 is more than the model's max_position_embeddings, 1024"),
    ],
)
def test_a_spec_that_cannot_be_met_is_refused(stock, fields, sentence):
    assert sentence in failure(stock, **fields)


def test_weights_too_large_for_their_dtype_are_refused(stock, tmp_path):
    directory = tmp_path / "large"
    shutil.copytree(stock, directory)
    edit_weights(directory, lambda t: t["model.norm.weight"].fill_(1e6))
    said = failure(directory, dtype="float16")
    assert "its tensor model.norm.weight has numbers that float16 cannot hold; choose" in said


def test_a_pool_too_small_for_one_sequence_is_refused_with_the_arithmetic(stock):
    # 3 layers × 2 × 2 heads × 16 numbers × 4 bytes × 16 tokens = 12,288 bytes for each block.
    said = failure(stock, kv_bytes=63 * 12288, max_model_len=1024)
    assert (
        "the KV pool of 774,144 bytes holds 63 blocks of 16 tokens (12,288 bytes each), and one "
        "sequence of 1024 tokens needs 64 blocks, 786,432 bytes; raise --kv-cache-memory or lower "
        "--max-model-len"
    ) in said


def test_a_pool_without_one_block_is_refused(stock):
    said = failure(stock, kv_bytes=100)
    assert "holds 0 blocks of 16 tokens" in said
    assert said.endswith("; raise --kv-cache-memory")


def test_an_unset_length_shrinks_to_the_pool(stock):
    _, info = load_runner(stock, kv_bytes=10 * 12288)
    assert (info.num_blocks, info.max_model_len, info.full_sequences) == (10, 160, 1)
    assert info.context_note == "of 1024, because its KV pool holds no more (--kv-cache-memory)"
    _, info = load_runner(stock, kv_bytes=1 << 30, max_num_seqs=2)
    assert (info.max_model_len, info.context_note, info.full_sequences) == (1024, "", 2)


def test_the_pool_is_no_larger_than_can_be_used(stock):
    _, info = load_runner(stock, kv_bytes=1 << 30, max_num_seqs=2, max_model_len=100)
    assert (info.num_blocks, info.max_model_len) == (14, 100)


def test_an_allocation_that_fails_is_one_sentence(stock, monkeypatch):
    def fail(*_args, **_fields):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(runner_module, "KvCache", fail)
    assert "the device has too little free memory" in failure(stock)


def test_an_unforeseen_error_is_spawn_failed_and_the_log_has_it_all(stock, monkeypatch, caplog):
    def fail(_self):
        raise KeyError("surprise")

    monkeypatch.setattr(checkpoint.Checkpoint, "__enter__", fail)
    runner = TorchRunner(RunnerSpec(str(stock)))
    with pytest.raises(SpawnFailed, match=r"in an unexpected way \(KeyError\)") as failed:
        runner.load(lambda _progress: None)
    assert "surprise" in failed.value.log_detail
    assert "Traceback" in caplog.text


def test_a_file_that_vanishes_while_a_library_reads_it_is_named_with_the_reason(stock, monkeypatch):
    def fail(_self):
        (stock / "nowhere.json").read_text()

    monkeypatch.setattr(checkpoint.Checkpoint, "__enter__", fail)
    said = failure(stock)
    assert said.endswith("could not use the file nowhere.json (No such file or directory)")


def test_an_error_of_a_descriptor_names_no_file():
    with pytest.raises(OSError, match="descriptor") as caught:
        os.stat(10**6)
    failed = failures.spawn_failed("model", caught.value, needs="weights")
    assert "in an unexpected way (OSError)" in str(failed)


def test_a_load_that_failed_can_be_tried_again(stock, tmp_path):
    directory = tmp_path / "again"
    shutil.copytree(stock, directory)
    weights_path = directory / "model.safetensors"
    weights_path.rename(directory / "aside")
    runner = TorchRunner(RunnerSpec(str(directory), kv_bytes=1 << 22, threads=1))
    with pytest.raises(SpawnFailed):
        runner.load(lambda _progress: None)
    (directory / "aside").rename(weights_path)
    assert runner.load(lambda _progress: None).architecture == "LlamaForCausalLM"


# --- names: demos and the Hub ----------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Use an empty Hugging Face cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cache_snapshot(hub, directory, name="models--some-org--tiny"):
    """Put a checkpoint into the Hugging Face cache, and return its folder."""
    snapshot = hub / name / "snapshots" / "abc123"
    shutil.copytree(directory, snapshot)
    (hub / name / "refs").mkdir()
    (hub / name / "refs" / "main").write_text("abc123")
    return snapshot


def test_an_id_not_cached_without_a_network_is_refused(hub):
    runner = TorchRunner(RunnerSpec("some-org/tiny"))
    with pytest.raises(SpawnFailed) as failed:
        runner.load(lambda _progress: None)
    assert str(failed.value) == (
        "Worker spawn failed: there is no directory of this name, it is not in the Hugging Face "
        "cache, and the Hub cannot be reached"
    )


def test_a_name_that_is_almost_a_demos_gets_their_names(hub):
    with pytest.raises(resolve.Refusal, match="; the demos are demo-stories, demo-embed, demo-re"):
        resolve.resolve("demo-storys")


@pytest.mark.parametrize("number", resolve.UNWRITABLE)
def test_a_cache_that_cannot_be_written_is_not_taken_for_a_network(hub, monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number), "/a/place")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    told = rf"cache cannot be written \({os.strerror(number)}\); name another folder in HF_HOME$"
    with pytest.raises(resolve.Refusal, match=told):
        resolve.resolve("some-org/tiny")


def test_a_hub_id_needs_a_home_directory_or_a_folder(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: {}["nobody"])
    assert resolve.resolve_local("some-org/tiny") is None
    with pytest.raises(resolve.Refusal, match="without a home directory there is no Hugging Face"):
        resolve.resolve("some-org/tiny")


def test_without_a_temporary_folder_a_load_says_so(stock, monkeypatch):
    def fail():
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(SpawnFailed, match="none can be written; name one in TMPDIR"):
        factory.look_at_files(RunnerSpec(str(stock)), None)


def test_a_cached_id_needs_no_network(hub, stock):
    snapshot = cache_snapshot(hub, stock)
    assert resolve.resolve("some-org/tiny") == resolve.Source(snapshot, "some-org/tiny")
    with pytest.raises(resolve.Refusal, match="cannot be reached"):
        resolve.resolve("some-org/tiny", "v2")


def test_half_a_download_is_not_taken_for_a_model(hub, stock):
    (cache_snapshot(hub, stock) / "model.safetensors").unlink()
    with pytest.raises(resolve.Refusal, match="its download is unfinished"):
        resolve.resolve("some-org/tiny")


def test_a_name_that_is_no_id_is_not_looked_up(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/c", "../x", "/no/such/place", "with space"):
        with pytest.raises(resolve.Refusal, match="there is no such directory"):
            resolve.resolve(name)


@pytest.mark.parametrize("name", ["./nothing", "../nothing", "a..b/c", "a--b", "x.git", "x" * 97])
def test_a_name_that_is_no_valid_hub_id_is_refused(hub, name):
    assert resolve.resolve_local(name) is None
    with pytest.raises(resolve.Refusal, match="there is no such directory"):
        resolve.resolve(name)


@pytest.mark.parametrize(
    ("name", "short", "told"),
    [
        ("x" * 300, "x" * 300, "its path cannot be accessed: File name too long"),
        ("~nobody-here/model", "model", "there is no such directory"),
    ],
)
def test_an_impossible_path_is_refused_without_a_traceback(hub, name, short, told):
    assert resolve.short_name(name) == short
    assert resolve.resolve_local(name) is None
    with pytest.raises(resolve.Refusal, match=told):
        resolve.resolve(name)


def test_a_demo_that_is_not_installed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(resolve, "DEMO_ROOT", tmp_path)
    with pytest.raises(resolve.Refusal, match="not part of the installation"):
        resolve.resolve("demo-stories")


def test_a_demo_is_found_in_the_package(monkeypatch, tmp_path, stock):
    shutil.copytree(stock, tmp_path / "stories")
    monkeypatch.setattr(resolve, "DEMO_ROOT", tmp_path)
    runner = TorchRunner(RunnerSpec("demo-stories", kv_bytes=1 << 22, threads=1))
    assert runner.load(lambda _progress: None).is_demo


# --- results of a load -----------------------------------------------------------------------


def test_progress_counts_every_tensor_and_byte(stock):
    seen = []
    TorchRunner(RunnerSpec(str(stock), kv_bytes=1 << 22, threads=1)).load(seen.append)
    assert seen[0] == LoadProgress("config")
    assert seen[-1] == LoadProgress("warm-up")
    counted = [step for step in seen if step.phase == "weights"]
    with safe_open(stock / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        size = sum(file.get_tensor(name).nbytes for name in names)
    assert [step.tensors_done for step in counted] == list(range(len(names) + 1))
    assert all(s.tensors_total == len(names) and s.bytes_total == size for s in counted)
    assert [s.bytes_done for s in counted] == sorted(s.bytes_done for s in counted)
    assert counted[-1].bytes_done == size


def test_generation_config_gives_defaults_and_ends(stock, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(stock, directory)
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 4, 9999]}
    said |= {"typical_p": 0.9, "repetition_penalty": 1.1, "min_new_tokens": 4, "max_new_tokens": 99}
    said |= {"presence_penalty": -0.5, "frequency_penalty": 2.0}
    (directory / "generation_config.json").write_text(json.dumps(said))
    _, info = load_runner(directory)
    assert (info.defaults.temperature, info.defaults.top_k, info.defaults.top_p) == (0.6, 20, 0.95)
    assert info.defaults.min_p is None
    assert (info.defaults.typical_p, info.defaults.repetition_penalty) == (0.9, 1.1)
    assert (info.defaults.presence_penalty, info.defaults.frequency_penalty) == (-0.5, 2.0)
    assert (info.defaults.min_tokens, info.defaults.max_tokens) == (4, 99)
    assert info.eos_token_ids == {3, 4}
    (directory / "generation_config.json").unlink()
    edit_config(directory, eos_token_id=7)
    assert load_runner(directory)[1].eos_token_ids == {7}


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_auto_dtype_is_float32_as_stored_else_bfloat16_where_it_is_native(tmp_path, stored):
    make(tmp_path, dtype=stored)
    runner, info = load_runner(tmp_path)
    able = torch.cpu.get_capabilities()
    has_bfloat16 = able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16")
    assert info.dtype == ("bfloat16" if has_bfloat16 and stored != "float32" else "float32")
    assert {p.dtype for p in runner._model.module.parameters()} == {getattr(torch, info.dtype)}
    planner = MiniPlanner(runner, info)
    one = planner.add([1, 2, 3], 8)
    planner.run()
    assert len(one.output) == 8


def test_a_checkpoint_without_the_base_models_prefix_loads(tmp_path):
    """The first GPT-2 checkpoints have `wte.weight`, and causal masks that nothing reads."""
    make(tmp_path, "gpt2")

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.zeros(4, dtype=torch.uint8)

    edit_weights(tmp_path, rename)
    assert load_runner(tmp_path)[1].architecture == "GPT2LMHeadModel"


def join_experts(tensors):
    """Join the weights of a layer's experts, as transformers holds them in memory."""
    for layer in range(3):
        base = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{base}.{i}.{part}_proj.weight") for i in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{base}.gate_up_proj"] = torch.cat([gates, ups], 1)
        tensors[f"{base}.down_proj"] = downs


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_whose_experts_are_in_one_tensor_loads(tmp_path, way):
    separate = make(tmp_path / "separate", "qwen3_moe")
    joined = shutil.copytree(separate, tmp_path / "joined")
    edit_weights(joined, join_experts)
    outputs = []
    for directory in (separate, joined):
        runner, info = load_runner(directory, way=way)
        planner = MiniPlanner(runner, info, seed=1, chunks=500)
        planner.add([1, 2, 3], 8)
        outputs.append(planner.run())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_pair_stored_twice_is_shared_only_where_equal(stock, tmp_path, same):
    directory = tmp_path / "model"
    shutil.copytree(stock, directory)

    def store_twice(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (not same)

    edit_weights(directory, store_twice)
    module = load_runner(directory, way=REFERENCE)[0]._model.module
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == same
