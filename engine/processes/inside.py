"""The first and the last acts of a program that the server runs in a process of its own.

Rule 1: the process does not outlive its server, whatever either does. Standard input is a pipe that
the server holds open; when it closes, the kernel sends a SIGKILL, which nothing can delay. (The
parent's death signal of prctl would come when the *thread* ends that started this process.)
Rule 2: the process ignores Ctrl-C and SIGTERM, which are for the server: the server drains first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import select
import signal
import socket
import sys
from typing import NoReturn

EXIT_LOST = 70  # EX_SOFTWARE of sysexits.h
SERVERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def live_with_the_server() -> None:
    """Ignore the server's signals, and end with the server. A crash writes its stacks."""
    for number in SERVERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_the_server(sys.stdin.fileno())
    faulthandler.enable()


def die_with_the_server(fd: int) -> None:
    """Have the kernel kill this process when the pipe's other end is closed. Only Linux can do
    that; elsewhere the end of the channels ends the process, once its thread has the GIL."""
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    look = select.poll()
    look.register(fd, select.POLLIN)
    if look.poll(0):  # the pipe was closed before the kernel watched it
        leave(EXIT_LOST)


def own_socket(fd: int) -> socket.socket:
    """Return the socket of a descriptor. Processes started from here do not inherit it."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def leave(code: int) -> NoReturn:
    """End at once, without the clean-up of libraries at an interpreter's end, which takes time and
    gains nothing."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
