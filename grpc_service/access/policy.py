"""Who may call what (D21): a pure function of the method, the client's address and its key.

Rule 1: with a key file, every client over TCP needs a key, even on this machine, because its other
users and everything that forwards calls connect over loopback, too. A Unix socket is protected by
its file's permissions. Rule 2: without a key file, RPCs that operate the server are served to this
machine only, and all others to every client that can connect (`grpc_service.app.server_config`
decides which those are). Rule 3: a wrong key is never better than none. Health and reflection are
served to every client that can connect, because probes have no keys.

| client | no key | a wrong key | a right key |
|---|---|---|---|
| Unix socket | served | UNAUTHENTICATED | served |
| loopback | UNAUTHENTICATED with a key file, else served | UNAUTHENTICATED | served |
| elsewhere, operating | PERMISSION_DENIED | UNAUTHENTICATED | served |
| elsewhere, all else | UNAUTHENTICATED with a key file, else served | UNAUTHENTICATED | served |

A server without a key file ignores keys. A path of HTTP has the admission of an RPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from engine.errors import NotAllowed, Unauthenticated
from grpc_service.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.requests.quota import Quota
    from grpc_service.access.keys import KeyRing

OURS = "triolet.v1."
# The calls by which clients use the server: they are logged at INFO and traced. Others are probes.
USES = (OURS, *(f"vllm.grpc.engine.VllmEngine/{name}" for name in ("Generate", "Embed", "Abort")))
HTTP_USES = "/v1/"  # the same of the paths of HTTP
HTTP_ABORT = "/triolet/abort"  # logged at INFO, as Control's is
CONTROL = "triolet.v1.Control/"
OPERATING = {
    f"triolet.v1.Models/{name}"
    for name in ("LoadModel", "UnloadModel", "LoadAdapter", "UnloadAdapter")
}
HEADER = "authorization"
SCHEME = b"bearer "


def admit(
    method: str,
    peer: str,
    metadata: Iterable[tuple[str, str | bytes]],
    keys: KeyRing | None,
) -> Quota | None:
    """Return the quota of the key's holder, None for a call that needs no key and has none.

    ``method`` is a full name such as ``triolet.v1.Inference/Generate``; ``peer`` is the client's
    address as grpc writes it.

    Raises:
        Unauthenticated: the call needs a key, or has a wrong one.
        NotAllowed: the client may not operate the server.
    """
    if not method.startswith(OURS):
        return None
    key = None if keys is None else _key_in(metadata)
    if keys is not None and key is not None:
        holder = keys.find(key)
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


def _key_in(metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
    """Return the key in ``authorization``, None without that header. Another scheme than Bearer
    counts as a wrong key, b""."""
    for name, value in metadata:
        if name == HEADER:
            data = value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
            is_bearer = data[: len(SCHEME)].lower() == SCHEME
            return data[len(SCHEME) :].strip() if is_bearer else b""
    return None


def is_unix(peer: str) -> bool:
    """Return whether ``peer`` has connected over a Unix socket."""
    return unquote(peer).partition(":")[0] == "unix"


def is_local(peer: str) -> bool:
    """Return whether ``peer`` has connected over loopback or a Unix socket. ``peer`` is written as
    grpc does: ``ipv4:127.0.0.1:5``, ``ipv6:%5B::1%5D:5`` or ``unix:``."""
    if is_unix(peer):
        return True
    address = unquote(peer).partition(":")[2]
    return is_loopback(address.rpartition(":")[0])
