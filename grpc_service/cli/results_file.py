"""A file of results that goes on after its program was killed: a line of JSON for each result.

Beside the file stands a note, ``FILE.resume``, that says what the results are of; it is removed
when all are there. Rule 1: each index has at most one line. A line counts once it is whole; what
follows the first line that is not, as a kill in the middle of a write or a machine's fall leaves
it, is cut off, and its results are made again. Rule 2: a file with results that has no note, or
whose note is of something else, is never touched. Rule 3: one program at a time writes a file.
Rule 4: the memory that this takes grows by bits for each result; `in_order` takes eight bytes.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO
    from typing import Self

SYNC_S = 5.0  # so much work is lost at most if the machine falls; a guess
LINE = re.compile(rb'\{"index": (\d+)[,}]')
WHOLE = b"}\n"


class Indices:
    """A set of whole numbers from 0, of which a million take 125 kB."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, index: int) -> bool:
        byte, bit = divmod(index, 8)
        return byte < len(self._bits) and bool(self._bits[byte] >> bit & 1)

    def add(self, index: int) -> None:
        """Add a number that is not in the set.

        Raises:
            ValueError: it is.
        """
        if index in self:
            raise ValueError(f"index {index} has a result already")
        byte, bit = divmod(index, 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1, 2 * len(self._bits)) - len(self._bits)))
        self._bits[byte] |= 1 << bit
        self._num += 1


class ResultsFile:
    """The results at ``path``. ``about`` has what they depend on, such as the input's digest, by
    names that a user knows. ``done`` are the indices of the results that are there. ``noted`` are
    facts about the results that `note` has added.

    Raises:
        ConfigError: the file is of something else, is being written, or cannot be written.
    """

    def __init__(self, path: str, about: Mapping[str, Any]) -> None:
        self.path = Path(os.path.expanduser(path))
        self._note_path = self.path.with_name(f"{self.path.name}.resume")
        self.done = Indices()
        self.noted: dict[str, Any] = {}
        self._about = json.loads(json.dumps(about))
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{path} is no regular file")  # a pipe or a device keeps no results
        try:
            self._file: FileIO = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        try:
            self._go_on()
        except BaseException:
            self._file.close()
            raise
        self._unwritten = bytearray()
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _go_on(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.path} is being written by another process") from None
        noted, end = self._read_note(), self._read_lines()
        about = None if noted is None else noted.pop("about", None)
        if about != self._about:
            if os.fstat(self._file.fileno()).st_size:
                raise ConfigError(f"{self.path} {self._what_is_other(about)}")
            noted = {}
        self.noted = noted or {}
        if about != self._about:
            self._write_note()
        self._file.truncate(end)

    def _what_is_other(self, about: dict[str, Any] | None) -> str:
        """Return what keeps results of ``about`` from going on."""
        if not isinstance(about, dict):
            return "exists, and has no unfinished results"
        names = [
            name
            for name in dict.fromkeys([*self._about, *about])
            if about.get(name) != self._about.get(name)
        ]
        anew = f"remove it and {self._note_path.name} to begin anew"
        return f"has results with another {', '.join(names)}; {anew}"

    def _read_note(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._note_path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            found = None
        return found if isinstance(found, dict) else {}

    def _write_note(self) -> None:
        """Write the note whole or not at all."""
        temporary = self._note_path.with_name(f"{self._note_path.name}.new")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(self.noted | {"about": self._about}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._note_path)
        except OSError as error:
            raise ConfigError(f"{temporary} cannot be written: {error.strerror}") from None

    def _read_lines(self) -> int:
        """Find the results that are there, and return where they end."""
        end = 0
        with self.path.open("rb") as lines:
            for line in lines:
                found = LINE.match(line)
                is_whole = line.endswith(WHOLE) and b"\0" not in line  # 0 is in a hole
                if found is None or not is_whole or int(found[1]) in self.done:
                    break
                self.done.add(int(found[1]))
                end += len(line)
        return end

    def note(self, name: str, fact: Any) -> None:
        """Keep a fact beside the results until all are there, such as the model that made them."""
        self.noted[name] = fact
        self._write_note()

    def add(self, index: int, fields: str) -> None:
        """Add a result: the fields of its line behind the index, as JSON without the braces.

        Raises:
            ValueError: the index has a result already.
        """
        self.done.add(index)
        self._unwritten += b'{"index": %d, %s}\n' % (index, fields.encode())

    def flush(self) -> None:
        """Hand all results to the system, so that they survive a kill, and every `SYNC_S` to the
        disk.

        Raises:
            ConfigError: they cannot be written.
        """
        now = time.monotonic()
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
            if now >= self._synced_at + SYNC_S:
                os.fsync(self._file.fileno())
                self._synced_at = now
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None

    def sync(self) -> None:
        """Hand all results to the disk. Raises as `flush`."""
        self._synced_at = -math.inf
        self.flush()

    def in_order(self) -> Iterator[bytes]:
        """Yield the lines by their indices, which are those from 0 to the last one, each once.

        Raises:
            OSError: the file cannot be read.
        """
        places, end = array("q", bytes(8 * len(self.done))), 0
        with self.path.open("rb") as lines:
            for line in lines:
                found = LINE.match(line)
                assert found is not None, "lines of others are cut off"
                places[int(found[1])] = end
                end += len(line)
            for place in places:
                lines.seek(place)
                yield lines.readline()

    def finish(self) -> None:
        """Remove the note, because all results are there and on the disk. Raises as `flush`."""
        self.sync()
        self._note_path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the file and its note, because the results are elsewhere. Raises OSError."""
        self.path.unlink()
        self._note_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()
