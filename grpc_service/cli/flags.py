"""The settings of ``triolet serve``: one table of flags, read from arguments or a TOML file.

Rule 1: a flag is one row of `FLAGS`. Its key in the file is its name with underscores, and its
default is that of the field that it sets. Rule 2: an unknown flag or key is refused, and the
message names it. An argument overrides the file. Rule 3: only features that exist have flags.

This file is long because it is one table, of which a reader looks up one row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config import (
    DEMO_MODELS,
    DTYPES,
    QUANTIZATIONS,
    ROUTINGS,
    RUNNERS,
    SPECULATIONS,
    AdapterConfig,
    EngineConfig,
    ModelConfig,
)
from engine.errors import ConfigError
from grpc_service.app.server_config import LOG_FORMATS, ServerConfig
from grpc_service.cli.config_file import read_file, read_table
from grpc_service.cli.values import (
    BYTES,
    COUNT,
    PORTS,
    SECONDS,
    SWITCH,
    Kind,
    one_of,
    text,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    Target = type[EngineConfig] | type[ServerConfig] | type[ModelConfig]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of serve. Its value goes to ``field`` of ``target``; with ``is_inverted``, a switch
    sets the field to False. A field of `ModelConfig` is set for every model whose own table does
    not set it."""

    name: str
    target: Target
    field: str
    kind: Kind
    help: str
    is_inverted: bool = False

    @property
    def key(self) -> str:
        """The flag's key in the file."""
        return self.name.replace("-", "_")

    def help_text(self) -> str:
        """Return the help text with the default, if there is one to show."""
        default = {f.name: f.default for f in dataclasses.fields(self.target)}[self.field]
        if self.kind.is_switch or default is None or default in ("", ()):
            return self.help
        return f"{self.help} (default: {default})"


FLAGS = (
    Flag("host", ServerConfig, "host", text("ADDRESS"), "address to listen on"),
    Flag("port", ServerConfig, "port", COUNT, "port to listen on; 0 takes a free one"),
    Flag("uds", ServerConfig, "uds", text("PATH"), "path of a Unix socket to listen on instead"),
    Flag("insecure", ServerConfig, "insecure", SWITCH, "serve other machines without TLS or key"),
    Flag(
        "max-message-bytes",
        ServerConfig,
        "max_message_bytes",
        BYTES,
        "most bytes of a request, images not counted",
    ),
    Flag(
        "max-image-bytes",
        ServerConfig,
        "max_image_bytes",
        BYTES,
        "most bytes of the images of one request, beside --max-message-bytes",
    ),
    Flag(
        "tls-cert",
        ServerConfig,
        "tls_cert",
        text("FILE"),
        "PEM file of the server's certificate chain",
    ),
    Flag("tls-key", ServerConfig, "tls_key", text("FILE"), "PEM file of the server's private key"),
    Flag(
        "client-ca",
        ServerConfig,
        "client_ca",
        text("FILE"),
        "PEM file of the authority that must have signed the clients' certificates (mTLS)",
    ),
    Flag(
        "api-key-file",
        ServerConfig,
        "api_key_file",
        text("FILE"),
        "file of the keys that clients must show, a name and a key per line; read again on SIGHUP",
    ),
    Flag(
        "key-max-requests",
        ServerConfig,
        "key_max_requests",
        COUNT,
        "most concurrent requests of one key (default: no limit)",
    ),
    Flag(
        "key-max-queued-tokens",
        ServerConfig,
        "key_max_queued_tokens",
        COUNT,
        "most prompt tokens of one key that wait (default: no limit)",
    ),
    Flag(
        "metrics-port",
        ServerConfig,
        "metrics_port",
        COUNT,
        "port for Prometheus; 0 takes a free one (default: none)",
    ),
    Flag("metrics-host", ServerConfig, "metrics_host", text("ADDRESS"), "address for Prometheus"),
    Flag(
        "vllm-engine-port",
        ServerConfig,
        "vllm_engine_ports",
        PORTS,
        "port on which a gateway (smg) may use the model, by vllm.grpc.engine.VllmEngine; with "
        "several models MODEL=PORT, once for each; on loopback without --insecure",
    ),
    Flag(
        "adapter-root",
        ServerConfig,
        "adapter_root",
        text("DIR"),
        "directory below which clients may have adapters loaded (LoadAdapter)",
    ),
    Flag(
        "log-format",
        ServerConfig,
        "log_format",
        one_of(*LOG_FORMATS),
        "human, json, or auto: human on a terminal",
    ),
    Flag(
        "keepalive-time",
        ServerConfig,
        "keepalive_time_s",
        SECONDS,
        "after how long a silent connection gets a ping",
    ),
    Flag(
        "keepalive-timeout",
        ServerConfig,
        "keepalive_timeout_s",
        SECONDS,
        "how long the answer may take before the connection is closed",
    ),
    Flag(
        "max-connections",
        ServerConfig,
        "max_connections",
        COUNT,
        "most connections; more are served health and Control alone, and end soon",
    ),
    Flag(
        "max-connections-per-address",
        ServerConfig,
        "max_connections_per_address",
        COUNT,
        "most connections of one address",
    ),
    Flag(
        "max-connection-age",
        ServerConfig,
        "max_connection_age_s",
        SECONDS,
        "after how long a client is asked to connect anew (default: never)",
    ),
    Flag(
        "max-connection-idle",
        ServerConfig,
        "max_connection_idle_s",
        SECONDS,
        "after how long without a call a client is asked to leave",
    ),
    Flag(
        "connection-budget",
        ServerConfig,
        "connection_budget",
        COUNT,
        "points that a connection may spend on frames and calls without use; one is about 10 µs, "
        "and half of them return each second",
    ),
    Flag(
        "max-held-bytes",
        ServerConfig,
        "max_held_bytes",
        BYTES,
        "most bytes kept of requests and answers that are not read",
    ),
    Flag(
        "revision",
        ModelConfig,
        "revision",
        text("NAME"),
        "branch, tag or commit of a Hugging Face model",
    ),
    Flag("dtype", ModelConfig, "dtype", one_of(*DTYPES), "the numbers that models compute with"),
    Flag(
        "quantization",
        ModelConfig,
        "quantization",
        one_of(*QUANTIZATIONS),
        "none, or what a text model's float weights are rounded to: int8 (half of bfloat16's "
        "memory, and nearly its accuracy) or int4 (a third of the memory, faster, less accurate)",
    ),
    Flag(
        "tensor-parallel-size",
        ModelConfig,
        "tp",
        COUNT,
        "how many processes, each on a GPU of its own, a text model is divided among",
    ),
    Flag(
        "speculation",
        ModelConfig,
        "speculation",
        one_of(*SPECULATIONS),
        "how a text model's next tokens are guessed, so that one step can verify several: off, "
        "lookup (what followed the same tokens before, in prompt or answer) or model (also by the "
        "--draft-model). It changes no token, and adapts to how often it is right",
    ),
    Flag(
        "draft-model",
        ModelConfig,
        "draft_model",
        text("NAME_OR_DIR"),
        "a small model of the same tokenizer, which guesses a text model's next tokens, too; it "
        "implies --speculation model, and drafts nothing where that does not pay",
    ),
    Flag("device", ModelConfig, "device", text("DEVICE"), "auto, cpu, cuda or cuda:N"),
    Flag(
        "threads",
        ModelConfig,
        "threads",
        COUNT,
        "CPU threads of each model's step, always so many; 0: models share the cores that the "
        "process and its CPU quota have, and use fewer while other programs take them, and an "
        "encoder has one",
    ),
    Flag("lazy", ModelConfig, "lazy", SWITCH, "load a model when a request first asks for it"),
    Flag(
        "runner",
        ModelConfig,
        "runner",
        one_of(*RUNNERS),
        "thread: models compute in threads of the server; process: each in a process of its own",
    ),
    Flag(
        "max-model-len",
        EngineConfig,
        "max_model_len",
        COUNT,
        "most tokens of prompt and completion together (default: the model's own limit, or what "
        "the KV pool can hold)",
    ),
    Flag("max-num-seqs", EngineConfig, "max_num_seqs", COUNT, "most sequences in one step"),
    Flag(
        "max-num-batched-tokens",
        EngineConfig,
        "max_num_batched_tokens",
        COUNT,
        "most tokens in one step",
    ),
    Flag(
        "max-drawings",
        EngineConfig,
        "max_drawings",
        COUNT,
        "most drawings of an image model that take turns; others wait",
    ),
    Flag(
        "max-image-pixels",
        EngineConfig,
        "max_image_pixels",
        COUNT,
        "most pixels of an image; decoding takes up to 20 bytes of memory for each",
    ),
    Flag(
        "step-time-target",
        EngineConfig,
        "step_time_target_s",
        SECONDS,
        "how long a step that computes prompts should take: a step gets as many prompt tokens as "
        "fit this time at the best speed so far, but at least an eighth of "
        "--max-num-batched-tokens; 0: only --max-num-batched-tokens limits a step",
    ),
    Flag(
        "inter-token-target",
        EngineConfig,
        "inter_token_target_s",
        SECONDS,
        "how long a step that computes prompts should take while answers are generated; prompts "
        "get at least half of the step's time, and at least two tokens for each sequence that "
        "runs or waits; 0: only --step-time-target counts",
    ),
    Flag("block-size", EngineConfig, "block_size", COUNT, "tokens in one block of the KV pool"),
    Flag(
        "kv-cache-memory",
        EngineConfig,
        "kv_cache_memory",
        BYTES,
        "size of the KV pool, of which the states of recurrent layers take at most half (default: "
        "what --max-num-seqs sequences need, at most 4 GiB and a quarter of the memory limit; "
        "128 MiB for a shipped model)",
    ),
    Flag(
        "prefault-kv-cache",
        EngineConfig,
        "prefault_kv_cache",
        SWITCH,
        "write to a CPU's whole KV pool at the load, so that no request waits until the operating "
        "system provides its memory",
    ),
    Flag(
        "memory-limit",
        EngineConfig,
        "memory_limit",
        BYTES,
        "most memory for models (default: 0.80 of the memory that the process may use)",
    ),
    Flag(
        "no-prefix-cache",
        EngineConfig,
        "prefix_cache",
        SWITCH,
        "compute every prompt completely",
        True,
    ),
    Flag(
        "no-prepared-plans",
        EngineConfig,
        "prepared_plans",
        SWITCH,
        "plan each step only after the one before it has ended",
        True,
    ),
    Flag("seed", EngineConfig, "seed", COUNT, "seed of the server's own random choices"),
    Flag(
        "max-queued-requests",
        EngineConfig,
        "max_queued_requests",
        COUNT,
        "most requests that wait; more are refused",
    ),
    Flag(
        "max-queued-tokens",
        EngineConfig,
        "max_queued_tokens",
        COUNT,
        "most prompt tokens that wait; more are refused",
    ),
    Flag(
        "stream-buffer",
        EngineConfig,
        "stream_buffer",
        COUNT,
        "how many messages a stream may be ahead of its client",
    ),
    Flag(
        "stall-timeout",
        EngineConfig,
        "stall_timeout_s",
        SECONDS,
        "how long a request waits for a client that does not read",
    ),
    Flag(
        "spawn-timeout",
        EngineConfig,
        "spawn_timeout_s",
        SECONDS,
        "how long a request waits for its model to load",
    ),
    Flag(
        "routing",
        EngineConfig,
        "routing",
        one_of(*ROUTINGS),
        "how the worker of a request is chosen: least-tokens, round-robin, or prefix (the worker "
        "that has cached most of the prompt, unless it has much more to do)",
    ),
    Flag(
        "max-worker-deaths",
        EngineConfig,
        "max_worker_deaths",
        COUNT,
        "if a model's workers die this often within 10 minutes, they are not restarted any more",
    ),
    Flag(
        "idle-ttl",
        EngineConfig,
        "idle_ttl_s",
        SECONDS,
        "unload a model that was not used for this long (default: only if memory is needed)",
    ),
    Flag(
        "step-timeout",
        EngineConfig,
        "step_timeout_s",
        SECONDS,
        "how long a step may take before it counts as hung: it is then logged, health is "
        "NOT_SERVING, and a drain does not wait for it",
    ),
    Flag(
        "drain-timeout",
        EngineConfig,
        "drain_timeout_s",
        SECONDS,
        "how long requests may take to finish after a signal to end",
    ),
    Flag(
        "default-deadline",
        EngineConfig,
        "default_deadline_s",
        SECONDS,
        "deadline of requests that have none (default: none)",
    ),
)
BY_KEY = {flag.key: flag for flag in FLAGS}


def configs_of(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[EngineConfig, ServerConfig]:
    """Return the configs that the arguments, the file that they name and ``ENGINE_CHECK`` give
    together.

    Raises:
        ConfigError: the message names the setting and what to change.
    """
    settings, models = ({}, []) if args.config is None else read_file(args.config, BY_KEY)
    settings |= {key: value for key, value in vars(args).items() if key in BY_KEY}
    engine = _fields(EngineConfig, settings)
    engine["models"] = _models(args, models, _fields(ModelConfig, settings))
    if "ENGINE_CHECK" in environ:
        engine["check_level"] = _check_level(environ["ENGINE_CHECK"])
    return EngineConfig(**engine), ServerConfig(**_fields(ServerConfig, settings))


def engine_config_of(table: Mapping[str, Any]) -> EngineConfig:
    """Return the config of an engine without a server of its own, from a table with the keys of the
    file.

    Raises:
        ConfigError: the message names the key and what to change.
    """
    known = {key: flag for key, flag in BY_KEY.items() if flag.target is not ServerConfig}
    settings, tables = read_table(table, known)
    common = _fields(ModelConfig, settings)
    tables = tables or [{"model": model} for model in DEMO_MODELS]
    models = tuple(ModelConfig(**common | one) for one in tables)
    return EngineConfig(models=models, **_fields(EngineConfig, settings))


def _fields(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are fields of ``target``, by the fields' names."""
    return {
        flag.field: settings[flag.key] != flag.is_inverted
        if flag.kind.is_switch
        else tuple(settings[flag.key])
        if flag.kind.is_repeated
        else settings[flag.key]
        for flag in FLAGS
        if flag.target is target and flag.key in settings
    }


def _models(
    args: argparse.Namespace, tables: list[dict[str, Any]], common: dict[str, Any]
) -> tuple[ModelConfig, ...]:
    """Return the models of the arguments, or else of the file, or else the shipped ones. Names are
    given to them in order."""
    if "model" in args:
        tables = [{"model": model} for model in args.model]
    tables = tables or [{"model": model} for model in DEMO_MODELS]
    names = getattr(args, "served_model_name", [])
    if len(names) > len(tables):
        raise ConfigError(
            f"--served-model-name is given {len(names)} times for {len(tables)} model(s); it "
            "names the models in order"
        )
    for table, name in zip(tables, names, strict=False):
        table["name"] = name
    models = tuple(ModelConfig(**common | table) for table in tables)
    models = _with_adapters(models, getattr(args, "adapter", []))
    if "model" not in args and not names:  # otherwise flags gave the names
        _check_names(args.config, models)
    return models


def _check_names(path: str, models: tuple[ModelConfig, ...]) -> None:
    """Check that no two models of the file share a name.

    Raises:
        ConfigError: two do; the message names the keys that have the name.
    """
    keys: dict[str, str] = {}
    for index, model in enumerate(models):
        for key, names in (("name", (model.name,)), ("aliases", model.aliases)):
            own = f"models[{index}].{key}"
            for name in names:
                if name in keys:
                    what = f"is taken by {keys[name]}; give one of them another name"
                    raise ConfigError(f"{path}: {own}: {name!r} {what}")
                keys[name] = own


def _check_level(text: str) -> int:
    if text not in ("0", "1", "2"):
        raise ConfigError(f"ENGINE_CHECK is {text!r}; use 0, 1 or 2")
    return int(text)


def _with_adapters(
    models: tuple[ModelConfig, ...], given: list[tuple[str, str, str]]
) -> tuple[ModelConfig, ...]:
    """Return the models with the adapters of ``--adapter``, each a base, a name and a directory."""
    names = [model.name for model in models]
    for base, name, _ in given:
        if base not in names:
            raise ConfigError(
                f"--adapter {base}:{name} has the base {base!r}, but the models are: "
                f"{', '.join(names)}"
            )
    return tuple(
        dataclasses.replace(
            model,
            adapters=model.adapters
            + tuple(AdapterConfig(name, path) for base, name, path in given if base == model.name),
        )
        for model in models
    )
