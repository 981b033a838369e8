"""Why a model cannot be served, before the runner turns it into a `SpawnFailed`.

Rule 1: one sentence, without a path: a client may read it. The path goes into ``detail``.
"""

from __future__ import annotations


class Refusal(Exception):
    """The model cannot be served; ``str(self)`` completes "the model 'NAME' cannot be loaded: ".

    ``detail`` is for the operator's log only.
    """

    def __init__(self, sentence: str, *, detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail
