"""Control of triolet.v1: figures, pausing, aborting, draining.

Rule: a handler decodes the request, calls the engine, and encodes the answer. Every end other than
success is an exception, which `grpc_service.access.interceptor` turns into a status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from engine.errors import Overloaded, RequestNotFound
from grpc_service._generated.triolet.v1 import control_pb2
from grpc_service.services import operations_codec, snapshots_codec

if TYPE_CHECKING:
    from grpc_service.access.rpc_record import Rpc
    from grpc_service.services.backend import Backend


WATCH_INTERVAL_S = 1.0
WATCHERS_MAX = 64  # guess: more than a server's dashboards; snapshots take the engine's time


class Control:
    """Watches and steers the server (control.proto). Every handler but WatchStats and Drain answers
    without waiting."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._num_watchers = 0

    async def GetStats(
        self, request: control_pb2.GetStatsRequest, rpc: Rpc
    ) -> control_pb2.GetStatsResponse:
        """Return the counters as they stand."""
        return snapshots_codec.encode_statistics(self._backend.statistics())

    async def WatchStats(self, request: control_pb2.WatchStatsRequest, rpc: Rpc) -> None:
        """Stream the counters, at once and then every `WATCH_INTERVAL_S`. A watcher that does not
        read costs nothing, as the next snapshot is taken only after the last one was read (D1).

        Raises:
            Overloaded: there are `WATCHERS_MAX` watchers already.
        Cancellation: safe; it is how every watch ends.
        """
        if self._num_watchers >= WATCHERS_MAX:
            raise Overloaded(f"{WATCHERS_MAX} clients watch already", retry_after_s=5.0)
        self._num_watchers += 1
        try:
            while True:
                await rpc.call.write(snapshots_codec.encode_statistics(self._backend.statistics()))
                await trio.sleep(WATCH_INTERVAL_S)
        finally:
            self._num_watchers -= 1

    async def Pause(self, request: control_pb2.PauseRequest, rpc: Rpc) -> control_pb2.PauseResponse:
        """Pause one model or all."""
        mode = operations_codec.decode_pause_mode(request)
        self._backend.engine.pause(mode, request.model)
        return control_pb2.PauseResponse()

    async def Resume(
        self, request: control_pb2.ResumeRequest, rpc: Rpc
    ) -> control_pb2.ResumeResponse:
        """End a pause."""
        self._backend.engine.resume(request.model)
        return control_pb2.ResumeResponse()

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, rpc: Rpc
    ) -> control_pb2.ResetPrefixCacheResponse:
        """Forget cached prefixes of one model or all."""
        self._backend.engine.reset_prefix_cache(request.model)
        return control_pb2.ResetPrefixCacheResponse()

    async def Abort(self, request: control_pb2.AbortRequest, rpc: Rpc) -> control_pb2.AbortResponse:
        """End requests by their ids, and return what became of each.

        Raises:
            RequestNotFound: the caller may end its own requests only, and one is not. None has
                been ended then.
        """
        names = operations_codec.decode_abort(request)
        outcomes = self._backend.engine.abort_all(names, rpc.only_of)
        return operations_codec.encode_aborts(names, outcomes)

    async def Explain(
        self, request: control_pb2.ExplainRequest, rpc: Rpc
    ) -> control_pb2.ExplainResponse:
        """Return what a live request does and waits for."""
        name = operations_codec.decode_name(request, "request_id")
        explained = self._backend.engine.explain(name, rpc.only_of)
        return operations_codec.encode_explanation(explained)

    async def GetUsage(
        self, request: control_pb2.GetUsageRequest, rpc: Rpc
    ) -> control_pb2.GetUsageResponse:
        """Return what ended requests have used, by holder and model.

        Raises:
            RequestNotFound: the caller may see its own requests only, and asks for another holder.
        """
        holder, model, since = operations_codec.decode_usage(request)
        if rpc.only_of is not None:
            if holder not in (None, rpc.only_of):
                raise RequestNotFound(f"no request of a holder {holder!r} is known")
            holder = rpc.only_of
        return operations_codec.encode_usage(*self._backend.engine.usage.sums(holder, model, since))

    async def Drain(self, request: control_pb2.DrainRequest, rpc: Rpc) -> control_pb2.DrainResponse:
        """Close the port, and answer when no request is left. The process stays up.

        Cancellation: ends the wait; the drain goes on.
        """
        timeout_s = operations_codec.decode_seconds(request, "timeout")
        await self._backend.engine.drain_in_background(timeout_s)
        return control_pb2.DrainResponse()
