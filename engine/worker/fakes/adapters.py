"""The adapters of a fake text runner: contents by the names of directories, without files."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from engine.errors import SpawnFailed
from engine.worker.text.interface import AdapterInfo

if TYPE_CHECKING:
    from engine.worker.fakes.text import FakeScript

ADAPTER_BYTES = 64  # the memory of an adapter; loading it takes twice as much


def digest_of_adapter(content: str) -> str:
    """Return the digest of an adapter's content."""
    return f"{crc32(content.encode()):08x}"


class FakeAdapters:
    """Implements `engine.worker.text.interface.Adapters`. ``loaded`` counts loads by digest."""

    def __init__(self, script: FakeScript) -> None:
        self._script = script
        self.loaded: dict[str, int] = {}

    def measure(self, directory: str) -> int:
        """Return the bytes that loading any adapter takes.

        Raises:
            SpawnFailed: The script has no adapter in this directory.
        """
        self._content(directory)
        return 2 * ADAPTER_BYTES

    def load(self, directory: str) -> AdapterInfo:
        """Load the adapter that the script has in the directory.

        Raises:
            SpawnFailed: The script has no adapter there.
        """
        digest = digest_of_adapter(self._content(directory))
        self._script.sleep(self._script.adapter_s)
        self.loaded[digest] = self.loaded.get(digest, 0) + 1
        return AdapterInfo(digest, ADAPTER_BYTES, rank=8, num_layers=1)

    def unload(self, digest: str) -> None:
        """Drop an adapter that was loaded."""
        self.loaded[digest] -= 1
        if not self.loaded[digest]:
            del self.loaded[digest]

    def _content(self, directory: str) -> str:
        if directory not in self._script.adapters:
            raise SpawnFailed("its directory does not exist")
        return self._script.adapters[directory]
