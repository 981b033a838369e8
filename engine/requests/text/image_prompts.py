"""Puts images into prompts: each image's own text replaces a marker that the template writes.

Rule 1: the model's own chat template is rendered with markers and no images, never by transformers'
``apply_chat_template``, which opens URLs and paths. Rule 2: only the markers that the template
writes are images. The same characters in a client's text are hidden from the template and put back
into its output, and their tokens are those of plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from engine.core.text.types import PromptImage
from engine.errors import InvalidRequest
from engine.images.preprocessor import digest_of_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.images.preprocessor import Preprocessor, SeenImage
    from engine.requests.text.chat_values import Chat
    from engine.worker.interface import Tokenizer, TokenSpan


class ReadImage(NamedTuple):
    """An image that was decoded, and the digest of its file."""

    seen: SeenImage
    digest: bytes


@dataclass(frozen=True, slots=True)
class HiddenChat:
    """A chat for the template: without images, and with ``names`` in the place of the markers and
    image tokens that its texts contain."""

    chat: Chat
    images: tuple[ReadImage, ...]
    names: Mapping[str, str]  # the text that each name replaces


@dataclass(frozen=True, slots=True)
class ImageText:
    """A rendered chat with the text of its images. ``owners`` has, for each of the model's image
    tokens in the text, the index of its image, None for a token in a client's text."""

    text: str
    owners: tuple[int | None, ...]


def hide(chat: Chat, preprocessor: Preprocessor) -> HiddenChat:
    """Return a chat as the template gets it. Its images are `ReadImage`s already."""
    key = uuid4().hex
    words = sorted({preprocessor.marker, preprocessor.token}, key=len, reverse=True)
    names = {f"{key}x{number}x": word for number, word in enumerate(words)}
    name_of = {word: name for name, word in names.items()}
    pattern = re.compile("|".join(map(re.escape, words)))
    images: list[ReadImage] = []

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: name_of[match[0]], value)
        if isinstance(value, ReadImage):
            images.append(value)
            return ""
        if isinstance(value, Mapping):
            if isinstance(value.get("image"), ReadImage):
                images.append(value["image"])
                return {"type": "image"}
            return {key: hidden(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [hidden(item) for item in value]
        return value

    own = replace(
        chat,
        messages=tuple(hidden(message) for message in chat.messages),
        tools=tuple(hidden(tool) for tool in chat.tools),
        template_args=hidden(chat.template_args),
    )
    return HiddenChat(own, tuple(images), names)


def show(text: str, hidden: HiddenChat, preprocessor: Preprocessor) -> ImageText:
    """Return a rendered chat with its images' texts, and with the hidden texts put back.

    Raises:
        InvalidRequest: the template did not write each image once.
    """
    pattern = re.compile("|".join(map(re.escape, (preprocessor.marker, *hidden.names))))
    owners: list[int | None] = []
    num_images = 0
    count = len(hidden.images)

    def shown(match: re.Match[str]) -> str:
        nonlocal num_images
        literal = hidden.names.get(match[0])
        if literal is not None:
            owners.extend([None] * literal.count(preprocessor.token))
            return literal
        if num_images < count:
            own = hidden.images[num_images].seen.text
            owners.extend([num_images] * own.count(preprocessor.token))
        else:
            own = ""
        num_images += 1
        return own

    text = pattern.sub(shown, text)
    if num_images != count:
        raise InvalidRequest.of(
            "chat",
            f"has {count} images, and the model's chat template wrote {num_images} of them",
        )
    return ImageText(text, tuple(owners))


def place(
    ids: Sequence[int],
    shown: ImageText,
    images: Sequence[ReadImage],
    preprocessor: Preprocessor,
    plain_ids: Callable[[str], Sequence[int]],
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Return the prompt and the places of its images, or of each tile of an image that is encoded
    tile by tile. ``ids`` are the tokens of the shown text; ``plain_ids`` tokenises a text without
    special tokens.

    Raises:
        InvalidRequest: the number of image tokens is not that of the text's image tokens.
    """
    _check_spans(ids, shown, preprocessor)
    prompt: list[int] = []
    places: list[list[int]] = [[] for _ in images]
    owners = iter(shown.owners)
    for id_ in ids:
        if id_ != preprocessor.token_id:
            prompt.append(id_)
            continue
        owner = next(owners)
        if owner is None:
            prompt.extend(plain_ids(preprocessor.token))
        else:
            places[owner].append(len(prompt))
            prompt.append(id_)
    runs = [
        piece
        for own, image in zip(places, images, strict=True)
        for piece in _pieces(own, image, is_whole=preprocessor.is_whole)
    ]
    return tuple(prompt), tuple(runs)


def _pieces(places: Sequence[int], image: ReadImage, *, is_whole: bool) -> Iterator[PromptImage]:
    """Yield the parts of an image that are encoded one by one, so that a step need not encode all
    of an image. ``places`` are the positions of its tokens."""
    pieces = image.seen.pieces
    left = iter(places)
    for number, seen in enumerate(pieces):
        own = tuple(islice(left, seen.num_tokens))
        yield PromptImage(
            start=own[0],
            count=own[-1] + 1 - own[0],
            cost=seen.cost,
            digest=image.digest if len(pieces) == 1 else digest_of_piece(image.digest, number),
            is_whole=is_whole,
            content=seen,
        )


def place_spans(
    spans: Sequence[TokenSpan], shown: ImageText, preprocessor: Preprocessor, tokenizer: Tokenizer
) -> tuple[TokenSpan, ...]:
    """Return the same prompt as `place`, as tokens with the characters of the shown text that they
    came from. ``spans`` are the tokens of that text.

    Raises:
        InvalidRequest: the number of image tokens is wrong, as in `place`.
    """
    _check_spans([span.token_id for span in spans], shown, preprocessor)
    plain = [
        (id_, tokenizer.decode((id_,), skip_special_tokens=False))
        for id_ in tokenizer.plain_ids(preprocessor.token)
    ]
    owners = iter(shown.owners)
    placed: list[TokenSpan] = []
    for span in spans:
        if span.token_id != preprocessor.token_id or next(owners) is not None:
            placed.append(span)
        else:
            placed += [replace(span, token_id=id_, text=text) for id_, text in plain]
    return tuple(placed)


def _check_spans(ids: Sequence[int], shown: ImageText, preprocessor: Preprocessor) -> None:
    if sum(1 for id_ in ids if id_ == preprocessor.token_id) != len(shown.owners):
        raise InvalidRequest.of("chat", "has image tokens that the model's tokenizer does not find")
