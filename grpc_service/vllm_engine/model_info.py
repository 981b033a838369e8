"""Makes the messages about a model for a gateway: its description and its tokenizer's files."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from engine.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.worker.interface import WorkerInfo

# The defaults that a gateway puts into requests without own values.
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
CHUNK_BYTES = 2**16  # bytes of a zip in one message: the gateway takes no more
# The files from which the gateway builds a tokenizer, and those that its chat templates need.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.json"),
    *("*.jinja", "*.model", "*.tiktoken"),
)


def encode_info(name: str, info: WorkerInfo, directory: Path | None) -> Any:
    """Return the description of a loaded model; ``directory`` has its files, if it has any."""
    is_text = info.capability.generates_text
    path = "" if directory is None else str(directory.absolute())
    return vllm_engine_pb2.GetModelInfoResponse(
        served_model_name=name,
        model_path=path,
        tokenizer_path=path,
        is_generation=is_text,
        max_context_length=info.max_model_len,
        max_req_input_len=info.max_model_len - 1 if is_text else info.max_model_len,
        vocab_size=info.vocab_size,
        architectures=[info.architecture],
        model_type=_model_type(directory),
        eos_token_ids=sorted(getattr(info, "eos_token_ids", ())),
        default_sampling_params_json=_defaults(info),
    )


def _defaults(info: Any) -> str:
    """Return the sampling defaults of the model as JSON; empty without any."""
    defaults = getattr(info, "defaults", None)
    known = {name: getattr(defaults, name, None) for name in DEFAULTS}
    known = {name: value for name, value in known.items() if value is not None}
    return json.dumps(known) if known else ""


def _model_type(directory: Path | None) -> str:
    """Return the name of the model's kind in its config.json; empty where it has none."""
    try:
        config = json.loads((directory / "config.json").read_text("utf-8")) if directory else {}
    except (OSError, ValueError):
        return ""
    model_type = config.get("model_type", "") if isinstance(config, dict) else ""
    return model_type if isinstance(model_type, str) else ""


def tokenizer_chunks(directory: Path | None) -> Iterator[Any]:
    """Yield the messages with a zip of the tokenizer's files. The last one has the zip's hash.

    Raises:
        Unsupported: there are no such files.
    """
    paths = (
        () if directory is None else [p for name in TOKENIZER_FILES for p in directory.glob(name)]
    )
    if not paths:
        raise Unsupported("the model has no tokenizer files that could be sent")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(set(paths)):
            file.write(path, path.name)
    data = archive.getvalue()
    for begin in range(0, len(data), CHUNK_BYTES):
        is_last = begin + CHUNK_BYTES >= len(data)
        yield common_pb2.GetTokenizerChunk(
            data=data[begin : begin + CHUNK_BYTES],
            sha256=hashlib.sha256(data).hexdigest() if is_last else "",
        )
