"""Generates the Python code of every proto into grpc_service/_generated, or checks it for drift.
The comments of repeated fields and maps have their limits, which become a table.

    python tools/regen_proto.py            writes the generated package
    python tools/regen_proto.py --check    writes nothing; exits with 1 and names files that differ

Rule 1: this program writes everything under grpc_service/_generated, including `__init__.py` files.
A file there that it would not write counts as drift, too. Rule 2: a descriptor keeps the file name
of its proto package (`triolet/v1/inference.proto`), because reflection clients ask for it by that
name. Only Python import paths are changed. The output depends on grpcio-tools, whose version
constraints.txt pins.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = Path("grpc_service/_generated")
FIELD = DescriptorProto.FIELD_FIELD_NUMBER
OUTPUT_PACKAGE = "grpc_service._generated"
LIMITS = Path("triolet/v1/count_limits.py")
# "At most 64.", "At most 64 in all turns.", or, of a tree of JSON values, "At most 64 values, 8
# levels deep."
LIMIT = re.compile(
    r"(?:^|\. )At most (\d+)(?: values)?(?: in all [a-z ]+)?(?:, (\d+) levels deep)?\."
)


@dataclass(frozen=True)
class Source:
    """A proto package, and the Python package, relative to the output, that its code goes into."""

    include: str
    proto_package: str
    python_package: str

    def protos(self) -> list[str]:
        """Return the paths of the package's protos, relative to the include directory, sorted."""
        include = ROOT / self.include
        folder = include / self.proto_package.replace(".", "/")
        return sorted(path.relative_to(include).as_posix() for path in folder.glob("*.proto"))


SOURCES = (
    Source("proto", "triolet.v1", "triolet.v1"),
    # Not `grpc.reflection.v1`: a package called grpc would read as the installed one.
    Source("proto/third_party", "grpc.reflection.v1", "grpc_reflection_v1"),
)


def generate(destination: Path) -> None:
    """Write the whole generated package into `destination`, which must be an empty directory."""
    write_init(destination)
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as scratch:
            run_protoc(source, Path(scratch))
            place(source, Path(scratch), destination)
    write_limits(destination / LIMITS)


def run_protoc(source: Source, out: Path) -> None:
    """Run protoc for one proto package.

    Raises:
        SystemExit: There is nothing to generate, or protoc failed and wrote why to standard error.
    """
    protos = source.protos()
    if not protos:
        raise SystemExit(f"no protos of package {source.proto_package} under {source.include}")
    outs = [f"--{plugin}_out={out}" for plugin in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{source.include}", *outs, *protos]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"protoc failed on package {source.proto_package}")


def place(source: Source, scratch: Path, destination: Path) -> None:
    """Move a package's generated modules to their Python package and adapt their imports."""
    package = destination
    for part in source.python_package.split("."):
        package /= part
        package.mkdir(exist_ok=True)
        write_init(package)
    for path in sorted((scratch / source.proto_package.replace(".", "/")).iterdir()):
        text = path.read_text(encoding="utf-8")
        (package / path.name).write_text(move_imports(text), encoding="utf-8")


def move_imports(text: str) -> str:
    """Replace the absolute imports that protoc writes by those of the modules' real places.

    The module name that protoc passes to its builder is replaced, too: it becomes `__module__` of
    the message classes, by which pickle finds them.
    """
    for source in SOURCES:
        moved = f"{OUTPUT_PACKAGE}.{source.python_package}"
        package = re.escape(source.proto_package)
        text = re.sub(
            rf"^from {package} import ", f"from {moved} import ", text, flags=re.MULTILINE
        )
        builder = r"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')"
        text = re.sub(rf"{builder}{package}\.", rf"\g<1>{moved}.", text)
    return text


def write_limits(path: Path) -> None:
    """Write the table of the limits that the comments of triolet.v1 have."""
    lines = [
        '"""Written by tools/regen_proto.py from the comments of the protos; do not edit."""\n',
        "# By the full name of a field: values, and levels of a tree of JSON values.",
        "COUNT_LIMITS: dict[str, tuple[int, int | None]] = {",
    ]
    for name, (count, levels) in sorted(limits().items()):
        lines.append(f'    "{name}": ({count}, {levels}),')
    path.write_text("\n".join([*lines, "}", ""]), encoding="utf-8")


def limits() -> dict[str, tuple[int, int | None]]:
    """Return what the comments of triolet.v1's fields say of their values, by full name."""
    source = SOURCES[0]
    found: dict[str, tuple[int, int | None]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "set.binpb"
        options = (f"-I{source.include}", "--include_source_info", f"--descriptor_set_out={out}")
        command = [sys.executable, "-m", "grpc_tools.protoc", *options, *source.protos()]
        subprocess.run(command, cwd=ROOT, check=True)
        files = FileDescriptorSet.FromString(out.read_bytes()).file
    for file in files:
        for location in file.source_code_info.location:
            comment = " ".join(location.leading_comments.split())
            limit, path = LIMIT.search(comment), location.path
            if limit is not None and len(path) == 4 and path[2] == FIELD:
                message = file.message_type[path[1]]
                name = f"{file.package}.{message.name}.{message.field[path[3]].name}"
                found[name] = (int(limit[1]), int(limit[2]) if limit[2] else None)
    return found


def write_init(package: Path) -> None:
    """Make a directory a package, with a line that asks people not to edit it."""
    line = '"""Written by tools/regen_proto.py; do not edit."""\n'
    (package / "__init__.py").write_text(line, encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under `folder` except bytecode, by relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in files
        if "__pycache__" not in path.parts
    }


def drift(current: Path, fresh: Path) -> list[str]:
    """Return a line for each file that is missing, superfluous or different."""
    have, want = contents(current), contents(fresh)
    found = []
    for name in sorted(have.keys() | want.keys()):
        if name not in have:
            found.append(f"missing: {OUTPUT / name}")
        elif name not in want:
            found.append(f"superfluous: {OUTPUT / name}")
        elif have[name] != want[name]:
            found.append(f"differs: {OUTPUT / name}")
    return found


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Generate grpc_service/_generated from proto/.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 on any drift")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        found = drift(ROOT / OUTPUT, fresh)
        if arguments.check:
            print("\n".join(found) if found else "grpc_service/_generated is current")
            return 1 if found else 0
        shutil.rmtree(ROOT / OUTPUT, ignore_errors=True)
        shutil.copytree(fresh, ROOT / OUTPUT)
    print("\n".join(found) if found else "nothing changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
