"""Command lines that run in a bare environment: no home directory, no writable file system, no
compiler, hardly any shared memory.

A user namespace gives the process a user id that no passwd file knows and a root that is read-only,
without rights on this machine (`unshare` of util-linux). It keeps the network and the owner's
access to files, so that the interpreter and the repository may lie anywhere.
"""

import os
import subprocess
import sys

from tests.support.programs import ROOT

UID = 54321  # nobody has it
SHM_BYTES = 64 * 1024
# Runs as the root user of a namespace. $1 is the folder for the new root, $2 the places that get an
# empty file system of some bytes each (PLACE=BYTES), $3 the folders in these places that stay
# visible. The command follows.
MAKE = """
set -e
root=$1 places=$2 kept=$3; shift 3
mount --rbind / "$root"
while read -r _ _ _ _ place _; do
    case $place in
        "$root"|"$root"/*) mount -o remount,bind,ro "$place" 2> /dev/null || true ;;
    esac
done < /proc/self/mountinfo
for one in $places; do
    mount -t tmpfs -o "size=${one#*=},mode=1777" none "$root${one%%=*}"
done
for one in $kept; do
    mkdir -p "$root$one"
    mount --rbind "$one" "$root$one"
    mount -o remount,bind,ro "$root$one"
done
exec unshare --user --map-user=$UID_INSIDE --map-group=$UID_INSIDE --root "$root" --wd / \\
    env -i PATH="$PATH_INSIDE" "$@"
"""


def command(root, *argv, writable=("/tmp",), path="/nowhere", **variables):
    """Return the command line that runs ``argv`` in such a namespace.

    ``root`` is an empty folder, at which the new root is mounted. ``writable`` are the folders
    that are empty and can be written; ``path`` is its PATH, which by default has no program.
    """
    places = [f"/dev/shm={SHM_BYTES}", *(f"{place}={1 << 24}" for place in writable)]
    needed = sorted({str(ROOT), sys.prefix, sys.base_prefix})
    kept = [one for one in needed if one.startswith(tuple(f"{place}/" for place in writable))]
    inside = [f"UID_INSIDE={UID}", f"PATH_INSIDE={path}"]
    shell = ["/bin/sh", "-c", MAKE, "sh", str(root), " ".join(places), " ".join(kept)]
    given = [f"{name}={value}" for name, value in variables.items()]
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    return ["env", *inside, *namespace, *shell, *given, *map(str, argv)]


def triolet(*args):
    """Return the command line of `triolet`, from this repository."""
    return [sys.executable, "-P", "-c", ENTRY, *args]


ENTRY = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + (
    "from grpc_service.cli.entry import main; sys.exit(main())"
)


def run(root, *argv, timeout_s=120, **settings):
    """Run a command in such a namespace to its end, and return what `subprocess.run` does."""
    line = command(root, *argv, **settings)
    return subprocess.run(
        line, capture_output=True, text=True, timeout=timeout_s, env=dict(os.environ)
    )
