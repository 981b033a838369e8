"""From what a client asked to what the core schedules: prompt, sampling, stops.

Rule 1: what needs the model is checked here, what does not in `engine.requests`; nothing behind
checks again. Rule 2: work that grows with the text runs in a thread with a limiter of its own, so
that a long prompt delays neither the event loop nor a step. Rule 3: such a job is a task of the
supervisor's nursery: it is joined, and whoever waits for it can leave at once.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from engine.answers import PLAIN, AnswerFormat, detect_format
from engine.core.types import Request
from engine.errors import EngineBug, InvalidRequest, RequestTooLarge, ShuttingDown
from engine.requests import MAX_PROMPT_LOGPROBS, resolve_sampling, resolve_stops
from engine.shift import fit, limits, without

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core.plan import ModelInfo, Tokenizer, TokenSpan
    from engine.core.types import Sampling, Stops
    from engine.generation import Generation
    from engine.replica import Replica
    from engine.requests import Chat, GenerateRequest, PromptOptions, SamplingParams
    from engine.threads import Threads

log = logging.getLogger(__name__)

INLINE_TOKENIZE_CHARS = 4096  # guess: below this a thread hop costs more than the work

T = TypeVar("T")


class Prompts:
    """Makes requests of the core's out of generations. Belongs to the Trio thread."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._limiter = trio.CapacityLimiter(1)
        self._template_limiters: dict[str, trio.CapacityLimiter] = {}  # one for each model
        self.nursery: trio.Nursery | None = None  # the supervisor's, while that runs

    async def prepare(self, generation: Generation, replica: Replica) -> Request:
        """The core's request: prompt tokenised and cut, sampling and stops resolved.

        Raises:
            InvalidRequest: what only the model can tell is wrong. RequestTooLarge: a prompt that
                leaves no room for an answer.
        Cancellation: at once; a thread that tokenises goes on to its end, for nobody.
        """
        asked, info = generation.request, replica.text_info
        ids, form = await self._prompt_ids(generation, replica)
        prompt = _truncate(asked.prompt, ids)
        self._check_prompt(asked, prompt, info)
        bad_words = await self._check_sampling(asked.sampling, replica)
        stops = resolve_stops(asked.sampling, asked.output, info, len(prompt))
        stops = replace(stops, shown=replica.tokenizer.special_ids_of(form.markers))
        if stops.min_tokens > 0 and len(stops.token_ids) >= info.vocab_size:
            raise InvalidRequest.of(
                "sampling.min_tokens", "cannot be reached: every token of the model is a stop token"
            )
        sampling = resolve_sampling(asked.sampling, asked.output, info.defaults, bad_words)
        _check_choice_left(sampling, stops, info.vocab_size)
        if asked.output.echo:
            skips = asked.output.skip_special_tokens is not False
            generation.echo(await self.decode(replica, prompt, skip_special_tokens=skips))
        if not form.is_plain:
            generation.tell_apart(form)
        deadline = generation.scope.deadline
        return Request(
            request_id=generation.core_id,
            prompt=prompt,
            sampling=sampling,
            stops=stops,
            arrival=generation.started_at,
            n=asked.n or 1,
            priority=asked.priority or 0,
            deadline=None if math.isinf(deadline) else deadline,
            constraint=asked.constraint,
            cache_salt=asked.prompt.cache_salt,
            bypass_prefix_cache=bool(asked.prompt.bypass_prefix_cache),
        )

    async def _prompt_ids(
        self, generation: Generation, replica: Replica
    ) -> tuple[tuple[int, ...], AnswerFormat]:
        """The prompt, not yet cut, and what its answer looks like."""
        asked = generation.request
        add_special = asked.prompt.add_special_tokens
        if asked.token_ids is not None:
            if add_special is not None:
                raise InvalidRequest.of("prompt.add_special_tokens", "does not go with token_ids")
            return asked.token_ids, PLAIN
        if asked.chat is None:
            text, adds = asked.text or "", add_special is not False
            return await self.tokenize(replica, text, add_special_tokens=adds), PLAIN
        chat = asked.chat
        if chat.shifts:
            generation.dropped = await self._shift(replica, asked)
            chat = replace(chat, messages=without(chat.messages, generation.dropped))
        text = await self.render_chat(replica, chat)
        form = detect_format(
            replica.tokenizer.chat_template(has_tools=bool(chat.tools)),
            has_tools=bool(chat.tools),
            prompt=text,
            constraint=None if asked.constraint is None else asked.constraint.source,
        )
        return await self.chat_ids(replica, text, bool(add_special)), form

    async def chat_ids(
        self, replica: Replica, text: str, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """As `tokenize`, for what a template made of a chat."""
        try:
            return await self.tokenize(replica, text, add_special_tokens=add_special_tokens)
        except InvalidRequest as error:  # it names ``text``, and there is none
            [violation] = error.violations
            raise InvalidRequest.of("chat", violation.description) from error

    async def _shift(self, replica: Replica, asked: GenerateRequest) -> tuple[int, ...]:
        """Which messages to leave out for the chat to fit."""
        chat = asked.chat
        assert chat is not None
        counts = fit(
            chat.messages, *limits(replica.text_info.max_model_len, asked.sampling.max_tokens)
        )
        messages = next(counts)
        adds = bool(asked.prompt.add_special_tokens)
        while True:
            text = await self.render_chat(replica, replace(chat, messages=messages))
            ids = await self.chat_ids(replica, text, adds)
            try:
                messages = counts.send(len(ids))
            except StopIteration as done:
                dropped: tuple[int, ...] = done.value
                return dropped

    def _check_prompt(
        self, asked: GenerateRequest, prompt: tuple[int, ...], info: ModelInfo
    ) -> None:
        """Hold what is left of the prompt against the model."""
        if not prompt:
            raise InvalidRequest.of("input", "has no tokens")
        if len(prompt) >= info.max_model_len:
            most = info.max_model_len - 1
            raise RequestTooLarge.of(
                "input", f"has {len(prompt)} tokens, but at most {most} leave room for an answer"
            )
        if asked.output.prompt_logprobs is not None:
            numbers = len(prompt) * (1 + asked.output.prompt_logprobs)
            if numbers > MAX_PROMPT_LOGPROBS:
                raise RequestTooLarge.of(
                    "output.prompt_logprobs",
                    f"asks for {numbers} numbers for {len(prompt)} tokens, of at most "
                    f"{MAX_PROMPT_LOGPROBS}",
                )
        if asked.token_ids is not None:
            cut_off = len(asked.token_ids) - len(prompt)
            first = 0 if asked.prompt.truncate_left is False else cut_off
            self.check_ids("token_ids.ids", prompt, info.vocab_size, first=first)

    async def _check_sampling(
        self, sampling: SamplingParams, replica: Replica
    ) -> tuple[tuple[int, ...], ...]:
        """Hold every id against the vocabulary; the bad words as the tokens they usually are."""
        vocab = replica.info.vocab_size
        self.check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab)
        for name in ("allowed_token_ids", "banned_token_ids"):
            ids = getattr(sampling, name)
            if len(ids) > vocab:
                raise InvalidRequest.of(
                    f"sampling.{name}", f"has {len(ids)} ids, of a vocabulary of {vocab}"
                )
            self.check_ids(f"sampling.{name}", ids, vocab)
        for token_id, _ in sampling.logit_bias:
            if not 0 <= token_id < vocab:
                raise InvalidRequest.of(
                    f"sampling.logit_bias[{token_id}]", f"is outside the vocabulary of {vocab}"
                )
        if not sampling.bad_words:
            return ()
        words = await self._inline_or_thread(
            sum(map(len, sampling.bad_words)),
            lambda: _tokens_of_words(replica.tokenizer, sampling.bad_words),
        )
        return tuple(word for word in words if max(word) < vocab)

    async def tokenize(
        self, replica: Replica, text: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """Encode a text: inline when short, else in a thread with a limiter of its own."""
        encode = replica.tokenizer.encode
        return await self._inline_or_thread(
            len(text), lambda: encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_spans(
        self, replica: Replica, text: str, *, add_special_tokens: bool
    ) -> tuple[TokenSpan, ...]:
        """As `tokenize`, each token with the characters it came from."""
        encode = replica.tokenizer.encode_spans
        return await self._inline_or_thread(
            len(text), lambda: encode(text, add_special_tokens=add_special_tokens)
        )

    async def decode(
        self, replica: Replica, ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str:
        """The text of ids, where `tokenize` would run.

        Raises:
            InvalidRequest: an id outside the vocabulary.
        """

        def job() -> str:
            self.check_ids("ids", ids, replica.info.vocab_size)
            return replica.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        return await self._inline_or_thread(len(ids), job)

    async def render_chat(self, replica: Replica, chat: Chat) -> str:
        """The text that a model's template makes of messages. Always in a thread: a template is
        the model's code, and takes what time it likes; nor does it keep other models' waiting."""
        limiter = self._template_limiters.setdefault(replica.model, trio.CapacityLimiter(1))
        return await self._in_thread(
            lambda: replica.tokenizer.render_chat(
                chat.messages,
                tools=chat.tools,
                template_args=chat.template_args,
                add_generation_prompt=chat.add_generation_prompt,
            ),
            limiter,
        )

    async def _inline_or_thread(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars < INLINE_TOKENIZE_CHARS:
            return _guarded(work)()
        return await self._in_thread(work, self._limiter)

    async def _in_thread(self, work: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        if self.nursery is None:
            raise ShuttingDown("the engine is closed")
        in_thread = _Job(_guarded(work))
        self.nursery.start_soon(in_thread.run, self._threads, limiter)
        return await in_thread.result()

    @staticmethod
    def check_ids(field: str, ids: Sequence[int], vocab_size: int, *, first: int = 0) -> None:
        """Raise InvalidRequest for the first id outside the vocabulary; ``first`` is the index
        that the first of ``ids`` has in the field."""
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return
        for index, token_id in enumerate(ids, start=first):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest.of(
                    f"{field}[{index}]", f"is {token_id}, outside the vocabulary of {vocab_size}"
                )


def _guarded(work: Callable[[], T]) -> Callable[[], T]:
    """``work``, with what is no Exception made one: a panic of a library in Rust."""

    def job() -> T:
        try:
            return work()
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            log.exception("a tokenizer failed")
            raise EngineBug(repr(error)) from error

    return job


class _Job(Generic[T]):
    """A job in a thread, and the one who waits for it."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._scope = trio.CancelScope()
        self._done = trio.Event()
        self._values: list[T] = []
        self._error: Exception | None = None

    async def run(self, threads: Threads, limiter: trio.CapacityLimiter) -> None:
        """Run it in its turn, unless its waiter has left by then."""
        try:
            with self._scope:
                self._values.append(await threads.run(self._job, limiter))
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    async def result(self) -> T:
        """What came of it. Cancellation: the job is not begun if it has not been."""
        try:
            await self._done.wait()
        finally:
            self._scope.cancel(reason="its waiter has left")
        if self._error is not None:
            raise self._error
        if not self._values:
            raise ShuttingDown("the engine is closed")
        return self._values[0]


def _tokens_of_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokenizer splits it at a text's beginning and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        for text in (word, f" {word}"):
            try:
                ids = tokenizer.encode(text, add_special_tokens=False)
            except InvalidRequest as error:
                [violation] = error.violations
                field = f"sampling.bad_words[{index}]"
                raise InvalidRequest.of(field, violation.description) from error
            if ids:
                found[tuple(ids)] = None
    return tuple(found)


def _check_choice_left(sampling: Sampling, stops: Stops, vocab_size: int) -> None:
    """Raise InvalidRequest unless some token can be sampled whatever the output is."""
    if not (sampling.allowed_token_ids or sampling.banned_token_ids or sampling.bad_words):
        return
    never = {*sampling.banned_token_ids, *(word[-1] for word in sampling.bad_words)}
    if stops.min_tokens > 0:
        never |= stops.token_ids
    if sampling.allowed_token_ids:
        if never.issuperset(sampling.allowed_token_ids):
            raise InvalidRequest.of(
                "sampling.allowed_token_ids",
                "leaves no token: banned tokens, ends of bad words and, before min_tokens, stop "
                "tokens are all that it has",
            )
    elif len(never) >= vocab_size:
        raise InvalidRequest.of("sampling.banned_token_ids", "leaves no token to sample")


def _truncate(options: PromptOptions, prompt: tuple[int, ...]) -> tuple[int, ...]:
    limit = options.truncate_to
    if limit is None or len(prompt) <= limit:
        return prompt
    return prompt[:limit] if options.truncate_left is False else prompt[-limit:]
