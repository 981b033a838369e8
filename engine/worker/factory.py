"""Makes unloaded runners from the configuration, which decides their kind, place and resources.

Rule: torch is imported only to make a runner in this process, after a check of the model's files,
and sentence-transformers only when an encoder is loaded.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from engine.errors import ConfigError, SpawnFailed
from engine.limits.cpu import cpu_limit
from engine.limits.memory import default_limit
from engine.settings import share
from engine.status import Capability
from engine.worker.image_generation import pipelines
from engine.worker.import_lock import holds_import_lock
from engine.worker.interface import RunnerSpec
from engine.worker.load import architectures, capability
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import (
    absence,
    read_json,
    resolve,
    resolve_local,
    weight_files,
)
from engine.worker.load.vision_architectures import find_vision, has_vision
from engine.worker.process.runner import ProcessRunner

if TYPE_CHECKING:
    from pathlib import Path

    from engine.config import EngineConfig, ModelConfig
    from engine.worker.encode.interface import EncodeRunner
    from engine.worker.image_generation.interface import ImageGenerationRunner
    from engine.worker.text.interface import TextRunner

    AnyRunner = TextRunner | EncodeRunner | ImageGenerationRunner

RUNNER_OF = "engine.worker.factory:runner_of"  # the function that a worker process calls
# The default size of a shipped model's KV pool. It holds 32 sequences of the story teller's full
# length; a pool for --max-num-seqs sequences would reserve a gigabyte for a model of 4 MB.
DEMO_KV_BYTES = 128 << 20
# The least time after which a rank that sends nothing while it loads counts as hung, however short
# the step timeout: importing torch holds the GIL for seconds, and for more on a busy machine.
SILENCE_S = 20.0


def threads_for(model: ModelConfig, config: EngineConfig) -> int:
    """Return how many CPU threads a worker uses: those that its model's setting names; one for an
    encoder; otherwise an equal share of `cpu_limit`, at least one."""
    if model.threads:
        return model.threads
    if _encodes(model):
        return 1
    num_workers = sum(m.num_replicas * m.tp for m in config.models if not _encodes(m))
    return max(1, cpu_limit().threads // num_workers)


def _known_capability(model: ModelConfig) -> Capability | None:
    return model.capability or capability.find(model.model, model.revision)


def _encodes(model: ModelConfig) -> bool:
    known = _known_capability(model)
    return known is not None and known.encodes


def _generates_text(model: ModelConfig) -> bool:
    """Return whether a model generates text, or may, if its files are not here yet."""
    known = _known_capability(model)
    return known is None or known.generates_text


def _kv_bytes(model: ModelConfig, config: EngineConfig) -> int | None:
    """Return the size of a model's KV pool in bytes; None lets the runner decide."""
    source = resolve_local(model.model, model.revision)
    is_demo = source is not None and source.is_demo
    return config.kv_cache_memory or (DEMO_KV_BYTES if is_demo else None)


def _draft_model(model: ModelConfig) -> str:
    """Return the draft model of a text model; empty if it has none. Other models have none."""
    if model.speculation != "model" or not _generates_text(model):
        return ""
    return model.draft_model


def runner_spec(model: ModelConfig, config: EngineConfig) -> RunnerSpec:
    """Return the part of the configuration that one model's runner needs."""
    tp = model.tp if _generates_text(model) else 1
    return share(
        RunnerSpec,
        model,
        config,
        model=model.model,
        threads=threads_for(model, config),
        kv_bytes=_kv_bytes(model, config),
        memory_limit=config.memory_limit or default_limit(),
        tp=tp,
        speculation=model.speculation if tp == 1 else "off",
        draft_model=_draft_model(model),
    )


def require_a_model(config: EngineConfig) -> None:
    """Check that one of the configured models may exist, or is loaded later.

    Raises:
        ConfigError: All models are paths at which there is nothing.
    """
    absences = {model.name: "" if model.lazy else absence(model.model) for model in config.models}
    if all(absences.values()):
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in absences.items()))


def make_runner(model: ModelConfig, config: EngineConfig) -> AnyRunner:
    """Return an unloaded runner that works where ``model.runner`` says: in threads of the server
    or in a process of its own. A divided model has one process for each rank.

    Raises:
        SpawnFailed: The files exclude the model (`look_at_files`); a process checks them itself.
    """
    spec = runner_spec(model, config)
    if model.runner == "process" or spec.tp > 1:
        return make_process_runner(model, config)
    return runner_of(spec, model.capability)


def make_process_runner(model: ModelConfig, config: EngineConfig) -> ProcessRunner:
    """Return an unloaded runner in a process of its own, or in a process for each rank."""
    spec, patience_s = runner_spec(model, config), max(SILENCE_S, config.step_timeout_s)
    return ProcessRunner(RUNNER_OF, spec, model.capability, patience_s)


def runner_of(spec: RunnerSpec, kind: Capability | None) -> AnyRunner:
    """Return an unloaded runner that works in any thread. Without a kind, the model's files decide.

    Raises:
        SpawnFailed: The files exclude the model (`look_at_files`).
    """
    kind = look_at_files(spec, kind)
    if spec.tp > 1 and not kind.generates_text:
        what = f"{kind.value} models are not divided; leave tensor_parallel_size out"
        raise SpawnFailed(what)
    return _import_runner(spec, kind)


def look_at_files(spec: RunnerSpec, kind: Capability | None) -> Capability:
    """Refuse a model that its small files alone exclude, before torch is imported, which takes
    seconds. Return its capability: ``kind`` or, if that is None, that of the files. A Hugging Face
    model that is not cached is downloaded.

    Raises:
        SpawnFailed: There are no such files, they exclude the model, or no temporary folder can be
            written, without which torch cannot be imported.
    """
    try:
        _find_temporary_folder()
        source = resolve(spec.model, spec.revision)
        if source.gguf:
            if kind is not None and kind is not Capability.TEXT_TO_TEXT:
                raise Refusal("a GGUF file is served as a text model only")
            return Capability.TEXT_TO_TEXT
        directory = source.directory
        kind = capability.fitting(directory, kind)
        if kind.encodes:
            from engine.worker.encode.files import check

            check(directory, kind)
        elif kind is Capability.TEXT_TO_IMAGE:
            pipelines.read(directory)
        else:
            kind = _look_at_text_model(spec, directory, kind)
    except Refusal as refusal:
        raise refusal.spawn_failed() from refusal
    return kind


def _find_temporary_folder() -> None:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        problem = "needs a temporary folder, and none can be written; name one in TMPDIR"
        raise Refusal(problem) from None


def _look_at_text_model(spec: RunnerSpec, directory: Path, kind: Capability) -> Capability:
    """Return a text model's capability; refuse a model that is not served."""
    config = read_json(directory, "config.json")
    sees = has_vision(config)
    if sees and spec.tp > 1:
        raise Refusal("a model that reads images is not divided; leave tensor_parallel_size out")
    if sees:
        find_vision(config)
    else:
        architectures.find(config)
    weight_files(directory)
    return Capability.VISION if sees else kind


@holds_import_lock
def _import_runner(spec: RunnerSpec, kind: Capability) -> AnyRunner:
    if kind is Capability.TEXT_TO_IMAGE:
        from engine.worker.image_generation.runner import PipelineRunner

        return PipelineRunner(spec)
    if kind.encodes:
        from engine.worker.encode.runner import EncoderRunner

        return EncoderRunner(spec, kind)
    if kind is Capability.VISION:
        from engine.worker.text.vision.runner import VisionRunner

        return VisionRunner(spec)
    if spec.tp > 1:
        from engine.worker.text.rank_runners import rank_runner

        return rank_runner(spec)
    from engine.worker.text.runner import TorchRunner

    return TorchRunner(spec)
