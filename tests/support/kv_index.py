"""What a gateway knows of a server's cached prefixes, from SubscribeKvEvents."""

from smg_grpc_proto.generated import common_pb2


class Index:
    """What a gateway knows: the tokens before each block, by its hash."""

    def __init__(self):
        self.paths = {}
        self.last = 0

    def apply(self, data):
        """Apply a message as the gateway does, but fail on gaps and unknown blocks."""
        batch = common_pb2.KvEventBatch.FromString(data)
        if self.last and batch.sequence_number <= self.last:
            return
        assert not self.last or batch.sequence_number == self.last + 1, "there is a gap"
        assert len(data) < 4 * 2**20
        for event in batch.events:
            self.apply_event(event)
        self.last = batch.sequence_number

    def apply_event(self, event):
        if event.HasField("cleared"):
            self.paths.clear()
        for one in event.removed.block_hashes:
            del self.paths[one]
        path = ()
        if event.stored.HasField("parent_block_hash"):
            path = self.paths[event.stored.parent_block_hash]  # a parent must be known
        for block in event.stored.blocks:
            path = (*path, *block.token_ids)
            assert block.block_hash not in self.paths
            assert block.block_size == len(block.token_ids)
            self.paths[block.block_hash] = path
