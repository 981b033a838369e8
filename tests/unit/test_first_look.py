"""A model that its small files show to be unservable is refused before torch is imported."""

import json

import pytest

from tests.support.programs import output_of

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
GGUF = "GGUF\x03\x00\x00\x00"
WHOLE = {"config.json": LLAMA, "model.safetensors": "", "tokenizer.json": {}}
MODULES = [{"path": "", "type": "sentence_transformers.models.Transformer"}, {"type": "os.system"}]

# The files of a directory, and the end of the error with which the directory is refused.
DIRECTORIES = {
    "nowhere": (None, "there is no such directory"),
    "unknown": (
        {"config.json": {"architectures": ["CTRLLMHeadModel"], "model_type": "ctrl"}},
        "the architecture CTRLLMHeadModel is not served; docs/features.md lists those that are",
    ),
    "falcon": (
        {"config.json": {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}},
        "FalconForCausalLM cannot have a paged cache, because its module in transformers computes "
        "its attention without transformers' attention interface; docs/features.md lists the "
        "models that are served",
    ),
    "recurrent": (
        {"config.json": {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}},
        "MambaForCausalLM has recurrent layers of a kind that is not served; "
        "docs/features.md lists the models that are served",
    ),
    "dynamic": (
        {"config.json": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}},
        "its rotary embedding is of type 'dynamic', which is untested or whose frequencies depend "
        "on the other sequences of the batch; docs/features.md lists the models that are served",
    ),
    "dynamic-layers": (
        {"config.json": LLAMA | {"rope_parameters": {"full": {"rope_type": "dynamic"}}}},
        "its rotary embedding is of type 'dynamic', which is untested or whose frequencies depend "
        "on the other sequences of the batch; docs/features.md lists the models that are served",
    ),
    "weightless": ({"config.json": LLAMA}, "it has no weights (model.safetensors)"),
    "file.txt": ("text", "it is a file, and a model is a directory or a GGUF file"),
    "ggufs": (
        {"tiny-q4.gguf": GGUF, "tiny-q8.gguf": GGUF, "README.md": ""},
        "its directory has 2 GGUF models; name the file to serve, such as ggufs/tiny-q4.gguf",
    ),
    "lora": (
        {
            "adapter_config.json": {"base_model_name_or_path": "some-org/base"},
            "adapter_model.bin": "",
        },
        "it is an adapter of PEFT, such as LoRA (adapter_config.json), and not a whole model; "
        "serve its base model, some-org/base, with --adapter BASE:NAME=DIR, or merge it by PEFT's "
        "merge_and_unload, save that, and serve the result",
    ),
    "lora-of-a-path": (
        {
            "config.json": LLAMA,
            "adapter_config.json": {"base_model_name_or_path": "/home/me/base-7b/"},
            "adapter_model.safetensors": "",
        },
        "it is an adapter of PEFT, such as LoRA (adapter_config.json), and not a whole model; "
        "serve its base model, base-7b, with --adapter BASE:NAME=DIR, or merge it by PEFT's "
        "merge_and_unload, save that, and serve the result",
    ),
    "pointer": (
        WHOLE | {"model.safetensors": POINTER, "pytorch_model.bin": POINTER},
        "its model.safetensors is a pointer of git-LFS, without the content; run 'git lfs pull' in "
        "the model's directory",
    ),
    "pointers": (
        WHOLE | {"model.safetensors": POINTER, "tokenizer.json": POINTER},
        "its model.safetensors and 1 more are pointers of git-LFS, without the content; run 'git "
        "lfs pull' in the model's directory",
    ),
    **{
        module: (
            {
                "config.json": {},
                "modules.json": [{"type": f"sentence_transformers.{room}.modules.{module}"}],
            },
            f"its module {module}, which makes {what}, is not served; choose a model whose modules "
            "end with a Pooling or a SpladePooling",
        )
        for module, room, what in (
            ("SparseAutoEncoder", "sparse_encoder", "sparse vectors"),
            ("LambdaTokenPooling", "multi_vector_encoder", "a vector for each token"),
        )
    },
    "encoder": (
        {"config.json": {}, "modules.json": MODULES},
        "its modules.json names a module of type 'os.system', which is not one of Dense, "
        "LayerNorm, Normalize, Pooling, Transformer",
    ),
}
LOOK = """
import json, sys
from engine.config import EngineConfig, ModelConfig
from engine.errors import SpawnFailed
from engine.worker.factory import make_runner

said = {}
for name, path in json.load(sys.stdin).items():
    model = ModelConfig(path)
    try:
        make_runner(model, EngineConfig(models=(model,)))
    except SpawnFailed as refused:
        said[name] = [str(refused), sorted({"torch", "transformers"} & sys.modules.keys())]
print(json.dumps(said))
"""


def write(path, files):
    """Write a file with the text ``files``, or a directory with a dict of files; None: nothing."""
    if files is None:
        return
    if isinstance(files, str):
        path.write_text(files)
        return
    path.mkdir()
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return, by directory, the error of loading a model from it in a new process, and which of
    torch and transformers were imported before the error."""
    root = tmp_path_factory.mktemp("models")
    for name, (files, _) in DIRECTORIES.items():
        write(root / name, files)
    paths = json.dumps({name: str(root / name) for name in DIRECTORIES})
    return json.loads(output_of(LOOK, input=paths))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_is_refused_as_what_it_is_before_torch_is_imported(said, name):
    """Importing torch and transformers takes seconds, which a mistake should not cost."""
    assert said[name] == [f"Worker spawn failed: {DIRECTORIES[name][1]}", []]
