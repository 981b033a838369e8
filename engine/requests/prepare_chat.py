"""Makes the prompt of a chat, with images or without.

Rule 1: images are decoded in threads with a limiter of their own, one at a time, so that requests
take turns, and the memory of the decoded ones is bounded for all requests; both as for Embed
(`engine.requests.prepare_inputs`). Rule 2: a request holds that memory to its end, because an image
may have to be encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge
from engine.images.errors import BadImage
from engine.images.sight import digest_of
from engine.requests.image_memory import ImageMemory
from engine.requests.image_prompts import ReadImage, hide, place, show

if TYPE_CHECKING:
    from contextlib import ExitStack

    from engine.core.text.types import PromptImage
    from engine.images.sight import Sight
    from engine.requests.chat_values import Chat
    from engine.requests.text_stream import TextStream
    from engine.requests.tokenizing import AnyReplica, Tokenizing

# Bytes of the images of all requests that are prepared or live. A guess: 38 images of SmolVLM at
# its largest, of which one request may have nine.
IMAGE_BYTES_MAX = 512 * 2**20
# What a template says that reads a message's content as parts.
PARTS_READ = re.compile(r"\[\s*['\"]type['\"]\s*\]|\.type\b|['\"]type['\"]\s*,")


class SeeingPrompt(NamedTuple):
    """A prompt's tokens, and where its images are."""

    ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


class Seeing:
    """Reads the images of chats. Belongs to the Trio thread.

    Cancellation of every async method: at once. A thread that decodes or tokenises goes on to its
    end, and its result is dropped.
    """

    def __init__(self, tokenizing: Tokenizing) -> None:
        self._tokenizing = tokenizing
        self._decoding = tokenizing.with_own_limiter()
        self.memory = ImageMemory(IMAGE_BYTES_MAX)

    async def read(
        self, stream: TextStream, replica: AnyReplica, chat: Chat, held: ExitStack
    ) -> Chat:
        """Return a chat with `ReadImage`s in the place of files. ``held`` gets their memory.
        Cancellation: as the class.

        Raises:
            InvalidRequest: images cannot be read, or the model reads none; it lists every one.
            RequestTooLarge: there are too many images for one request.
        """
        files = list(chat.images)
        if not files:
            return chat
        sight = _sight_of(replica)
        if sight is None:
            raise InvalidRequest([FieldViolation(path, "is for a model that reads images, which "
                                                 f"{replica.model} does not")
                                  for path, _ in files])  # fmt: skip
        most = max(1, self.memory.request_bytes_max // sight.max_bytes)
        if len(files) > most:
            raise RequestTooLarge.of(
                "chat.messages", f"has {len(files)} images, of at most {most} in one request"
            )
        phase, stream.phase = stream.phase, "decode image"
        await self.memory.take(len(files) * sight.max_bytes, held)
        read, found = [], []
        for path, data in files:
            try:
                read.append(await self._decoding.run_in_thread(partial(_read, sight, data)))
            except BadImage as error:
                found.append(FieldViolation(path, f"the image {error}"))
        if found:
            raise InvalidRequest(found)
        stream.phase = phase
        images = iter(read)
        return replace(chat, messages=tuple(_with_images(one, images) for one in chat.messages))

    async def prompt_of(
        self, replica: AnyReplica, chat: Chat, add_special_tokens: bool
    ) -> tuple[str, SeeingPrompt]:
        """Return a chat whose images are read as text and as tokens. Cancellation: as the class.

        Raises:
            InvalidRequest: the template refuses the chat, or does not write each image once; or the
                text cannot be tokenised.
        """
        sight, tokenizer = _sight_of(replica), replica.tokenizer
        if sight is None:
            text = await self._tokenizing.render_chat(replica, chat)
            return text, SeeingPrompt(
                await self._tokenizing.chat_ids(replica, text, add_special_tokens)
            )
        hidden = hide(chat, sight)
        template = tokenizer.chat_template(has_tools=bool(chat.offered_tools))
        own = hidden.chat
        if PARTS_READ.search(template):
            own = replace(own, messages=tuple(map(_in_parts, own.messages)))
        shown = show(await self._tokenizing.render_chat(replica, own), hidden, sight)
        ids = await self._tokenizing.chat_ids(replica, shown.text, add_special_tokens)
        placed = place(ids, shown, hidden.images, sight, tokenizer.plain_ids)
        return shown.text, SeeingPrompt(*placed)


def _sight_of(replica: AnyReplica) -> Sight | None:
    sight: Sight | None = replica.info.images
    return sight


def _read(sight: Sight, data: bytes) -> ReadImage:
    return ReadImage(sight.read(data), digest_of(data))


def _with_images(message: Mapping[str, Any], images: Any) -> Mapping[str, Any]:
    """Return a message with the next images in the place of its files."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = [
        {"type": "image", "image": next(images)}
        if isinstance(part, Mapping) and isinstance(part.get("image"), bytes)
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is a list of parts, as the template reads it."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
