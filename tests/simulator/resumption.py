"""Clients whose streams are cut and who continue them, as often as drawn.

Some have a resume window: they lose their connections, and attach in time or too late. Both are
drawn by generators of their own, so that worlds without them stay the same.
"""

import random
from collections.abc import Iterable
from dataclasses import replace

from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.kept_events import ReceivedChoice
from engine.requests.text.values import GenerateRequest
from tests.simulator.clients import Client
from tests.simulator.readers import TextReader

FAULT = "resumes"
SHARE = 0.3  # of worlds
WINDOW_MAX_S = 200.0
CUT_SHARE = 0.4  # share of a world's clients that would read to the end


def is_drawn(seed: int) -> bool:
    """Return whether clients of the world of this seed continue streams."""
    return _rng(seed).random() < SHARE


def _rng(seed: int) -> random.Random:
    return random.Random(f"resumes {seed}")


def cut(seed: int, clients: Iterable[Client]) -> tuple[Client, ...]:
    """Return the clients, some of them with streams that are cut."""
    rng, again = _rng(seed), random.Random(f"attaches again {seed}")
    return tuple(_cut(rng, again, client) for client in clients)


def _cut(rng: random.Random, again: random.Random, client: Client) -> Client:
    stays = client.leave_after is None and client.cancel_at_s is None and not client.must_fail
    if not isinstance(client.request, GenerateRequest) or not stays or rng.random() >= CUT_SHARE:
        return client
    first, *others = [rng.randint(0, 9) for _ in range(rng.choice([1, 1, 2, 8]))]
    client = replace(client, leave_after=first, cuts=tuple(others))
    if not client.over_wire or rng.random() < 0.4:
        return client
    window = rng.choice([0.5, 20.0, WINDOW_MAX_S])
    away = rng.choice([0.0, 0.5, 0.99, 1.01, 3.0]) * window
    client = replace(client, request=replace(client.request, resume_window_s=window), away_s=away)
    is_hasty = again.random() < 0.3
    return replace(client, again_s=again.choice([0.0, 0.01, 1.0])) if is_hasty else client


def continued(reader: TextReader, now: float, number: int) -> TextReader | None:
    """Return the reader of the request that continues a cut stream, with the events so far; None if
    the client has everything, or leaves for good."""
    client, asked = reader.client, reader.client.request
    assert isinstance(asked, GenerateRequest)
    n = asked.n or 1
    if client.cuts is None or len(reader.finished) == n:
        return None
    heard = [
        ContinuedChoice(tuple(reader.tokens.get(choice, ())), choice in reader.finished)
        for choice in range(n)
    ]
    name = asked.request_id.partition("+")[0]
    client = _next_cut(reader)
    request = replace(
        asked,
        request_id=f"{name}+{number}",
        continuation=Continuation(tuple(heard)),
        check=False,
    )
    following = _same(reader, replace(client, arrival_s=now, request=request))
    following.num_had = sum(map(len, reader.tokens.values()))
    return following


def attached(reader: TextReader) -> tuple[TextReader, tuple[ReceivedChoice, ...]]:
    """Return the reader of the call that attaches to a lost stream, and the numbers of tokens that
    its client has received."""
    received = tuple(
        ReceivedChoice(len(reader.tokens.get(choice, ())), choice in reader.finished)
        for choice in range(reader.client.request.n or 1)
    )
    following = _same(reader, _next_cut(reader))
    following.has_grown = bool(reader.tokens or reader.finished)
    return following, received


def _next_cut(reader: TextReader) -> Client:
    """Return the reader's client with its next cut."""
    client = reader.client
    seen = sum(map(len, reader.tokens.values())) + len(reader.finished)
    again, cuts = (seen + client.cuts[0], client.cuts[1:]) if client.cuts else (None, None)
    return replace(client, leave_after=again, cuts=cuts)


def _same(reader: TextReader, client: Client) -> TextReader:
    return TextReader(
        client,
        tokens=reader.tokens,
        text=reader.text,
        finished=reader.finished,
        num_had=reader.num_had,
        num_clients=reader.num_clients,
    )
