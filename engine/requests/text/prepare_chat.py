"""Makes the prompt of a chat, with images or without.

Rule 1: images are decoded in threads with a limiter of their own, one at a time, so that requests
take turns, and the memory of decoded images is bounded for all requests; both as for Embed
(`engine.requests.encode.prepare`). Rule 2: a request holds that memory to its end, because an image
may have to be encoded again. Rule 3: an image that comes again is mostly not decoded again
(`engine.requests.text.kept_images`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.core.common.phases import Phase
from engine.errors import FieldViolation, InvalidRequest
from engine.requests.image_memory import ImageMemory
from engine.requests.text.image_prompts import ImageText, ReadImage, hide, place, place_spans, show
from engine.requests.text.kept_images import KeptImages
from engine.requests.tokenizing import of_field

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from engine.core.text.types import PromptImage
    from engine.images.decoder import DecodeImage
    from engine.images.preprocessor import Preprocessor
    from engine.requests.prepared import Assignment
    from engine.requests.text.chat_values import Chat
    from engine.requests.tokenizing import AnyReplica, TokenBound, Tokenizing
    from engine.worker.interface import TokenSpan

# Bytes of the images of all requests that are prepared or live. A guess: 38 images of the largest
# size that SmolVLM reads fit, and one request may have nine of them.
IMAGE_BYTES_MAX = 512 * 2**20
# Found in a template that reads a message's content as parts.
PARTS_READ = re.compile(r"\[\s*['\"]type['\"]\s*\]|\.type\b|['\"]type['\"]\s*,")


class VisionPrompt(NamedTuple):
    """A prompt's tokens, and where its images are."""

    ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


class VisionInput:
    """Reads the images of chats. Belongs to the Trio thread.

    Cancellation of every async method: at once. A thread that decodes or tokenises goes on to its
    end, and its result is dropped.
    """

    def __init__(self, tokenizing: Tokenizing) -> None:
        self._tokenizing = tokenizing
        self.memory = ImageMemory(IMAGE_BYTES_MAX)
        self._kept = KeptImages(decode=tokenizing.image_decoder)

    async def read(self, assignment: Assignment[Any, Any], chat: Chat) -> Chat:
        """Return a chat with `ReadImage`s in the place of files, whose memory is held.
        Cancellation: as the class.

        Raises:
            InvalidRequest: images cannot be read, or the model reads none; it lists every one.
            RequestTooLarge: there are too many images for one request.
        """
        preprocessor, count = (
            _preprocessor_for(assignment.replica, chat),
            sum(1 for _ in chat.images),
        )
        if preprocessor is None or not count:
            return chat
        self.memory.check_count("chat.messages", count, preprocessor.max_bytes)
        assignment.report(Phase.DECODE_IMAGE)
        num_bytes = count * preprocessor.max_bytes
        await self.memory.take(
            num_bytes, assignment.held, assignment.core_id, assignment.spare_images
        )
        read = partial(self._kept.read, preprocessor, owner=assignment.cache_owner)
        chat = await self._read_each(chat, read, assignment.origin.party)
        assignment.report(Phase.TOKENIZE)
        return chat

    async def prompt_of(
        self,
        replica: AnyReplica,
        chat: Chat,
        add_special_tokens: bool,
        *,
        party: Hashable,
        bound: TokenBound | None = None,
        close: Callable[[str], str] | None = None,
    ) -> tuple[str, VisionPrompt]:
        """Return a chat with read images as text and as tokens. ``close`` appends something to the
        text. Cancellation: as the class.

        Raises:
            InvalidRequest: the template refuses the chat, or does not write each image once; or the
                text cannot be tokenised.
            RequestTooLarge: the chat has no images, and more tokens than ``bound`` allows.
        """
        shown, images = await self._shown(replica, chat, party)
        if close is not None:
            shown = replace(shown, text=close(shown.text))
        with of_field("chat"):
            ids = await self._tokenizing.tokenize(
                replica,
                shown.text,
                add_special_tokens=add_special_tokens,
                party=party,
                bound=None if images else bound,
            )
        preprocessor = _preprocessor_of(replica)
        if preprocessor is None:
            return shown.text, VisionPrompt(ids)
        placed = place(ids, shown, images, preprocessor, replica.tokenizer.plain_ids)
        return shown.text, VisionPrompt(*placed)

    async def spans(
        self, replica: AnyReplica, chat: Chat, add_special_tokens: bool, party: Hashable
    ) -> tuple[TokenSpan, ...]:
        """Return the tokens of a chat's prompt, including its images' tokens, each with the
        characters of the text that it came from. Each image is dropped once its tokens are counted.
        Cancellation: as the class.

        Raises:
            InvalidRequest: an image or the chat is refused, as by `read` and `prompt_of`.
            RequestTooLarge: there are too many images for one request, or as
                `Tokenizing.spans`.
        """
        preprocessor, count = _preprocessor_for(replica, chat), sum(1 for _ in chat.images)
        if preprocessor is not None and count:
            self.memory.check_count("chat.messages", count, preprocessor.max_bytes)
            measure = partial(_measure, self._tokenizing.image_decoder, preprocessor)
            chat = await self._read_each(chat, measure, party)
        shown, _ = await self._shown(replica, chat, party)
        with of_field("chat"):
            spans = await self._tokenizing.spans(
                replica, shown.text, add_special_tokens=add_special_tokens, party=party
            )
        return (
            spans
            if preprocessor is None
            else place_spans(spans, shown, preprocessor, replica.tokenizer)
        )

    async def _read_each(
        self, chat: Chat, read: Callable[[bytes], ReadImage], party: Hashable
    ) -> Chat:
        """Return a chat with the result of ``read``, called in a thread, for each file."""
        images = iter(await self._tokenizing.read_images(chat.images, read, party))
        return replace(chat, messages=tuple(_with_images(m, images) for m in chat.messages))

    async def _shown(
        self, replica: AnyReplica, chat: Chat, party: Hashable
    ) -> tuple[ImageText, Sequence[ReadImage]]:
        """Return the text of a chat whose images are read, and the images."""
        preprocessor = _preprocessor_of(replica)
        if preprocessor is None:
            return ImageText(await self._tokenizing.render_chat(replica, chat, party), ()), ()
        hidden = hide(chat, preprocessor)
        template = replica.tokenizer.chat_template(has_tools=bool(chat.offered_tools))
        own = hidden.chat
        if PARTS_READ.search(template):
            own = replace(own, messages=tuple(map(_in_parts, own.messages)))
        text = await self._tokenizing.render_chat(replica, own, party)
        return show(text, hidden, preprocessor), hidden.images


def _preprocessor_of(replica: AnyReplica) -> Preprocessor | None:
    """Return the model's image preprocessor for chats; None if it reads no images in chats."""
    if not replica.info.capability.generates_text:
        return None  # an encoder's images are not read in chats
    preprocessor: Preprocessor | None = replica.info.images
    return preprocessor


def _preprocessor_for(replica: AnyReplica, chat: Chat) -> Preprocessor | None:
    """Return the model's image preprocessor for a chat; None if the model reads no images.

    Raises:
        InvalidRequest: the model reads no images, and the chat has some.
    """
    preprocessor = _preprocessor_of(replica)
    if preprocessor is None:
        what = f"is for a model that reads images, which {replica.model} does not"
        if violations := [FieldViolation(path, what) for path, _ in chat.images]:
            raise InvalidRequest(violations)
    return preprocessor


def _measure(decode: DecodeImage, preprocessor: Preprocessor, data: bytes) -> ReadImage:
    """Return what a request keeps of an image before the model reads it, without pixels."""
    return ReadImage(decode(preprocessor.read, data)._replace(tiles=()), b"")


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
    if not isinstance(content, str) or (message.get("tool_calls") and not content):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
