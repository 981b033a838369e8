"""Requests that need more than the constructor of their message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpc_service.client import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def chat_request(
    conversation: Iterable[messages.Message | Mapping[str, str]],
    model: str,
    sampling: messages.SamplingParams | Mapping[str, Any] | None,
) -> messages.GenerateRequest:
    """Return the request for an answer to ``conversation``."""
    chat = messages.Chat(messages=list(conversation))
    return messages.GenerateRequest(model=model, chat=chat, sampling=sampling)
