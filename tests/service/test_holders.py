"""Several holders on one server: what a user's key may do with somebody else's request.

The rules of admission are in `tests/unit/test_access.py`, for every RPC by the descriptors. Here
each RPC and each path of HTTP that names a request, or that shows requests, is asked about one of
somebody else's; an RPC of which this says nothing fails a test.
"""

import contextlib

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from engine.requests.quota import Origin, Quota
from engine.requests.text.prepare import _salt_of
from grpc_service._generated.triolet.v1 import control_pb2, inference_pb2, models_pb2
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.examples import examples
from tests.support.openai_calls import TEXT, ask
from tests.support.server import fake
from tests.support.wire import (
    Generation,
    details,
    error_of,
    generate,
    reason,
    wait_serving,
    wait_until,
)

KEYS = {
    "ann": "the-key-of-ann-0001",
    "ben": "the-key-of-ben-0001",
    "ops": "the-key-of-the-operator",
    "gate": "the-key-of-a-gateway",
    "late": "the-key-of-somebody-patient",
    "few": "the-key-of-a-holder-of-few",
    "tight": "the-key-of-a-tight-holder",
    "spent": "the-key-of-a-spendthrift",
    "wordy": "the-key-of-a-holder-of-long-texts",
    "pair": "the-key-of-two-requests",
}
LINES = {"ann": "role=user max_priority=-1", "ops": "role=operator", "gate": "delegate=true"}
LINES["late"] = "max_priority=5"
LINES |= {"few": "max_choices=3", "tight": "max_kv_blocks=150", "spent": "max_tokens_per_minute=50"}
LINES["wordy"] = "max_tokenizer_seconds_per_minute=0.000001"
LINES["pair"] = "max_requests=2"
SOON_S = 15.0
PROMPT = list(range(1, 40))
NAMES = st.text("3a:\0", max_size=6)
LIVE = {"prompt_ids": [5], "max_tokens": 2000}
# By caller, whether it gets the answer about a request of Ann's; otherwise it is NOT_FOUND.
MAY_SEE = {"ann": True, "ben": False, "ops": True, "gate": False, "gate for ann": False}


class Metadata(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds metadata to every call."""

    def __init__(self, metadata):
        self._metadata = metadata

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_stream = intercept_unary_unary


def metadata_of(caller):
    """Return what a caller shows: a key, and perhaps for whom it calls."""
    name, _, other = caller.partition(" for ")
    shown = [("authorization", f"Bearer {KEYS[name]}")]
    return [*shown, ("x-triolet-holder", other)] if other else shown


def called_by(server, caller):
    """Return a channel whose calls are the caller's."""
    return grpc.intercept_channel(server.channel, Metadata(metadata_of(caller)))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve a slow fake to four keys."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"{name} {key} {LINES.get(name, '')}\n" for name, key in KEYS.items()))
    settings = {"api_key_file": str(path), "openai_port": 0}
    with fake(script={"step_s": 0.01}, server=settings) as one:
        wait_serving(one.channel)
        yield one


@contextlib.contextmanager
def living(server, caller="ann", **fields):
    """Yield a request that is on its way, and its id."""
    with Generation(called_by(server, caller), **LIVE | fields) as call:
        call.read_deltas(1)
        yield call, call.heard.started.request_id


def explain(channel, name):
    return (
        stubs.ControlStub(channel).Explain(pb.ExplainRequest(request_id=name), timeout=SOON_S).state
    )


def abort(channel, *names):
    answer = stubs.ControlStub(channel).Abort(pb.AbortRequest(request_ids=names), timeout=SOON_S)
    return [result.outcome for result in answer.results]


def attach(channel, name):
    """Attach with a right id; nobody but the holder can have the token."""
    asked = pb.AttachRequest(request_id=name, attach_token="guessed")
    return list(stubs.InferenceStub(channel).Attach(asked, timeout=SOON_S))


def is_not_found(error):
    return error is not None and (error.code(), reason(error)) == (
        grpc.StatusCode.NOT_FOUND,
        "REQUEST_NOT_FOUND",
    )


# ---- somebody else's request -----------------------------------------------------------------

# The RPCs whose requests name a request; `Attach` is in tests/service/test_resuming.py, too.
ABOUT_A_REQUEST = {
    "triolet.v1.Control/Abort",
    "triolet.v1.Control/Explain",
    "triolet.v1.Control/GetUsage",
    "triolet.v1.Inference/Attach",
}
MADE_BY_IT = {  # these name the request that they make
    f"triolet.v1.Inference/{name}"
    for name in ("Generate", "Embed", "EmbedStream", "Rerank", "Classify", "GenerateImage")
}


def test_every_rpc_that_names_a_request_is_asked_about_here():
    naming = {
        f"{service.full_name}/{method.name}"
        for file in (inference_pb2, models_pb2, control_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if any("request_id" in field.name for field in method.input_type.fields)
        or any("holder" in field.name for field in method.input_type.fields)
    }
    assert naming - MADE_BY_IT == ABOUT_A_REQUEST


@pytest.mark.parametrize("caller", MAY_SEE)
def test_a_request_is_explained_to_its_holder_and_to_operators(server, caller):
    with living(server) as (_, name):
        channel = called_by(server, caller)
        if MAY_SEE[caller]:
            assert explain(channel, name) == "RUNNING"
        else:
            theirs = error_of(lambda: explain(channel, name))
            unknown = error_of(lambda: explain(channel, "nobodys"))
            assert is_not_found(theirs)
            assert theirs.details().replace(name, "ID") == unknown.details().replace(
                "nobodys", "ID"
            )


@pytest.mark.parametrize("caller", MAY_SEE)
def test_a_request_is_aborted_by_its_holder_and_by_operators(server, caller):
    with living(server) as (call, name):
        channel = called_by(server, caller)
        if MAY_SEE[caller]:
            assert abort(channel, name) == [pb.ABORT_OUTCOME_ABORTED]
            assert reason(call.finish().error) == "ABORTED"
        else:
            assert is_not_found(error_of(lambda: abort(channel, name)))
            assert is_not_found(error_of(lambda: abort(channel, "nobodys")))
            call.read_deltas(len(call.heard.deltas) + 5)  # it goes on


def test_an_abort_of_several_requests_ends_none_if_one_is_somebody_elses(server):
    with living(server, "ben") as (own, own_name), living(server) as (_, name):
        ben = called_by(server, "ben")
        assert is_not_found(error_of(lambda: abort(ben, own_name, name)))
        own.read_deltas(len(own.heard.deltas) + 5)
        assert abort(ben, own_name) == [pb.ABORT_OUTCOME_ABORTED]
        assert reason(own.finish().error) == "ABORTED"
        assert abort(ben, own_name) == [pb.ABORT_OUTCOME_ALREADY_ENDED]
        assert is_not_found(error_of(lambda: abort(called_by(server, "ann"), own_name)))


@pytest.mark.parametrize("caller", ["ben", "ops", "gate for ann"])
def test_nobody_else_attaches_to_a_request(server, caller):
    with living(server, resume_window={"seconds": 20}) as (_, name):
        assert is_not_found(error_of(lambda: attach(called_by(server, caller), name)))


def test_a_gateways_holders_have_requests_of_their_own(server):
    with living(server, "gate for one") as (_, name):
        assert explain(called_by(server, "gate for one"), name) == "RUNNING"
        for caller in ("gate for two", "gate"):
            assert is_not_found(error_of(lambda who=caller: explain(called_by(server, who), name)))
        assert explain(called_by(server, "ops"), name) == "RUNNING"


def test_holders_have_ids_of_their_own(server):
    """Nobody learns from an answer that another holder uses an id, or keeps it from using one."""
    ann, ben, ops = (called_by(server, caller) for caller in ("ann", "ben", "ops"))
    with living(server, request_id="job-1") as (call, name):
        assert is_not_found(error_of(lambda: explain(ben, name)))
        with living(server, "ben", request_id=name) as (own, own_name):
            assert own_name == name
            again = generate(ben, prompt_ids=[5], request_id=name, max_tokens=2, timeout=SOON_S)
            assert reason(again.error) == "DUPLICATE_REQUEST"
            assert [explain(channel, name) for channel in (ann, ben, ops)] == ["RUNNING"] * 3
            assert abort(ben, name) == [pb.ABORT_OUTCOME_ABORTED]
            assert reason(own.finish().error) == "ABORTED"
            call.read_deltas(len(call.heard.deltas) + 5)
        assert abort(ben, name) == [pb.ABORT_OUTCOME_ALREADY_ENDED]
        assert is_not_found(error_of(lambda: explain(ben, name)))
        assert explain(ops, name) == "RUNNING"
        with living(server, "ben", request_id=name) as (own, _):
            assert abort(ops, name) == [pb.ABORT_OUTCOME_ABORTED]
            for one in (call, own):
                assert reason(one.finish().error) == "ABORTED"
    for channel in (ann, ben, ops):
        assert abort(channel, name) == [pb.ABORT_OUTCOME_ALREADY_ENDED]


# ---- what others use ---------------------------------------------------------------------------


def usage(channel, **asked):
    """Return the requests of each holder that a caller sees."""
    answer = stubs.ControlStub(channel).GetUsage(pb.GetUsageRequest(**asked), timeout=SOON_S)
    return {one.holder: one.requests for one in answer.sums}


@pytest.mark.parametrize("caller", MAY_SEE)
def test_a_holder_sees_its_own_use_and_operators_everybodys(server, caller):
    channel, name = called_by(server, caller), caller.replace(" for ", "/")
    for asking in (called_by(server, "ann"), channel):
        assert generate(asking, prompt_ids=[5], max_tokens=2, timeout=SOON_S).error is None
    is_operator = caller == "ops"
    wait_until(lambda: usage(channel).get(name), SOON_S, "its own record")
    assert is_operator or set(usage(channel)) == {name}
    assert usage(channel, holder=name)[name] == usage(channel)[name]
    for other in {"ann", "", "nobody"} - {name}:
        if is_operator:
            assert (other in usage(channel, holder=other)) == (other in usage(channel))
        else:
            assert is_not_found(error_of(lambda other=other: usage(channel, holder=other)))
    assert usage(channel, model="no such model") == {}


# ---- the paths of HTTP -----------------------------------------------------------------------


@pytest.mark.parametrize("caller", MAY_SEE)
def test_the_page_shows_a_user_its_own_requests(server, caller):
    headers = dict(metadata_of(caller))
    port = server.openai_port
    with living(server) as (call, name):
        listed = ask(port, "/triolet/requests", verb="GET", headers=headers).json
        assert [one["request_id"] for one in listed["requests"]] == [name] * MAY_SEE[caller]
        assert listed["total"] == MAY_SEE[caller]
        path = f"/triolet/explain?request_id={name}"
        told = ask(port, path, verb="GET", headers=headers)
        assert told.status == (200 if MAY_SEE[caller] else 404)
        statistics = ask(port, "/triolet/statistics", verb="GET", headers=headers)
        assert statistics.status == (200 if caller == "ops" else 403)
        metrics = ask(port, "/metrics", verb="GET", headers=headers)
        assert metrics.status == (200 if caller == "ops" else 403)
        ended = ask(port, "/triolet/abort", {"request_ids": [name]}, headers=headers)
        assert ended.status == (200 if MAY_SEE[caller] else 404)
        if MAY_SEE[caller]:
            assert reason(call.finish().error) == "ABORTED"
        else:
            call.read_deltas(len(call.heard.deltas) + 5)
    operator = called_by(server, "ops")
    stub = stubs.ControlStub(operator)
    wait_until(lambda: not stub.GetStats(pb.GetStatsRequest()).totals.running, SOON_S)


# ---- what a holder shares ----------------------------------------------------------------------


def cached(server, caller, prompt):
    """Return how many of a prompt's tokens a caller finds in the cache."""
    heard = generate(called_by(server, caller), prompt_ids=prompt, max_tokens=2, timeout=SOON_S)
    assert heard.error is None, heard.error
    return heard.finished().usage.cached_tokens


def test_holders_share_no_cached_prefix(server):
    assert cached(server, "ann", PROMPT) == 0
    assert cached(server, "ann", PROMPT) == 32
    for caller in ("ben", "gate", "gate for ann", "gate for ben"):
        assert cached(server, caller, PROMPT) == 0, caller
    assert cached(server, "gate for ann", PROMPT) == 32


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(NAMES, NAMES), min_size=2, max_size=2, unique=True))
@example([("a", ""), ("", "a\0")])
@example([("a", "\0"), ("a\0", "")])
def test_no_salt_of_a_client_makes_another_holders(pairs):
    """No two pairs of a holder's name and a client's own salt make one salt; without both there
    is none, so that a router follows the blocks (`ObservePrefixes`)."""
    one, other = (_salt_of(*pair) for pair in pairs)
    assert one != other
    assert _salt_of("", "") == ""


def test_holders_share_prefixes_if_the_server_is_told_so(tmp_path):
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {KEYS[name]}\n" for name in ("ann", "ben")))
    with fake(server={"api_key_file": str(path)}, engine={"share_prefixes": True}) as server:
        wait_serving(server.channel)
        assert cached(server, "ann", PROMPT) == 0
        assert cached(server, "ben", PROMPT) == 32


def test_a_keys_requests_are_as_urgent_as_it_may_be(server):
    ann = called_by(server, "ann")
    assert generate(ann, priority=-1, max_tokens=2, timeout=SOON_S).error is None
    error = generate(ann, priority=-2, max_tokens=2, timeout=SOON_S).error
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "priority: is -2, but this key's requests may have -1 or more" in error.details()


def test_a_keys_choices_are_limited_and_not_its_calls(server):
    few = called_by(server, "few")
    with living(server, "few", n=2):
        error = generate(few, n=2, max_tokens=2, timeout=SOON_S).error
        assert (error.code(), reason(error)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
        )
        assert "runs 2 of at most 3 choices, and this request has 2" in error.details()
        assert generate(few, max_tokens=2, timeout=SOON_S).error is None
        error = generate(few, n=4, max_tokens=2, timeout=SOON_S).error  # would never run
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "n: is 4, but this key runs at most 3 choices" in error.details()
    wait_until(
        lambda: generate(few, n=3, max_tokens=2, timeout=SOON_S).error is None, SOON_S, "the end"
    )


@pytest.mark.parametrize(
    ("caller", "fields", "told"),
    [
        ("few", {"prompt": ["<5>"] * 4}, "4 prompts, which are 4 choices at a time, of at most 3"),
        ("few", {"prompt": ["<5>"] * 2, "n": 2}, "2 prompts, which are 4 choices"),
        ("few", {"prompt": "<5>", "n": 4}, "is 4, but this key runs at most 3 choices"),
        ("pair", {"prompt": ["<5>"] * 3}, "3 prompts, which are 3 requests at a time"),
    ],
)
def test_what_a_key_may_never_run_is_no_error_to_try_again(server, caller, fields, told):
    """Else a client that retries, such as `triolet batch`, would do so for ever."""
    asked, headers = {"model": "fake", "max_tokens": 2}, dict(metadata_of(caller))
    answer = ask(server.openai_port, TEXT, asked | fields, headers=headers)
    assert answer.status == 400
    assert answer.error["param"] == ("n" if fields["prompt"] == "<5>" else "prompt")
    assert told in answer.error["message"]
    assert "retry-after" not in answer.headers
    fits = asked | {"prompt": ["<5>"] * 2}
    assert ask(server.openai_port, TEXT, fits, headers=headers).status == 200


def test_a_keys_blocks_are_limited(server):
    tight = called_by(server, "tight")
    with living(server, "tight"):
        error = generate(tight, prompt_ids=[5], max_tokens=2000, timeout=SOON_S).error
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "KV blocks of at most 150" in error.details()
        assert generate(tight, prompt_ids=[5], max_tokens=2, timeout=SOON_S).error is None
    wait_until(
        lambda: generate(tight, prompt_ids=[5], max_tokens=10, timeout=SOON_S).error is None,
        SOON_S,
        "the end",
    )


def test_a_key_has_so_many_tokens_a_minute(server):
    spent = called_by(server, "spent")
    asked = {"prompt_ids": range(1, 31), "max_tokens": 30, "timeout": SOON_S}
    assert generate(spent, **asked).error is None

    def refused():
        return generate(spent, prompt_ids=[5], max_tokens=1, timeout=SOON_S).error

    error = wait_until(refused, SOON_S, "the record")
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "has used its 50 tokens a minute" in error.details()


def test_a_key_has_so_many_seconds_of_tokenizers_a_minute(server):
    wordy, text = called_by(server, "wordy"), "Once upon a time " * 60
    assert generate(wordy, text=text, max_tokens=2, timeout=SOON_S).error is None
    stub = stubs.InferenceStub(wordy)
    for call in (
        lambda: list(stub.Generate(pb.GenerateRequest(text="a"), timeout=SOON_S)),
        lambda: stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=SOON_S),
        lambda: stub.Detokenize(pb.DetokenizeRequest(ids=[5]), timeout=SOON_S),
    ):
        error = error_of(call)
        assert (error.code(), reason(error)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
        )
        assert "this key has used its 1e-06 seconds of tokenizers a minute" in error.details()
        assert details(error)["RetryInfo"].retry_delay.seconds >= 1
    headers = dict(metadata_of("wordy"))
    answer = ask(server.openai_port, "/v1/completions", {"prompt": "a"}, headers=headers)
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "seconds of tokenizers" in answer.json["error"]["message"]


def test_a_request_without_a_priority_has_one_that_its_key_may_use(server):
    late = called_by(server, "late")
    assert generate(late, max_tokens=2, timeout=SOON_S).error is None
    assert generate(late, priority=5, max_tokens=2, timeout=SOON_S).error is None
    error = generate(late, priority=0, max_tokens=2, timeout=SOON_S).error
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("most", "asked", "priority"),
    [(None, None, 0), (None, -3, -3), (-1, None, 0), (5, None, 5), (5, 7, 7), (0, None, 0)],
)
def test_what_the_scheduler_takes_for_a_requests_priority(most, asked, priority):
    assert Origin(quota=Quota("ann", max_priority=most)).priority_of(asked) == priority
    assert Origin().priority_of(asked) == (asked or 0)
