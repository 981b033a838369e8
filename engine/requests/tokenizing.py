"""Converts text to token ids and back, off the event loop, for requests of every kind.

Rule 1: work that grows with the text runs in a thread, so that a long prompt delays neither the
event loop nor a step. Rule 2: such a job is a task of `RequestTasks`, so it is joined, and a task
that waits for it can stop waiting at once. Rule 3: a job cannot be interrupted. Therefore a text
that is certainly too long is refused without a job (`check_fits`), and a long text is tokenised in
pieces, each in a job, until there are as many tokens as are wanted (`TokenBound`). Short texts have
a thread that long texts do not use. At either thread, and at that for images, the parties
(`engine.requests.quota.Origin`) share the time, a whole text in each turn, so that only one text is
tokenised in part at a time. Rule 4: the time of a turn, in which others wait, and of a job that
needs no thread, is counted to its party.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio

from engine.core.common.vocabulary import check_ids, first_outside
from engine.errors import EngineBug, FieldViolation, InvalidRequest, RequestTooLarge, ShuttingDown
from engine.images.decoder import decode_here
from engine.images.errors import BadImage
from engine.requests.quota import Quota
from engine.requests.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from engine.images.decoder import DecodeImage
    from engine.replica.replica import Replica
    from engine.replica.threads import Threads
    from engine.requests.tasks import RequestTasks
    from engine.requests.text.chat_values import Chat
    from engine.worker.interface import Tokenizer, TokenSpan

    AnyReplica = Replica[Any, Any]

log = logging.getLogger(__name__)

TOKENIZE_TOKENS_MAX = 100_000  # tokens in an answer to Tokenize; a guess: 3 MiB, built in 0.5 s
TOKENIZE_CHARS_MAX = 2**20  # characters of a text in Tokenize; a guess: ten for each token
INLINE_TOKENIZE_CHARS = 4096  # a shorter text needs no thread; a guess: a thread would cost more
LONG_TEXT_CHARS = 2**16  # longer texts are tokenised in pieces; a guess: this length takes 0.1 s

T = TypeVar("T")
Part = TypeVar("Part", bound="Sequence[Any]")


class TokenBound(NamedTuple):
    """How many tokens of a text are wanted. A text with more is refused or, with ``is_cut``, cut to
    its first ``most`` tokens, or to its last ones with ``keeps_end``."""

    most: int
    is_cut: bool = False
    keeps_end: bool = False


class Tokenizing:
    """Runs tokenizers and chat templates. Belongs to the Trio thread. One job at a time runs for
    short texts, and one for texts of `LONG_TEXT_CHARS` and more; parties share their time.

    Every async method raises ShuttingDown once the engine is closed.

    Cancellation of every async method: ends the wait at once; a job that runs in a thread goes on
    to its end, and its result is dropped.
    """

    def __init__(
        self,
        threads: Threads,
        tasks: RequestTasks,
        image_decoder: DecodeImage = decode_here,
        image_turns: Turns | None = None,
    ) -> None:
        """Decode images by ``image_decoder``."""
        self.image_decoder = image_decoder
        self._threads = threads
        self._tasks = tasks
        self._short_turns, self._long_turns = Turns(), Turns()
        self._image_turns = image_turns or Turns()
        self._template_turns: dict[str, Turns] = {}  # by model

    def with_own_turns(self) -> Tokenizing:
        """Return another instance, whose texts do not wait for this one's texts. The two together
        decode one image at a time."""
        return Tokenizing(self._threads, self._tasks, self.image_decoder, self._image_turns)

    async def tokenize(
        self,
        replica: AnyReplica,
        text: str,
        *,
        add_special_tokens: bool,
        party: Hashable,
        bound: TokenBound | None = None,
    ) -> tuple[int, ...]:
        """Return the ids of a text: at once if it is short, otherwise made in a thread. If
        ``bound`` cuts the text, there may be more ids than wanted, at the end that is not kept.

        Raises:
            InvalidRequest: the text cannot be tokenised.
            RequestTooLarge: the text has more tokens than ``bound`` allows.
        Cancellation: as the class.
        """
        tokenizer = replica.tokenizer
        if bound is not None and not bound.is_cut:
            check_fits(text, tokenizer, bound.most)
        if len(text) < LONG_TEXT_CHARS:
            encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
            return await self.run(len(text), encode, party)
        divide = partial(tokenizer.encode_jobs, text, add_special_tokens=add_special_tokens)
        from_end = bound is not None and bound.keeps_end
        most = math.inf if bound is None else bound.most
        parts = await self._in_pieces(divide, party, most, from_end=from_end)
        count = sum(map(len, parts))
        if bound is not None and count > bound.most and not bound.is_cut:
            raise too_long(f"at least {count}", bound.most)
        return tuple(chain.from_iterable(parts))

    async def spans(
        self, replica: AnyReplica, text: str, *, add_special_tokens: bool, party: Hashable
    ) -> tuple[TokenSpan, ...]:
        """Return the tokens of a text, as Tokenize answers them: each with its characters.

        Raises:
            InvalidRequest: the text cannot be tokenised.
            RequestTooLarge: there are more characters than one call may have, or more tokens than
                one answer holds.
        Cancellation: as the class.
        """
        tokenizer = replica.tokenizer
        if len(text) > TOKENIZE_CHARS_MAX:
            raise RequestTooLarge.of(
                "text", f"has {len(text)} characters, of at most {TOKENIZE_CHARS_MAX} in one call"
            )
        if len(text) < LONG_TEXT_CHARS:

            def job() -> tuple[TokenSpan, ...]:
                # The ids come first: they cost little, and may be too many for an answer.
                _check_answer_holds(
                    len(tokenizer.encode(text, add_special_tokens=add_special_tokens))
                )
                return tokenizer.encode_spans(text, add_special_tokens=add_special_tokens)

            return await self.run(len(text), job, party)
        divide = partial(tokenizer.span_jobs, text, add_special_tokens=add_special_tokens)
        parts = await self._in_pieces(divide, party, TOKENIZE_TOKENS_MAX)
        _check_answer_holds(sum(map(len, parts)))
        return tuple(chain.from_iterable(parts))

    async def _in_pieces(
        self,
        divide: Callable[[], Sequence[Callable[[], Part]]],
        party: Hashable,
        most: float,
        *,
        from_end: bool = False,
    ) -> list[Part]:
        """Return the tokens of the pieces that ``divide()`` makes, in the text's order: as few
        pieces, from the front or ``from_end``, as have more than ``most`` tokens, or all. Each is a
        job of its own. Cancellation: as the class; no further piece begins."""
        parts: deque[Part] = deque()

        def jobs() -> Iterator[Callable[[], None]]:
            made: list[Callable[[], Part]] = []
            yield lambda: made.extend(divide())
            count, add = 0, parts.appendleft if from_end else parts.append
            while made and count <= most:
                yield partial(_add_made, add, made.pop(-1 if from_end else 0))
                count += len(parts[0 if from_end else -1])

        await self._run_jobs(jobs(), self._long_turns, party)
        return list(parts)

    async def decode(
        self,
        replica: AnyReplica,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        party: Hashable,
    ) -> str:
        """Return the text of ids.

        Raises:
            InvalidRequest: an id is outside the vocabulary, and the tokenizer has no token for it.
        Cancellation: as the class.
        """
        tokenizer, vocab_size = replica.tokenizer, replica.info.vocab_size

        def job() -> str:
            if first_outside(ids, vocab_size) is not None:
                for index, id_ in enumerate(ids):
                    if not tokenizer.is_known(id_):
                        check_ids("ids", (id_,), vocab_size, first=index)
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        return await self.run(len(ids), job, party)

    async def render_chat(self, replica: AnyReplica, chat: Chat, party: Hashable) -> str:
        """Return the text that a model's template makes of messages. Cancellation: as the class.

        This always runs in a thread, and each model has turns of its own: a template is code of the
        model's author, whose running time is unknown, and other models must not wait for it.
        """
        turns = self._template_turns.setdefault(replica.model, Turns())
        return await self._in_thread(
            lambda: replica.tokenizer.render_chat(
                chat.messages,
                tools=chat.offered_tools,
                template_args=chat.template_args,
                add_generation_prompt=chat.opens_turn,
                continue_final_message=chat.continue_final_message,
            ),
            turns,
            party,
        )

    async def run(self, num_chars: int, work: Callable[[], T], party: Hashable) -> T:
        """Return ``work()``, called at once or, for `INLINE_TOKENIZE_CHARS` characters or more, in
        a thread. Cancellation: as the class.
        """
        if num_chars < INLINE_TOKENIZE_CHARS:
            with _counted_to(party):
                return guarded(work)()
        turns = self._short_turns if num_chars < LONG_TEXT_CHARS else self._long_turns
        return await self._in_thread(work, turns, party)

    async def run_in_thread(self, work: Callable[[], T], party: Hashable) -> T:
        """Return ``work()``, called in a thread. Cancellation: as the class."""
        return await self._in_thread(work, self._short_turns, party)

    async def read_images(
        self, files: Iterable[tuple[str, bytes]], read: Callable[[bytes], T], party: Hashable
    ) -> list[T]:
        """Return the results of ``read``, which may have an image decoded, called in a thread with
        each file. No other image is decoded at the same time. Cancellation: as the class.

        Raises:
            InvalidRequest: images cannot be read; it lists the ``path`` of each, from ``files``.
        """
        made, violations = [], []
        for path, data in files:
            try:
                job = partial(read, data)
                made.append(await self._in_thread(job, self._image_turns, party))
            except BadImage as error:
                violations.append(FieldViolation(path, str(error)))
        if violations:
            raise InvalidRequest(violations)
        return made

    async def _in_thread(self, work: Callable[[], T], turns: Turns, party: Hashable) -> T:
        values: list[T] = []
        await self._run_jobs([lambda: values.append(work())], turns, party)
        return values[0]

    async def _run_jobs(
        self, jobs: Iterable[Callable[[], None]], turns: Turns, party: Hashable
    ) -> None:
        """Run one job after another in a thread, with one turn of its party for all of them."""
        in_thread = _Jobs(map(guarded, jobs))
        self._tasks.start(in_thread.run, self._threads, turns, party)
        await in_thread.wait()


@contextmanager
def of_field(field: str) -> Iterator[None]:
    """Name ``field`` in violations that name ``text``, which was made from this field."""
    try:
        yield
    except InvalidRequest as error:
        raise error.renamed(lambda path: field if path == "text" else path) from error


@contextmanager
def _counted_to(party: Hashable) -> Iterator[None]:
    """Count the time of the block to its party."""
    began = trio.current_time()
    try:
        yield
    finally:
        _count(party, trio.current_time() - began)


def _count(party: Hashable, seconds: float) -> None:
    """Count seconds to a party that is a key's holder."""
    if isinstance(party, Quota):
        party.counted.spend_tokenizer(seconds, trio.current_time())


def check_fits(text: str, tokenizer: Tokenizer, most: int) -> None:
    """Check that a prompt does not certainly have more than ``most`` tokens, without tokenising it.

    Raises:
        RequestTooLarge: the prompt certainly has more.
    """
    fewest = math.ceil(len(text) / tokenizer.max_chars_per_token)
    if fewest > most:
        raise too_long(f"at least {fewest}", most)


def _check_answer_holds(count: int) -> None:
    """Check that an answer of a Tokenize call holds ``count`` tokens.

    Raises:
        RequestTooLarge: an answer holds fewer.
    """
    if count > TOKENIZE_TOKENS_MAX:
        raise RequestTooLarge.of(
            "text", f"has at least {count} tokens, of at most {TOKENIZE_TOKENS_MAX} in one answer"
        )


def too_long(count: str, most: int) -> InvalidRequest:
    """Return the error of a prompt with this number of tokens, of at most ``most``."""
    return RequestTooLarge.of(
        "input", f"has {count} tokens, but at most {most} leave room for an answer"
    )


def guarded(work: Callable[[], T]) -> Callable[[], T]:
    """Return ``work``, changed in one way: a panic of a Rust library, which is no `Exception`,
    becomes an `EngineBug`."""

    def job() -> T:
        try:
            return work()
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            log.exception("a library failed")
            raise EngineBug(repr(error)) from error

    return job


def _add_made(add: Callable[[T], None], job: Callable[[], T]) -> None:
    add(job())


class _Jobs:
    """Jobs in a thread, and the task that waits for them."""

    def __init__(self, jobs: Iterable[Callable[[], None]]) -> None:
        self._jobs = jobs
        self._scope = trio.CancelScope()
        self._done = trio.Event()
        self._are_done = False
        self._error: Exception | None = None

    async def run(self, threads: Threads, turns: Turns, party: Hashable) -> None:
        """Run the jobs in their turn, until their waiter has left."""
        try:
            with self._scope:
                async with turns.turn(party):
                    with _counted_to(party):
                        for job in self._jobs:
                            await threads.run(job, trio.CapacityLimiter(1))
                    self._are_done = True
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    async def wait(self) -> None:
        """Wait for the jobs, and raise what one of them raised.

        Cancellation: a job that has not begun does not begin.
        """
        try:
            await self._done.wait()
        finally:
            self._scope.cancel(reason="its waiter has left")
        if self._error is not None:
            raise self._error
        if not self._are_done:
            raise ShuttingDown("the engine is closed")
