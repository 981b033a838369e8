"""Channels beside the main one, for calls that must not wait for a step.

Each compilation of a constraint has a channel of its own, which is kept for a later one. A channel
is made here, and one of its ends is passed to the worker process over the control socket.

Rule: a lent channel is used only by its borrower's thread; the lock, which no step takes, guards
everything else.
"""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.processes.channel import Channel, ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Iterator


class SideChannels:
    """The side channels to one worker process. Every method may be called from any thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()  # guards the fields below; held while a channel is opened
        self._is_closed = False
        self._idle: list[Channel] = []
        self._all: set[Channel] = set()

    @contextmanager
    def lent(self) -> Iterator[Channel]:
        """Lend an idle channel, or a new one, while the block runs. If the block raises, an answer
        may still be on its way, so the channel is closed.

        Raises:
            ChannelClosed: The worker process was given up, or no channel can be opened.
        """
        channel = self._take()
        try:
            yield channel
        except BaseException:
            self._drop(channel)
            raise
        self._keep(channel)

    def close(self) -> None:
        """Close every channel, also those that are lent, and open no more. Idempotent."""
        with self._lock:
            self._is_closed = True
            channels = list(self._all)
            self._all.clear()
            self._idle.clear()
        for channel in channels:
            channel.close()

    def _take(self) -> Channel:
        with self._lock:
            if self._is_closed:
                raise ChannelClosed("the worker process was given up")
            if self._idle:
                return self._idle.pop()
            try:
                channel = self._open()
            except OSError as error:
                raise ChannelClosed(f"no channel can be opened: {error}") from error
            self._all.add(channel)
            return channel

    def _open(self) -> Channel:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return Channel(ours)

    def _keep(self, channel: Channel) -> None:
        with self._lock:
            if channel in self._all:
                self._idle.append(channel)

    def _drop(self, channel: Channel) -> None:
        with self._lock:
            self._all.discard(channel)
        channel.close()
