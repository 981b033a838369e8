"""Decodes images in a process of its own, the decoder, which has a lower priority (D23).

A decoder in a thread of the server would delay every token: it takes a core from the step's
threads, and the GIL may be held by a thread that has no core. A file that crashes a library ends
only the decoder.

Rule: whatever a file does to the decoder, its request gets an answer, and the next image is
decoded.
"""

from __future__ import annotations

import logging
import pickle
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from engine.images.errors import BadImage
from engine.processes.channel import BadMessage, Channel, ChannelClosed
from engine.processes.child import how_it_ended, start_child

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "engine.images.decoder_main"
# An image is sent at most this often: the process may die for another reason than the image.
TRIES = 2
# Seconds that the process has to end by itself once its channel is closed; then it is killed.
DEATH_LIMIT_S = 1.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class DecodeImage(Protocol):
    """Calls a function that decodes an image, here or in another process."""

    def __call__(self, read: Callable[[bytes], T], data: bytes) -> T:
        """Return ``read(data)``. Meant for threads.

        Raises:
            BadImage: ``read`` raised it.
        """


def decode_here(read: Callable[[bytes], T], data: bytes) -> T:
    """Call ``read`` in the caller's thread."""
    return read(data)


class DecoderProcess:
    """Decodes one image at a time, in a process that starts with the first image. After its death,
    the next image starts another process. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while an image is decoded
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    @property
    def pid(self) -> int:
        """The process's number; 0 while there is none."""
        process = self._process
        return 0 if process is None else process.pid

    def __call__(self, read: Callable[[bytes], T], data: bytes) -> T:
        """Return ``read(data)``, called in the decoder. ``read`` and its result are pickled. If no
        process can be started, the image is decoded in this thread.

        Raises:
            BadImage: ``read`` raised it, or the image ended the decoder.
            RuntimeError: ``read`` raised something else; the message has its stack.
        """
        with self._lock:
            for _ in range(TRIES):
                try:
                    name, value = self._answer(read, data)
                    break
                except OSError as error:
                    log.warning("images are decoded in the server: no process starts: %s", error)
                    return read(data)
                except (ChannelClosed, BadMessage):
                    how = self._end()
                    log.warning("the process that decodes images %s; another one is started", how)
                except BaseException:  # a later image must not get this image's answer
                    self._end()
                    raise
            else:
                raise BadImage(f"ended the process that decodes it, which {how}")
        if name == "refused":
            raise BadImage(value)
        if name == "raised":
            raise RuntimeError(f"the process that decodes images raised an error:\n{value}")
        result: T = value
        return result

    def close(self) -> None:
        """End the process, after a running decoding. A further image would start another one."""
        with self._lock:
            self._end()

    def _answer(self, read: Callable[[bytes], T], data: bytes) -> tuple[str, Any]:
        """Return the name and the value of the process's answer. Start a process if there is none,
        or if the last one died while it had no image."""
        if self._process is not None and self._process.poll() is not None:
            log.warning("the process that decodes images %s; another one is started", self._end())
        channel = self._channel or self._start()
        channel.send("read", (pickle.dumps(read), len(data)))
        channel.send_bytes(data)
        return channel.receive()

    def _start(self) -> Channel:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                fd = theirs.fileno()
                self._process = start_child(PROGRAM, [str(fd)], [fd], threads=1)
            except BaseException:
                ours.close()
                raise
        self._channel = Channel(ours)
        return self._channel

    def _end(self) -> str:
        """End the process, and return how it ended."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if process is None or channel is None:
            return ""
        channel.close()
        try:
            process.wait(DEATH_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
        return how_it_ended(process.returncode)
