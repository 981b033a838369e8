"""Gives a checkpoint's tokenizer a token that its embedding has no row for, as some fine-tunes
have."""

import json
from pathlib import Path

from tokenizers import Tokenizer

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def add_token(folder: Path, text: str, rows: int, *, special: bool = True) -> int:
    """Add a token behind an embedding of ``rows`` to a folder's tokenizer.json, and return its id.
    Ids have no gaps, so that other tokens come between."""
    file = folder / "tokenizer.json"
    written = json.loads(file.read_text())
    own = Tokenizer.from_file(str(file)).get_vocab().values()
    first = max(own) + 1
    last = max(first, rows)
    written.setdefault("added_tokens", []).extend(
        {"id": one, "content": text if one == last else f"<row {one}>", "special": special, **FLAGS}
        for one in range(first, last + 1)
    )
    file.write_text(json.dumps(written))
    return last


def rows_of(folder: Path) -> int:
    """Return how many rows the embedding of a folder's model has, by its config."""
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])
