"""Parts of a page that a tool makes: printed, written between two markers of the page, or checked.

Every tool that makes such a part has the same command line: without an option it prints the part,
``--write`` writes it into the page, ``--check`` exits 1 if the page shows another one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINE_README = Path(__file__).parent.parent / "engine" / "README.md"


@dataclass
class Shown:
    """A part of ``page`` named ``name``, made by ``python -m tool``. ``fence`` is the language of
    its code block, or "" if the part is Markdown itself."""

    name: str
    tool: str
    make: Callable[[], str]
    description: str
    fence: str = "mermaid"
    page: Path = ENGINE_README
    marker: str = "<!-- {} -->"  # a comment of the page

    @property
    def begin(self) -> str:
        """Return the marker before the part."""
        return self.marker.format(f"{self.name}: made by `python -m {self.tool} --write`")

    @property
    def end(self) -> str:
        """Return the marker after the part."""
        return self.marker.format(f"{self.name}: end")

    def embed(self, text: str, part: str) -> str:
        """Return the page's ``text`` with ``part`` between the markers.

        Raises:
            ValueError: The text does not have each marker once, in order.
        """
        before, begin, rest = text.partition(self.begin)
        shown, end, after = rest.partition(self.end)
        if not (begin and end) or self.begin in shown + after or self.end in before + after:
            raise ValueError("the page needs both markers, once each and in order")
        if self.fence:
            part = f"```{self.fence}\n{part}\n```"
        return f"{before}{self.begin}\n{part}\n{self.end}{after}"

    def main(self, argv: list[str] | None = None) -> int:
        """Run the command line; return the exit code."""
        parser = argparse.ArgumentParser(prog=self.tool, description=self.description)
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--check", action="store_true", help="compare it with the page")
        mode.add_argument("--write", action="store_true", help="write it into the page")
        args = parser.parse_args(argv)
        part = self.make()
        if not (args.check or args.write):
            print(part)
            return 0
        text = self.page.read_text()
        wanted = self.embed(text, part)
        if args.write:
            self.page.write_text(wanted)
        elif text != wanted:
            print(
                f"{self.page.name} shows another {self.name}; run python -m {self.tool} --write",
                file=sys.stderr,
            )
            return 1
        return 0
