"""What a request's output must be, from the request alone, without a schedule or an engine.

Rule: this follows the fake model's definition (`engine.worker.fakes.text`) and shares only its
primitive functions. A stop string is searched in the whole text.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.core.common.types import EndReason
from engine.images.preprocessor import digest_of
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import GenerateRequest
from engine.worker.fakes.digests import digest_after, first_digest, next_token
from engine.worker.fakes.preprocessor import num_tokens_of
from engine.worker.fakes.tokenizer import EOS, IMAGE_ID, FakeTokenizer
from tests.simulator.encode_oracle import pixels_in

MAX_MODEL_LEN = 160
NO_MARKERS: Mapping[int, str] = {}
OPENING, CLOSING = "<think>", "</think>"


def is_end(digest: int) -> bool:
    """Return whether the model of a world with `has_ends` ends a sequence here: one token in 41."""
    return digest % 41 == 7


@dataclass(frozen=True)
class Expected:
    """One choice's whole output."""

    tokens: tuple[int, ...]
    text: str
    reason: EndReason
    matched: str | int | None
    num_reasoning: int = 0


def prompt_of(request: GenerateRequest) -> tuple[int, ...]:
    """Return the token ids for which a valid request is computed."""
    ids = request.token_ids
    if ids is None and request.chat is not None:
        ids = tuple(token for token, _ in _read_chat(request.chat))
    elif ids is None:
        ids = FakeTokenizer().encode(request.text or "")
    limit = request.prompt.truncate_to
    if limit is None or len(ids) <= limit:
        return ids
    return ids[:limit] if request.prompt.truncate_left is False else ids[len(ids) - limit :]


def _read_chat(chat: Chat, owner: str = "") -> Iterator[tuple[int, bytes]]:
    """Yield a chat's tokens; those of an image with its digest for ``owner``, others with b""."""
    encode = FakeTokenizer().encode
    for number, message in enumerate(chat.messages):
        content = message["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        head = "\n" * (number > 0) + f"{message['role']}: "
        for part in ({"text": head}, *parts):
            if "text" in part:
                yield from ((token, b"") for token in encode(part["text"]))
            else:
                count = num_tokens_of(pixels_in(part["image"]))
                yield from [(IMAGE_ID, digest_of(part["image"], owner))] * count


def _contents_of(request: GenerateRequest, owner: str) -> list[bytes]:
    """Return for each token of the prompt the digest of its image; b"" for text."""
    if request.chat is not None and next(request.chat.images, None) is not None:
        return [digest for _, digest in _read_chat(request.chat, owner)]
    return [b""] * len(prompt_of(request))


def echo_of(request: GenerateRequest, markers: Mapping[int, str] = NO_MARKERS) -> str:
    """Return the text that comes before the output. ``markers`` are the texts of some ids."""
    if not request.output.echo:
        return ""
    prompt = prompt_of(request)
    return "".join(markers.get(token, f"<{token}>") for token in prompt if token != EOS)


def expected_output(
    request: GenerateRequest,
    choice: int,
    *,
    has_ends: bool,
    adapter: str = "",
    markers: Mapping[int, str] = NO_MARKERS,
    owner: str = "",
) -> Expected:
    """Return the fake model's output for one choice of a request of the holder ``owner``, with an
    adapter of this digest. ``markers`` are the texts of some ids; the first that closes the
    reasoning is forced.

    No request may have both stop strings and min_tokens: its end would depend on how text is held
    back, which is not modelled here.
    """
    asked, prompt = request.sampling, prompt_of(request)
    room = MAX_MODEL_LEN - len(prompt)
    longest = min(asked.max_tokens or room, room)
    least = min(asked.min_tokens or 0, longest)
    stop_ids = set(asked.stop_token_ids) | (set() if asked.ignore_eos else {EOS})
    tokens, text, thought = [], "", Thinking(request)
    digest = first_digest(adapter)
    for token, content in zip(prompt, _contents_of(request, owner), strict=True):
        digest = digest_after(digest, token, content)
    while True:
        token = next_token(digest, asked.seed, choice)
        if has_ends and len(tokens) + 1 >= least and is_end(digest):
            token = EOS
        if thought.is_spent:
            token = next(one for one, own in markers.items() if own == CLOSING)
        digest = digest_after(digest, token)
        tokens.append(token)
        piece = markers.get(token, f"<{token}>")
        thought.add(piece)
        text += "" if token == EOS else piece
        hits = sorted((text.find(s) + len(s), s) for s in asked.stop if s in text)
        if hits:
            end, stop = hits[0]
            shown = text[:end] if asked.include_stop else text[: end - len(stop)]
            shown = thought.without(shown)
            return Expected(tuple(tokens), shown, EndReason.STOP, stop, thought.count)
        if token in stop_ids and len(tokens) >= least:
            shown = thought.without(text)
            return Expected(tuple(tokens), shown, EndReason.STOP, token, thought.count)
        if len(tokens) >= longest:
            shown = thought.without(text)
            return Expected(tuple(tokens), shown, EndReason.LENGTH, None, thought.count)


class Thinking:
    """The reasoning of an answer: it begins within it if the request has a budget, and in a chat
    may begin with it. No chat has a budget here."""

    def __init__(self, request: GenerateRequest) -> None:
        self.count = 0
        self._budget = request.reasoning.budget_tokens
        self._is_inside = self._budget is not None
        self._may_begin = self._is_chat = request.chat is not None
        self._last = ""

    def add(self, piece: str) -> None:
        """Append the text of a token."""
        self._is_inside = self._is_inside and piece != CLOSING
        self.count += self._is_inside
        self._is_inside |= self._may_begin and piece == OPENING
        self._may_begin = False
        self._last = piece

    def without(self, text: str) -> str:
        """Return an answer's text as its client gets it: a chat's reasoning comes beside it."""
        if not (self._is_chat and text.startswith(OPENING)):
            return text
        return text.partition(CLOSING)[2]

    @property
    def is_spent(self) -> bool:
        """Whether the reasoning ends now: behind a sentence, or at the end of the margin."""
        if not self._is_inside or self._budget is None or self.count < self._budget:
            return False
        margin = min(64, self._budget // 4)
        return self._last.endswith(". ") or self.count >= self._budget + margin
