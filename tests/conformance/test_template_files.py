"""A model's chat templates come from the files that transformers reads, whatever others exist."""

import itertools
import json

import pytest
import transformers
from transformers import ProcessorMixin

from engine.errors import InvalidRequest, SpawnFailed
from engine.worker.load.resolve import WANTED_FILES
from engine.worker.text.files import open_files
from engine.worker.tokenizing.tokenizer import load_tokenizer
from tests.support import toy_tokenizers
from tests.support.gguf_files import write_model
from tests.support.model_zoo import Zoo

pytestmark = [
    # transformers leaves files open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ASK = [{"role": "user", "content": "q"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
READS = "{% if tools %}{% endif %}"  # a template that mentions tools gets them


def as_json(template):
    return json.dumps({"chat_template": template})


# Files that a model's folder may have, each with a template that writes the file's key here.
FILES = {
    "processor": ("processor_config.json", as_json("processor" + READS)),
    "json": ("chat_template.json", as_json("json" + READS)),
    "jinja": ("chat_template.jinja", "jinja" + READS),
    "named": ("additional_chat_templates/tool_use.jinja", "named" + READS),
    "config": ("tokenizer_config.json", as_json("config" + READS)),
    "list": (
        "tokenizer_config.json",
        as_json(
            [
                {"name": "default", "template": "default" + READS},
                {"name": "tool_use", "template": "tools" + READS},
            ]
        ),
    ),
}
IMAGES = ("preprocessor_config.json", "{}")  # a file of models that read images
# With a processor, transformers refuses a chat_template.json beside named files.
CHOICES = [
    {*chosen}
    for count in range(4)
    for chosen in itertools.combinations((*FILES, "images"), count)
    if not {"config", "list"} <= {*chosen}
    if not ({"json", "named"} <= {*chosen} and {"images", "processor"} & {*chosen})
]


def write(directory, names):
    """Write a tokenizer and these files into a folder."""
    toy_tokenizers.save("byte_level", directory)
    (directory / "config.json").write_text('{"model_type": "gpt2"}')
    (directory / "tokenizer_config.json").write_text("{}")
    for name in names:
        path, content = {**FILES, "images": IMAGES}[name]
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(content)


def of_transformers(directory, *, has_processor):
    """Return the templates that transformers finds in a folder, by name."""
    found = None
    if has_processor:
        found = ProcessorMixin.get_processor_dict(directory)[0].get("chat_template")
    if found is None:
        found = transformers.AutoTokenizer.from_pretrained(directory).chat_template
    return {"default": found} if isinstance(found, str) else found or {}


@pytest.mark.parametrize("names", CHOICES, ids=lambda names: "+".join(sorted(names)) or "none")
def test_the_template_is_that_of_transformers(tmp_path, names):
    write(tmp_path, names)
    has_processor = bool({"images", "processor"} & names)
    expected = of_transformers(tmp_path, has_processor=has_processor)
    if not expected and "json" in names:
        expected = {"default": "json" + READS}  # transformers reads it for images only
    ours = load_tokenizer(tmp_path)
    with_tools = expected.get("tool_use", expected.get("default", ""))
    assert ours.chat_template(has_tools=True) == with_tools
    if "default" in expected:
        assert ours.render_chat(ASK) == expected["default"].removesuffix(READS)
    if expected:
        assert ours.render_chat(ASK, tools=TOOLS) == with_tools.removesuffix(READS)


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_a_broken_file_of_a_template_is_named(tmp_path, name):
    write(tmp_path, ())
    (tmp_path / name).write_text("{")
    with pytest.raises(SpawnFailed, match=f"the model's {name} is not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_text(as_json("{% if %}"))
    with pytest.raises(SpawnFailed, match=rf"chat template in {name} is wrong at line 1"):
        load_tokenizer(tmp_path)


def test_every_file_of_a_template_is_downloaded():
    from fnmatch import fnmatch

    for path, _ in FILES.values():
        assert any(fnmatch(path, pattern) for pattern in WANTED_FILES), path


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_broken_named_template_ends_only_the_requests_that_need_it(tmp_path, checkpoint, is_gguf):
    """Other requests are answered, and perhaps none ever needs the broken templates."""
    broken, plain = "{% if tools %}", "plain" + READS
    if is_gguf:
        key = "tokenizer.chat_template"
        metadata = {key: plain, f"{key}.tool_use": broken, f"{key}.rag": broken}
        path = write_model(checkpoint, tmp_path / "made.gguf", metadata=metadata)
        with open_files(str(path), "", with_tokenizer=True) as files:
            ours = files.tokenizer()
    else:
        write(tmp_path, {"jinja"})
        (tmp_path / "chat_template.jinja").write_text(plain)
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(broken)
        ours = load_tokenizer(tmp_path)
    assert ours.render_chat(ASK) == "plain"
    with pytest.raises(InvalidRequest, match=r"chat: the model's chat template is wrong at line 1"):
        ours.render_chat(ASK, tools=TOOLS)


GGUF = {
    "tokenizer.chat_template": ("default", "plain" + READS),
    "tokenizer.chat_template.tool_use": ("tool_use", "tools" + READS),
    "tokenizer.chat_template.rag": ("rag", "rag" + READS),
}


@pytest.mark.parametrize("keys", [(), *itertools.combinations(GGUF, 1), [*GGUF][:2], GGUF])
def test_the_templates_of_a_gguf_file_are_all_read(tmp_path, checkpoint, keys):
    """The file's list of template names is not needed, and a name that is a path is ignored."""
    names = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.../x": "no"}
    metadata = {key: GGUF[key][1] for key in keys} | names
    path = write_model(checkpoint, tmp_path / "made.gguf", metadata=metadata)
    with open_files(str(path), "", with_tokenizer=True) as files:
        ours = files.tokenizer()
    expected = dict(GGUF[key] for key in keys)
    for has_tools in (True, False):
        chosen = expected.get("default", "")
        wanted = expected.get("tool_use", chosen) if has_tools else chosen
        assert ours.chat_template(has_tools=has_tools) == wanted
        if wanted:
            told = ours.render_chat(ASK, tools=TOOLS if has_tools else [])
            assert told == wanted.removesuffix(READS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a tiny checkpoint without a template."""
    return Zoo(tmp_path_factory.mktemp("zoo")).directory("llama")
