"""Who may call what, and for whom (D21): a pure function of the method, the client's address, its
certificate and its metadata.

A call's *holder* is that of its key; else, on a server without keys, the first subject alternative
name of its client's certificate, with its type; all other calls have none together. A key that may
delegate can name another holder in the metadata `HOLDER_HEADER`. A holder is a *user* unless its
key is an operator's; without a key, the clients on this machine are operators. A user may end its
own requests, ask about them and attach to them, and nothing that concerns other holders' requests.

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

With a right key, operating is served to operators, and is PERMISSION_DENIED for users. Elsewhere,
a client with a certificate may call `OF_OWN` without a key. A server without a key file ignores
keys and `HOLDER_HEADER`. A path of HTTP has the admission of an RPC.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from engine.errors import InvalidRequest, NotAllowed, Unauthenticated
from engine.requests.quota import Quota
from grpc_service.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from grpc_service.access.keys import KeyRing

OURS = "triolet.v1."
# The calls by which clients use the server: they are logged at INFO and traced. Others are probes.
USES = (OURS, *(f"vllm.grpc.engine.VllmEngine/{name}" for name in ("Generate", "Embed", "Abort")))
HTTP_USES = "/v1/"  # the same of the paths of HTTP
HTTP_ABORT = "/triolet/abort"  # logged at INFO, as Control's is
CONTROL = "triolet.v1.Control/"
# Users may call these for their own requests.
OF_OWN = {f"{CONTROL}{name}" for name in ("Abort", "Explain", "GetUsage")}
OPERATING = {
    f"triolet.v1.Models/{name}"
    for name in ("LoadModel", "UnloadModel", "LoadAdapter", "UnloadAdapter")
}
HEADER = "authorization"
HOLDER_HEADER = "x-triolet-holder"
HOLDER = re.compile(r"[!-~]{1,128}")  # a name of a holder for whom a key's client calls
# Clients with certificates are holders for whom this one, which has no limits, calls.
CERTIFIED = Quota("certificate")
SCHEME = b"bearer "


class Caller(NamedTuple):
    """Whose call it is, None for no holder's, and whether its client may operate the server."""

    holder: Quota | None
    is_operator: bool


def admit(
    method: str,
    peer: str,
    metadata: Iterable[tuple[str, str | bytes]],
    keys: KeyRing | None,
    certified: str = "",
) -> Caller:
    """Return whose call it is.

    ``method`` is a full name such as ``triolet.v1.Inference/Generate``; ``peer`` is the client's
    address as grpc writes it, and ``certified`` the name in its certificate, "" without one.

    Raises:
        Unauthenticated: the call needs a key, or has a wrong one.
        NotAllowed: the client may not operate the server, or may not call for others.
        InvalidRequest: the name of the holder for whom it calls is wrong.
    """
    if not method.startswith(OURS):
        return Caller(None, is_operator=False)
    caller = _caller_of(peer, metadata, keys, certified)
    is_operating = method.startswith(CONTROL) or method in OPERATING
    if is_operating and not caller.is_operator:
        if caller.holder is None:
            raise NotAllowed(
                "this RPC is served to clients on the server's machine, or with one of its keys"
            )
        if method not in OF_OWN:
            raise NotAllowed("this RPC is served to operators: to keys with role=operator")
    if keys is not None and caller.holder is None and not is_unix(peer):
        raise Unauthenticated("a key is needed: send it as `authorization: Bearer KEY`")
    return caller


def _caller_of(
    peer: str,
    metadata: Iterable[tuple[str, str | bytes]],
    keys: KeyRing | None,
    certified: str,
) -> Caller:
    if keys is None:
        return Caller(CERTIFIED.delegated(certified) if certified else None, is_local(peer))
    key, name = _shown_in(metadata)
    if key is None:
        if name is not None and is_unix(peer):
            raise NotAllowed(f"{HOLDER_HEADER} needs a key with delegate=true")
        return Caller(None, is_local(peer))
    holder = keys.find(key)
    if holder is None:
        raise Unauthenticated("this key is not one of the server's")
    if name is None:
        return Caller(holder, holder.is_operator)
    if not holder.may_delegate:
        raise NotAllowed(f"{HOLDER_HEADER} is sent, but this key has no delegate=true")
    if not HOLDER.fullmatch(name):
        what = "must have 1 to 128 characters of ASCII, without spaces"
        raise InvalidRequest.of(HOLDER_HEADER, what)
    return Caller(holder.delegated(name), is_operator=False)


def _shown_in(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[bytes | None, str | None]:
    """Return the key in ``authorization``, and the name in `HOLDER_HEADER`; None without the
    header. Another scheme than Bearer counts as a wrong key, b"".

    Raises:
        InvalidRequest: two holders are named: a gateway has to take out the name that its own
            client sent, and has not.
    """
    key, holder = None, None
    for name, value in metadata:
        if name == HEADER and key is None:
            data = value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
            is_bearer = data[: len(SCHEME)].lower() == SCHEME
            key = data[len(SCHEME) :].strip() if is_bearer else b""
        elif name == HOLDER_HEADER:
            if holder is not None:
                raise InvalidRequest.of(HOLDER_HEADER, "is sent twice")
            holder = value if isinstance(value, str) else value.decode("latin-1")
    return key, holder


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
