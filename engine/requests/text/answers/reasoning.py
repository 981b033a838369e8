"""Decides how an answer reasons: whether it does, up to which budget, and what comes behind it.

Rule: what the request asks for is done by the template's own switch if it has one, otherwise in the
prompt's text, and its bounds are those of `engine.core.text.thought`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from engine.core.text.types import Reasoning
from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.answers.dialects import (
    ANALYSIS,
    ASSISTANT,
    CHANNEL,
    CHANNEL_ENDS,
    FINAL,
    MESSAGE,
    START,
)
from engine.requests.text.answers.format import (
    PLAIN,
    AnswerFormat,
    detect_format,
)
from engine.requests.text.answers.reasoning_grammar import lead_rules, marker
from engine.requests.text.answers.structural_tags import translated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.text.types import Constraint
    from engine.requests.text.chat_values import Chat
    from engine.requests.text.values import GenerateRequest, ReasoningOptions, SamplingParams
    from engine.worker.interface import Tokenizer

# Variables by which templates switch reasoning. Where one of the second name is set by the template
# itself, it is the caller's only if the template asks whether it is defined.
SWITCHES = ("enable_thinking", "thinking")
BUDGET_OF_NOTHING = (
    "bounds reasoning for which the constraint leaves no room: its grammar spells the reasoning's "
    "end itself, or the chat has begun the answer"
)
_TAG = re.compile(r"\{[%{].*?[%}]\}", re.S)
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.S)


class Answer(NamedTuple):
    """How the answer of a request is read, counted, bounded and constrained."""

    form: AnswerFormat = PLAIN
    reasoning: Reasoning | None = None
    constraint: Constraint | None = None


def switch_of(template: str) -> str:
    """Return the variable by which a caller switches the template's reasoning; "" if there is
    none."""
    code = "\n".join(_QUOTED.sub("''", tag) for tag in _TAG.findall(template))
    for name in SWITCHES:
        is_set = re.search(rf"\bset\s+{name}\s*=", code)
        asks = rf"(?<![\w.]){name}\s*(?:\s+is\s+(?:not\s+)?(?:un)?defined\b|\|\s*default\b)"
        is_asked = re.search(asks, code)
        if is_asked or (not is_set and re.search(rf"(?<![\w.]){name}\b(?!\s*=[^=])", code)):
            return name
    return ""


def with_switch(chat: Chat, options: ReasoningOptions, template: str) -> Chat:
    """Return a chat whose template is told whether the model reasons, if it has a switch for that.

    Raises:
        InvalidRequest: ``chat.template_args`` says something else.
    """
    name = "" if options.enabled is None else switch_of(template)
    if not name:
        return chat
    if chat.template_args.get(name, options.enabled) != options.enabled:
        raise InvalidRequest.of("reasoning.enabled", f"differs from chat.template_args[{name!r}]")
    return replace(chat, template_args={**chat.template_args, name: options.enabled})


def closed(prompt: str, template: str, *, has_tools: bool) -> str:
    """Return a chat's prompt behind which the model does not reason: its reasoning is empty. In
    channels it has chosen its last message, unless it may call tools."""
    form = detect_format(template, prompt=prompt)
    if form.has_channels and has_tools and not form.begins_inside:
        return prompt
    if form.has_channels:
        _, is_begun, _ = form.opened.partition(MESSAGE)
        if not is_begun:
            return f"{prompt}{CHANNEL}{FINAL}{MESSAGE}"
        if not form.begins_inside:
            return prompt
        last = "" if has_tools else f"{CHANNEL}{FINAL}{MESSAGE}"
        return f"{prompt}{CHANNEL_ENDS[0]}{START}{ASSISTANT}{last}"
    if form.reasoning is None or form.is_behind:
        return prompt
    opening, closing, _ = form.reasoning
    begun = prompt.rstrip() if form.begins_inside else prompt + opening
    return f"{begun}\n\n{closing}\n\n"


def answer_of(
    request: GenerateRequest, form: AnswerFormat, prompt: str, template: str, tokenizer: Tokenizer
) -> Answer:
    """Return how the answer of a request is read and led. ``form`` is its format without regard to
    a constraint, and ``prompt`` the prompt's text, without the answer's beginning in the chat.

    Raises:
        Unsupported: the model does not reason, and the request says how it is to reason.
        InvalidRequest: the request bans the end of the reasoning, which it bounds; or it bounds the
            reasoning beside a constraint that leaves none.
    """
    options, chat = request.reasoning, request.chat
    constraint = translated(request.constraint, tokenizer.added_id_of)
    begun = "" if chat is None else chat.answer_begun
    if not form.reasons:
        if options.budget_tokens is not None or options.enabled:
            name = "enabled" if options.budget_tokens is None else "budget_tokens"
            what = f"reasoning.{name} is set, and this model's template marks no reasoning"
            raise Unsupported(what, field=f"reasoning.{name}")
        leads = False
    elif constraint is None or options.enabled is False or begun:
        leads = False
    elif constraint.reasoning is None:  # a form that spells the reasoning's end has rules for it
        is_free = form.marks_end not in constraint.source
        leads = is_free and (chat is not None or options.budget_tokens is not None)
    else:
        leads = constraint.reasoning
    budget = 0 if options.enabled is False else options.budget_tokens
    if leads and constraint is not None:
        form = replace(form, tools=None, functions={})
        lead = _lead(form, tokenizer, is_required=options.enabled is True)
        constraint = replace(constraint, reasoning=None, lead=lead)
    elif constraint is not None:  # whose grammar alone says what may come
        if options.budget_tokens is not None:
            raise InvalidRequest.of("reasoning.budget_tokens", BUDGET_OF_NOTHING)
        constraint, budget = replace(constraint, reasoning=None), None
        form = detect_format(template, prompt=prompt, constraint=constraint.source)
    is_enforced = leads or (chat is not None and chat.must_call)
    reasoning = None
    if form.reasons:
        reasoning = reasoning_of(form, begun, budget, tokenizer, is_enforced=is_enforced)
    if leads or options.budget_tokens is not None:
        _check_possible(form, request.sampling, tokenizer)
    return Answer(PLAIN if chat is None else form, reasoning, constraint)


def inside(form: AnswerFormat, prompt: str) -> AnswerFormat:
    """Return the format of an answer to a text, which may go on with reasoning that has begun."""
    if form.has_channels or form.reasoning is None or form.is_behind:
        return form
    opening, closing, _ = form.reasoning
    is_inside = prompt.rfind(opening) > prompt.rfind(closing)
    return replace(form, opened=opening) if is_inside else form


def _lead(form: AnswerFormat, tokenizer: Tokenizer, *, is_required: bool) -> str:
    """Return the grammar of an answer that has its form behind its reasoning; "" if the answer
    begins there."""
    find_id = tokenizer.added_id_of
    if form.is_behind:
        return ""
    if form.has_channels:
        part = f'{marker(CHANNEL, find_id)} "{FINAL}" {marker(MESSAGE, find_id)} @form'
    elif form.answer is not None:
        part = rf"({marker(form.answer.opening, find_id)} /[ \n]{{1,4}}/?)? @form"
    else:
        part = "@form"
    return "\n".join(lead_rules(form, find_id, part, is_required=is_required)) + "\n"


def reasoning_of(
    form: AnswerFormat,
    begun: str,
    budget: int | None,
    tokenizer: Tokenizer,
    *,
    is_enforced: bool,
) -> Reasoning:
    """Return how the reasoning of an answer in this format is counted and ended. ``begun`` is the
    answer's beginning in the chat. ``is_enforced``: a grammar says what follows the reasoning."""
    if form.reasoning is not None:
        opening, closing, _ = form.reasoning
        begun = form.opened + begun
        ending = () if budget is None else _ids_of((closing,), tokenizer)
        again = None if is_enforced else form.opens_again
        return Reasoning(opening, (closing,), begun, again, budget, ending)
    texts: tuple[str, ...] = (CHANNEL_ENDS[0],)
    shunned: frozenset[int] = frozenset()
    if not is_enforced:  # otherwise the grammar says what comes next
        texts += (START, ASSISTANT, CHANNEL)
        if form.tools is None:
            texts += (FINAL, MESSAGE)
        else:
            spelled = (ANALYSIS, f" {ANALYSIS}")
            shunned = frozenset(_ids_of((text,), tokenizer)[0] for text in spelled)
    ending = () if budget is None else _ids_of(texts, tokenizer)
    closings = (*CHANNEL_ENDS, START, CHANNEL)
    begun = form.opened + begun
    return Reasoning("", closings, begun, form.opens_again, budget, ending, shunned)


def _ids_of(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of texts: of each the one that it is, or those that it is made of."""
    ids: list[int] = []
    for text in texts:
        own = tokenizer.added_id_of(text)
        ids += tokenizer.encode(text, add_special_tokens=False) if own is None else (own,)
    return tuple(ids)


def _check_possible(form: AnswerFormat, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
    """Check that the request does not exclude the marker that ends the reasoning.

    Raises:
        InvalidRequest: it does.
    """
    end = form.reasoning.closing if form.reasoning is not None else CHANNEL_ENDS[0]
    needed = set(_ids_of((end,), tokenizer))
    what = f"excludes {end}, which ends the reasoning that the request bounds"
    if not needed.isdisjoint(sampling.banned_token_ids):
        raise InvalidRequest.of("sampling.banned_token_ids", what)
    if sampling.allowed_token_ids and not needed.issubset(sampling.allowed_token_ids):
        raise InvalidRequest.of("sampling.allowed_token_ids", what)
    for index, word in enumerate(sampling.bad_words):
        if word.strip() and word.strip() in end:
            raise InvalidRequest.of(f"sampling.bad_words[{index}]", what)
