"""The generated faces are those that `tools/regen_faces.py` makes of the files for asyncio."""

import pytest

from tools import regen_faces
from tools.regen_faces import Face

SOURCE = '''"""For asyncio."""

import asyncio


class AsyncReader:
    async def read(self) -> list[str]:
        """Read all.

        Cancellation: the reading ends.
        """
        try:
            return [part async for part in await self._open()]
        except StopAsyncIteration:
            return []
        except asyncio.CancelledError:  # asyncio only
            self.close()

            raise

    def __aiter__(self) -> AsyncReader:
        return _AsyncIterator(self)


def _close() -> None:  # asyncio only
    pass
'''
WANTED = '''# Written by tools/regen_faces.py from aio.py; do not edit.
"""For asyncio."""



class Reader:
    def read(self) -> list[str]:
        """Read all."""
        try:
            return [part for part in self._open()]
        except StopIteration:
            return []

    def __iter__(self) -> Reader:
        return _Iterator(self)
'''


def test_the_generated_faces_are_current():
    assert regen_faces.drift() == []


def test_a_face_is_its_source_without_what_waits(monkeypatch, tmp_path):
    monkeypatch.setattr(regen_faces, "ROOT", tmp_path)
    (tmp_path / "aio.py").write_text(SOURCE)
    face = Face("aio.py", "blocking.py", (("import asyncio\n", ""),))
    assert face.generate() == WANTED
    monkeypatch.setattr(regen_faces, "FACES", (face,))
    assert "blocking.py" in regen_faces.drift()


def test_a_change_that_is_not_in_the_source_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(regen_faces, "ROOT", tmp_path)
    (tmp_path / "aio.py").write_text(SOURCE)
    with pytest.raises(SystemExit, match="has no 'import trio' to be changed"):
        Face("aio.py", "blocking.py", (("import trio", ""),)).generate()
