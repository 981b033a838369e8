"""What a request's output must be, from the request alone, without a schedule or an engine.

Rule: this follows the fake model's definition (`engine.worker.fakes.text`) and shares only its
four primitive functions. A stop string is searched in the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core.common.types import EndReason
from engine.worker.fakes.digests import digest_after, first_digest, next_token
from engine.worker.fakes.tokenizer import EOS, FakeTokenizer

if TYPE_CHECKING:
    from engine.requests.text_values import GenerateRequest

MAX_MODEL_LEN = 160


def is_end(digest: int) -> bool:
    """Return whether a drawn world with ends of its own ends a sequence here: one token in 41."""
    return digest % 41 == 7


@dataclass(frozen=True)
class Expected:
    """One choice's whole output."""

    tokens: tuple[int, ...]
    text: str
    reason: EndReason
    matched: str | int | None


def prompt_of(request: GenerateRequest) -> tuple[int, ...]:
    """Return the token ids for which a valid request is computed."""
    ids = request.token_ids
    if ids is None:
        text = request.text or ""
        if request.chat is not None:
            text = "\n".join(f"{m['role']}: {m['content']}" for m in request.chat.messages)
        ids = FakeTokenizer().encode(text)
    limit = request.prompt.truncate_to
    if limit is None or len(ids) <= limit:
        return ids
    return ids[:limit] if request.prompt.truncate_left is False else ids[len(ids) - limit :]


def echo_of(request: GenerateRequest) -> str:
    """Return the text that comes before the output."""
    if not request.output.echo:
        return ""
    return "".join(f"<{token}>" for token in prompt_of(request) if token != EOS)


def expected_output(
    request: GenerateRequest, choice: int, *, has_ends: bool, adapter: str = ""
) -> Expected:
    """Return the fake model's output for one choice, with an adapter of this digest.

    No request has both stop strings and min_tokens: the held-back text would decide its end, which
    is not modelled here.
    """
    asked, prompt = request.sampling, prompt_of(request)
    room = MAX_MODEL_LEN - len(prompt)
    longest = min(asked.max_tokens or room, room)
    least = min(asked.min_tokens or 0, longest)
    stop_ids = set(asked.stop_token_ids) | (set() if asked.ignore_eos else {EOS})
    tokens, text = [], ""
    digest = first_digest(adapter)
    for token in prompt:
        digest = digest_after(digest, token)
    while True:
        token = next_token(digest, asked.seed, choice)
        if has_ends and len(tokens) + 1 >= least and is_end(digest):
            token = EOS
        digest = digest_after(digest, token)
        tokens.append(token)
        text += "" if token == EOS else f"<{token}>"
        hits = sorted((text.find(s) + len(s), s) for s in asked.stop if s in text)
        if hits:
            end, stop = hits[0]
            shown = text[:end] if asked.include_stop else text[: end - len(stop)]
            return Expected(tuple(tokens), shown, EndReason.STOP, stop)
        if token in stop_ids and len(tokens) >= least:
            return Expected(tuple(tokens), text, EndReason.STOP, token)
        if len(tokens) >= longest:
            return Expected(tuple(tokens), text, EndReason.LENGTH, None)
