"""The limits of a server and the reason for each value.

A value marked "guess" was chosen by judgement and never measured against others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may use, and how a server shares its time between clients."""

    # ---- messages and streams

    # Largest request, in bytes, after decompression. 4 MiB is the default of every gRPC server.
    max_message_bytes: int = 4 * 2**20
    # Calls that one connection may have open. Guess: more than the sequences of the largest batch.
    streams_per_connection: int = 1000
    # Upper bound of the bytes of a request's header list. Guess.
    header_list_bytes: int = 2**15

    # ---- HTTP/2

    # Bytes that a client may send on a stream before we acknowledge any. Guess: a request of usual
    # size arrives without waiting for a window update.
    stream_window_bytes: int = 2**18
    # The same for all streams of a connection. Guess: four stream windows.
    connection_window_bytes: int = 2**20
    # Upper bound of our HPACK encoder's dynamic table, in bytes, even if the client allows more.
    # 4096 is HTTP/2's default.
    header_table_bytes: int = 2**12
    # Closed streams of which we remember how they were closed. Guess: frames that were on their way
    # at the close arrive before so many other streams have closed.
    closed_streams: int = 2**12

    # ---- clients that are slow or gone

    # A connection that was silent for this long is pinged. With the timeout, a dead client is found
    # within 45 s.
    keepalive_time_s: float = 30.0
    # A client that does not answer a ping for this long loses its connection.
    keepalive_timeout_s: float = 15.0
    # Time for a TLS handshake. Guess: a phone on a bad network.
    handshake_timeout_s: float = 20.0
    # A connection with this many unsent bytes accepts no message and is not read from. Guess.
    clogged_bytes: int = 2**16
    # Time that the rest of a partly sent message gets before its call is reset. Guess.
    end_patience_s: float = 1.0

    # ---- fairness

    # Time for which the received bytes of one client may keep all other tasks waiting. Guess.
    part_s: float = 0.002
    # Bounds of the size of such a part, which adapts to `part_s`: 16 KiB may be a page of a prompt,
    # or 1,800 empty frames that take 60 ms.
    part_bytes_min: int = 2**8
    part_bytes_max: int = 2**14
    # Time that the received bytes of all clients may take of one turn of Trio's loop. Guess.
    share_s: float = 0.004
    # Clients that are let in at once when a new turn begins. Guess.
    parts_per_turn: int = 16
    # Calls that start in one turn of Trio's loop: some 3 ms.
    starts_per_turn: int = 6

    @property
    def calls_per_connection(self) -> int:
        """Calls of a connection that may run at once: the open ones, and as many again that were
        reset and have not ended yet."""
        return 2 * self.streams_per_connection
