"""``triolet completion SHELL``: a script that completes commands and flags, made by shtab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import shtab

if TYPE_CHECKING:
    import argparse

FILES = {"--config", "--uds", "--file"}
DIRECTORIES = {"serve --model"}


def run(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script for the whole command line of ``parser``. Return the exit code."""
    for command, subparser in _commands(parser).items():
        for action in subparser._actions:
            for flag in action.option_strings:
                if flag in FILES:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
                elif f"{command} {flag}" in DIRECTORIES:
                    action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))
    return 0


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the subcommands, by name."""
    return {
        name: subparser
        for action in parser._actions
        if isinstance(action.choices, dict)  # the action of the subcommands
        for name, subparser in action.choices.items()
    }
