"""Makes the core's request from a Generate request: prompt, sampling, stops.

Rule: everything that depends on the loaded model is checked here and nowhere later. Fields that
need no model are checked in `engine.requests.text.values`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from engine.core.common.vocabulary import check_ids, check_text
from engine.core.text.types import Request
from engine.errors import InvalidRequest, RequestTooLarge
from engine.requests.prepared import Prepared
from engine.requests.text.answers.format import detect_format
from engine.requests.text.answers.reasoning import (
    Answer,
    answer_of,
    closed,
    inside,
    with_switch,
)
from engine.requests.text.answers.structural_tags import translated
from engine.requests.text.answers.tool_grammar import tool_constraint
from engine.requests.text.chat_values import function_of
from engine.requests.text.prepare_chat import VisionInput, VisionPrompt
from engine.requests.text.resolve import resolve_sampling, resolve_stops
from engine.requests.text.truncation import choose_dropped, truncation_limits, without_messages
from engine.requests.text.values import MAX_PROMPT_LOGPROBS
from engine.requests.tokenizing import TokenBound, of_field, too_long

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from contextlib import AbstractAsyncContextManager

    from engine.core.text.types import Constraint, PromptImage, Sampling, Stops
    from engine.replica.replica import Replica
    from engine.requests.prepared import Assignment
    from engine.requests.tasks import RequestTasks
    from engine.requests.text.answers.format import AnswerFormat
    from engine.requests.text.chat_values import Chat
    from engine.requests.text.compiled_constraints import CompiledConstraints
    from engine.requests.text.values import GenerateRequest, PromptOptions, SamplingParams
    from engine.requests.tokenizing import Tokenizing
    from engine.worker.interface import Tokenizer
    from engine.worker.text.interface import Adapters, ModelInfo

    TextReplica = Replica[ModelInfo, "TextTools"]
    TextAssignment = Assignment[GenerateRequest, TextReplica]


@dataclass(frozen=True, slots=True)
class TextTools:
    """The parts of a text model's runner that are used beside its tokenizer and its steps: requests
    use the constraints, and the pool the adapters (None: the model takes none)."""

    constraints: CompiledConstraints
    adapters: Adapters | None = None


@dataclass(frozen=True, slots=True)
class PreparedText(Prepared[Request]):
    """A Generate request that is ready to run.

    ``form`` is the format of its answers; None: they are plain text. ``echo`` is the prompt's text,
    to be sent before each choice. ``dropped`` are the indices of the chat's messages that were left
    out.
    """

    form: AnswerFormat | None = None
    echo: str = ""
    dropped: tuple[int, ...] = ()

    def with_adapter(self, digest: str) -> Self:
        if digest == self.request.adapter:
            return self
        return replace(self, request=replace(self.request, adapter=digest))


class TextPreparer:
    """Makes the core's requests from Generate requests. Belongs to the Trio thread."""

    def __init__(self, tokenizing: Tokenizing, tasks: RequestTasks) -> None:
        self._tokenizing = tokenizing
        self._tasks = tasks
        self._vision_input = VisionInput(tokenizing)
        self.image_memory = self._vision_input.memory

    async def prepare(self, assignment: TextAssignment) -> PreparedText:
        """Return the core's request: prompt tokenised and cut, images decoded and placed, sampling
        and stops resolved. The memory of the images is held.

        Raises:
            InvalidRequest: A field is wrong for this model.
            RequestTooLarge: The prompt leaves no room for an answer.

        Cancellation: at once. A thread that tokenises goes on to its end, and its result is
            dropped.
        """
        request, replica, party = assignment.request, assignment.replica, assignment.origin.party
        info = replica.info
        (ids, images), (form, reasoning, constraint), dropped = await self._prompt_ids(assignment)
        if constraint is None and request.chat is not None and request.chat.must_call:
            constraint = await self._tool_constraint(request.chat, form, replica, party)
        prompt = _truncate(request.prompt, ids)
        self._check_prompt(request, prompt, images, replica)
        bad_words = await self._check_sampling(request.sampling, replica, party)
        stops = resolve_stops(request.sampling, request.output, info, len(prompt))
        stops = replace(stops, shown=replica.tokenizer.special_ids_of(form.markers))
        if stops.min_tokens > 0 and len(stops.token_ids) >= info.vocab_size:
            raise InvalidRequest.of(
                "sampling.min_tokens", "cannot be reached: every token of the model is a stop token"
            )
        sampling = resolve_sampling(request.sampling, request.output, info.defaults, bad_words)
        _check_choice_left(sampling, stops, info.vocab_size)
        sampling = replace(sampling, drawn_seed=assignment.seed if sampling.seed is None else None)
        outputs = _outputs(request, stops, info)
        if outputs:  # the client already has the prompt's log-probabilities
            sampling = replace(sampling, prompt_logprobs=None)
        echo = ""
        if request.output.echo:
            skips = request.output.skip_special_tokens is not False
            echo = await self._tokenizing.decode(
                replica, prompt, skip_special_tokens=skips, party=party
            )
        core_request = Request(
            request_id=assignment.core_id,
            prompt=prompt,
            sampling=sampling,
            stops=stops,
            arrival=assignment.arrival,
            n=request.n or 1,
            priority=assignment.origin.priority_of(
                request.priority, is_background=request.background
            ),
            deadline=assignment.deadline,
            constraint=constraint,
            cache_salt=_salt_of(assignment.cache_owner, request.prompt.cache_salt),
            bypass_prefix_cache=bool(request.prompt.bypass_prefix_cache),
            outputs=outputs,
            adapter=assignment.adapter,
            speculates=request.sampling.speculation is not False,
            images=images,
            reasoning=reasoning,
            holder=assignment.origin.holder,
            weight=assignment.origin.weight,
        )
        if request.output.tool_argument_deltas and form.tools is not None:
            form = replace(form, streams_arguments=True)
        hold = None if constraint is None else partial(self._hold_compiled, constraint)
        return PreparedText(core_request, hold, None if form.is_plain else form, echo, dropped)

    def _hold_compiled(
        self, constraint: Constraint, replica: TextReplica
    ) -> AbstractAsyncContextManager[None]:
        return replica.tools.constraints.held(constraint, self._tasks)

    async def _prompt_ids(
        self, assignment: TextAssignment
    ) -> tuple[VisionPrompt, Answer, tuple[int, ...]]:
        """Return the prompt before it is cut, with its images; how the answer is read and led; and
        the indices of the messages that were left out."""
        request, replica, party = assignment.request, assignment.replica, assignment.origin.party
        add_special = request.prompt.add_special_tokens
        bound = _bound_of(request.prompt, replica.info)
        if request.token_ids is not None:
            answer = await self._answer_to_text(request, None, replica, party)
            return VisionPrompt(request.token_ids), answer, ()
        if request.chat is None:
            text, adds = request.text or "", add_special is not False
            ids = await self._tokenizing.tokenize(
                replica, text, add_special_tokens=adds, party=party, bound=bound
            )
            return VisionPrompt(ids), await self._answer_to_text(request, text, replica, party), ()
        template = replica.tokenizer.chat_template(has_tools=bool(request.chat.offered_tools))
        chat = with_switch(request.chat, request.reasoning, template)
        chat = await self._vision_input.read(assignment, chat)
        dropped: tuple[int, ...] = ()
        if chat.truncates:
            dropped = await self._messages_to_drop(replica, request, chat, party)
            chat = replace(chat, messages=without_messages(chat.messages, dropped))
        close = None
        if request.reasoning.enabled is False:
            close = partial(closed, template=template, has_tools=bool(chat.offered_tools))
        text, prompt = await self._vision_input.prompt_of(
            replica, chat, bool(add_special), party=party, bound=bound, close=close
        )
        offered = [function_of(tool) for tool in chat.offered_tools]
        # without the answer's beginning in the chat, which the template has not written
        text = text.removesuffix(chat.answer_begun.lstrip())
        form = detect_format(
            template,
            functions={one["name"]: _schema_of(one) for one in offered},
            prompt=text,
            tool_format=replica.info.tool_format,
        )
        return prompt, answer_of(request, form, text, template, replica.tokenizer), dropped

    async def _answer_to_text(
        self, request: GenerateRequest, text: str | None, replica: TextReplica, party: Hashable
    ) -> Answer:
        """Return how the answer to a text, or to tokens, is led: at once, unless the request says
        how it is to reason."""
        constraint = request.constraint
        if not (request.reasoning.bounds or (constraint is not None and constraint.reasoning)):
            return Answer(constraint=translated(constraint, replica.tokenizer.added_id_of))
        if text is None:
            text = await self._tokenizing.decode(
                replica, request.token_ids or (), skip_special_tokens=False, party=party
            )
        template = replica.tokenizer.chat_template(has_tools=False)
        form = inside(detect_format(template, prompt=text), text)
        return answer_of(request, form, text, template, replica.tokenizer)

    async def _messages_to_drop(
        self, replica: TextReplica, request: GenerateRequest, chat: Chat, party: Hashable
    ) -> tuple[int, ...]:
        """Return the indices of the messages to leave out so that the chat fits the context."""
        info = replica.info
        most = request.sampling.max_tokens or info.defaults.max_tokens
        counts = choose_dropped(chat.messages, *truncation_limits(info.max_model_len, most))
        messages = next(counts)
        adds = bool(request.prompt.add_special_tokens)
        while True:
            shorter = replace(chat, messages=messages)
            _, prompt = await self._vision_input.prompt_of(replica, shorter, adds, party=party)
            try:
                messages = counts.send(len(prompt.ids))
            except StopIteration as done:
                dropped: tuple[int, ...] = done.value
                return dropped

    async def _tool_constraint(
        self, chat: Chat, form: AnswerFormat, replica: TextReplica, party: Hashable
    ) -> Constraint:
        """Return the constraint of an answer that must be a call of a tool."""
        only = "" if chat.tool_choice == "required" else chat.tool_choice
        find_id = replica.tokenizer.added_id_of
        return await self._tokenizing.run(
            chat.num_bytes,
            lambda: tool_constraint(chat.tools, only, form, find_id),
            party,
        )

    def _check_prompt(
        self,
        request: GenerateRequest,
        prompt: tuple[int, ...],
        images: tuple[PromptImage, ...],
        replica: TextReplica,
    ) -> None:
        """Check the cut prompt against the model's limits."""
        info = replica.info
        if not prompt:
            raise InvalidRequest.of("input", "has no tokens")
        if len(prompt) >= info.max_model_len:
            raise too_long(f"{len(prompt)}", info.max_model_len - 1)
        if request.output.prompt_logprobs is not None:
            if any(image.is_whole for image in images):
                raise InvalidRequest.of(
                    "output.prompt_logprobs",
                    "cannot be set beside images of this model, whose tokens see each other",
                )
            numbers = len(prompt) * (1 + request.output.prompt_logprobs)
            if numbers > MAX_PROMPT_LOGPROBS:
                raise RequestTooLarge.of(
                    "output.prompt_logprobs",
                    f"asks for {numbers} numbers for {len(prompt)} tokens, of at most "
                    f"{MAX_PROMPT_LOGPROBS}",
                )
        if request.token_ids is not None:
            cut_off = len(request.token_ids) - len(prompt)
            first = 0 if request.prompt.truncate_left is False else cut_off
            check_ids("token_ids.ids", prompt, info.vocab_size, first=first)
            return
        field = "text" if request.chat is None else "chat"
        check_text(field, prompt, info.vocab_size, replica.tokenizer)

    async def _check_sampling(
        self, sampling: SamplingParams, replica: TextReplica, party: Hashable
    ) -> tuple[tuple[int, ...], ...]:
        """Check every id against the vocabulary, and return the bad words as tokens."""
        vocab = replica.info.vocab_size
        check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab)
        for name in ("allowed_token_ids", "banned_token_ids"):
            ids = getattr(sampling, name)
            if len(ids) > vocab:
                raise InvalidRequest.of(
                    f"sampling.{name}", f"has {len(ids)} ids, of a vocabulary of {vocab}"
                )
            check_ids(f"sampling.{name}", ids, vocab)
        for token_id in sampling.logit_bias:
            if not 0 <= token_id < vocab:
                raise InvalidRequest.of(
                    f"sampling.logit_bias[{token_id}]", f"is outside the vocabulary of {vocab}"
                )
        if not sampling.bad_words:
            return ()
        words = await self._tokenizing.run(
            sum(map(len, sampling.bad_words)),
            lambda: _tokens_of_words(replica.tokenizer, sampling.bad_words),
            party,
        )
        return tuple(word for word in words if max(word) < vocab)


def _schema_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's arguments; an empty one if it has none."""
    schema = function.get("parameters")
    return schema if isinstance(schema, Mapping) else {}


def _tokens_of_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return each word as the tokenizer splits it at the beginning of a text and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        for text in (word, f" {word}"):
            with of_field(f"sampling.bad_words[{index}]"):
                ids = tokenizer.encode(text, add_special_tokens=False)
            if ids:
                sequences[tuple(ids)] = None
    return tuple(sequences)


def _salt_of(owner: str, own_salt: str) -> str:
    """Return the salt of a request's cached prefixes, which no other holder's requests have,
    whatever salt their client sends: the owner's length says where its name ends."""
    return f"{len(owner)}:{owner}{own_salt}" if owner or own_salt else ""


def _check_choice_left(sampling: Sampling, stops: Stops, vocab_size: int) -> None:
    """Raise InvalidRequest unless some token can be sampled after every possible output."""
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


def _outputs(
    request: GenerateRequest, stops: Stops, info: ModelInfo
) -> tuple[tuple[int, ...] | None, ...]:
    """Return the tokens that each choice of a continued request has, None for a choice that has
    ended; () for a new request, or if no token or end was received of the stream that was cut.

    Raises:
        InvalidRequest: a token is outside the vocabulary, or a choice has too many tokens.
    """
    continuation = request.continuation
    if continuation is None or not continuation.has_begun:
        return ()
    outputs: list[tuple[int, ...] | None] = [()] * (request.n or 1)
    for index, choice in enumerate(continuation.choices):
        path = f"continuation.choices[{index}].token_ids"
        if len(choice.token_ids) > stops.max_tokens:
            what = (
                f"has {len(choice.token_ids)} tokens, but a choice has at most {stops.max_tokens}"
            )
            raise InvalidRequest.of(path, what)
        check_ids(path, choice.token_ids, info.vocab_size)
        outputs[index] = None if choice.finished else choice.token_ids
    return tuple(outputs)


def _bound_of(options: PromptOptions, info: ModelInfo) -> TokenBound:
    """Return the bound up to which a prompt's text is tokenised: the truncation, or the context."""
    if options.truncate_to is None:
        return TokenBound(info.max_model_len - 1)
    return TokenBound(
        options.truncate_to, is_cut=True, keeps_end=options.truncate_left is not False
    )


def _truncate(options: PromptOptions, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the prompt, cut as the request says."""
    limit = options.truncate_to
    if limit is None or len(prompt) <= limit:
        return prompt
    return prompt[:limit] if options.truncate_left is False else prompt[-limit:]
