"""The requests of a simulated world to its encoders; `clients` draws how their readers behave."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.core.encode.types import ACTIVATIONS, AGGREGATIONS, PRECISIONS, RANGED
from engine.requests.encode.classify_values import ClassifyRequest
from engine.requests.encode.values import MAX_INPUTS, EmbedRequest, EncodeRequests, RerankRequest
from engine.worker.fakes.encode import DIMENSIONS
from tests.simulator.clients import FRAGILE, MODEL, SLEEPY, Client
from tests.simulator.encode_oracle import LABELLERS, MAX_INPUT_LEN, image_file

EMBEDDER, RERANKER = "embedder", "reranker"


def ask_encoder(
    rng: random.Random,
    client: Client,
    index: int,
    active: frozenset[str],
    step_s: float,
    *,
    is_named: bool,
) -> Client:
    """Return ``client`` with a request to an encoder instead.

    Most of its deadlines and cancels come after a few steps. With ``is_named`` the request names
    its model, because the configuration does not say which models are encoders.
    """
    request = _draw_embed(rng) if rng.random() < 0.6 else _draw_rerank(rng)
    name = EMBEDDER if isinstance(request, EmbedRequest) else RERANKER
    timeout_s, cancel_at_s = client.request.timeout_s, client.cancel_at_s
    if timeout_s is not None and rng.random() < 0.7:
        timeout_s /= 10
    if cancel_at_s is not None and rng.random() < 0.7:
        client = replace(client, cancel_at_s=cancel_at_s / 12)
    if "stalled_readers" in active and rng.random() < 0.15:
        client = replace(client, stall_after=rng.randint(0, 3))
    request = replace(
        request,
        model=name if is_named or rng.random() < 0.5 else "",
        request_id=f"e{index}",
        priority=rng.choice([None, 0, 0, -1, 2]),
        timeout_s=timeout_s,
    )
    client = replace(client, request=request, may_end=frozenset(), must_fail=False)
    if "bad_requests" in active and rng.random() < 0.2:
        client = _spoil(rng, client, request, index)
    elif "model_trouble" in active and rng.random() < 0.1:
        client = _ask_elsewhere(rng, client, request)
    return client


def _draw_count(rng: random.Random) -> int:
    """Draw a number of inputs: mostly a few, sometimes more than fit into one step."""
    return rng.choice([1, 2, rng.randint(1, 8), rng.randint(1, 8), rng.randint(10, 90)])


def _draw_ids(rng: random.Random) -> tuple[int, ...]:
    longest = rng.choice([3, MAX_INPUT_LEN, 2 * MAX_INPUT_LEN])
    return tuple(rng.randint(1, 899) for _ in range(rng.randint(1, longest)))


def _draw_text(rng: random.Random) -> str:
    return "".join(f"<{token}>" for token in _draw_ids(rng))


def _draw_embed(rng: random.Random) -> EmbedRequest:
    count = _draw_count(rng)
    takes_ids = rng.choice([0.0, 0.5, 1.0])
    return EmbedRequest(
        inputs=tuple(
            _draw_ids(rng) if rng.random() < takes_ids else _draw_text(rng) for _ in range(count)
        ),
        dimensions=rng.choice([None, None, 1, 5, 8]),
        normalize=rng.choice([None, False, True]),
        prompt_name=rng.choice(["", "", "query"]),
        truncate=rng.choice([None, True]),
    )


def show_images(rng: random.Random, client: Client) -> Client:
    """Return ``client``, with images among its request's inputs if that is a valid Embed. In one
    such client of ten one image is damaged, and the request must fail."""
    request = client.request
    if not isinstance(request, EmbedRequest) or client.must_fail or rng.random() < 0.3:
        return client
    images = [image_file(rng.randbytes(48)) for _ in range(rng.choice([1, 3, 20]))]
    texts = list(request.inputs) * rng.randint(0, 1)
    inputs = rng.sample(texts + images, len(texts) + len(images))
    if rng.random() < 0.1:
        inputs[inputs.index(images[0])] = images[0][:-30]
        client = replace(client, may_end=frozenset({"INVALID_REQUEST"}), must_fail=True)
    return replace(client, request=replace(request, inputs=tuple(inputs)))


def shape_vectors(rng: random.Random, client: Client, others: Sequence[str]) -> Client:
    """Return ``client``, with a precision in its Embed request, or with another kind of vectors by
    the model of ``others`` that makes them. In one such client of ten a field does not fit, and the
    request must fail."""
    request = client.request
    if client.must_fail or client.may_end or rng.random() < 0.4:
        return client
    if isinstance(request, RerankRequest):
        # an empty document alone has no tokens
        model = request.model if "" in request.documents else rng.choice([request.model, *others])
        return replace(client, request=replace(request, model=model))
    if not isinstance(request, EmbedRequest):
        return client
    kind = "" if request.has_images else rng.choice(["", *others])
    if kind == "sparse":
        limits = {"top_k": rng.choice([None, 1, 3]), "threshold": rng.choice([None, 0.0, 0.75])}
        fields = {"kind": kind, "model": kind, "dimensions": None, "normalize": None} | limits
    else:
        precision = rng.choice([*PRECISIONS])
        number = request.dimensions or DIMENSIONS
        ranges = ((0.25,) * number, (0.75,) * number) if precision in RANGED else None
        fields = {"kind": kind, "model": kind or request.model}
        fields |= {"precision": precision, "ranges": ranges}
    if rng.random() < 0.1:
        wrong = {"precision": "int8", "ranges": ((1.0,), (0.0,))}, {"top_k": 0}, {"threshold": -1.0}
        fields |= rng.choice(wrong) | {"check": False}
        client = replace(client, may_end=frozenset({"INVALID_REQUEST"}), must_fail=True)
    return replace(client, request=replace(request, **fields))


def label_inputs(rng: random.Random, client: Client) -> Client:
    """Return ``client``, with a Classify request by one of `LABELLERS` in the place of its Embed or
    Rerank. In one such client of ten a field does not fit, and the request must fail."""
    request = client.request
    is_ours = isinstance(request, EmbedRequest | RerankRequest)
    if not is_ours or client.must_fail or client.may_end or rng.random() < 0.5:
        return client
    model = rng.choice([*LABELLERS])
    fields: dict[str, Any] = {"aggregation": rng.choice(AGGREGATIONS)}
    draw = _draw_text
    if model == "labeller":
        fields = {
            "activation": rng.choice(["", *ACTIVATIONS]),
            "top_k": rng.choice([None, 1, 2, 9]),
        }
        draw = _draw_labelled
    fields |= {
        "inputs": tuple(draw(rng) for _ in range(_draw_count(rng))),
        "model": model,
        "truncate": rng.choice([None, True]),
    }
    if rng.random() < 0.1:
        wrong = (
            {"top_k": 0},
            {"activation": "relu"},
            {"aggregation": "best"},
            {"inputs": ("\ud800",)},
        )
        fields |= rng.choice(wrong) | {"check": False}
        client = replace(client, may_end=frozenset({"INVALID_REQUEST"}), must_fail=True)
    names = ("request_id", "priority", "timeout_s")
    made = ClassifyRequest(**fields, **{name: getattr(request, name) for name in names})
    return replace(client, request=made)


def _draw_labelled(rng: random.Random) -> Any:
    form = rng.choice([_draw_text, _draw_ids, None])
    return (_draw_text(rng), _draw_text(rng)) if form is None else form(rng)


def _draw_rerank(rng: random.Random) -> RerankRequest:
    count = _draw_count(rng)
    return RerankRequest(
        query=_draw_text(rng)[:100],
        documents=tuple(rng.choice([_draw_text(rng), ""]) for _ in range(count)),
        raw_scores=rng.choice([None, False, True]),
        top_n=rng.choice([None, None, 1, rng.randint(1, count + 2)]),
    )


def _spoil(rng: random.Random, client: Client, request: EncodeRequests, index: int) -> Client:
    """Change the request so that it is refused, or use an earlier request's id."""
    if rng.random() < 0.1:
        name = f"e{rng.randint(max(0, index - 20), index)}"
        named = replace(request, request_id=name)
        return replace(client, request=named, may_end=frozenset({"DUPLICATE_REQUEST"}))
    is_embed = isinstance(request, EmbedRequest)
    bad = _spoil_embed(rng, request) if is_embed else _spoil_rerank(rng, request)
    is_long = bad.truncate is False
    reason = "REQUEST_TOO_LARGE" if is_long else "INVALID_REQUEST"
    return replace(client, request=bad, may_end=frozenset({reason}), must_fail=True)


def _spoil_embed(rng: random.Random, request: EmbedRequest) -> EmbedRequest:
    inputs = request.inputs
    changes = (
        lambda: {"inputs": ()},
        lambda: {"inputs": ("a",) * (MAX_INPUTS + 1)},
        lambda: {"inputs": (*inputs, ())},
        lambda: {"inputs": (*inputs, ""), "prompt_name": ""},
        lambda: {"inputs": (*inputs, (1, 1000))},
        lambda: {"inputs": (*inputs, (-1,))},
        lambda: {"inputs": (*inputs, "\ud800")},
        lambda: {"dimensions": rng.choice([0, 9])},
        lambda: {"prompt_name": "nobody's"},
        lambda: {"prompt_name": "x" * 200},
        lambda: {"priority": 2**31},
        lambda: {"timeout_s": float("nan")},
        lambda: {"inputs": (*inputs, (5,) * (MAX_INPUT_LEN + 1)), "truncate": False},
    )
    return replace(request, check=False, **rng.choice(changes)())


def _spoil_rerank(rng: random.Random, request: RerankRequest) -> RerankRequest:
    documents = request.documents
    changes = (
        {"documents": ()},
        {"query": ""},
        {"query": "\ud800"},
        {"documents": (*documents, "\ud800")},
        {"top_n": 0},
        {"documents": (*documents, "<5>" * MAX_INPUT_LEN), "truncate": False},
    )
    return replace(request, check=False, **rng.choice(changes))


def _ask_elsewhere(rng: random.Random, client: Client, request: EncodeRequests) -> Client:
    """Use a model that does not load, loads for long, has another capability, or does not exist."""
    other = RERANKER if isinstance(request, EmbedRequest) else EMBEDDER
    model, reasons = rng.choice(
        [
            (FRAGILE, {"SPAWN_FAILED"}),
            (SLEEPY, {"SPAWN_TIMEOUT", "INVALID_REQUEST"}),
            (MODEL, {"INVALID_REQUEST"}),
            (other, {"INVALID_REQUEST"}),
            ("nobody", {"MODEL_NOT_FOUND"}),
        ]
    )
    asked = replace(request, model=model)
    return replace(client, request=asked, may_end=frozenset(reasons), must_fail=True)
