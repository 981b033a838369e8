"""A channel: whole messages between a server and a process of its own, over a socket pair.

A message is a name and a value, pickled, behind a header.

Rule 1: a message arrives whole, or `ChannelClosed` or `BadMessage` is raised; the channel is of no
use after either. Rule 2: unpickling can run any code, so a channel is a socket pair that the server
made and handed to its own process, of the same program and user, and to nothing else. Rule 3:
imports no torch.

Source: D3, D8.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEADER = struct.Struct("<4sQ")  # the mark, and the number of bytes that follow
MARK = b"tri1"
# The most bytes of one message; a header with a larger number is not ours. The largest known
# messages are the log-probabilities of a prompt of 128,000 tokens with 20 alternatives each, 68 MB
# (measured).
MESSAGE_MAX = 1 << 30
PROTOCOL = 5


class ChannelClosed(Exception):
    """The other side is gone, or this side closed the channel."""


class BadMessage(Exception):
    """The bytes that came are no message."""


def packed(name: str, value: object) -> bytes:
    """Return a message in the form that is sent.

    Raises:
        Exception: the value cannot be pickled.
    """
    body = pickle.dumps((name, value), PROTOCOL)
    if len(body) > MESSAGE_MAX:
        raise ValueError(f"a message of {len(body)} bytes")
    return HEADER.pack(MARK, len(body)) + body


class Channel:
    """One end of a socket pair. One thread at a time sends and receives. Any thread may close the
    channel; a thread that waits in it then raises ChannelClosed at once.

    The last user of the descriptor closes it, so that its number never becomes another file's while
    a thread still reads from it. That takes no lock: `close` and each user first set their own flag
    and then look at the other's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_used = False
        self._is_closed = False

    def fileno(self) -> int:
        """Return the descriptor, or -1 once it is closed."""
        return self._socket.fileno()

    def send(self, name: str, value: object) -> None:
        """Send a whole message; wait while the other side does not take it.

        Raises:
            ChannelClosed: the message will not arrive. Exception: the value cannot be pickled;
                nothing was sent.
        """
        self.send_packed(packed(name, value))

    def send_packed(self, message: bytes) -> None:
        """Send what `packed` returned, as `send`."""
        with self._used():
            self._socket.sendall(message)

    def receive(self) -> tuple[str, Any]:
        """Wait for a message, without Python's global lock, and return its name and value.

        Raises:
            ChannelClosed: no message will come. BadMessage: what came is no message.
        """
        with self._used():
            mark, size = HEADER.unpack(self._read(HEADER.size))
            if mark != MARK or size > MESSAGE_MAX:
                raise BadMessage("what came does not begin as a message does")
            body = self._read(size)
        try:
            name, value = pickle.loads(body)
        except Exception as error:
            raise BadMessage(f"a message cannot be read: {error!r}") from error
        return name, value

    def send_bytes(self, data: bytes) -> None:
        """Send bytes that `receive_bytes` of the other side takes, without a copy.

        Raises:
            ChannelClosed: the bytes will not arrive.
        """
        with self._used():
            self._socket.sendall(data)

    def receive_bytes(self, size: int) -> bytes:
        """Wait for ``size`` bytes, as `receive`, and return them.

        Raises:
            ChannelClosed: the bytes will not come.
        """
        with self._used():
            return bytes(self._read(size))

    @contextmanager
    def watched(self) -> Iterator[int]:
        """Lend the descriptor while the block runs, to wait on it in place of `receive`.

        Raises:
            ChannelClosed: the channel is closed.
        """
        with self._used():
            yield self._socket.fileno()

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._is_closed = True
        with suppress(OSError):  # one of the ends is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_used:
            self._socket.close()

    @contextmanager
    def _used(self) -> Iterator[None]:
        self._is_used = True
        try:
            if self._is_closed:
                raise ChannelClosed("the channel was closed")
            yield
        except OSError as error:
            raise ChannelClosed(f"the channel ended: {error}") from error
        finally:
            self._is_used = False
            if self._is_closed:
                self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise ChannelClosed("the other side closed the channel")
            done += count
        return data


def wait_for_any(channels: Sequence[Channel], limit_s: float | None) -> list[int]:
    """Wait until something has come on a channel, or the other side of one is gone; return the
    places of these channels, or nothing after ``limit_s`` seconds. Waits without Python's global
    lock, in the thread that would receive.

    Raises:
        ChannelClosed: one of the channels is closed.
    """
    with ExitStack() as stack:
        look = select.poll()
        fds = [stack.enter_context(channel.watched()) for channel in channels]
        for fd in fds:
            look.register(fd, select.POLLIN)
        ready = {fd for fd, _ in look.poll(None if limit_s is None else limit_s * 1000)}
    return [place for place, fd in enumerate(fds) if fd in ready]
