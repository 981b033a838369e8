"""What an encode request must get, from the request alone, without a schedule or an engine.

Rule: as in `tools.simulator.oracle`, this follows the fake encoder's definition
(`engine.worker.fakes.encoder`) and shares only its primitive functions.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from engine.requests.encode_values import EmbedRequest
from engine.worker.fakes.encoder import PROMPTS, SEPARATOR, score_of, vector_of
from engine.worker.fakes.text import FakeTokenizer

if TYPE_CHECKING:
    from engine.requests.encode_values import EncodeRequests

MAX_INPUT_LEN = 48  # of the drawn worlds' encoders: so short that some inputs are cut


def inputs_of(request: EncodeRequests) -> list[tuple[int, ...]]:
    """Return the token ids from which a valid request's inputs are computed, in their order."""
    encode = FakeTokenizer().encode
    if isinstance(request, EmbedRequest):
        prompt = encode(PROMPTS.get(request.prompt_name, ""))
        whole = [prompt + encode(one) if isinstance(one, str) else one for one in request.inputs]
    else:
        head = (*encode(request.query), SEPARATOR)
        whole = [head + encode(document) for document in request.documents]
    return [ids[:MAX_INPUT_LEN] for ids in whole]


def expected_results(request: EncodeRequests) -> list[list[float]]:
    """Return each input's numbers, rounded to float32."""
    found = []
    for ids in inputs_of(request):
        if isinstance(request, EmbedRequest):
            values = vector_of(ids)[: request.dimensions]
            if request.normalize:
                length = sum(value * value for value in values) ** 0.5
                values = [value / length for value in values]
        else:
            values = [score_of(ids, raw=bool(request.raw_scores))]
        found.append(list(array("f", values)))
    return found
