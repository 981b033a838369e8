"""Names the benches whose figures are older than what they measure, for the command
`python -m tools.lab.bench stale`.

Each file of `tools/lab/figures` has the commit at which it was measured. Its figures are old if a
later commit, or the working tree, changed a path that its bench measures, or the bench itself.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from tools.lab.bench.catalog import FIGURES, ROOT, measured_paths, names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def git(root: Path, *args: str) -> list[str] | None:
    """Return the lines that git prints, or None if it fails."""
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.splitlines()


def changes(root: Path, commit: str, paths: Sequence[str]) -> str:
    """Return in words what has changed in ``paths`` since a commit, or "" if nothing has."""
    later = git(root, "log", "--format=%h %s", f"{commit.rstrip('+')}..HEAD", "--", *paths)
    if later is None:
        return f"the commit {commit} is not in this repository"
    found = []
    if later:
        found.append(f"{len(later)} later commit{'s' * (len(later) > 1)}, the last {later[0]}")
    if git(root, "status", "--porcelain", "--", *paths):
        found.append("changes that are not committed")
    if commit.endswith("+") and not later:
        found.append("it was measured with changes that were not committed")
    return "; ".join(found)


def stale(root: Path = ROOT) -> Iterator[str]:
    """Yield a line for each file of figures that is old, and for each bench without figures."""
    figures = root / FIGURES.relative_to(ROOT)
    missing = set(names(root))
    for path in sorted(figures.glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        bench, commit = found["bench"], found["commit"]
        missing.discard(bench)
        if why := changes(root, commit, measured_paths(bench, root)):
            yield f"{bench} ({path.name}, {commit}, {found['machine']['when']}): {why}"
    yield from (f"{bench}: there are no figures" for bench in sorted(missing))


def report(root: Path = ROOT) -> int:
    """Print what is old. Return the exit code: 1 if anything is, else 0."""
    lines = list(stale(root))
    print("\n".join(lines) or "all figures are of what is measured now")
    return 1 if lines else 0
