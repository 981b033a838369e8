"""How many replicas a fleet needs, by what runs and waits in the replicas' engines. Pure.

Rule: this file imports nothing of ours, because Serve's controller gets a copy of it.
"""

from __future__ import annotations

import math
from typing import Any

SEQUENCES = "sequences"  # what a replica reports: how many run, wait or are parked


def by_queue_depth(context: Any) -> tuple[int, dict[str, Any]]:
    """Return how many replicas would have ``target_ongoing_requests`` sequences each: a policy for
    ``autoscaling_config`` of a Serve config file. Serve applies the delays and bounds of that file.

    Requests that wait for a replica count as one sequence each.
    """
    reported = context.aggregated_metrics.get(SEQUENCES, {})
    sequences = sum(reported.values()) + (context.total_queued_requests or 0)
    return math.ceil(sequences / context.config.get_target_ongoing_requests()), {}
