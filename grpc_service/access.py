"""Who may call what (D21). Pure: a method, a peer and the keys shown go in, a decision comes out.

Rule 1: with a key file, whoever comes over TCP needs a key, also from this machine: its other users
and whatever forwards calls come over loopback too. A Unix socket has its file's permissions.
Rule 2: without one, RPCs that operate the server are for this machine; all else is for whoever can
connect (`grpc_service.config` says who that may be). Rule 3: a wrong key is never better than none.
Health and reflection are for everybody who can connect: probes have no keys.

| | no key shown | a wrong key | a key |
|---|---|---|---|
| Unix socket | served | UNAUTHENTICATED | served |
| loopback | UNAUTHENTICATED with a key file, else served | UNAUTHENTICATED | served |
| elsewhere, operating | PERMISSION_DENIED | UNAUTHENTICATED | served |
| elsewhere, all else | UNAUTHENTICATED with a key file, else served | UNAUTHENTICATED | served |

A server without a key file does not look at keys: there, any key is as good as none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from engine.errors import NotAllowed, Unauthenticated
from grpc_service.config import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.quota import Quota
    from grpc_service.keys import KeyRing

OURS = "triolet.v1."
CONTROL = "triolet.v1.Control/"
OPERATING = {"triolet.v1.Models/LoadModel", "triolet.v1.Models/UnloadModel"}
HEADER = "authorization"
SCHEME = b"bearer "


def admit(
    method: str,
    peer: str,
    metadata: Iterable[tuple[str, str | bytes]],
    keys: KeyRing | None,
) -> Quota | None:
    """Whether a call may be served; the key's holder, None for a call without a key.

    ``method`` is ``triolet.v1.Inference/Generate``; ``peer`` is as grpc writes it.

    Raises:
        Unauthenticated: a key is needed, or a wrong one was shown.
        NotAllowed: the peer may not operate the server.
    """
    if not method.startswith(OURS):
        return None
    shown = None if keys is None else _shown(metadata)
    if keys is not None and shown is not None:
        holder = keys.find(shown)
        if holder is None:
            raise Unauthenticated("this key is not one of the server's")
        return holder
    is_operating = method.startswith(CONTROL) or method in OPERATING
    if is_operating and not is_local(peer):
        raise NotAllowed(
            "this RPC is served to clients on the server's machine, or with one of its keys"
        )
    if keys is not None and not is_unix(peer):
        raise Unauthenticated("a key is needed: send it as `authorization: Bearer KEY`")
    return None


def _shown(metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
    """The key in ``authorization``; None: there is no such header. One of another scheme is no
    key of ours, and so a wrong one."""
    for name, value in metadata:
        if name == HEADER:
            data = value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
            is_bearer = data[: len(SCHEME)].lower() == SCHEME
            return data[len(SCHEME) :].strip() if is_bearer else b""
    return None


def is_unix(peer: str) -> bool:
    """Does ``peer`` come over a Unix socket?"""
    return unquote(peer).partition(":")[0] == "unix"


def is_local(peer: str) -> bool:
    """Does ``peer``, as grpc writes it (``ipv4:127.0.0.1:5``, ``ipv6:%5B::1%5D:5``, ``unix:``),
    come over loopback or a Unix socket?"""
    if is_unix(peer):
        return True
    address = unquote(peer).partition(":")[2]
    return is_loopback(address.rpartition(":")[0])
