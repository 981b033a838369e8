"""The error for a model that cannot be served; the runner turns it into a `SpawnFailed`.

Rule: the message is one sentence that a client may read, so it contains no path. Paths go into
``detail``.
"""

from __future__ import annotations

from engine.errors import SpawnFailed


class Refusal(Exception):
    """The model cannot be served; in the sentence ``str(self)``, "it" is the model, whose name
    `engine.pool.load_errors` puts before. ``detail`` is for the operator's log only."""

    def __init__(self, sentence: str, *, detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail

    def spawn_failed(self) -> SpawnFailed:
        """Return the error of a load that ends with this refusal."""
        return SpawnFailed(str(self), log_detail=self.detail)
