"""Compares a memory estimate with the memory taken, which a separate program measures."""

from pathlib import Path
from tempfile import TemporaryFile

from tests.support import prestarted
from tests.support.server import SERVING_IMPORTS

LIMIT_S = 240


def check_estimate(program: str, directory: Path) -> None:
    """Run a module of this folder on a model, in a process of its own that has imported what a
    server imports. Its last line has the estimate and the memory taken, in bytes. Check that the
    estimate is no less than the memory taken, and at most four times as much."""
    module, imports = f"tests.support.{program}", SERVING_IMPORTS
    with TemporaryFile() as out, TemporaryFile() as err:
        process = prestarted.start(module, [str(directory)], out, err, imports=imports)
        with process.stdin:
            code = process.wait(LIMIT_S)
        printed, complaints = (file.seek(0) or file.read().decode() for file in (out, err))
    assert code == 0, complaints
    estimate, taken = map(int, printed.split()[-2:])
    assert taken <= estimate <= 4 * taken, (estimate, taken)
