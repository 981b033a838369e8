"""Requests over HTTP that are answered before their body is read, by name."""

import json

from tests.support.openai_calls import CHAT, TEXT, request

KEY = "a-key-that-is-long-enough"
BEARER = {"Authorization": f"Bearer {KEY}"}
BODY = {"model": "fake", "prompt": [1, 2], "max_tokens": 2}
LIMITS = {"max_message_bytes": 50_000}  # of a server for these requests; it needs the key, too
# By name: path, verb, headers and status of what is answered before its body is read.
EARLY = {
    "no path": ("/v1/responses", "POST", {}, 404),
    "no model": ("/v1/models/none", "GET", {}, 404),
    "a verb": (CHAT, "PUT", {}, 405),
    "a type": (TEXT, "POST", {"Content-Type": "text/plain"}, 415),
    "an encoding": (TEXT, "POST", {"Content-Encoding": "gzip"}, 415),
    "a host": (TEXT, "POST", {"Host": "evil.example"}, 403),
    "an origin": (TEXT, "POST", {"Origin": "https://evil.example"}, 403),
    "a key": (TEXT, "POST", {"Authorization": "Bearer wrong"}, 401),
    "a deadline": (TEXT, "POST", {"X-Request-Timeout": "soon"}, 400),
    "a size": (TEXT, "POST", {}, 413),
    "a question of a page": (CHAT, "OPTIONS", {}, 403),
    "health": ("/health", "GET", {}, 200),
    "models": ("/v1/models", "GET", {}, 200),
    "a WebSocket": (
        "/health",
        "GET",
        {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version": "13",
        },
        200,  # as if it did not ask for a WebSocket
    ),
}


def body_of(name, size):
    """Return a body of ``size`` bytes, of more than the limit where the size is what is wrong."""
    return json.dumps(BODY).encode().ljust(max(size, 60_000) if name == "a size" else size)


def early(name, size):
    """Return the bytes of a request that is answered early."""
    path, verb, headers, _ = EARLY[name]
    body = body_of(name, size)
    return request(
        path, body, verb=verb, headers={"Content-Length": str(len(body))} | BEARER | headers
    )
