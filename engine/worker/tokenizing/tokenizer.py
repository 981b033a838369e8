"""Turns text into token ids and back, by the files of a model's directory.

Rule 1: tokenizer.json decides. The `tokenizers` library reads it; transformers is imported only for
a model with the files of an older kind of tokenizer, and converts them by its own code, never by
the checkpoint's. Rule 2: nothing changes the tokenizer after `load_tokenizer`, so every method may
be called from any thread.

This file agrees with transformers' AutoTokenizer in these points. Special tokens that stand in a
user's text are parsed as special tokens. ``add_special_tokens`` runs the post-processor of
tokenizer.json, and ``add_bos_token`` in tokenizer_config.json is ignored. Special tokens that
tokenizer.json lacks are added from tokenizer_config.json, or from special_tokens_map.json if the
former has no added_tokens_decoder. Unlike AutoTokenizer, this file does not truncate, pad, or clean
up spaces after decoding.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.errors import InvalidRequest, SpawnFailed, install_command
from engine.worker.import_lock import holds_import_lock
from engine.worker.load.reading import check_readable, has_file, read_text, reading
from engine.worker.tokenizing.call_turns import CallForm, form_of, in_form
from engine.worker.tokenizing.templates import check_syntax, render, takes_tools
from engine.worker.tokenizing.text_encoder import TextEncoder
from engine.worker.tokenizing.token_sizes import max_chars_per_token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


# The names a chat template may read (transformers' SPECIAL_TOKENS_ATTRIBUTES).
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Names that `render_chat` or Jinja sets itself. A client's template_args may not set them.
_RESERVED_ARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "self",
        "tools",
    }
)
# From this number of ids on, `decode_batch` decodes them, because `decode` holds the GIL: 0.25 s
# for 262,144 ids. For fewer ids it would be slower.
LONG_IDS = 2**10
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# The files of older kinds of tokenizers; one of the sets may replace tokenizer.json.
_OLDER_FILES = (("vocab.json", "merges.txt"), ("tokenizer.model",))
# Bytes of the CPU's memory for each token of a vocabulary: of the tokenizer, and of what samplers
# and constraints know of its tokens. Measured: 240 to 400, with 49,152 and with 151,936 tokens.
TOKEN_BYTES = 350
_ANCHOR_LETTERS = "aeionstrAEINOST0123456789.,"


class HfTokenizer(TextEncoder):
    """Implements `engine.worker.interface.Tokenizer` with one `tokenizers.Tokenizer`.

    ``max_chars_per_token`` are the most characters that one token can stand for (`token_sizes`).
    ``special_ids`` are the ids that ``skip_special_tokens`` leaves out. ``special_tokens`` maps
    names such as ``bos_token`` to their text. ``anchor`` is one token of plain text, or ().
    Decoded after the anchor, a token has its text as part of a longer text, with its leading space.
    ``tokens`` are the backend's, if they are known; it takes 0.15 s to list 150,000.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        tokens: Collection[str] = (),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        super().__init__(backend)
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._added = {token.content: id_ for id_, token in added.items()}
        self._special_sizes = frozenset(
            len(text) for text, id_ in self._added.items() if id_ in self.special_ids
        )
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.max_chars_per_token = max_chars_per_token(backend, tokens)
        self.anchor = _find_anchor(backend)
        self._chat_templates = dict(chat_templates or {})
        self._texts: dict[int, str] = {}
        self._known: set[int] = set()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids outside the vocabulary, which a padded output layer
        has, have no text."""
        if len(token_ids) < LONG_IDS:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        [text] = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def is_known(self, token_id: int) -> bool:
        """Return whether the vocabulary has the id. A vocabulary may have gaps."""
        if token_id in self._known:
            return True
        if not 0 <= token_id < 2**32 or self.backend.id_to_token(token_id) is None:
            return False
        self._known.add(token_id)
        return True

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a special token's text, encoded as plain text."""
        ids = self.encode(text[:1], add_special_tokens=False)
        return ids + self.encode(text[1:], add_special_tokens=False)

    def token_of(self, token_id: int) -> str:
        """Return a token in the vocabulary's spelling; empty for an id that it lacks."""
        return str(self.backend.id_to_token(token_id) or "")

    def token_text(self, token_id: int) -> str:
        """Return the text that one token has inside a text. Part of a character becomes U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            before = self.decode(self.anchor, skip_special_tokens=False)
            whole = self.decode((*self.anchor, token_id), skip_special_tokens=False)
            text = self._texts[token_id] = whole[len(before) :]
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        template_args: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt of a chat as text, rendered by the model's own template.

        Encode the prompt with ``add_special_tokens=False``, because templates write their special
        tokens themselves. With ``continue_final_message`` the prompt ends with the content of the
        last message, which the model continues.

        Raises:
            InvalidRequest: There is no template, it has no tools, the chat is empty,
                ``template_args`` sets a reserved name, the template changes the last message's
                content, or as `render`.
            RequestTooLarge: The prompt is too long (`render`).
        """
        template = self._template(has_tools=bool(tools))
        if tools and not takes_tools(template):
            what = "cannot be offered: this model's chat template has no tools"
            raise InvalidRequest.of("chat.tools", what)
        args = dict(template_args or {})
        if clash := sorted(_RESERVED_ARGS & args.keys()):
            raise InvalidRequest.of("chat.template_args", f"cannot set {', '.join(clash)}")
        if not messages:
            raise InvalidRequest.of("chat", "a chat needs at least one message")
        has_calls = any(message.get("tool_calls") for message in messages)
        form = form_of(template, tuple(self.special_tokens.items())) if has_calls else CallForm()
        turns = [in_form(message, form) for message in messages]
        mark = ""
        if continue_final_message:
            mark = f"<{uuid4().hex}>"  # in no message, so that it can be found in the prompt
            turns[-1]["content"] = _with_end(turns[-1].get("content", ""), mark)
        text = render(
            template,
            turns,
            [dict(tool) for tool in tools] or None,
            {**self.special_tokens, **args},
            add_generation_prompt=add_generation_prompt,
        )
        if not mark:
            return text
        text, mark_, _ = text.rpartition(mark)
        if not mark_ or mark in text:
            what = "is not possible: the model's chat template changes the last message"
            raise InvalidRequest.of("chat.continue_final_message", what)
        return text

    def chat_template(self, *, has_tools: bool) -> str:
        """Return the source of the template that `render_chat` uses; empty if there is none."""
        templates = self._chat_templates
        use = "tool_use" if has_tools and "tool_use" in templates else "default"
        return templates.get(use, "")

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens."""
        ids = (self.backend.token_to_id(text) for text in texts)
        return self.special_ids.intersection(ids)

    def special_ids_within(self, text: str) -> frozenset[int]:
        """Return the ids of the special tokens whose text occurs in this text."""
        parts = {text[at : at + size] for at in range(len(text)) for size in self._special_sizes}
        return self.special_ids_of([part for part in parts if part in self._added])

    def added_id_of(self, text: str) -> int | None:
        """Return the id of a text that is an added token, special or not; None for others."""
        return self._added.get(text)

    def has_marker(self, text: str) -> bool:
        """Return whether a text has the text of a special token in it, or of another added token
        that llguidance takes for one: in angle brackets."""
        return any(
            own in text
            for own, id_ in self._added.items()
            if id_ in self.special_ids or (own.startswith("<") and own.endswith(">"))
        )

    def _template(self, *, has_tools: bool) -> str:
        """Return the template that transformers would choose: with tools the template named
        tool_use, if there is one, else the default.

        Raises:
            InvalidRequest: There is no such template.
        """
        if not self._chat_templates:
            raise InvalidRequest.of("chat", "this model has no chat template; send text instead")
        template = self.chat_template(has_tools=has_tools)
        if not template:
            raise InvalidRequest.of("chat", "this model has no default chat template")
        return template


def _with_end(content: object, end: str) -> object:
    """Return a message's content, a text or a list of parts, with ``end`` after its last text."""
    if not isinstance(content, list):
        return f"{content}{end}"
    return [*content[:-1], {**content[-1], "text": f"{content[-1].get('text', '')}{end}"}]


def tokenizer_bytes(vocab_size: int, device: str) -> int:
    """Return an estimate of what a tokenizer takes of a device's memory: nothing but on the CPU."""
    return TOKEN_BYTES * vocab_size if device == "cpu" else 0


def load_tokenizer(
    path: str | Path, backend: Backend | None = None, tokens: Collection[str] = ()
) -> HfTokenizer:
    """Read the tokenizer of a model directory. A ``backend`` stands for its tokenizer.json,
    and has these ``tokens``.

    Raises:
        SpawnFailed: tokenizer.json is missing or no tokenizer, a file beside it is not JSON, or the
            default chat template cannot be parsed.
        Refusal: A file cannot be read.
    """
    directory = Path(path)
    file = directory / "tokenizer.json"
    if backend is None:
        if not has_file(file):
            return _convert(directory)
        backend = _read_backend(file)
    return read_beside(directory)(backend, tokens)


def read_beside(directory: Path) -> Callable[[Backend, Collection[str]], HfTokenizer]:
    """Read the files beside a model's tokenizer.json, and return a function that makes a tokenizer
    of a backend and its tokens (`load_tokenizer`).

    Raises:
        SpawnFailed, Refusal: as `load_tokenizer`.
    """
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(directory / "special_tokens_map.json")
    special = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    templates = _read_templates(directory, config)

    def complete(backend: Backend, tokens: Collection[str]) -> HfTokenizer:
        _add_missing(backend, config)
        return HfTokenizer(backend, special_tokens=special, chat_templates=templates, tokens=tokens)

    return complete


def _read_backend(file: Path) -> Backend:
    check_readable(file)
    try:
        return Backend.from_file(str(file))
    except Exception as error:
        message = "the model's tokenizer.json is damaged, or of a newer kind"
        raise SpawnFailed(message, log_detail=f"{file}: {error}") from error


@holds_import_lock
def _convert(directory: Path) -> HfTokenizer:
    """Have transformers convert the files of an older kind of tokenizer.

    Raises:
        SpawnFailed: There are no such files, or they cannot be converted.
    """
    older = [names for names in _OLDER_FILES if all(has_file(directory / name) for name in names)]
    if not older:
        raise SpawnFailed("the model has no tokenizer.json", log_detail=str(directory))
    for name in older[0]:
        check_readable(directory / name)
    files = " and ".join(older[0])
    if files == "tokenizer.model" and find_spec("sentencepiece") is None:
        raise _not_converted(files, install_command("sentencepiece"))
    from transformers import AutoTokenizer

    elsewhere = "where transformers can, AutoTokenizer's save_pretrained writes tokenizer.json"
    try:
        made = AutoTokenizer.from_pretrained(
            directory, use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend = Backend.from_str(made.backend_tokenizer.to_str())
        special = {n: t for n, t in made.special_tokens_map.items() if n in _SPECIAL_NAMES}
    except Exception as error:  # each kind of tokenizer raises errors of its own
        raise _not_converted(files, elsewhere, f"{type(error).__name__}: {error}") from error
    # A class that does not read these files returns a tokenizer with a few special tokens only.
    wanted = _read_json(directory / "config.json").get("vocab_size", 0)
    if 2 * (size := backend.get_vocab_size()) < wanted:
        detail = f"{type(made).__name__} has {size} tokens of {wanted}"
        raise _not_converted(files, elsewhere, detail)
    config = _read_json(directory / "tokenizer_config.json")
    templates = _read_templates(directory, config)
    return HfTokenizer(backend, special_tokens=special, chat_templates=templates)


def _not_converted(files: str, way_out: str, detail: str = "") -> SpawnFailed:
    what = f"the model has {files} instead of tokenizer.json, which cannot be converted here"
    return SpawnFailed(f"{what}; {way_out}", log_detail=detail)


def _read_json(file: Path) -> dict[str, Any]:
    if not has_file(file):
        return {}
    try:
        value = json.loads(read_text(file))
    except ValueError as error:
        message = f"the model's {file.name} is not JSON"
        raise SpawnFailed(message, log_detail=f"{file}: {error}") from error
    return value if isinstance(value, dict) else {}


def _content(token: object) -> str:
    """Return the text of a special token that a file has as text or as AddedToken's fields."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _added(token: object, *, special: bool) -> AddedToken:
    """Return the AddedToken that a file has as text or as AddedToken's fields."""
    if not isinstance(token, dict):
        return AddedToken(str(token), special=special, normalized=False)
    names = ("single_word", "lstrip", "rstrip", "normalized")
    flags = {name: bool(token[name]) for name in names if name in token}
    return AddedToken(_content(token), special=special or bool(token.get("special")), **flags)


def _add_missing(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add the tokens that the configuration names and tokenizer.json lacks."""
    have = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if _content(token) not in have:
            backend.add_tokens([_added(token, special=False)])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else list(extra)
    for token in [*(config[n] for n in _SPECIAL_NAMES if config.get(n)), *extra]:
        known = have.get(_content(token))
        if known is None or not known.special:
            backend.add_special_tokens([_added(token, special=True)])


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, from the first place that has any. The order is
    transformers': a processor's own files, template files, tokenizer_config.json. Without a
    processor, its files come last; transformers does not read them then.

    Only the default template is checked, as no request may need the others.

    Raises:
        SpawnFailed: The default template cannot be parsed, or a file is not JSON.
        Refusal: A file cannot be read.
    """
    of_processor = {
        name: _named_templates(_read_json(directory / name).get("chat_template"))
        for name in ("processor_config.json", "chat_template.json")
    }
    has_processor = any(has_file(directory / name) for name in _PROCESSOR_FILES)
    files = {"default": directory / "chat_template.jinja"}
    folder = directory / "additional_chat_templates"
    if has_file(folder):
        with reading(folder.name):
            named = sorted(folder.iterdir())
        files |= {file.stem: file for file in named if file.suffix == ".jinja"}
    written = {name: read_text(file) for name, file in files.items() if has_file(file)}
    of_tokenizer = {
        "": written,
        "tokenizer_config.json": _named_templates(config.get("chat_template")),
    }
    places = {**of_processor, **of_tokenizer} if has_processor else {**of_tokenizer, **of_processor}
    for place, templates in places.items():
        if "default" in templates:
            check_syntax(templates["default"], place or files["default"].name)
        if templates:
            return templates
    return {}


def _named_templates(written: Any) -> dict[str, str]:
    """Return the templates in a field of a JSON file: one text, or a list of named templates."""
    named = [{"name": "default", "template": written}] if isinstance(written, str) else written
    if isinstance(named, dict):
        return {str(name): str(template) for name, template in named.items()}
    return {str(entry["name"]): str(entry["template"]) for entry in named or ()}


def _find_anchor(backend: Backend) -> tuple[int, ...]:
    """Return a token whose text is one plain character at any place; () if there is none."""
    for letter in _ANCHOR_LETTERS:
        id_ = backend.token_to_id(letter)
        if id_ is not None and backend.decode([id_, id_], skip_special_tokens=False) == 2 * letter:
            return (id_,)
    return ()
