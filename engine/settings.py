"""Defines settings, and the groups of settings that several parts of the engine have.

Rule 1: a setting is one field, with its default, unit, range and help. The flags of `triolet
serve`, the keys of its file, their checks, their help and docs/settings.toml are made from the
fields. Rule 2: a part of the engine that needs a group inherits it; `share` copies whole groups, so
that no setting is copied by its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, TypeVar, cast

from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from dataclasses import Field

T = TypeVar("T")

RUNNERS = ("thread", "process")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
QUANTIZATIONS = ("none", "int8", "int4")
SPECULATIONS = ("off", "lookup", "model")
TOOL_FORMATS = (  # the rows of engine.requests.text.answers.dialects
    *("auto", "channels", "mistral-ids", "mistral-named", "mistral", "kimi-k2", "deepseek-v3"),
    *("deepseek-v3.1", "minimax-m2", "seed-oss", "glm", "qwen3-coder", "cohere", "gemma", "gemma4"),
    *("lfm2", "phi-4", "phi-4-marked", "granite", "hermes", "pythonic", "llama"),
)
RANKS_MAX = 64  # ranks of a model; as many as it may have replicas
THREADS_MAX = 1024  # more than a machine has cores; each thread takes memory


@dataclass(frozen=True, slots=True)
class Setting:
    """The metadata of a setting: everything but the name, type and default, which the field has.

    ``help`` is the flag's help; a setting without help has no flag. ``unset`` is the help's text
    for a default of None. A value is at least ``low``, more than ``above``, at most ``high``, and
    one of ``choices``; the default is valid whatever they are. ``unit`` is the help's placeholder
    for the value. ``flag`` is the flag's name if it is not the field's. ``section`` begins a
    section of the help, to which the settings of the class belong from here on.
    """

    help: str
    unset: str
    low: float | None
    above: float | None
    high: float | None
    choices: tuple[str, ...]
    unit: str
    flag: str
    section: str


def setting(
    default: T,
    text: str = "",
    *,
    unset: str = "",
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    unit: str = "",
    flag: str = "",
    section: str = "",
) -> T:
    """Return the field of a setting for a dataclass; `Setting` explains the arguments."""
    known = Setting(text, unset, low, above, high, choices, unit, flag, section)
    return field(default=default, metadata={"setting": known})


def setting_of(field: Field[Any]) -> Setting | None:
    """Return the setting of a field; None if the field is no setting."""
    return cast("Setting | None", field.metadata.get("setting"))


def flag_of(field: Field[Any]) -> str:
    """Return the flag of a setting, without leading dashes and without the ``_s`` of seconds."""
    known = setting_of(field)
    return (known and known.flag) or field.name.removesuffix("_s").replace("_", "-")


def settings_of(config: type[Any]) -> Iterator[tuple[str, Field[Any]]]:
    """Yield the settings of a configuration, its own and then those of its groups, each with its
    section."""
    known = {field.name: field for field in fields(config)}
    for group in config.__mro__:
        section = ""
        for name in get_annotations(group):
            own = setting_of(known[name]) if name in known else None
            if own is not None:
                section = own.section or section
                yield section, known[name]


def check(config: Any) -> None:
    """Check the range of each setting.

    Raises:
        ConfigError: A value is outside; the message names the flag and its range.
    """
    for option in fields(config):
        known, value = setting_of(option), getattr(config, option.name)
        if known is None or value is None or value == option.default:
            continue
        unit = " s" if option.name.endswith("_s") else ""
        what = f"--{flag_of(option)} is {value}{unit}, but"
        if known.low is not None and not value >= known.low:
            raise ConfigError(f"{what} must be at least {known.low:g}")
        if known.above is not None and not value > known.above:
            raise ConfigError(f"{what} must be more than {known.above:g}")
        if known.high is not None and value > known.high:
            raise ConfigError(f"{what} may be at most {known.high:g}")
        if known.choices:
            require_one_of(flag_of(option), value, known.choices)


def require_one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    """Check that a value is allowed.

    Raises:
        ConfigError: The value is not allowed.
    """
    if value not in allowed:
        *most, last = allowed
        raise ConfigError(f"--{flag} is {value!r}; use {', '.join(most)} or {last}")


def share(target: type[T], *configs: object, **others: Any) -> T:
    """Return a ``target`` with the groups that it has in common with the configurations, and with
    ``others``, which take precedence."""
    shared = {
        field.name: getattr(config, field.name)
        for group in target.__mro__[:-1]
        for config in configs
        if is_dataclass(group) and isinstance(config, group)
        for field in fields(group)
    }
    return target(**shared | others)


# ---- the groups


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """The limits that schedulers of every kind of work have."""

    max_queued_requests: int = setting(
        2048, "most requests that wait; more are refused", low=1, section="requests that wait"
    )
    max_queued_tokens: int = setting(  # for drawings, the denoising steps are counted
        1_000_000, "most prompt tokens that wait; more are refused", low=1
    )
    stall_timeout_s: float = setting(
        30.0, "how long a request waits for a client that does not read", above=0
    )
    aging_s: float = 10.0  # a request that waits so long gains one level of priority


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The limits of one step. The steps of an encoder count padding; an input that is longer than
    ``max_num_batched_tokens`` has a step of its own."""

    max_num_seqs: int = setting(
        256, "most sequences in one step", low=1, section="memory and steps"
    )
    max_num_batched_tokens: int = setting(2048, "most tokens in one step", low=1)


@dataclass(frozen=True, kw_only=True)
class TextSteps(StepLimits):
    """The settings for planning a text model's steps."""

    block_size: int = setting(
        16, "tokens in one block of the KV pool", low=1, section="memory and steps"
    )
    step_time_target_s: float = setting(
        0.15,
        "how long a step that computes prompts should take: a step gets as many prompt tokens as "
        "fit this time at the best speed so far, but at least an eighth of "
        "--max-num-batched-tokens; 0: only --max-num-batched-tokens limits a step",
        low=0,
    )
    inter_token_target_s: float = setting(
        0.02,
        "how long a step that computes prompts should take while answers are generated; prompts "
        "get at least half of the step's time, and at least two tokens for each sequence that "
        "runs or waits; 0: only --step-time-target counts",
        low=0,
    )
    prefix_cache: bool = setting(True, "compute every prompt completely")
    prepared_plans: bool = setting(True, "plan each step only after the one before it has ended")


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """The limits of images that models draw or read."""

    # Not tuned: with more drawings in turn, each would take longer and none would end sooner.
    max_drawings: int = setting(
        4, "most drawings of an image model that take turns; others wait", low=1, section="images"
    )
    # A picture of 8K has 33.2 million pixels, and a phone's mostly 12 or 24. Images are decoded one
    # at a time.
    max_image_pixels: int = setting(
        2**25, "most pixels of an image; decoding takes up to 20 bytes of memory for each", low=1
    )


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """The settings of a loaded model's memory; the runner of each model has its own values."""

    max_model_len: int | None = setting(
        None,
        "most tokens of prompt and completion together",
        unset="the model's own limit, or what the KV pool can hold",
        low=2,
        section="memory and steps",
    )
    prefault_kv_cache: bool = setting(
        False,
        "write to a CPU's whole KV pool at the load, so that no request waits until the operating "
        "system provides its memory",
    )
    seed: int = setting(0, "seed of the server's own random choices")
    packed_cache: str = setting(
        "",
        "folder that keeps packed weights of GGUF files, which later starts and other processes "
        "map; off: none. By default triolet/packed in the user's cache",
        unit="DIR",
        section="loads, failures and the end",
    )
    packed_cache_bytes: int = setting(
        32 << 30,
        "most bytes of the packed weights that are kept",
        low=0,
        unit="BYTES",
        section="loads, failures and the end",
    )


@dataclass(frozen=True, kw_only=True)
class ModelChoices:
    """The settings of the form in which a model is loaded, and of its device."""

    revision: str = setting(
        "", "branch, tag or commit of a Hugging Face model", unit="NAME", section="models"
    )
    dtype: str = setting(  # auto: depends on the checkpoint and the device
        "auto", "the numbers that models compute with", choices=DTYPES
    )
    kv_cache_dtype: str = setting(
        "auto",
        "the numbers of a text model's KV pool; auto: those of --dtype or, if that is auto too, "
        "float32 for weights in float32 and else bfloat16, or float16 on a processor without it. "
        "int8 takes about a quarter of float32's memory",
        choices=KV_DTYPES,
    )
    quantization: str = setting(
        "none",
        "none, or what a text model's float weights are rounded to: int8 (half of bfloat16's "
        "memory, and nearly its accuracy) or int4 (a third of the memory, faster, less accurate)",
        choices=QUANTIZATIONS,
    )
    speculation: str = setting(
        "lookup",
        "how a text model's next tokens are guessed, so that one step can verify several: off, "
        "lookup (what followed the same tokens before, in prompt or answer) or model (also by the "
        "--draft-model). It changes no token, and adapts to how often it is right",
        choices=SPECULATIONS,
    )
    draft_model: str = setting(
        "",
        "a small model of the same tokenizer, which guesses a text model's next tokens, too; it "
        "implies --speculation model, and drafts nothing where that does not pay",
        unit="NAME_OR_DIR",
    )
    tool_format: str = setting(
        "auto",
        "the dialect in which a text model writes tool calls; auto: that of its chat template",
        choices=TOOL_FORMATS,
    )
    tp: int = setting(
        1,
        "how many processes, each on a GPU of its own, a text model is divided among",
        low=1,
        high=RANKS_MAX,
        flag="tensor-parallel-size",
    )
    device: str = setting(  # auto: the first of cuda, mps and cpu that is available
        "auto", "auto, cpu, cuda or cuda:N", unit="DEVICE"
    )
    threads: int = setting(
        0,
        "CPU threads of each model's step, always so many; 0: models share the cores that the "
        "process and its CPU quota have, and use fewer while other programs take them, and an "
        "encoder has one",
        low=0,
        high=THREADS_MAX,
    )
