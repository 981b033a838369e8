"""What a request's body becomes: requests for the engine, and what makes the answer of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import InvalidRequest
from engine.requests.stream import num_asked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.requests.kind import ClientRequest
    from engine.requests.quota import Quota
    from grpc_service.openai.fields import Fields


@dataclass(frozen=True, slots=True)
class Context:
    """What the body of a request is translated with: an id that it may replace by one of its own,
    the seconds that the client's deadline leaves (None: no deadline), when it came, in seconds
    since 1970, and the bytes that its images may have."""

    request_id: str
    timeout_s: float | None
    created: int
    max_image_bytes: int


def id_of(fields: Fields, context: Context) -> str:
    """Return the id that the body gives its request, or that it has by its header."""
    if given := fields.text("request_id"):
        return given
    fields.sent_as["request_id"] = "X-Request-Id"
    return context.request_id


class Encoder(Protocol):
    """Makes the answer of one call. ``source`` numbers the call's requests."""

    def encode(self, source: int, events: Sequence[Any]) -> list[bytes]:
        """Return what is to be written for events of a request, possibly nothing."""

    def encode_short(self, source: int, event: Any) -> bytes | None:
        """Return what is to be written for one event, None if `encode` has to do it."""

    def is_heavy(self, events: Sequence[Any]) -> bool:
        """Return whether `encode` takes long for these events, and belongs in a thread."""


class WholeEncoder:
    """An encoder of answers that are sent whole, when every request has ended."""

    def encode_short(self, source: int, event: Any) -> bytes | None:
        """Return None: `encode` keeps every event."""
        return None

    def is_heavy(self, events: Sequence[Any]) -> bool:
        """Return False, as most answers are short."""
        return False


@dataclass(frozen=True, slots=True)
class Work:
    """A translated request. ``is_stream``: the answer is a stream of events. ``num_chars`` are
    those of the body that were images. ``rename`` returns, of the number of one of the requests and
    of a field of triolet.v1, under which name this body had it. The errors of the engine alone have
    such fields: those of the translation have the body's."""

    request_id: str
    requests: tuple[ClientRequest, ...]
    encoder: Encoder
    is_stream: bool = False
    num_chars: int = 0
    rename: Callable[[int, str], str] = lambda source, path: path

    def check_fits(self, quota: Quota | None) -> None:
        """Raise InvalidRequest if a key's limits can never hold all prompts at a time."""
        if quota is None or len(self.requests) == 1:
            return
        num_prompts, limits = len(self.requests), quota.counted.limits
        for what, asked, most in (
            ("requests", num_prompts, quota.counted.max_requests),
            ("choices", sum(map(num_asked, self.requests)), limits.max_choices),
        ):
            if most is not None and asked > most:
                told = f"has {num_prompts} prompts, which are {asked} {what} at a time, of at most "
                raise InvalidRequest.of("prompt", f"{told}{most} of this key")
