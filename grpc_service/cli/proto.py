"""``triolet proto``: writes the .proto files of the API, for making clients in other languages."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

PACKAGE = Path(__file__).resolve().parents[1]
# The wheel has the files inside the package, the repository beside it.
SOURCES = (PACKAGE / "proto", PACKAGE.parent / "proto")


def run(args: argparse.Namespace) -> int:
    """Write the files into a directory, which is made if it is missing, and print their paths.
    Return the exit code."""
    source = next(folder for folder in SOURCES if folder.is_dir())
    try:
        for file in sorted(source.rglob("*.proto")):
            target = Path(args.directory) / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            print(target)
    except OSError as error:
        print(f"triolet: {args.directory} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0
