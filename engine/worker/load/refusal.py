"""The error for a model that cannot be served; the runner turns it into a `SpawnFailed`.

Rule: the message is one sentence that a client may read, so it contains no path. Paths go into
``detail``.
"""

from __future__ import annotations

from engine.errors import SpawnFailed


class Refusal(Exception):
    """The model cannot be served; ``str(self)`` completes "the model 'NAME' cannot be loaded: ".

    ``detail`` is for the operator's log only.
    """

    def __init__(self, sentence: str, *, detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail

    def for_model(self, name: str) -> SpawnFailed:
        """Return the error that a client gets who asks for the model ``name``."""
        return SpawnFailed(f"the model {name!r} cannot be loaded: {self}", log_detail=self.detail)
