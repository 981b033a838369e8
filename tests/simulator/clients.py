"""The clients of a simulated world: what each requests, and how its reader behaves."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from engine.core.text.types import Constraint
from engine.requests.encode.classify_values import ClassifyRequest
from engine.requests.encode.values import EmbedRequest, EmbedStreamRequest, RerankRequest
from engine.requests.image_generation.values import DrawRequest
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import (
    GenerateRequest,
    OutputOptions,
    PromptOptions,
    SamplingParams,
)
from tests.simulator.oracle import MAX_MODEL_LEN, prompt_of

MODEL, FRAGILE, SLEEPY = "fake", "fragile", "sleepy"
AnyRequest: TypeAlias = (
    GenerateRequest
    | EmbedRequest
    | EmbedStreamRequest
    | RerankRequest
    | ClassifyRequest
    | DrawRequest
)
Families = tuple[tuple[int, ...], ...]

FORMS, BAD_FORM = tuple(f"form {number}" for number in range(12)), "bad"
TOOLS = ({"type": "function", "function": {"name": "f"}},)  # so that the parser looks for calls


@dataclass(frozen=True)
class Client:
    """One request, and how its reader behaves.

    The reader sleeps ``delay_s`` after each message, leaves after ``leave_after`` events, and stops
    reading after ``stall_after``. The request is cancelled or aborted ``cancel_at_s`` after its
    arrival, or aborted ``abort_before_s`` before it. A client with ``over_wire`` uses the simulated
    part of the gRPC front; if it stalled, its call lasts ``linger_s`` longer than its request.

    A client with ``cuts`` continues its stream after it left, and leaves again after as many
    further events as the next cut says, until there are no more cuts. If the request has a resume
    window, the client loses its connection instead, and attaches ``away_s`` later; with ``again_s``
    it attaches once more so much later, while the server still serves its first Attach.

    ``may_end`` are errors with which this request may end, beside those allowed to all. With
    ``must_fail`` it must end with one of ``may_end``.
    """

    arrival_s: float
    request: AnyRequest
    buffer: int
    delay_s: float = 0.0
    leave_after: int | None = None
    stall_after: int | None = None
    cancel_at_s: float | None = None
    aborts: bool = False
    abort_before_s: float | None = None
    over_wire: bool = False
    linger_s: float = 0.0
    cuts: tuple[int, ...] | None = None
    away_s: float = 0.0
    again_s: float | None = None
    may_end: frozenset[str] = frozenset()
    must_fail: bool = False


def draw_client(
    rng: random.Random,
    index: int,
    active: frozenset[str],
    duration: float,
    families: Families,
    step_s: float,
    stream_buffer: int,
) -> Client:
    """Draw a client with the faults ``active``. Streams over gRPC have ``stream_buffer`` slots."""
    arrival = 0.0 if "bursts" in active and rng.random() < 0.5 else rng.uniform(0, duration)
    request = _draw_request(rng, index, active, families, step_s)
    buffer = rng.choice([2, 5, 256])
    over_wire = rng.random() < 0.5
    client = Client(arrival, request, stream_buffer if over_wire else buffer, over_wire=over_wire)
    client = replace(client, **_draw_behaviour(rng, active, step_s))
    if "odd_requests" in active and rng.random() < 0.3:
        client = _make_odd(rng, client)
    if "bad_requests" in active and rng.random() < 0.12:
        client = _spoil(rng, client, index)
    if "model_trouble" in active and rng.random() < 0.1:
        client = _ask_elsewhere(rng, client)
    return client


def draw_beside(
    seed: int,
    number: int,
    active: frozenset[str],
    duration: float,
    step_s: float,
    stream_buffer: int,
    ask: Callable[[random.Random, int, float | None], Any],
    bad: Sequence[tuple[dict[str, Any], str]],
) -> tuple[Client, ...]:
    """Draw clients of another kind of work, whose requests ``ask`` makes. Some requests get the
    fields of an entry of ``bad``, and must be refused for the reason that the entry names."""
    rng = random.Random(f"drawers {seed}")
    own = active - {"odd_requests", "bad_requests", "model_trouble"}
    found = []
    for index in range(number):
        client = draw_client(rng, index, own, duration, ((1,),), step_s, stream_buffer)
        request = ask(rng, index, client.request.timeout_s)
        client = replace(client, request=request, cuts=None)
        if "bad_requests" in active and rng.random() < 0.1:
            fields, reason = rng.choice(bad)
            client = replace(
                client,
                request=replace(request, **fields),
                may_end=frozenset({reason}),
                must_fail=True,
            )
        found.append(client)
    return tuple(found)


def _draw_request(
    rng: random.Random, index: int, active: frozenset[str], families: Families, step_s: float
) -> GenerateRequest:
    prefix = rng.choice(families) if rng.random() < 0.6 else ()
    own = tuple(rng.randint(1, 900) for _ in range(rng.randint(1, 40)))
    return GenerateRequest(
        token_ids=prefix + own,
        n=rng.choice([None, 1, 1, 2, 2, 4]),
        priority=rng.choice([0, 0, 0, -1, 2]),
        request_id=f"r{index}",
        sampling=SamplingParams(max_tokens=rng.randint(1, 25), seed=rng.choice([None, 7])),
        prompt=PromptOptions(
            bypass_prefix_cache=True if rng.random() < 0.1 else None,
            cache_salt="salt" if rng.random() < 0.05 else "",
        ),
        timeout_s=rng.uniform(0, 60 * step_s)
        if "deadlines" in active and rng.random() < 0.2
        else None,
    )


def _draw_behaviour(rng: random.Random, active: frozenset[str], step_s: float) -> dict[str, Any]:
    fate = rng.random()
    if "leavers" in active and fate < 0.1:
        return {"leave_after": rng.randint(0, 12)}
    if "cancels" in active and fate < 0.25:
        stalls = {"stall_after": rng.randint(0, 6)} if rng.random() < 0.3 else {}
        return {"cancel_at_s": rng.uniform(0, 60 * step_s), **stalls}
    if "aborts" in active and fate < 0.32:
        if rng.random() < 0.2:
            return {"abort_before_s": rng.choice([0.01, 30.0, 90.0])}
        stalls = {"stall_after": rng.randint(0, 6)} if rng.random() < 0.3 else {}
        return {"cancel_at_s": rng.uniform(0, 60 * step_s), "aborts": True, **stalls}
    if "stalled_readers" in active and fate < 0.4:
        return {"stall_after": rng.randint(0, 6), "linger_s": rng.choice([0.0, 3.0])}
    if "slow_readers" in active and fate < 0.6:
        return {"delay_s": rng.choice([2, 20]) * step_s}
    return {}


def _make_odd(rng: random.Random, client: Client) -> Client:
    """Add to the request one valid feature beyond token ids and a limit."""
    request, sampling = client.request, client.request.sampling
    ids = request.token_ids or ()
    match rng.randrange(12):
        case 0:
            request = replace(request, token_ids=None, text="".join(f"<{i}>" for i in ids))
        case 1:  # long enough to be tokenised in a thread
            request = replace(
                request,
                token_ids=None,
                text="".join(f"<{i}>" for i in ids) * 60 + "x" * 2000,
                prompt=replace(request.prompt, truncate_to=rng.randint(1, 100)),
            )
        case 2:
            messages = ({"role": "user", "content": "".join(f"<{i}>" for i in ids)},)
            request = replace(
                request, token_ids=None, chat=Chat(messages, tools=TOOLS, truncates=True)
            )
        case 3:
            request = replace(request, output=OutputOptions(echo=True))
        case 4:
            request = replace(
                request,
                prompt=replace(
                    request.prompt, truncate_to=rng.randint(1, 60), truncate_left=rng.random() < 0.5
                ),
            )
        case 5:
            stops = rng.choice([("7>",), ("<1", "99"), ("><5", "0><")])
            sampling = replace(sampling, stop=stops, include_stop=rng.random() < 0.5)
        case 6:
            sampling = replace(sampling, stop_token_ids=tuple(range(1, 1000, 37)))
        case 7:
            sampling = replace(sampling, min_tokens=min(4, sampling.max_tokens or 4))
        case 8:
            sampling = replace(sampling, max_tokens=None, ignore_eos=rng.random() < 0.5)
        case 9:
            sampling = _edit(rng, sampling)
        case 10:
            least = rng.choice([0, 3])
            request = replace(request, output=OutputOptions(logprobs=least, prompt_logprobs=least))
        case 11:
            request = replace(request, constraint=Constraint("regex", rng.choice(FORMS)))
    request = replace(request, sampling=sampling)
    if len(prompt_of(request)) >= MAX_MODEL_LEN:
        return client
    return replace(client, request=request)


def _edit(rng: random.Random, sampling: SamplingParams) -> SamplingParams:
    """Set options that the engine checks and hands on, and the fake model ignores."""
    return replace(
        sampling,
        logit_bias={5: 1.5, 7: -2.0},
        allowed_token_ids=rng.choice([(), tuple(range(999))]),
        banned_token_ids=rng.choice([(), (3, 4)]),
        bad_words=rng.choice([(), ("<1>", "<2><3>"), ("words of " * 25,) * 20]),
    )


def _spoil_sampling(rng: random.Random, sampling: SamplingParams) -> SamplingParams:
    """Set options that no model with the fake one's vocabulary can follow."""
    changes = (
        {"logit_bias": {5: 1.5, 1000: 1.0}},
        {"allowed_token_ids": tuple(range(1001))},
        {"allowed_token_ids": (3, 4), "banned_token_ids": (4, 3)},
        {"banned_token_ids": tuple(range(1000))},
        {"bad_words": ("a", "\ud800")},
        {"allowed_token_ids": (3, 1000)},
        {"banned_token_ids": (-1,)},
        {"stop_token_ids": (1000,)},
    )
    return replace(sampling, **rng.choice(changes))


def _spoil(rng: random.Random, client: Client, index: int) -> Client:
    """Change the request in one way in which a request can be refused."""
    request, prompt = client.request, client.request.prompt
    change = partial(replace, request, check=False)  # the server checks requests
    reason = "INVALID_REQUEST"
    match rng.randrange(13):
        case 0:  # the id of an earlier request, which may have ended by now
            name = f"r{rng.randint(max(0, index - 20), index)}"
            return replace(
                client,
                request=change(request_id=name),
                may_end=frozenset({"DUPLICATE_REQUEST"}),
            )
        case 1:
            request, reason = change(model="nobody"), "MODEL_NOT_FOUND"
        case 2:
            request = change(text="both", chat=None, token_ids=(5,))
        case 3:
            request = change(text=None, chat=None, token_ids=())
        case 4:
            request = change(text=None, chat=None, token_ids=(1, 2, 1000))
        case 5:
            request = change(token_ids=None, chat=None, text="\ud800")
        case 6:
            request = change(
                text=None,
                chat=None,
                token_ids=(5,),
                prompt=replace(prompt, add_special_tokens=True),
            )
        case 7:
            request = change(
                text=None,
                chat=None,
                token_ids=(5,) * MAX_MODEL_LEN,
                prompt=replace(prompt, truncate_to=None),
            )
            reason = "REQUEST_TOO_LARGE"
        case 8:  # more choices than any stream of this buffer or scheduler can hold
            request = change(n=16)
            client, reason = replace(client, buffer=5, over_wire=False), "REQUEST_TOO_LARGE"
        case 9 | 10:
            sampling = replace(request.sampling, min_tokens=None)
            request = change(sampling=_spoil_sampling(rng, sampling))
        case 11:
            request = change(constraint=Constraint("regex", BAD_FORM))
        case 12:
            chat = Chat(({"role": "user", "content": "\ud800"},))
            request = change(token_ids=None, text=None, chat=chat)
    return replace(client, request=request, may_end=frozenset({reason}), must_fail=True)


def _ask_elsewhere(rng: random.Random, client: Client) -> Client:
    """Use a model that does not load, or that loads for longer than requests wait."""
    if client.request.model:
        return client
    change = partial(replace, client.request, check=False)  # unchecked: it may be invalid
    if rng.random() < 0.5:
        return replace(
            client,
            request=change(model=FRAGILE),
            may_end=client.may_end | {"SPAWN_FAILED"},
            must_fail=True,
        )
    return replace(
        client,
        request=change(model=SLEEPY),
        may_end=client.may_end | {"SPAWN_TIMEOUT"},
    )
