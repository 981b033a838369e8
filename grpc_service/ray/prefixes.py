"""Says which replica of a Ray deployment has computed the beginning of a prompt. Pure.

The router of a deployment has no tokenizer. So it compares beginnings as bytes of the request's
prompt, in chunks of `CHUNK_BYTES`, and each chunk's key stands for everything up to its end. A
replica remembers the keys of what it computed, at most as many as its KV pool has blocks. That is
an estimate: a replica may have forgotten a prefix, which then is computed again, and no answer is
different.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from grpc_service._generated.triolet.v1 import inference_pb2

PREFIXES = "prefixes"  # what a replica reports: the keys of what it computed
CHUNK_BYTES = 64  # guess: about as long as a block of 16 tokens
CHUNKS_MAX = 256  # chunks of one prompt: 16 KiB tell prompts apart well enough
SENT_MAX = 8192  # keys of prompts sent to a replica, until it reports its own keys

ReplicaT = TypeVar("ReplicaT")


def keys_of(request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
    """Return one key for each whole chunk of a request's prompt. Prompts that begin with the same
    chunks have the same first keys, unless their models or their cache salts differ."""
    kind = request.WhichOneof("input") or ""
    origin = f"{request.model}\0{request.prompt.cache_salt}\0{kind}"
    data = b"".join(_parts(request, kind))[: CHUNKS_MAX * CHUNK_BYTES]
    key, keys = origin.encode(), []
    for end in range(CHUNK_BYTES, len(data) + 1, CHUNK_BYTES):
        key = key if len(key) <= 64 else blake2b(key).digest()
        key = blake2b(data[end - CHUNK_BYTES : end], digest_size=8, key=key).digest()
        keys.append(int.from_bytes(key, "little"))
    return tuple(keys)


def _parts(request: inference_pb2.GenerateRequest, kind: str) -> Iterator[bytes]:
    """Yield the prompt in parts. Prompts with the same beginning have the same first parts."""
    if kind == "text":
        yield request.text.encode()
    elif kind == "token_ids":
        for token_id in request.token_ids.ids[: CHUNKS_MAX * CHUNK_BYTES // 4]:
            yield token_id.to_bytes(4, "little")
    elif kind == "chat":
        chat = request.chat
        yield chat.template_args.SerializeToString(deterministic=True)
        for message in (*chat.tools, *chat.messages):
            data = message.SerializeToString(deterministic=True)
            yield len(data).to_bytes(4, "little") + data


class Prefixes:
    """The keys of the prompts that came last, at most ``most`` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[int, None] = {}  # keys, the most recently used last

    def add(self, keys: Sequence[int]) -> None:
        """Note a prompt. When there are too many keys, the least recently used ones go first, and
        of one prompt the keys of its end."""
        for key in reversed(keys):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def report(self) -> list[int]:
        """Return every key."""
        return list(self._keys)


class Places(Generic[ReplicaT]):
    """Which replica has which prefixes, as far as one router knows.

    ``imbalance_max``: a replica is preferred for a prefix only while it has at most this many
    requests more than the replica with the fewest.
    """

    def __init__(self, imbalance_max: int) -> None:
        self._imbalance_max = imbalance_max
        self._sent: dict[ReplicaT, Prefixes] = {}
        self._reported: dict[ReplicaT, frozenset[int]] = {}

    def preferred(self, keys: Sequence[int], queue_lens: Mapping[ReplicaT, int]) -> list[ReplicaT]:
        """Return the replicas that have computed most of the prompt, among those in ``queue_lens``,
        which has their numbers of requests. The list is empty if no replica has computed its
        beginning, or if all that have are too busy."""
        depths = {replica: self._depth(replica, keys) for replica in queue_lens}
        deepest = max(depths.values(), default=0)
        if not deepest:
            return []
        most = min(queue_lens.values()) + self._imbalance_max
        return [
            replica
            for replica, depth in depths.items()
            if depth == deepest and queue_lens[replica] <= most
        ]

    def sent(self, replica: ReplicaT, keys: Sequence[int]) -> None:
        """Note that a prompt was sent to a replica."""
        self._sent.setdefault(replica, Prefixes(SENT_MAX)).add(keys)

    def reported(self, replica: ReplicaT, keys: Iterable[int]) -> None:
        """Note which keys a replica reports, instead of those that it reported before."""
        self._reported[replica] = frozenset(keys)

    def keep(self, replicas: Collection[ReplicaT]) -> None:
        """Forget all replicas but these."""
        for known in (self._sent, self._reported):
            for gone in [replica for replica in known if replica not in replicas]:
                del known[gone]

    def _depth(self, replica: ReplicaT, keys: Sequence[int]) -> int:
        sent, reported = self._sent.get(replica, ()), self._reported.get(replica, ())
        for depth, key in enumerate(keys):
            if key not in sent and key not in reported:
                return depth
        return len(keys)
