"""How many prompt tokens a step may have while sequences decode, so that those get their next
tokens in time.

Rule: such a step takes the target. But prompts get at least as much of its time as decodes, and at
least `TOKENS_EACH` tokens for each sequence that decodes or waits for its first token. So with few
sequences a prompt delays readers little. With many, a step computes more prompt tokens, because
more answers end meanwhile and other prompts take their places.
"""

from __future__ import annotations

TOKENS_EACH = 2  # measured with 8 and 32 clients: `python -m tools.lab.bench pace`, `serve`
GAIN = 0.25  # guess: how much one step changes an estimate
CHUNK_MIN = 16  # tokens; guess: fewer hardly take less time
PROMPTS_SHARE_MIN = (
    0.1  # guess: of a step's time, however short it was beside others of its decodes
)


class DecodePace:
    """Estimates times from the steps before, whose costs may change, as that of attention does with
    long contexts. ``target_s`` 0 leaves ``max_tokens`` as the only bound.

    Steps are kept by their size in halvings: of ``max_tokens`` for prompts, and in doublings for
    decodes.
    """

    def __init__(self, max_tokens: int, target_s: float) -> None:
        self._max_tokens = max_tokens
        self._target_s = target_s
        # [k] is the time of a step that decodes less than 2**k sequences; 0: unknown.
        self._decode_s = [0.0] * (max_tokens.bit_length() + 1)
        # [k] is the prompt tokens per second of steps with at least max_tokens / 2**k of them, and
        # with less than those of [k - 1]; 0: unknown.
        self._rates = [0.0] * (max_tokens.bit_length() + 1)

    def note(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Count a committed step that took ``seconds``, which is more than 0."""
        if not num_prompt_tokens:
            _follow(self._decode_s, num_decodes.bit_length(), seconds)
            return
        left_s = max(seconds - self._decodes_take(num_decodes), PROMPTS_SHARE_MIN * seconds)
        k = (-(-self._max_tokens // num_prompt_tokens) - 1).bit_length()
        _follow(self._rates, k, num_prompt_tokens / left_s)
        if num_prompt_tokens == self._max_tokens >> k:
            # The smallest step of a size counts for the next smaller size, too, whose largest step
            # takes as long. Otherwise an old, higher rate of that size would choose this step
            # again and again.
            _follow(self._rates, k + 1, num_prompt_tokens / left_s)

    def prompt_tokens(self, limit: int, num_sequences: int, num_decodes: int) -> int:
        """Return how many prompt tokens, at most ``limit``, a step may have beside so many decodes,
        if ``num_sequences`` run or wait, the decodes included."""
        if not (self._target_s and num_decodes):
            return limit
        decode_s = self._decodes_take(num_decodes)
        in_time = self._tokens_in(max(self._target_s - decode_s, decode_s))
        return min(limit, max(in_time, TOKENS_EACH * num_sequences))

    def _decodes_take(self, num_decodes: int) -> float:
        """Return how long the decodes would take alone, by steps with as many of them or fewer."""
        known = self._decode_s[: num_decodes.bit_length() + 1]
        return next(filter(None, reversed(known)), 0.0)

    def _tokens_in(self, seconds: float) -> int:
        """Return how many prompt tokens take so long, by the steps of about that size. A size that
        was never tried counts as fast as the next larger one."""
        rate, limit = 0.0, self._max_tokens
        for k, known in enumerate(self._rates):
            rate = known or rate
            size = self._max_tokens >> k
            if rate and rate * seconds >= size:
                return max(min(limit, int(rate * seconds)), min(CHUNK_MIN, self._max_tokens))
            limit = size
        return min(CHUNK_MIN, self._max_tokens) if rate else self._max_tokens


def _follow(estimates: list[float], k: int, value: float) -> None:
    """Move an estimate towards a new value."""
    k = min(k, len(estimates) - 1)
    estimates[k] += GAIN * (value - estimates[k]) if estimates[k] else value
