"""What is known of the RPC that the running task serves: for its limits and its log line.

Rule: one record per call, made by `grpc_service.reception` and found by whoever serves the call.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.generation import Lifetime
    from engine.quota import Quota


@dataclass(eq=False, slots=True)
class Rpc:
    """One call. ``method`` is ``triolet.v1.Inference/Generate``, ``request_id`` the client's own
    or one made for it, ``quota`` None without a key. ``generation`` is set by whoever
    starts one for it."""

    method: str
    request_id: str = ""
    quota: Quota | None = None
    generation: Lifetime[Any] | None = None

    @property
    def told_id(self) -> str:
        """The id that the engine knows the request by, or else the call's own; "-" for none."""
        if self.generation is not None:
            return self.generation.request_id
        return self.request_id or "-"


current: ContextVar[Rpc | None] = ContextVar("rpc", default=None)
