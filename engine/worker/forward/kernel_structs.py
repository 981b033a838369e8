"""Declares the structs and functions of the compiled kernels for ctypes (D12).

Rule: every struct mirrors one of `engine/kernels/`, field by field.
"""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)

import torch  # first, so that the kernels' library, which is loaded later, uses torch's OpenMP

PARTS_MOST = 3  # adapted parts of a packed product; PARTS_MOST in engine/kernels/adapters.h


class Linear(Structure):
    """A packed linear layer: its panels, bias and size. Only weights of 8 bits or fewer have
    scales, bits and a size of groups; ``nested`` is `engine.worker.quantized.weight.Form.nested`.
    The ``kind`` of others is 0 if their dtype is the model's, else one of `WEIGHT_KINDS`. A layer
    of ``parts`` has no weight of its own."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias", "scales", "offsets", "table", "parts")),
        *((name, c_int64) for name in ("outputs", "inputs", "group", "kind", "bits", "centre")),
        *((name, c_int64) for name in ("nested", "num_parts", "alternates")),
    )


class Rows(Structure):
    """`engine.worker.forward.packing.PackedRows` with contiguous int64 arrays."""

    _fields_ = (
        *((name, c_void_p) for name in ("starts", "ends", "offsets", "tables", "slots", "untils")),
        *((name, c_int64) for name in ("num_rows", "table_width", "block_size", "num_tokens")),
        ("num_blocks", c_int64),
    )


class Attention(Structure):
    """One layer's cache and attention parameters. There is no window or softcap if it is 0, and
    there are no sinks if they are null. Only a cache of int8 has scales."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "sinks")),
        *((name, c_int64) for name in ("kind", "heads", "kv_heads", "width", "window")),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class Experts(Structure):
    """A mixture of experts. In a layer without experts, ``count`` is 0."""

    _fields_ = (
        ("router", Linear),
        ("gate_up", POINTER(Linear)),
        ("down", POINTER(Linear)),
        *((name, c_int64) for name in ("count", "chosen", "is_normalised")),
    )


class Convolution(Structure):
    """The short convolution that a layer has in place of attention. In a layer with attention,
    ``length`` is 0."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias", "states")),
        *((name, c_int64) for name in ("length", "place")),
    )


class StateRows(Structure):
    """A step's rows, one for each sequence (`NativeStep` splits short ones), and their states."""

    _fields_ = (
        *((name, c_void_p) for name in ("owners", "offsets", "sources", "results")),
        *((name, c_int64) for name in ("count", "slots")),
    )


class Layer(Structure):
    """One decoder layer. A norm that the layer does not have is null."""

    _fields_ = (
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down", "shared_gate")),
        *(
            (name, c_void_p)
            for name in (
                "before_attention",
                "after_attention",
                "before_mlp",
                "after_mlp",
                "query_norm",
                "key_norm",
            )
        ),
        ("is_norm_of_heads", c_int64),
        ("query_rotary", c_int64),
        ("key_rotary", c_int64),
        ("experts", Experts),
        ("convolution", Convolution),
        ("attention", Attention),
    )


# The type of a function that adds up so many numbers at an address over a divided model's ranks, in
# place, and returns 0, or 1 if that failed.
SumFunction = CFUNCTYPE(c_int32, c_void_p, c_int64)


class Model(Structure):
    """A whole decoder, or one rank's part of it."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("num_layers", "hidden", "mlp")),
        *((name, c_int64) for name in ("vocab", "embedding_rows", "activation")),
        *(
            (name, c_float)
            for name in (
                "eps",
                "embedding_scale",
                "residual_scale",
                "logits_scale",
                "logits_softcap",
                "gate_alpha",
                "gate_limit",
            )
        ),
        ("is_packed", c_int32),
        ("embedding", c_void_p),
        ("table", Linear),
        ("final_norm", c_void_p),
        ("head", Linear),
        ("add_up", c_void_p),
    )


class Step(Structure):
    """The input of one forward, and the address of its logits."""

    _fields_ = (
        ("rows", Rows),
        ("ids", c_void_p),
        ("keep", c_void_p),
        ("cosines", POINTER(c_void_p)),
        ("sines", POINTER(c_void_p)),
        *((name, c_int64) for name in ("rotary_width", "num_kept", "num_threads")),
        ("logits", c_void_p),
        ("groups", c_void_p),
        *((name, c_int64) for name in ("num_groups", "shrunk_width")),
        ("image_tokens", c_void_p),
        ("image_rows", c_void_p),
        *((name, c_int64) for name in ("num_image_tokens", "num_deep")),
        ("states", StateRows),
    )


class Expansion(Structure):
    """One adapted part of a packed product."""

    _fields_ = (
        ("weight", c_void_p),
        *((name, c_int64) for name in ("first", "step", "panels", "depth", "offset")),
    )


class Adapted(Structure):
    """The matrices that an adapter adds to one packed product."""

    _fields_ = (("shrink", Linear), ("scales", c_void_p), ("parts", Expansion * PARTS_MOST))


class Group(Structure):
    """The tokens of a step that have one adapter."""

    _fields_ = (
        *((name, c_int64) for name in ("first", "count", "kept_first", "kept_count")),
        ("products", c_void_p),
    )


class BlockRows(Structure):
    """The part of a packed layer that comes from one tensor in GGUF's blocks, from output ``first``
    on. ``order`` is the address of its rows' indices, or None."""

    _fields_ = (
        *((name, c_void_p) for name in ("data", "order")),
        *((name, c_int64) for name in ("row_bytes", "first", "count", "kind")),
    )


MIRRORED = (
    *(Linear, Rows, Attention, Experts, Layer, Model, Step, Expansion, Adapted, Group),
    *(Convolution, StateRows, BlockRows),
)
KINDS = {torch.float32: 0, torch.bfloat16: 1}
# The kinds of weights that are narrower than the rows, which are float32.
WEIGHT_KINDS = {torch.bfloat16: 1, torch.float16: 2}
CACHE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_RETURNS_NOTHING = None
_SCORES = (c_void_p, c_int64, c_float, c_float, c_float)  # Scores in engine/kernels/draws.h
SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "triolet_kind": (c_char_p, ()),
    "triolet_sizes": (_RETURNS_NOTHING, (POINTER(c_int64),)),
    "triolet_integer_kind": (c_char_p, ()),
    "triolet_packed_numbers": (c_int64, (c_int64, c_int64, c_int64)),
    "triolet_pack": (
        _RETURNS_NOTHING,
        (c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    ),
    "triolet_small_bytes": (c_int64, (c_int64, c_int64, c_int64)),
    "triolet_pack_small": (
        _RETURNS_NOTHING,
        (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    ),
    "triolet_pack_blocks": (
        c_int32,
        (POINTER(BlockRows), *(c_int64,) * 6, *(c_void_p,) * 3),
    ),
    "triolet_checksum": (c_uint64, (c_void_p, c_int64)),
    "triolet_in_memory": (c_int64, (c_void_p, c_int64)),
    "triolet_texts": (c_int64, (c_void_p, c_int64, c_int64, c_void_p)),
    "triolet_layout": (c_int64, ()),
    "triolet_scale_bytes": (c_int64, (c_int64,) * 4),
    "triolet_pack_scales": (
        _RETURNS_NOTHING,
        (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p),
    ),
    "triolet_pack_nested": (
        _RETURNS_NOTHING,
        (c_int64, c_void_p, c_void_p, *(c_int64,) * 5, c_void_p),
    ),
    "triolet_arena_new": (c_void_p, ()),
    "triolet_arena_free": (_RETURNS_NOTHING, (c_void_p,)),
    "triolet_step_bytes": (c_int64, (c_int64, POINTER(Model), POINTER(Step))),
    "triolet_step": (c_int32, (c_int64, POINTER(Model), POINTER(Step), c_void_p)),
    "triolet_attend": (
        c_int32,
        (c_int64, POINTER(Attention), POINTER(Rows), *(c_void_p,) * 4, c_int64, c_void_p),
    ),
    "triolet_mass": (c_double, _SCORES),
    "triolet_draw_by_cdf": (c_int64, (*_SCORES, c_double, c_double)),
    "triolet_draw_by_noise": (c_int64, (*_SCORES, c_int64, c_uint64)),
    "triolet_linear": (
        c_int32,
        (c_int64, POINTER(Linear), c_void_p, c_int64, c_void_p, c_int64, c_void_p),
    ),
}
