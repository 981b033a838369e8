"""Streams to gateways which prefixes of a model are cached (SubscribeKvEvents).

A subscription begins with a snapshot of all blocks, in one batch or several, and goes on with a
batch for each group of changes. Batches have consecutive numbers. A gateway that lost its
connection names the last number that it got, and goes on from there if the changes since then are
still kept; if not, it gets OUT_OF_RANGE, and begins anew without a number.

Rule: each subscription numbers its batches from its own origin, the time in nanoseconds, and
a batch takes more than one nanosecond. So a number belongs to one subscription, of one process: a
gateway that reconnects after the server's restart, or whose snapshot broke off, gets OUT_OF_RANGE.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import trio
from smg_grpc_proto.generated import common_pb2

from engine.core.text.types import ObservePrefixes
from engine.errors import Overloaded, ShuttingDown
from grpc_service.rpc.errors import RpcError
from grpc_service.rpc.status import StatusCode
from grpc_service.vllm_engine.prefixes import Block, ModelPrefixes, ReplicaPrefixes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.replica.replica import AnyReplica
    from grpc_service.rpc.call import Call

SUBSCRIBERS_MAX = 64  # guess: gateways of one fleet
BATCHES_MAX = 1024  # batches kept for gateways that reconnect. Guess: a minute of a busy server
KEPT_BYTES_MAX = 2**24  # bytes of kept batches, whose sizes differ by a factor of a thousand
CHANGES_MAX = 4096  # blocks of one batch; changes without a subscriber become one batch. Guess.
SNAPSHOT_BLOCKS_MAX = 1024  # blocks of a batch take about 4 ms; other tasks run between batches
SNAPSHOT_BYTES_MAX = 2**21  # bytes of a snapshot's batch; the gateway takes 4 MiB


class _Origin(NamedTuple):
    """How a subscription numbers its batches: those of its snapshot from ``first`` on, and then
    those after the change number ``base``."""

    first: int
    num_chunks: int
    base: int

    def number_of(self, change: int) -> int:
        """Return the number of the batch with this change."""
        return self.first + self.num_chunks - 1 + change - self.base


class KvFeed:
    """The changes of one model's cached prefixes, for all its subscribers.

    A change here is a group of blocks that came or went at once; changes are numbered from 1.
    """

    def __init__(self) -> None:
        self._prefixes = ModelPrefixes(self._wake, CHANGES_MAX)
        self._replicas: dict[AnyReplica, ReplicaPrefixes] = {}
        self._last = 0  # the number of the latest change
        self._kept: deque[bytes] = deque()  # the events of the latest changes
        self._kept_bytes = 0
        self._origins: deque[_Origin] = deque(maxlen=SUBSCRIBERS_MAX)
        self._changed = trio.Event()
        self._num_subscribers = 0
        self._is_closed = False

    def follow(self, replicas: Iterable[AnyReplica]) -> None:
        """Mirror the caches of these replicas from now on, and of no others."""
        wanted = dict.fromkeys(replicas)
        for gone in [replica for replica in self._replicas if replica not in wanted]:
            self._replicas.pop(gone).cleared()
        for replica in wanted:
            if replica not in self._replicas:
                self._replicas[replica] = ReplicaPrefixes(self._prefixes)
                replica.loop.post(ObservePrefixes(self._replicas[replica]))

    def close(self) -> None:
        """End all subscriptions, because the server ends."""
        self._is_closed = True
        self._wake()

    async def serve(self, call: Call, start: int) -> None:
        """Stream batches until the client ends the call. ``start`` is the number of the last batch
        that it got, 0 for none.

        Raises:
            Overloaded: there are `SUBSCRIBERS_MAX` subscribers already.
            RpcError: OUT_OF_RANGE, if the batches after ``start`` are not kept; DATA_LOSS, if the
                client reads too slowly.
            ShuttingDown: the server ends.
            Disconnected: the client has ended the call.
        Cancellation: safe; it is how every subscription ends.
        """
        if self._num_subscribers >= SUBSCRIBERS_MAX:
            raise Overloaded(f"{SUBSCRIBERS_MAX} subscriptions are open", retry_after_s=5.0)
        self._num_subscribers += 1
        try:
            self._collect()
            origin, last = self._resume(start) if start else await self._begin(call)
            if start:  # so the gateway gets headers at once; it skips a batch that it has
                await call.write(common_pb2.KvEventBatch(sequence_number=start))
            while not self._is_closed:
                changed = self._changed  # taken before `_collect`, so that no change is missed
                self._collect()
                while last < self._last:
                    if last < self._last - len(self._kept):
                        what = "the subscriber fell behind; subscribe anew"
                        raise RpcError(StatusCode.DATA_LOSS, what)
                    events = self._kept[last - self._last]
                    last += 1
                    await call.write(_batch(origin.number_of(last), events))
                await changed.wait()
            raise ShuttingDown("the server ends")
        finally:
            self._num_subscribers -= 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _collect(self) -> None:
        """Make one change of all blocks that came or went since the last change."""
        changes = self._prefixes.take_changes()
        if changes is None:  # too many changes to be kept
            self._kept.clear()
            self._kept_bytes = 0
            self._last += 1
        elif changes:
            self._kept.append(_encode(changes))
            self._kept_bytes += len(self._kept[-1])
            self._last += 1
            while len(self._kept) > BATCHES_MAX or self._kept_bytes > KEPT_BYTES_MAX:
                self._kept_bytes -= len(self._kept.popleft())

    async def _begin(self, call: Call) -> tuple[_Origin, int]:
        """Send a snapshot; return the subscription's origin, and the last change in it."""
        blocks = list(self._prefixes.blocks.values())
        size = _chunk_size(blocks)
        count = max(1, -(-len(blocks) // size))
        origin = _Origin(time.time_ns(), count, self._last)
        self._origins.append(origin)
        cleared = common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
        for index in range(count):
            header = common_pb2.KvEventBatch(
                snapshot=common_pb2.KvSnapshotChunk(index=index, count=count, blocks=len(blocks)),
                events=[cleared] * (index == 0),
            )
            events = _encode(blocks[index * size : (index + 1) * size])
            await call.write(_batch(origin.first + index, header.SerializeToString() + events))
        return origin, origin.base

    def _resume(self, start: int) -> tuple[_Origin, int]:
        """Return the origin of the subscription whose batch ``start`` was received, and its change.

        Raises:
            RpcError: OUT_OF_RANGE, if the batches after ``start`` are not kept.
        """
        origin = max(
            (origin for origin in self._origins if origin.first <= start),
            key=lambda origin: origin.first,
            default=None,
        )
        if origin is not None:
            last = origin.base + start - origin.number_of(origin.base)
            if max(origin.base, self._last - len(self._kept)) <= last <= self._last:
                return origin, last
        raise RpcError(
            StatusCode.OUT_OF_RANGE,
            f"the batches after {start} are not kept; subscribe with start_sequence_number 0",
        )


def _batch(number: int, fields: bytes) -> bytes:
    """Return a KvEventBatch's bytes: ``fields`` are the encoded other fields, in any order."""
    own = common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time(), dp_rank=0)
    return bytes(own.SerializeToString() + fields)


def _chunk_size(blocks: Sequence[Block]) -> int:
    """Return how many blocks a batch of the snapshot has."""
    block_bytes = 64 + 5 * len(blocks[0].tokens) if blocks else 1
    return max(1, min(SNAPSHOT_BLOCKS_MAX, SNAPSHOT_BYTES_MAX // block_bytes))


def _encode(changes: Sequence[Block | bytes]) -> bytes:
    """Return the bytes of a batch with these changes, without its number. Blocks that follow one
    another in a prompt make one event, as do keys that are removed one after another."""
    batch = common_pb2.KvEventBatch()
    last: Block | bytes | None = None
    for change in changes:
        if isinstance(change, Block):
            if not (isinstance(last, Block) and change.parent == last.key):
                stored = batch.events.add().stored
                if change.parent is not None:
                    stored.parent_block_hash = block_hash(change.parent)
            batch.events[-1].stored.blocks.add(
                block_hash=block_hash(change.key),
                token_ids=change.tokens,
                block_size=len(change.tokens),
            )
        else:
            if not isinstance(last, bytes):
                batch.events.add().removed.SetInParent()
            batch.events[-1].removed.block_hashes.append(block_hash(change))
        last = change
    data: bytes = batch.SerializeToString()
    return data


def block_hash(key: bytes) -> int:
    """Return a key as the signed number of 64 bits by which the gateway knows the block."""
    return int.from_bytes(key[:8], "little", signed=True)
