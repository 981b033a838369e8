"""The phases of a request, by the names that clients, metrics and logs show."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The phases of a request, from its arrival to its end. Each kind of work has some of them.

    The value is the published name: it stands in the metadata of a deadline's error, in the labels
    of metrics, and in log lines.
    """

    LOAD = "load"  # the request waits for a replica of its model
    TOKENIZE = "tokenize"
    DECODE_IMAGE = "decode image"
    COMPILE = "compile"  # the request's constraint is compiled
    QUEUED = "queued"
    PREFILL = "prefill"
    ENCODE = "encode"  # inputs are encoded, or a drawing's prompt
    DENOISE = "denoise"
    DECODE = "decode"  # tokens are sampled, or latents become images
    PARKED = "parked"
    WRITE = "write"  # finished images become files, or wait for their reader
