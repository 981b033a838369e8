"""Routes a Generate request to the replica that has computed the beginning of its prompt.

Serve runs one router in each proxy. All other requests go to the less busy of two replicas.
"""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter

from grpc_service.ray.prefixes import PREFIXES, Places, keys_of

if TYPE_CHECKING:
    from collections.abc import Sequence

IMBALANCE_MAX = 8  # guess: a prompt of 1,000 tokens costs about as much as 8 requests' decodes


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """A router of Serve's (`RequestRouterConfig.request_router_class`)."""

    def initialize_state(self, imbalance_max: int = IMBALANCE_MAX) -> None:
        """Take ``request_router_kwargs`` of the Serve config file; `Places` explains them."""
        self._places: Places[Any] = Places(imbalance_max)

    def update_replicas(self, replicas: list[Any]) -> None:
        """Take note of which replicas there are, and of what they report."""
        super().update_replicas(replicas)
        self._places.keep({replica.replica_id for replica in replicas})
        for replica in replicas:
            self._places.reported(replica.replica_id, replica.routing_stats.get(PREFIXES, ()))

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any | None = None
    ) -> list[list[Any]]:
        """Return ranks of replicas: those that have computed most of the prompt, then two of all.
        Serve takes the one with the fewest requests of the first rank in which one has room."""
        lens = self.replica_queue_len_cache
        by_id = {r.replica_id: r for r in candidate_replicas}
        queue_lens = {key: lens.get(key) or 0 for key in by_id}
        preferred = self._places.preferred(_keys_of(pending_request), queue_lens)
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[by_id[key] for key in preferred], two]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Take note of where a prompt was sent."""
        self._places.sent(replica_id, _keys_of(pending_request))


def _keys_of(pending: Any | None) -> Sequence[int]:
    """Return the keys of a Generate request's prompt, and () for any other request."""
    if pending is None or pending.metadata.call_method != "Generate" or not pending.args:
        return ()
    [argument] = pending.args
    if isinstance(argument, bytes):  # pickled by Serve's proxy
        argument = pickle.loads(argument).user_request_proto
    return keys_of(argument)
