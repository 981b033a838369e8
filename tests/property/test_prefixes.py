"""What a gateway is told of drawn prefix caches, replayed into an index like the gateway's.

Whatever the caches keep and forget, the index has exactly the blocks that a request finds at one
replica or more, and gets each block after its parent.
"""

import hypothesis.strategies as st
import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import Overloaded
from grpc_service.rpc.errors import RpcError
from grpc_service.rpc.status import StatusCode
from grpc_service.vllm_engine import kv_feed
from grpc_service.vllm_engine.kv_feed import KvFeed, block_hash
from tests.support.examples import examples
from tests.support.kv_index import Index


def key_of(path):
    """Return a key for the block that ends ``path``, whose tokens are not 0."""
    return b"".join(token.to_bytes(2, "big") for token in path).rjust(8, b"\0")


class Cache:
    """A replica whose prefix cache holds any blocks, whether their parents are there or not."""

    def __init__(self):
        self.paths = set()

        self.loop = self

    def post(self, event):
        self.observer = event.observer

    def store(self, path):
        if path not in self.paths:
            self.paths.add(path)
            parent = key_of(path[:-1]) if len(path) > 1 else None
            self.observer.stored(key_of(path), parent, [path[-1]])

    def remove(self, path):
        self.paths.discard(path)
        self.observer.removed(key_of(path))

    def clear(self):
        self.paths.clear()
        self.observer.cleared()

    def found(self):
        """Return the paths whose parents are all cached: requests find these."""
        return {
            path
            for path in self.paths
            if all(path[:length] in self.paths for length in range(1, len(path)))
        }


class Call:
    """A gateway's call: each message goes into its index, until the call is cancelled."""

    def __init__(self, index):
        self.index = index

    async def write(self, message):
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self.index.apply(data)
        await trio.lowlevel.checkpoint()


def listen(feed, index):
    """Subscribe, after the last batch that the index has, and leave once everything has come."""

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.serve, Call(index), index.last)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(main)


PATHS = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)


class FeedMachine(RuleBasedStateMachine):
    """One or more replicas, and gateways that listen now and then."""

    @initialize(num_replicas=st.integers(1, 3))
    def start(self, num_replicas):
        self.feed = KvFeed()
        self.replicas = [Cache() for _ in range(num_replicas)]
        self.feed.follow(self.replicas)
        self.indexes = [Index(), Index()]

    @rule(data=st.data(), path=PATHS)
    def store(self, data, path):
        data.draw(st.sampled_from(self.replicas)).store(path)

    @rule(data=st.data(), path=PATHS)
    def store_a_whole_prefix(self, data, path):
        replica = data.draw(st.sampled_from(self.replicas))
        for length in range(1, len(path) + 1):
            replica.store(path[:length])

    @rule(data=st.data())
    def remove(self, data):
        replica = data.draw(st.sampled_from(self.replicas))
        if replica.paths:
            replica.remove(data.draw(st.sampled_from(sorted(replica.paths))))

    @rule(data=st.data())
    def remove_a_block_that_was_never_told(self, data):
        data.draw(st.sampled_from(self.replicas)).observer.removed(b"unknown!")

    @rule(data=st.data())
    def clear(self, data):
        data.draw(st.sampled_from(self.replicas)).clear()

    @rule(data=st.data())
    def replace_a_replica(self, data):
        index = data.draw(st.integers(0, len(self.replicas) - 1))
        self.replicas[index] = Cache()
        self.feed.follow(self.replicas)

    @rule(which=st.integers(0, 1))
    def listen(self, which):
        listen(self.feed, self.indexes[which])
        found = set().union(*(replica.found() for replica in self.replicas))
        paths = self.indexes[which].paths
        assert set(paths.values()) == found
        assert all(block_hash(key_of(path)) == one for one, path in paths.items())

    @rule(which=st.integers(0, 1))
    def begin_anew(self, which):
        self.indexes[which] = Index()

    @invariant()
    def the_mirror_has_what_requests_find(self):
        if hasattr(self, "feed"):
            found = set().union(*(replica.found() for replica in self.replicas))
            assert set(self.feed._prefixes.blocks) == {key_of(path) for path in found}


TestFeed = FeedMachine.TestCase
TestFeed.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


# ---- by example ------------------------------------------------------------------------------


@pytest.fixture
def feed():
    """Return a feed of one replica, and the replica."""
    one, replica = KvFeed(), Cache()
    one.follow([replica])
    return one, replica


def refusal_of(feed, index):
    with pytest.raises(RpcError) as caught:
        trio.run(feed.serve, Call(index), index.last)
    return caught.value.status.code


def test_a_block_is_told_only_once_its_whole_prefix_can_be_found(feed):
    one, replica = feed
    index = Index()
    replica.store((1, 2))
    listen(one, index)
    assert index.paths == {}
    replica.store((1,))
    listen(one, index)
    assert set(index.paths.values()) == {(1,), (1, 2)}
    replica.remove((1,))
    listen(one, index)
    assert index.paths == {}


def test_a_subscriber_of_an_earlier_process_begins_anew(feed):
    one, replica = feed
    replica.store((1,))
    index = Index()
    index.last = 5  # a batch number of no subscription to this feed
    assert refusal_of(one, index) is StatusCode.OUT_OF_RANGE
    listen(one, known := Index())
    known.last += 1000  # a batch number that does not exist yet
    assert refusal_of(one, known) is StatusCode.OUT_OF_RANGE


def test_a_snapshot_of_many_batches_is_whole_or_begun_anew(feed, monkeypatch):
    monkeypatch.setattr(kv_feed, "SNAPSHOT_BLOCKS_MAX", 2)
    one, replica = feed
    for token in range(7):
        replica.store((token,))
    index = Index()
    listen(one, index)
    assert len(index.paths) == 7
    index.last -= 1  # as if the last batch of the snapshot had been lost
    assert refusal_of(one, index) is StatusCode.OUT_OF_RANGE


def test_a_gateway_that_was_away_for_too_long_begins_anew(feed, monkeypatch):
    monkeypatch.setattr(kv_feed, "CHANGES_MAX", 3)
    one, replica = KvFeed(), Cache()
    one.follow([replica])
    index = Index()
    listen(one, index)
    for token in range(5):
        replica.store((token,))
    assert refusal_of(one, index) is StatusCode.OUT_OF_RANGE
    listen(one, again := Index())
    assert len(again.paths) == 5
    replica.store((9,))
    listen(one, again)
    assert len(again.paths) == 6


def test_a_subscriber_that_does_not_read_costs_a_bounded_memory_and_no_other_a_batch(
    feed, monkeypatch
):
    monkeypatch.setattr(kv_feed, "KEPT_BYTES_MAX", 200)
    one, replica = feed

    class Unread(Call):
        async def write(self, message):
            await read.wait()
            await super().write(message)

    async def subscribe(call):
        try:
            await one.serve(call, 0)
        except RpcError as error:
            refused.append(error.status.code)

    async def main():
        nonlocal read
        read = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(subscribe, Unread(Index()))
            nursery.start_soon(subscribe, Call(known))
            for token in range(1, 100):
                replica.store((token,))
                await trio.testing.wait_all_tasks_blocked()
                assert sum(map(len, one._kept)) == one._kept_bytes <= 200
            read.set()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    read, refused, known = None, [], Index()
    trio.run(main)
    assert len(known.paths) == 99
    assert refused == [StatusCode.DATA_LOSS]  # the gateway has to subscribe from the beginning


def test_a_subscription_that_its_gateway_leaves_makes_room_for_another(feed, monkeypatch):
    monkeypatch.setattr(kv_feed, "SUBSCRIBERS_MAX", 2)
    one, _ = feed
    for _ in range(5):
        listen(one, Index())

    async def main():
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(one.serve, Call(Index()), 0)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Overloaded, match="2 subscriptions are open"):
                await one.serve(Call(Index()), 0)
            nursery.cancel_scope.cancel()

    trio.run(main)
