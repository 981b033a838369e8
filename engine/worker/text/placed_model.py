"""A loaded text model on its device: weights, a paged KV cache of its own, and how it runs.

A runner has a model that answers and maybe another that drafts; both are measured, loaded and run
by this file. Rule: nothing here handles sequences. The caller sets the thread's state.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.forward import native
from engine.worker.forward.attention import KEYWORD
from engine.worker.forward.backends import (
    how_it_runs,
    objection_to_decoder,
    objection_to_kernels,
    pick_backend,
    prepare,
)
from engine.worker.forward.kv_cache import (
    STATES_PER_SEQUENCE,
    KvCache,
    pick_kv_dtype,
    size_pool,
)
from engine.worker.forward.packed_cache import Layers, bound_of, open_cache
from engine.worker.forward.recurrent import StateSlots, open_states
from engine.worker.forward.thread_state import thread_state
from engine.worker.forward.transfer import send
from engine.worker.interface import Inspection, KvInspection, LoadProgress
from engine.worker.load.architectures import context_limit, layer_shapes
from engine.worker.load.devices import pick_dtype
from engine.worker.load.division import pick_rank_device
from engine.worker.load.generation_config import read_generation
from engine.worker.load.loader import (
    load_model,
    narrow_linears,
    stays_narrow,
    weight_bytes,
)
from engine.worker.load.probe import probe
from engine.worker.load.recurrent import RECURRENT, state_shapes
from engine.worker.load.refusal import Refusal
from engine.worker.skeleton.config import SkeletonConfig
from engine.worker.text.files import open_files
from engine.worker.text.warmup import workspace_bytes
from engine.worker.tokenizing.tokenizer import tokenizer_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from engine.worker.forward.adapters import AdapterGroup
    from engine.worker.forward.attention import AttentionBackend
    from engine.worker.forward.backends import Execution
    from engine.worker.forward.kv_cache import PoolSize
    from engine.worker.forward.packing import Ints, PackedRows
    from engine.worker.forward.recurrent import States
    from engine.worker.interface import RunnerSpec
    from engine.worker.load.architectures import Architecture, LayerShape
    from engine.worker.load.checkpoint import Checkpoint
    from engine.worker.load.division import Division
    from engine.worker.load.loader import LoadedModel
    from engine.worker.load.recurrent import Recurrence, StateShape
    from engine.worker.load.resolve import Source
    from engine.worker.text.interface import SamplingDefaults
    from engine.worker.tokenizing.tokenizer import HfTokenizer

    Sizing = Callable[[RunnerSpec, Sequence[LayerShape], torch.dtype, int, int, int], PoolSize]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all that a load places on a device, by the model's config and the headers of its
    weights. The reservation of memory, the load and ``triolet inspect`` all compute with them.

    ``dtype`` is the model's dtype, and ``kv_dtype`` that of the numbers in its KV pool.
    ``objection`` says why the model does not run compiled; empty if it does. ``narrow`` are weights
    of 16 bits that a module of transformers keeps so (`narrow_linears`)."""

    device: torch.device
    architecture: Architecture
    config: Any
    dtype: torch.dtype
    kv_dtype: torch.dtype
    shapes: tuple[LayerShape, ...]
    states: Mapping[int, StateShape]
    objection: str
    weight_bytes: int
    pool: PoolSize
    stored: str
    file_bytes: int
    narrow: frozenset[str]

    def inspection(self, spec: RunnerSpec) -> Inspection:
        """Return the model's kind and its parts' bytes, for people and the memory's reservation."""
        pool = self.pool
        return Inspection(
            device=str(self.device),
            architecture=self.architecture.name,
            dtype=str(self.dtype).removeprefix("torch."),
            stored=self.stored,
            file_bytes=self.file_bytes,
            weight_bytes=self.weight_bytes,
            tokenizer_bytes=tokenizer_bytes(int(self.config.vocab_size), str(self.device)),
            workspace_bytes=workspace_bytes(spec, self.config, self.dtype) + pool.new_state_bytes,
            execution=how_it_runs(self.objection, self.device, self.dtype, self.shapes),
            context_limit=context_limit(self.config, spec.max_model_len),
            max_model_len=pool.max_model_len,
            kv=KvInspection(
                str(self.kv_dtype).removeprefix("torch."),
                pool.bytes_per_block // pool.block_size,
                pool.block_size,
                pool.num_blocks,
                pool.bytes_per_state,
                STATES_PER_SEQUENCE if pool.bytes_per_state else 0,
                pool.num_states,
            ),
        )


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A loaded model with its cache and settings. ``make_tokenizer`` returns its tokenizer, which
    may take 0.2 s; call it once."""

    architecture: Architecture
    config: Any
    dtype: torch.dtype
    device: torch.device
    pool: PoolSize
    cache: KvCache
    execution: Execution
    make_tokenizer: Callable[[], HfTokenizer]
    defaults: SamplingDefaults
    ends: frozenset[int]
    is_demo: bool
    states: States | None = None

    @property
    def vocab_size(self) -> int:
        """The number of ids that the model's embedding has."""
        return int(self.config.vocab_size)

    def num_bytes(self, spec: RunnerSpec) -> int:
        """Return the bytes that the model takes: weights, tokenizer, pool, and a step's own
        memory."""
        activations = self.execution.activation_bytes(spec, self.pool)
        workspace = workspace_bytes(spec, self.config, self.dtype, activations)
        workspace += self.pool.new_state_bytes
        workspace += tokenizer_bytes(self.vocab_size, str(self.device))
        return self.execution.model.num_bytes + self.pool.num_bytes + workspace


def measure(spec: RunnerSpec, division: Division, sizing: Sizing = size_pool) -> Sizes:
    """Return the sizes of all that `place` will place on the device; for a rank, of its part.

    Raises:
        Refusal: The config and the headers show that the model cannot be served.
    """
    pick_rank_device(spec.device, division)  # refuse before a download
    with open_files(spec.model, spec.revision, with_tokenizer=False) as files:
        architecture, config = division.read_config(files.source.directory)
        context_limit(config, spec.max_model_len)  # refuse before the weights are opened
        with files.open_weights() as whole:
            return _sizes(spec, division, (architecture, config), whole, sizing)[0]


def _sizes(
    spec: RunnerSpec,
    division: Division,
    found: tuple[Architecture, Any],
    whole: Checkpoint,
    sizing: Sizing,
) -> tuple[Sizes, Checkpoint]:
    """Return the sizes of a load of a known architecture and config, and the part of the open
    weights that this rank reads.

    Raises:
        Refusal: The dtype or the form of the weights is not supported, or the pool cannot hold one
            sequence.
    """
    architecture, config = found
    device = pick_rank_device(spec.device, division)
    checkpoint = division.part_of(whole, architecture, config)
    dtype, shapes = pick_dtype(spec.dtype, checkpoint.main_dtype, device), layer_shapes(config)
    kv_dtype = pick_kv_dtype(spec, dtype, checkpoint.main_dtype)
    states = state_shapes(architecture.name, config)
    objection = division.objection_to_decoder(architecture) or objection_to_decoder(
        architecture, config, device, dtype, shapes
    )
    if objection and spec.quantization != "none":
        raise Refusal(f"{spec.quantization} weights need the compiled decoder, and {objection}")
    if spec.dtype == "auto" and not objection and checkpoint.rounds_inputs:
        dtype = torch.float32
    narrow = _narrow_weights(found, whole, device, dtype, shapes)
    num_bytes = weight_bytes(
        checkpoint, config, dtype, spec.quantization, is_compiled=not objection, narrow=narrow
    )
    limit = context_limit(config, spec.max_model_len)
    pool = sizing(spec, shapes, kv_dtype, limit, state_bytes(states, dtype), num_bytes)
    sizes = Sizes(
        device,
        architecture,
        config,
        dtype,
        kv_dtype,
        shapes,
        states,
        objection,
        num_bytes,
        pool,
        whole.stored,
        whole.file_bytes,
        narrow,
    )
    return sizes, checkpoint


def _narrow_weights(
    found: tuple[Architecture, Any],
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
) -> frozenset[str]:
    """Return the weights that a module of transformers keeps in 16 bits for compiled products."""
    has_any = any(stays_narrow(tensor, dtype) for tensor in checkpoint.tensors.values())
    if isinstance(found[1], SkeletonConfig) or not has_any:
        return frozenset()
    has_products = not objection_to_kernels(device, dtype, shapes)
    return narrow_linears(*found) if has_products else frozenset()


class _Counted:
    """Reports a load's progress, to which weights that are packed later are added."""

    def __init__(self, progress: Callable[[LoadProgress], None]) -> None:
        self._progress = progress
        self._last = LoadProgress("")

    def __call__(self, stage: LoadProgress) -> None:
        self._last = stage
        self._progress(stage)

    def add(self, num_bytes: int) -> None:
        """Report that so many bytes more are done."""
        if num_bytes:
            self(replace(self._last, bytes_done=self._last.bytes_done + num_bytes))


def place(
    spec: RunnerSpec,
    division: Division,
    progress: Callable[[LoadProgress], None],
    *,
    chosen: AttentionBackend | None = None,
    sizing: Sizing = size_pool,
) -> PlacedModel:
    """Load a model and allocate its pool, which ``sizing`` sizes. ``chosen`` is the attention
    backend; None: the fastest is chosen.

    Raises:
        Refusal: The model cannot be served.
    """
    counted = _Counted(progress)
    counted(LoadProgress("config"))
    device = pick_rank_device(spec.device, division)
    with ExitStack() as stack:
        with open_files(spec.model, spec.revision, with_tokenizer=True) as files:
            source = files.source
            architecture, config = division.read_config(source.directory)
            context_limit(config, spec.max_model_len)
            defaults, ends = read_generation(source, config)
            with files.open_weights() as whole:
                sizes, checkpoint = _sizes(spec, division, (architecture, config), whole, sizing)
                dtype, shapes = sizes.dtype, sizes.shapes
                tensors = checkpoint.tensors.values()
                in_blocks = [one.shape for one in tensors if checkpoint.form(one.name)]
                layers = stack.enter_context(_layers_beside(spec, source, in_blocks, sizes))
                make_tokenizer = files.tokenizer_later()
                if (
                    chosen is not None
                    or objection_to_kernels(device, dtype, shapes)
                    or division.objection_to_decoder(architecture)
                ):
                    _, config = division.read_config(source.directory, is_stock=True)
                model = load_model(
                    checkpoint,
                    architecture,
                    config,
                    dtype=dtype,
                    device=device,
                    progress=counted,
                    quantization=spec.quantization,
                    narrow=sizes.narrow if chosen is None else (),
                )
            division.complete(model, source.directory)
        recurrence = RECURRENT[architecture.name] if sizes.states else None
        packer = layers()
        if in_blocks and type(packer) is Layers:  # blocks fill memory; what building takes is free
            make_tokenizer = _returning(make_tokenizer())
        cache, execution = _prepared(
            spec, model, sizes, chosen, division, recurrence, packer, counted.add
        )
    progress(LoadProgress("warm-up"))
    opened = None
    if recurrence is not None:
        slots = StateSlots(recurrence, sizes.states, sizes.pool.num_states, dtype, device)
        opened = open_states(execution.model.module, slots)
    return PlacedModel(
        architecture,
        config,
        dtype,
        device,
        sizes.pool,
        cache,
        execution,
        make_tokenizer,
        defaults,
        ends,
        source.is_demo,
        opened,
    )


def _returning(tokenizer: HfTokenizer) -> Callable[[], HfTokenizer]:
    """Return a function that returns ``tokenizer``."""
    return lambda: tokenizer


@contextmanager
def _layers_beside(
    spec: RunnerSpec, source: Source, shapes: Sequence[tuple[int, ...]], sizes: Sizes
) -> Iterator[Callable[[], Layers]]:
    """Have a thread open what `_layers_of` returns while the block goes on: checking a file of
    packed weights needs no lock of Python's, and building a model does. Yield a function that
    waits for the thread; close the layers at the end of the block."""

    def open_layers() -> Layers:
        with thread_state(spec.threads, sizes.device):
            return _layers_of(spec, source, shapes, sizes)

    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_layers)
        try:
            yield opening.result
        finally:
            if opening.exception() is None:
                opening.result().close()


def _layers_of(
    spec: RunnerSpec, source: Source, shapes: Sequence[tuple[int, ...]], sizes: Sizes
) -> Layers:
    """Return the packer of layers whose tensors have these shapes and are quantised in blocks. It
    uses the packed cache if a GGUF file has such layers and runs compiled, else memory alone."""
    if not source.gguf or sizes.objection or not shapes:
        return Layers()
    cache = open_cache(spec.packed_cache, spec.packed_cache_bytes)
    if cache is None:
        return Layers()
    return cache.layers_of(source.gguf, native.load(), bound_of(shapes), sizes.weight_bytes)


def state_bytes(states: Mapping[int, StateShape], dtype: torch.dtype) -> int:
    """Return the bytes of one sequence's states in all layers; 0 without recurrent layers."""
    return sum(shape.num_bytes(dtype.itemsize) for shape in states.values())


def _prepared(
    spec: RunnerSpec,
    model: LoadedModel,
    sizes: Sizes,
    chosen: AttentionBackend | None,
    division: Division,
    recurrence: Recurrence | None,
    layers: Layers,
    note: Callable[[int], None],
) -> tuple[KvCache, Execution]:
    """Return the model's cache, and the model prepared to run over that cache."""
    shapes, pool, device = sizes.shapes, sizes.pool, model.device
    calls = probe(model, shapes)
    cache = KvCache(shapes, pool.num_blocks, pool.block_size, dtype=sizes.kv_dtype, device=device)
    if spec.prefault_kv_cache:
        cache.prefault()
    backend, reason = chosen, "it was chosen"
    if backend is None:
        backend, reason = pick_backend(device, model.dtype, shapes, calls)
    execution = prepare(
        model,
        backend,
        reason,
        calls,
        cache,
        quantization=spec.quantization,
        objection=division.objection_to_decoder(model.architecture),
        recurrent=recurrence.module if recurrence is not None else "",
        layers=layers,
        note=note,
    )
    return cache, execution


def compute(
    module: Callable[..., Any],
    backend: AttentionBackend,
    cache: KvCache,
    device: torch.device,
    input_ids: Ints,
    rows: PackedRows,
    keep: Ints,
    forward: Callable[[Sequence[AdapterGroup], dict[str, Any]], Any] | None = None,
    groups: Sequence[AdapterGroup] = (),
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> torch.Tensor:
    """Run a forward over ``input_ids`` [num_tokens] of ``rows``, and return the logits of the
    tokens ``keep`` [num_kept], as [num_kept, vocab] float32. ``forward`` computes ``groups`` with
    adapters. ``change`` adds images to the module's inputs."""
    ids, positions, kept = send((input_ids, rows.positions, keep), device)
    inputs = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "use_cache": False,
        "logits_to_keep": kept,
        KEYWORD: backend.prepare(rows, cache),
    }
    if change is not None:
        inputs = change(inputs)
    output = module(**inputs) if forward is None else forward(groups, inputs)
    return output.logits[0].to(torch.float32)
