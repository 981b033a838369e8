"""A setting is declared once: no default stands twice, and what is derived from it agrees."""

import ast
import operator
import re
from collections import defaultdict

import pytest

from engine.config import (
    EncoderConfig,
    EngineConfig,
    ImageGenerationConfig,
    ModelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from engine.errors import ConfigError
from engine.settings import flag_of, settings_of, share
from engine.worker.interface import RunnerSpec
from grpc_service.app.server_config import ServerConfig
from grpc_service.cli.flags import configs_of
from grpc_service.cli.main import build_parser
from tests.support.programs import ROOT, output_of
from tools import list_settings

CONFIGS = (EngineConfig, ModelConfig, WorkerConfig, ServerConfig)
DEFAULTS = {(one.name, one.default) for config in CONFIGS for _, one in settings_of(config)}
OPERATORS = {ast.Mult: operator.mul, ast.Pow: operator.pow, ast.LShift: operator.lshift}


def number_of(node):
    """Return the number that an expression has, alone or as the default in a call of `setting`;
    None if it is not a number."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setting" and node.args:
        return number_of(node.args[0])
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = number_of(node.left), number_of(node.right)
        return left and right and OPERATORS[type(node.op)](left, right)
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int | float) else None


def defaults_in(source):
    """Yield name, number and line of each default: of a class's fields, and of arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            given = [(node.target.id, node.value)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            plain = [*node.args.posonlyargs, *node.args.args]
            pairs = zip(reversed(plain), reversed(node.args.defaults), strict=False)
            pairs = [*pairs, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
            given = [(one.arg, default) for one, default in pairs]
        else:
            continue
        for name, value in given:
            number = number_of(value)
            if number not in (None, 0, 1):  # too many defaults have these values
                yield name, number, node.lineno


def repeated(sources):
    """Return the settings whose default stands in several places, with these places."""
    places = defaultdict(list)
    for path, source in sources.items():
        for name, number, line in defaults_in(source):
            if (name, number) in DEFAULTS:
                places[name, number].append(f"{path}:{line}")
    return {one: found for one, found in places.items() if len(found) > 1}


def product():
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("engine", "grpc_service")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_generated" not in path.parts
    }


def test_no_default_of_a_setting_stands_twice():
    assert repeated(product()) == {}


@pytest.mark.parametrize(
    "again",
    [
        "class Limits:\n    max_num_seqs: int = 256",
        "class Limits:\n    max_image_pixels: int = 1 << 25",
        "class Limits:\n    stall_timeout_s: float = setting(30.0, 'how long')",
        "def plan(rows, max_num_batched_tokens=2048): ...",
        "async def plan(*, block_size: int = 16): ...",
    ],
)
def test_a_default_that_stands_twice_is_found(again):
    [found] = repeated(product() | {"again.py": again}).values()
    assert found[-1].startswith("again.py")
    assert repeated({"other.py": "def plan(max_num_seqs=0, tp=1, block_size=None): ..."}) == {}


NEW_FIELD = """
import sys
from importlib.machinery import SourceFileLoader

PLACE = "    max_queued_tokens: int = setting("
FIELD = "    max_new_things: int = setting(77, 'most new things', low=5)\\n"
get_code = SourceFileLoader.get_code

def with_field(loader, name):
    if name != "engine.settings":
        return get_code(loader, name)
    before, place, after = loader.get_source(name).partition(PLACE)
    return compile(before + FIELD + place + after, loader.path, "exec")

SourceFileLoader.get_code = with_field
from engine.config import EncoderConfig
from engine.errors import ConfigError
from engine.settings import share
from grpc_service.cli.flags import configs_of
from grpc_service.cli.main import build_parser
from tools import list_settings

def config(*argv):
    return configs_of(build_parser().parse_args(["serve", *argv]), {})[0]

print(config().max_new_things, config("--max-new-things", "6").max_new_things)
with open(sys.argv[1], "w") as file:
    file.write("max_new_things = 8")
from_file = config("--config", sys.argv[1])
print(share(EncoderConfig, from_file, max_model_len=9).max_new_things)
try:
    config("--max-new-things", "4")
except ConfigError as error:
    print(error)
print(list_settings.make_list())
build_parser().parse_args(["serve", "--help"])
"""


def test_a_new_field_is_a_flag_a_key_and_a_line_of_help_and_docs_and_reaches_the_core(tmp_path):
    printed = output_of(NEW_FIELD, tmp_path / "triolet.toml")
    default_and_flag, file, error, *told = printed.splitlines()
    assert (default_and_flag, file) == ("77 6", "8")
    assert error == "--max-new-things is 4, but must be at least 5"
    assert "# most new things (at least 5)\n# max_new_things = 77" in "\n".join(told)
    section = "\n".join(told).partition("requests that wait:\n")[2].partition("\n\n")[0]
    assert "  --max-new-things N    most new things (default: 77)" in section.splitlines()


def test_the_listed_settings_are_a_file_with_the_defaults(tmp_path):
    """Listed keys with defaults, without their ``#``, are read as a configuration file."""
    lines = re.findall(r"^# (\w+ = [^A-Z{\[].*)$", list_settings.make_list(), re.MULTILINE)
    file = tmp_path / "triolet.toml"
    file.write_text("\n".join(lines))
    args = build_parser().parse_args(["serve", "--config", str(file)])
    assert configs_of(args, {}) == (EngineConfig(), ServerConfig())
    assert len(lines) > 40


def test_a_group_is_handed_on_whole_and_others_are_not():
    config = EngineConfig(max_drawings=9, max_queued_tokens=70, max_num_seqs=3, seed=5)
    drawing = share(ImageGenerationConfig, config)
    assert (drawing.max_drawings, drawing.max_queued_tokens) == (9, 70)
    assert not hasattr(drawing, "max_num_seqs")
    spec = share(RunnerSpec, ModelConfig("m", threads=2), config, model="x", seed=6)
    assert (spec.model, spec.threads, spec.max_num_seqs, spec.seed) == ("x", 2, 3, 6)


REQUIRED = {
    **{EngineConfig: {}, WorkerConfig: {}, ImageGenerationConfig: {}},
    ModelConfig: {"model": "m"},
    ServerConfig: {"api_key_file": "/keys"},
    SchedulerConfig: {"num_blocks": 128},
    EncoderConfig: {"max_model_len": 8},
}


@pytest.mark.parametrize("config", REQUIRED, ids=lambda one: one.__name__)
def test_a_value_beyond_the_range_of_a_setting_is_refused(config):
    for _, one in settings_of(config):
        known = one.metadata["setting"]
        wrong = [
            *([] if known.low is None else [known.low - 1, float("nan")]),
            *([] if known.above is None else [known.above, float("nan")]),
            *([] if known.high is None else [known.high + 1]),
            *(["no-such"] if known.choices else []),
        ]
        for value in wrong:
            with pytest.raises(ConfigError, match=f"^--{flag_of(one)} is .*{value}"):
                config(**REQUIRED[config] | {one.name: value})
    if config is EncoderConfig:  # the field of EncoderConfig itself has no default
        with pytest.raises(ConfigError, match="--max-model-len is 0, but must be at least 1"):
            EncoderConfig(max_model_len=0)
