"""Every place where the library relies on how h2 works inside.

h2's public interface is enough for a correct server, but not for a fast and fair one. Only this
file uses more than that, and each part has a test in ``test_h2_overrides.py`` that fails when h2
changes inside: run those tests before allowing a new version of h2.

| part | reason |
|---|---|
| `Window` | a DATA frame of h2 costs eight times ours (`streams.Stream`) |
| `FrameLengths` | h2 waits for all of a frame that is too long |
| `QuietDataFrame` | h2 describes every frame for a log that is off |
| `UncountedStream` | h2 ends the connection for a wrong content-length |
| `ServerH2.release_connection`, `ServerH2.release_stream` | h2 opens both windows at once |
| `ServerH2.open_inbound_streams` | h2 ends the connection for one stream too many |
| `ServerH2.drop` | h2 looks for closed streams among all of them |
| `ServerH2._receive_settings_frame` | h2 keeps unknown settings for ever |
| `ServerH2._receive_goaway_frame` | h2 ends running streams when the client opens no more |
| `ServerH2._receive_headers_frame` | h2 does not tell faults of compression from others |
| `ServerH2._acknowledge_settings` | h2 lets the client choose the size of our header table |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated
from h2.exceptions import ProtocolError
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream
from hpack import HPACKError
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, SettingsFrame, WindowUpdateFrame

if TYPE_CHECKING:
    from collections.abc import Iterable

    from h2.events import Event
    from hpack.struct import Header
    from hyperframe.frame import Frame, SettingsFrame

    from grpc_service.rpc.limits import Limits

_KNOWN_SETTINGS = {*SettingCodes}
_LENGTH_BYTES = 3  # bytes of the length in a frame's header
_DEFAULT_WINDOW = 65_535  # window of a new connection. Source: RFC 9113, section 6.9.2.


class Window(Protocol):
    """h2's count of the bytes that may still be sent on a stream or on a connection.

    h2 adds what the client allows, and refuses what would exceed HTTP/2's maximum. Code that writes
    DATA frames itself subtracts what it sends.
    """

    outbound_flow_control_window: int


class FrameLengths(FrameBuffer):
    """Refuses a frame that is too long as soon as its length is known; h2 waits for the frame's
    body, of up to 16 MiB, before it refuses the frame."""

    def __next__(self) -> Frame:
        if len(self._data) >= _LENGTH_BYTES:
            self._validate_frame_length(int.from_bytes(self._data[:_LENGTH_BYTES], "big"))
        frame = super().__next__()
        if frame.__class__ is DataFrame:
            frame.__class__ = QuietDataFrame
        return frame


class QuietDataFrame(DataFrame):
    """A DATA frame whose description leaves out the body; h2 makes one of every frame."""

    __repr__ = object.__repr__


class UncountedStream(H2Stream):
    """A stream whose body h2 does not compare with its content-length: for a difference h2 ends the
    connection, and `grpc_service.rpc.streams.Stream` that stream alone."""

    def _initialize_content_length(self, headers: Iterable[Header]) -> None:
        pass

    def _track_content_length(self, length: int, end_stream: bool) -> None:
        pass


class CompressionError(ProtocolError):
    """A block of headers cannot be decompressed."""

    error_code = ErrorCodes.COMPRESSION_ERROR


class ServerH2(H2Connection):
    """h2's connection, for a server. Names and values of headers are bytes. Headers are not
    validated: a fault in them would end the connection. A closed stream stays in h2's table until
    `drop`."""

    def __init__(self, limits: Limits) -> None:
        self.MAX_CLOSED_STREAMS = limits.closed_streams
        super().__init__(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._header_table_bytes = limits.header_table_bytes
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams_per_connection,
                SettingCodes.MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
                SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            },
        )
        # Header lists larger than announced end their calls (`Call.fault`). Lists twice as large
        # end the connection, as decoding them takes long and serves no call.
        self.decoder.max_header_list_size = 2 * limits.header_list_bytes
        self.incoming_buffer = FrameLengths(server=True)
        self._frame_dispatch_table[QuietDataFrame] = self._receive_data_frame
        self.initiate_connection()
        self.increment_flow_control_window(limits.connection_window_bytes - _DEFAULT_WINDOW)

    @property
    def open_inbound_streams(self) -> int:
        """Return 0, so that h2 never counts streams. h2 would end the connection for one too many;
        `Http2Connection` refuses that one alone. Source: RFC 9113, section 5.1.2."""
        return 0

    def close(self) -> None:
        """Take no more frames. h2's table of methods, which refers to this object, is emptied."""
        self._frame_dispatch_table.clear()

    def window_of(self, stream_id: int) -> Window:
        """Return the send window of a stream. The connection's own is this object."""
        return self.streams[stream_id]

    def is_open(self, stream_id: int) -> bool:
        """Return whether a stream is known and not closed."""
        state = self.streams.get(stream_id)
        return state is not None and not state.closed

    def drop(self, stream_id: int) -> None:
        """Forget a stream if it is closed; only how it was closed is remembered."""
        state = self.streams.get(stream_id)
        if state is not None and state.closed:
            del self.streams[stream_id]
            self._closed_streams[stream_id] = state.closed_by

    def goaway(self, last_stream_id: int) -> bytes:
        """Return the frame that asks the client to open no streams after ``last_stream_id``. h2's
        own would end the streams that run."""
        return GoAwayFrame(0, last_stream_id=last_stream_id).serialize()

    def release_connection(self, num_bytes: int) -> None:
        """Let the client send ``num_bytes`` more on the connection."""
        if increment := self._inbound_flow_control_window_manager.process_bytes(num_bytes):
            self._prepare_for_sending([WindowUpdateFrame(0, window_increment=increment)])

    def release_stream(self, stream_id: int, num_bytes: int) -> None:
        """Let the client send ``num_bytes`` more on a stream, if the stream is open."""
        state = self.streams.get(stream_id)
        if state is not None and not state.closed:
            self._prepare_for_sending(state.acknowledge_received_data(num_bytes))

    def _begin_new_stream(self, stream_id: int, allowed_ids: AllowedStreamIDs) -> H2Stream:
        stream = super()._begin_new_stream(stream_id, allowed_ids)
        stream.__class__ = UncountedStream
        return stream

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Frame], list[Event]]:
        """Give a decompression fault its own error code: after it no later header can be decoded.
        Source: RFC 9113, section 4.3."""
        try:
            return super()._receive_headers_frame(frame)
        except ProtocolError as error:
            if isinstance(error.__cause__, HPACKError):
                raise CompressionError(str(error)) from error
            raise

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[Event]]:
        """Drop unknown settings, of which h2 would keep each one for ever."""
        for number in frame.settings.keys() - _KNOWN_SETTINGS:
            del frame.settings[number]
        return super()._receive_settings_frame(frame)

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        """Announce that the client opens no more streams; those that run go on in both directions,
        where h2 would end them."""
        return [], [ConnectionTerminated()]

    def _acknowledge_settings(self) -> list[Frame]:
        """Bound the dynamic table of our header encoder, whatever size the client allows."""
        frames: list[Frame] = super()._acknowledge_settings()
        encoder = self.encoder
        if encoder.header_table_size > self._header_table_bytes:
            encoder.header_table_size = self._header_table_bytes
        # When a client has changed the table's size several times, we announce the smallest and the
        # last size. hpack would announce all of them, or none if the last one came twice.
        # Source: RFC 7541, section 4.2.
        if changes := encoder.table_size_changes:
            changes[:] = [min(changes), changes[-1]]
            encoder.header_table.resized = True
        return frames
