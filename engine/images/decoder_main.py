"""The program of the process that decodes images: `python -m engine.images.decoder_main FD`.

`engine.images.decoder.DecoderProcess` starts it. FD is the descriptor of a socket, from which one
image after another comes. The process ends with that channel, and with its server.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from typing import Any, NoReturn

from engine.images.errors import BadImage
from engine.processes.channel import Channel, ChannelClosed
from engine.processes.inside import leave, live_with_the_server, own_socket

# Added to the server's niceness. On a shared core, Linux gives a thread of the server about ten
# times the time of this process.
NICENESS = 10


def main() -> NoReturn:
    """Decode images until the channel ends."""
    live_with_the_server()
    os.nice(NICENESS)
    channel = Channel(own_socket(int(sys.argv[1])))
    with contextlib.suppress(ChannelClosed):
        while True:
            _, (packed, size) = channel.receive()
            channel.send(*_answer(packed, channel.receive_bytes(size)))
    leave(0)


def _answer(packed: bytes, data: bytes) -> tuple[str, Any]:
    """Return the name and the value of the message that answers an image. ``packed`` is the pickled
    function that decodes it."""
    try:
        return "answered", pickle.loads(packed)(data)
    except BadImage as error:
        return "refused", str(error)
    except Exception:
        return "raised", traceback.format_exc()


if __name__ == "__main__":
    main()
