"""List every setting of ``triolet serve`` as a file for ``--config``, from the settings' fields.

python -m tools.list_settings            prints the list
python -m tools.list_settings --check    exits 1 if docs/settings.toml has another one
python -m tools.list_settings --write    writes it there
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import fields
from itertools import groupby
from pathlib import Path

from grpc_service.cli.flags import FLAGS, Flag
from tools.shown import Shown

PAGE = Path(__file__).parent.parent / "docs" / "settings.toml"
WIDTH = 96


def make_list() -> str:
    """Return the sections; a setting is its help, its range, and its key with the default."""
    sections = (
        "\n\n".join((f"# ---- {section}", *map(_entry, flags)))
        for section, flags in groupby(sorted(FLAGS, key=_place), lambda flag: flag.section)
    )
    return "\n\n\n".join(sections)


def _place(flag: Flag) -> int:
    return [one.section for one in FLAGS].index(flag.section)


def _entry(flag: Flag) -> str:
    [field] = [one for one in fields(flag.target) if one.name == flag.field]
    known = field.metadata["setting"]
    bounds = (("at least", known.low), ("more than", known.above), ("at most", known.high))
    limits = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    notes = ", ".join((*limits, *known.choices))
    unset = f"default: {known.unset}" if known.unset else ""
    notes = "; ".join(filter(None, (notes, unset)))
    value = field.default != flag.is_inverted if flag.kind.is_switch else field.default
    shown = flag.kind.metavar if value in (None, "", ()) else json.dumps(value)
    text = f"{flag.help} ({notes})" if notes else flag.help
    lines = textwrap.wrap(text, WIDTH, break_on_hyphens=False)
    return "\n".join(f"# {line}" for line in (*lines, f"{flag.key} = {shown}"))


SHOWN = Shown(
    "settings",
    "tools.list_settings",
    make_list,
    str(__doc__).splitlines()[0],
    fence="",
    page=PAGE,
    marker="# {}",
)

if __name__ == "__main__":
    sys.exit(SHOWN.main())
