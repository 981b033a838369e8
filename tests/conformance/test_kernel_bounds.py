"""No index of a step reads or writes memory outside what it points into (engine/kernels/bounds.h).

A token id outside the embedding makes its row NaN, so that the row gets no token. Any other index
outside its bounds makes the kernels refuse the step before they compute anything.
`test_kernel_sources.py` runs this file under the sanitizers, also with a bounds check removed.
"""

import ctypes
import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.errors import EngineBug, SpawnFailed
from engine.worker.forward import kernel_structs as structs
from engine.worker.forward import native
from engine.worker.forward.adapters import AdapterGroup
from engine.worker.forward.attention import KEYWORD, AttentionCall
from engine.worker.forward.decoder import GROUPS, NativeDecoder
from engine.worker.forward.image_rows import IMAGES, ImageRows
from engine.worker.forward.kv_cache import KvCache
from engine.worker.forward.packer import Packer
from engine.worker.forward.packing import pack
from engine.worker.forward.recurrent import RowState
from engine.worker.forward.rewrites import ExpertParts, take_apart
from engine.worker.load.adapter import LowRank, StoredAdapter
from engine.worker.load.architectures import layer_shapes
from engine.worker.load.probe import probe
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.weight import quantise
from tests.conformance import test_native_attention as attention
from tests.conformance.test_rewrites import Built, load
from tests.support.model_zoo import TINY, load_runner

FAR = (-(2**63), -(2**32), -1, 2**32 - 1, 2**63 - 1)
COUNTS = (1, 40, 3)  # the rows' tokens: a decode, a chunk, and a short row
BLOCKS = ([5], [1, 2, 7], [9])
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
FORMS = {  # forms of the embedding: a model of the zoo, its dtype, and its quantization
    "in panels": ("llama", FLOAT32, "none"),
    "in panels, bfloat16": ("llama", BFLOAT16, "none"),
    "plain": ("llama, untied, biases", FLOAT32, "none"),
    "plain, bfloat16": ("llama, untied, biases", BFLOAT16, "none"),
    "8 bits": ("llama", FLOAT32, "int8"),
    "8 bits, untied": ("llama, untied, biases", FLOAT32, "int4"),
    "experts": ("qwen3_moe", FLOAT32, "none"),
    "convolutions": ("lfm2", FLOAT32, "none"),
}


class Stepping:
    """A compiled model. A test can change a step after Python made it and before the kernels
    run."""

    def __init__(self, directory, dtype=FLOAT32, quantization="none"):
        self.built = Built(directory, dtype, is_stock=False, quantization=quantization)
        self.decoder = self.built.execution.model.module
        assert isinstance(self.decoder, NativeDecoder)
        self.library, self.change = self.decoder._library, None
        self.decoder._library = SimpleNamespace(triolet_step=self._step)
        for tensor in self.caches:
            tensor.zero_()

    @property
    def caches(self):
        return (*self.built.cache.keys, *self.built.cache.values)

    def _step(self, kind, model, step, arena):
        if self.change is not None:
            self.change(step._obj)
        return self.library.triolet_step(kind, model, step, arena)

    def run(self, ids=None, change=None, **keywords):
        """Return the logits of every token of rows of `COUNTS`, [num_tokens, vocab]."""
        rows = pack([0] * len(COUNTS), COUNTS, [np.array(one) for one in BLOCKS], 16)
        if ids is None:
            ids = np.arange(1, rows.num_tokens + 1)
        if self.built.states is not None:
            self.built.states.begin(rows, [RowState(None, ())] * len(COUNTS))
        self.change = change
        with torch.inference_mode():
            output = self.decoder(
                input_ids=torch.from_numpy(np.asarray(ids, np.int64))[None],
                position_ids=torch.from_numpy(rows.positions)[None],
                logits_to_keep=torch.arange(rows.num_tokens),
                **{KEYWORD: self.built.execution.backend.prepare(rows, self.built.cache)},
                **keywords,
            )
        return output.logits[0].clone()


@pytest.mark.parametrize("form", FORMS)
def test_an_id_without_a_row_makes_its_row_nan_and_leaves_its_mates(zoo, form):
    name, dtype, quantization = FORMS[form]
    one = Stepping(zoo.directory(name), dtype, quantization)
    good = one.run()
    assert good.isfinite().all()
    chunk = slice(COUNTS[0], sum(COUNTS[:2]))
    for place in (0, 7, COUNTS[1] - 1):
        for wrong in (*FAR, one.built.vocab):
            ids = np.arange(1, sum(COUNTS) + 1)
            ids[chunk.start + place] = wrong
            found = one.run(ids)
            assert found[chunk][place:].isnan().all(), wrong
            assert torch.equal(found[: chunk.start], good[: chunk.start])
            assert torch.equal(found[chunk.stop :], good[chunk.stop :])


@contextmanager
def refused(what):
    """Check that the block raises the error of an index outside its bounds."""
    with pytest.raises(EngineBug) as raised:
        yield
    assert raised.value.log_detail == f"an index is outside its bounds in {what}"


def at(address, index, value):
    """Write the index at a place of an array of a step."""
    ctypes.c_int64.from_address(address + 8 * index).value = value


NUM = sum(COUNTS)
# Each index of a step: a function (step, value) that sets it, and the first values below and above
# its bounds.
INDICES = {
    "a row's start": (lambda s, v: at(s.rows.starts, 1, v), (-1, COUNTS[1])),
    "a row's end": (lambda s, v: at(s.rows.ends, 1, v), (0, 3 * 16 + 1)),
    "a first token": (lambda s, v: at(s.rows.offsets, 0, v), (-1, 1)),
    "a token between": (lambda s, v: at(s.rows.offsets, 1, v), (0, COUNTS[1] + 1)),
    "a last token": (lambda s, v: at(s.rows.offsets, s.rows.num_rows, v), (NUM - 1, NUM + 1)),
    "a block": (lambda s, v: at(s.rows.tables, s.rows.table_width + 2, v), (-1, 64)),
    "a decode's block": (lambda s, v: at(s.rows.tables, 0, v), (-1, 64)),
    "a slot": (lambda s, v: at(s.rows.slots, 20, v), (-1, 64 * 16)),
    "a token's sight": (lambda s, v: at(s.rows.untils, 20, v), (0, COUNTS[1] + 1)),
    "a kept token": (lambda s, v: at(s.keep, 0, v), (-1, 1)),
    "a last kept token": (lambda s, v: at(s.keep, NUM - 1, v), (NUM - 2, NUM)),
}


def check_refused(one, change, values, keywords=dict):
    """Check that the step with each value is refused, that no cache was written, and that the next
    step gives the same logits. ``keywords`` makes the step's further inputs."""
    good = one.run(**keywords())
    before = [tensor.clone() for tensor in one.caches]
    for value in (*FAR, *values):
        with refused("a step"):
            one.run(change=lambda step, value=value: change(step, value), **keywords())
    assert all(map(torch.equal, before, one.caches))
    assert torch.equal(one.run(**keywords()), good)


@pytest.mark.parametrize("index", INDICES)
def test_an_index_outside_its_bounds_refuses_the_step(zoo, index):
    change, values = INDICES[index]
    check_refused(Stepping(zoo.directory("llama")), change, values)


STATES = {
    "a token's owner": (lambda s, v: at(s.states.owners, 20, v), (0, 2)),
    "a state's first token": (lambda s, v: at(s.states.offsets, 0, v), (-1, 1)),
    "a state's last token": (lambda s, v: at(s.states.offsets, 3, v), (NUM - 1, NUM + 1)),
    "a state's slot": (lambda s, v: at(s.states.sources, 1, v), (-2, 1)),
}


@pytest.mark.parametrize("index", STATES)
def test_an_index_of_states_outside_its_bounds_refuses_the_step(zoo, index):
    change, values = STATES[index]
    one = Stepping(zoo.directory("lfm2"))
    good = one.run()
    far = [value for value in FAR if value != -1]  # -1 means that the row has no state
    for value in (*far, *values):
        with refused("a step"):
            one.run(change=lambda step, value=value: change(step, value))
    assert torch.equal(one.run(), good)


def group_at(step, name, value):
    """Write one number of the first group of a step."""
    group = structs.Group.from_address(step.groups)
    setattr(group, name, value)


ADAPTED = {
    name: (lambda s, v, name=name: group_at(s, name, v), values)
    for name, values in {
        "first": (-1, 2),
        "count": (-1, NUM),
        "kept_first": (-1, 2),
        "kept_count": (-1, NUM),
    }.items()
}


@pytest.mark.parametrize("index", ADAPTED)
def test_an_index_of_adapters_outside_its_bounds_refuses_the_step(zoo, index):
    change, values = ADAPTED[index]
    one = Stepping(zoo.directory("llama"))
    host = one.built.execution.adapters
    name = next(name for name in host.places if name.endswith("q_proj"))
    inputs, outputs = host.places[name]
    part = LowRank(torch.randn(4, inputs), torch.randn(outputs, 4), 0.5)
    adapter = host.place(StoredAdapter("x", {name: part}))
    group = AdapterGroup(adapter, 1, NUM - 1, 1, NUM - 1)
    check_refused(one, change, values, lambda: {GROUPS: (group,)})


def test_a_place_of_an_image_outside_its_bounds_refuses_the_step(zoo):
    rows = torch.randn(1, 2, TINY.hidden)
    check_refused(
        Stepping(zoo.directory("llama")),
        lambda step, value: at(step.image_tokens, 1, value),
        (-1, NUM),
        lambda: {IMAGES: ImageRows(torch.tensor([3, 4]), rows)},
    )


def test_a_block_outside_the_cache_refuses_the_attention_of_a_stock_module():
    case = attention.make_case(1, (4, 2, 64), (FLOAT32, FLOAT32), [(20, 1), (0, 33)])
    backend = attention.NativeBackend(native.load())
    good = attention.attend(backend, case, AttentionCall(0, 0.125))
    before = [tensor.clone() for tensor in (*case.cache.keys, *case.cache.values)]
    step = backend.prepare(case.rows, case.cache)
    num_blocks = case.cache.num_blocks
    for name, place, outside in (("tables", 1, num_blocks), ("slots", 3, 16 * num_blocks)):
        address = getattr(step.rows, name)
        old = ctypes.c_int64.from_address(address + 8 * place).value
        for value in (*FAR, outside):
            at(address, place, value)
            with refused("a step's attention"):
                step.attend(AttentionCall(0, 0.125), case.query, case.key, case.value)
        at(address, place, old)
    for was, now in zip(before, (*case.cache.keys, *case.cache.values), strict=True):
        assert torch.equal(was.nan_to_num(7.0), now.nan_to_num(7.0))
    assert torch.equal(step.attend(AttentionCall(0, 0.125), case.query, case.key, case.value), good)


# ---- what a checkpoint brings


CHECKPOINTS = {
    "more ids than rows": ("llama", {"vocab_size": 600}, r"embed_tokens.weight has the shape"),
    "more chosen experts than there are": (
        "qwen3_moe", {"num_experts_per_tok": 99}, "does not describe a Qwen3Moe",
    ),
    "no chosen experts": ("qwen3_moe", {"num_experts_per_tok": 0}, "0 of 8 experts"),
    "a window behind": ("mistral", {"sliding_window": -5}, "a sliding window of -5 keys"),
    "no window": ("mistral", {"sliding_window": 0}, "a sliding window of 0 keys"),
    "more turned numbers than a head has": (
        "glm", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 2.0}},
        "does not describe a Glm",
    ),
    "keys that heads cannot share": ("llama", {"num_key_value_heads": 3}, "has the shape"),
    "a shorter convolution": ("lfm2", {"conv_L_cache": 2}, "has the shape"),
    "a padding id behind the embedding": ("llama", {"pad_token_id": 2**32 - 1}, "num_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_whose_sizes_do_not_fit_is_refused(zoo, tmp_path, name):
    arch, fields, sentence = CHECKPOINTS[name]
    shutil.copytree(zoo.directory(arch), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(SpawnFailed, match=sentence):
        load_runner(tmp_path)


def test_ends_behind_the_vocabulary_are_left_out(zoo, tmp_path):
    shutil.copytree(zoo.directory("llama"), tmp_path, dirs_exist_ok=True)
    for file in ("config.json", "generation_config.json"):
        path = tmp_path / file
        given = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(given | {"eos_token_id": [7, TINY.vocab, 2**32 - 1, -1]}))
    runner, info = load_runner(tmp_path)
    runner.close()
    assert info.eos_token_ids == {7}


def decoder_with(zoo, arch="llama", **changes):
    """Compile a model of which some parts are changed."""
    model = load(zoo.directory(arch), FLOAT32)
    shapes = layer_shapes(model.config)
    parts = take_apart(model.module, probe(model, shapes))
    parts = replace(parts, **{name: change(parts) for name, change in changes.items()})
    cache = KvCache(shapes, 4, 16, dtype=FLOAT32, device=torch.device("cpu"))
    return NativeDecoder(native.load(), parts, cache, FLOAT32)


def test_parts_that_do_not_fit_are_not_compiled(zoo):
    """transformers' own module, which would fail for some of these parts, is not run."""

    def wider(parts):
        [rotary] = parts.rotaries
        return (lambda positions: tuple(torch.cat([one] * 3, -1) for one in rotary(positions)),)

    def of_two_widths(parts):
        [rotary] = parts.rotaries
        return (rotary, lambda positions: tuple(one[..., :8] for one in rotary(positions)))

    def choosing(count):
        def change(parts):
            return tuple(
                replace(one, mlp=replace(one.mlp, chosen=count))
                if isinstance(one.mlp, ExpertParts)
                else one
                for one in parts.layers
            )

        return change

    for arch, changes, sentence in (
        ("llama", {"rotaries": wider}, "rotary embeddings turn 48 numbers of heads of 16"),
        ("llama", {"rotaries": of_two_widths}, "rotary embeddings turn 8, 16 numbers"),
        ("qwen3_moe", {"layers": choosing(9)}, "9 of 8 experts"),
        ("qwen3_moe", {"layers": choosing(0)}, "0 of 8 experts"),
    ):
        with pytest.raises(Refusal, match=sentence):
            decoder_with(zoo, arch, **changes)


@pytest.mark.parametrize("change", ["fewer outputs", "fewer groups", "offsets", "no change"])
@pytest.mark.parametrize("bits", [8, 4])
def test_scales_of_another_shape_are_not_packed(bits, change):
    weight = quantise(torch.randn(48, 96), bits)
    changed = {
        "fewer outputs": {"scales": weight.scales[:32]},
        "fewer groups": {"scales": weight.scales[:, :2]},
        "offsets": {"offsets": weight.scales[:16]},
        "no change": {},
    }[change]
    packer = Packer(native.load(), FLOAT32)
    if not changed:
        packer.pack(weight, None)
        return
    with pytest.raises(Refusal, match="scales of the shape"):
        packer.pack(replace(weight, **changed), None)
