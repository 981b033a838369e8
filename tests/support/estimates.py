"""Memory estimates and the memory taken, which separate programs measure."""

from pathlib import Path
from tempfile import TemporaryFile

from tests.support import prestarted
from tests.support.server import SERVING_IMPORTS

LIMIT_S = 240


def check_estimate(program: str, directory: Path) -> None:
    """Run a module of this folder on a model, in a process of its own that has imported what a
    server imports. Its last line has the estimate and the memory taken, in bytes. Check that the
    estimate is no less than the memory taken, and at most four times as much."""
    estimate, taken = measured(program, directory)
    assert taken <= estimate <= 4 * taken, (estimate, taken)


def measured(program: str, *args: object) -> tuple[int, int]:
    """Run a module of this folder as `check_estimate` does, and return the two numbers with which
    it ends."""
    module, imports = f"tests.support.{program}", SERVING_IMPORTS
    with TemporaryFile() as out, TemporaryFile() as err:
        process = prestarted.start(module, [str(arg) for arg in args], out, err, imports=imports)
        with process.stdin:
            code = process.wait(LIMIT_S)
        printed, complaints = (file.seek(0) or file.read().decode() for file in (out, err))
    assert code == 0, complaints
    estimate, taken = map(int, printed.split()[-2:])
    return estimate, taken
