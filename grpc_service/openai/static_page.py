"""The page at ``/``: the files of ``page/``, sent as they are, to whoever may connect.

Rule 1: nothing is built, and nothing comes from another host. Rule 2: the page holds no secret and
no figure of the server; what it shows, its script asks for, with the key of the person before it.
"""

from __future__ import annotations

from functools import partial
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from grpc_service.openai.call import HttpCall

INDEX = "index.html"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data: blob:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


def replies() -> dict[str, Callable[[HttpCall], Awaitable[None]]]:
    """Return what answers each path of the page."""
    found: dict[str, Callable[[HttpCall], Awaitable[None]]] = {}
    for file in resources.files(__package__).joinpath("page").iterdir():
        kind = TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == INDEX else f"/page/{file.name}"
            found[path] = partial(_show, body=file.read_bytes(), kind=kind)
    return found


async def _show(call: HttpCall, *, body: bytes, kind: bytes) -> None:
    await call.answer(200, body, kind, HEADERS)
