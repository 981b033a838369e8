"""The limits of a server and the reason for each value.

A value marked "guess" was chosen by judgement and never measured against others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may use, and how a server shares its time between clients."""

    # ---- messages and streams

    # Largest request, in bytes, after decompression. 4 MiB is the default of every gRPC server.
    max_message_bytes: int = 4 * 2**20
    # Bytes beyond ``max_message_bytes`` that requests of some methods may have, by full name.
    extra_bytes_by_method: Mapping[str, int] = field(default_factory=dict)
    # Messages of this size and more are compressed where the client asks for it. Guess.
    compressed_bytes_min: int = 1024
    # Calls that one connection may have open. Guess: more than the sequences of the largest batch.
    streams_per_connection: int = 1000
    # Upper bound of the bytes of a request's header list. A call with more ends; with twice as many
    # the connection does. Guess.
    header_list_bytes: int = 2**15

    # ---- HTTP/2

    # Bytes that a client may send on a stream before we acknowledge any. Guess: a request of usual
    # size arrives without waiting for a window update.
    stream_window_bytes: int = 2**16
    # The same for a whole connection. Guess: sixteen stream windows.
    connection_window_bytes: int = 2**20
    # Upper bound of our HPACK encoder's dynamic table, in bytes, even if the client allows more.
    # 4096 is HTTP/2's default.
    header_table_bytes: int = 2**12
    # Closed streams of which we remember how they were closed. Guess: frames that were on their way
    # at the close arrive before this many other streams have closed.
    closed_streams: int = 2**12

    # ---- clients that are slow or gone

    # A connection that was silent for this long is pinged. A dead client is found within 45 s.
    keepalive_time_s: float = 30.0
    # A client that does not answer a ping for this long loses its connection.
    keepalive_timeout_s: float = 15.0
    # Time for a TLS handshake. Guess: a phone on a bad network.
    handshake_timeout_s: float = 20.0
    # A connection with this many unsent bytes accepts no message and is not read from. Guess.
    clogged_bytes: int = 2**16
    # Time for the rest of an incomplete frame or block of headers. Guess: as for a handshake.
    frame_timeout_s: float = 20.0
    # Time for a request of a method that takes one. Guess: 4 MiB over a slow mobile network.
    request_timeout_s: float = 60.0
    # Time after which a client is asked to connect anew, give or take a tenth; its calls go on.
    connection_age_s: float = math.inf
    # Time without a call after which a client is asked to leave. Guess.
    connection_idle_s: float = 1800.0
    # Connections of all clients: a quarter of the file descriptors that most systems allow a
    # process. Connections of one address: the pool of a proxy. Guesses.
    connections_max: int = 16_384
    connections_per_address_max: int = 4096
    # Connections beyond ``connections_max``, in the reserve (`Entrance`), and after how many
    # seconds their clients are asked to connect anew. Guess: twice the probes of a server.
    reserved_max: int = 64
    reserved_s: float = 5.0
    # Connections of one address that are being opened, and how many while the address owes time.
    # More are closed as they come. Guess: crowds behind a proxy.
    openings_per_address_max: int = 1024
    openings_in_debt_max: int = 256
    # Time that a client gets to answer that its connection will end. Guess: a slow round trip.
    leave_patience_s: float = 1.0
    # Prefixes of paths. A full server serves these methods alone on the connections of its reserve,
    # a leaving server on connections that are still open, to clients that do not obey GOAWAY.
    lasting_methods: tuple[bytes, ...] = ()
    # Time in which a server that shuts down still accepts calls that clients had sent before they
    # knew. Guess: 4 MiB over a usual network.
    settle_patience_s: float = 5.0
    # Time, and bytes, that a client may still send after its connection has ended. Guess.
    linger_s: float = 1.0
    linger_bytes: int = 2**18
    # Time that the rest of a partly sent message gets before its call is reset. Guess.
    end_patience_s: float = 1.0

    # ---- bytes that the server keeps (`grpc_service.rpc.held_bytes`)

    # Bytes of all clients' incomplete requests and unread answers. Guess: four requests of
    # ``max_message_bytes``. A request of the largest size (with ``extra_bytes_by_method``) must
    # fit.
    held_bytes: int = 16 * 2**20
    # Time after which a request or an answer whose bytes do not change makes no progress. Guess.
    held_stall_s: float = 1.0

    # ---- clients that cost more than they bring (`grpc_service.rpc.accounts`)

    # Points (`accounts.POINT_S`) that a connection may spend at once on frames and calls without
    # use. Guess: 0.1 s of the loop; a client that resets a thousand calls at once stays below it.
    budget: float = 10_000.0
    # Points that come back in a second: 50 ms of the loop.
    budget_per_s: float = 5_000.0
    # Share of `budget` for new connections from the address of a client whose connection was ended
    # for its cost, and for how many seconds after that. Guess.
    offender_share: float = 0.1
    offender_time_s: float = 60.0
    # Share of the loop's time that useless frames and calls of all clients may take. Guess.
    overhead_share: float = 0.1
    # Seconds of `overhead_share` that may be used at once. Guess.
    overhead_burst_s: float = 0.02

    # ---- fairness

    # Time for which the received bytes of one client may keep all other tasks waiting. Guess.
    part_s: float = 0.002
    # Bounds of the bytes that are handled in `part_s`: 16 KiB may be a page of a prompt, or 1,800
    # SETTINGS frames that take some 25 ms.
    part_bytes_min: int = 2**8
    part_bytes_max: int = 2**14
    # Time that the received bytes of all clients may take of one turn of Trio's loop. Guess.
    share_s: float = 0.004
    # Calls of one connection that wait to be refused; beyond it nothing more is read. Guess.
    refusals_queued_max: int = 64
    # Waiting clients whose bytes are handled when a turn of the loop begins. Guess.
    parts_per_turn: int = 16
    # Calls that start in one turn of Trio's loop: some 3 ms.
    starts_per_turn: int = 6

    @property
    def calls_per_connection(self) -> int:
        """Calls of a connection that may run at once: the open ones, and as many again that were
        reset and have not ended yet."""
        return 2 * self.streams_per_connection
