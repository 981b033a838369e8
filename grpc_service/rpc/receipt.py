"""Waits until the client of a call has received what was written to it.

What is written stands in the sockets' buffers for a while, and is lost with the connection. The
answer to a ping says that everything before it has arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from grpc_service.rpc.call import Call


async def wait_received(call: Call) -> None:
    """Wait until the client's machine has all that was written, or for
    `Limits.keepalive_timeout_s`.

    Cancellation: safe. A connection that is lost cancels the call.
    """
    http2, received = call.connection.http2, trio.Event()
    key = http2.mark(received.set)
    call.connection.flusher.touch(call.connection)
    try:
        with trio.move_on_after(call.limits.keepalive_timeout_s):
            await received.wait()
    finally:
        http2.marks.pop(key, None)
