"""A synchronous gRPC client for the tests: requests, whole streams, statuses with their details.

Rule: every call is bounded. A call without a deadline of its own is cancelled after `CALL_LIMIT_S`,
and its test then fails with the status CANCELLED.
"""

import contextlib
import threading
import time
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY

from grpc_service.client import messages as pb
from grpc_service.client import stubs

CALL_LIMIT_S = 60.0
POLL_S = 0.005
POLL_MOST_S = 0.1
# A proxy that the environment names cannot reach this machine's loopback address.
NO_PROXY = (("grpc.enable_http_proxy", 0),)
# A client whose window closes after a few KB. The receiver chooses the window's size.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STOP = pb.FINISH_REASON_STOP
LENGTH = pb.FINISH_REASON_LENGTH


def wait_until(condition, timeout_s=10.0, what=""):
    """Poll until ``condition()`` is true, and return its value.

    One poll counts as at most `POLL_MOST_S`: on a busy machine, neither this process nor the server
    may run for seconds.
    """
    waited, last = 0.0, time.monotonic()
    while not (found := condition()):
        assert waited < timeout_s, f"not within {timeout_s} s: {what or condition}"
        time.sleep(POLL_S)
        now = time.monotonic()
        waited += min(now - last, POLL_MOST_S)
        last = now
    return found


@contextlib.contextmanager
def connect(address, *options):
    """Return a channel with a connection of its own."""
    own = ("grpc.use_local_subchannel_pool", 1)
    with grpc.insecure_channel(address, options=[*NO_PROXY, own, *options]) as channel:
        yield channel


def details(error):
    """Return the google.rpc details of a call's end, by message name.

    Return {} for a status that did not come from the server: a client's timer, a lost connection,
    or a refusal by grpc itself.
    """
    values = [v for key, v in error.trailing_metadata() or () if key == GRPC_DETAILS_METADATA_KEY]
    if not values:
        return {}
    [value] = values
    status = Status.FromString(value)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = {}
    for packed in status.details:
        name = packed.TypeName().removeprefix("google.rpc.")
        found[name] = getattr(error_details_pb2, name)()
        assert packed.Unpack(found[name])
    assert found["ErrorInfo"].domain == "triolet"
    return found


def reason(error):
    """Return the reason of the status's ErrorInfo, or "" without one."""
    found = details(error)
    return found["ErrorInfo"].reason if found else ""


def broken_fields(error):
    """Return the fields that a BadRequest names."""
    return [v.field for v in details(error)["BadRequest"].field_violations]


def error_of(call):
    """Return the error that ``call()`` raises."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"no error but {answer}")


# ---- generate --------------------------------------------------------------------------------


def generate_request(**fields):
    """Return a GenerateRequest.

    A list ``prompt_ids`` stands for token_ids; fields of ``sampling`` may be given at the top
    level.
    """
    sampling = dict(fields.pop("sampling", {}))
    for name in ("max_tokens", "min_tokens", "temperature", "stop", "seed", "stop_token_ids"):
        if name in fields:
            sampling[name] = fields.pop(name)
    if "prompt_ids" in fields:
        fields["token_ids"] = {"ids": list(fields.pop("prompt_ids"))}
    elif not fields.keys() & {"text", "token_ids", "chat"}:
        fields["text"] = "Once"
    return pb.GenerateRequest(sampling=sampling, **fields)


@dataclass
class Heard:
    """What a client received for one request. ``error`` is None for a success."""

    messages: list = field(default_factory=list)
    error: grpc.RpcError | None = None

    @property
    def kinds(self):
        """Return the kinds of the messages, in their order."""
        return [message.WhichOneof("event") for message in self.messages]

    @property
    def started(self):
        """Return Started, which only progress may precede."""
        return next(m for m in self.messages if not m.HasField("progress")).started

    @property
    def deltas(self):
        """Return the Deltas, in their order."""
        return [message.delta for message in self.messages if message.HasField("delta")]

    def text(self, choice=0):
        """Return the text of a choice."""
        return "".join(delta.text for delta in self.deltas if delta.choice == choice)

    def ids(self, choice=0):
        """Return the token ids of a choice."""
        return [i for delta in self.deltas if delta.choice == choice for i in delta.token_ids]

    def finished(self, choice=0):
        """Return Finished of a choice."""
        [one] = [
            message.finished
            for message in self.messages
            if message.HasField("finished") and message.finished.choice == choice
        ]
        return one


def timeout_metadata(timeout_s):
    """Return the metadata that tells the server a timeout of which the client itself has no timer.

    Only the server can end such a call at its deadline, however busy the machine is.
    """
    return [] if timeout_s is None else [("grpc-timeout", f"{round(timeout_s * 1000)}m")]


class StreamingCall:
    """A call under way, read at the test's pace. Leaving its context cancels the call.

    ``server_timeout`` is a timeout for the server alone (`timeout_metadata`). The messages and the
    error of the call become attributes of ``heard``, which is the call itself unless one is given.
    """

    def __init__(self, method, request, *, timeout=None, server_timeout=None, heard=None):
        self.messages = []
        self.error = None
        self.heard = heard or self
        self.call = method(request, timeout=timeout, metadata=timeout_metadata(server_timeout))
        self._limit = threading.Timer(CALL_LIMIT_S, self.call.cancel)
        self._limit.daemon = True
        self._limit.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cancel()

    def cancel(self):
        """Cancel the call."""
        self.call.cancel()
        self._limit.cancel()
        self._limit.join()

    def read(self):
        """Return the next message, or None at the end."""
        try:
            message = next(self.call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            self.heard.error = error
            return None
        self.heard.messages.append(message)
        return message

    def finish(self):
        """Read to the end."""
        try:
            while self.read() is not None:
                pass
        finally:
            self._limit.cancel()
            self._limit.join()
        return self.heard


class Generation(StreamingCall):
    """A Generate call. Token ids are requested unless ``output`` is given."""

    def __init__(self, channel, *, timeout=None, server_timeout=None, **fields):
        fields.setdefault("output", {"token_ids": True})
        super().__init__(
            stubs.InferenceStub(channel).Generate,
            generate_request(**fields),
            timeout=timeout,
            server_timeout=server_timeout,
            heard=Heard(),
        )

    def read_deltas(self, count):
        """Read until ``count`` Deltas have come in all."""
        while len(self.heard.deltas) < count:
            assert self.read() is not None, f"ended: {self.heard.error}"
        return self


def generate(channel, *, timeout=None, **fields):
    """Make a Generate call, read it to the end, and return what came."""
    return Generation(channel, timeout=timeout, **fields).finish()


# ---- the other calls -------------------------------------------------------------------------


def stats(channel, timeout=10):
    """Return the totals of Control.GetStats."""
    stub = stubs.ControlStub(channel)
    return stub.GetStats(pb.GetStatsRequest(), timeout=timeout).totals


def replica_states(channel):
    """Return the states of all replicas, sorted."""
    stub = stubs.ControlStub(channel)
    found = stub.GetStats(pb.GetStatsRequest(), timeout=10).replicas
    return sorted(replica.state for replica in found)


def ended(channel):
    """Return how many requests have ended since the server's start, by reason, without zeros."""
    totals = stats(channel).requests_total
    return {field.name: count for field, count in totals.ListFields()}


def is_idle(totals):
    """Return whether no request lives, and every block and state slot is free."""
    live = totals.running + totals.waiting + totals.parked + totals.ending
    if live or totals.free_states != totals.total_states:
        return False
    return totals.free_blocks == totals.total_blocks > 0


def wait_idle(channel, timeout_s=10.0):
    """Poll until the server is idle, and return the totals.

    The limit begins anew with each request that ends, so that a slow machine needs no other limit.
    """
    seen = [stats(channel)]

    def is_other():
        seen.append(stats(channel))
        return is_idle(seen[-1]) or seen[-1].requests_total != seen[0].requests_total

    while not is_idle(seen[-1]):
        del seen[:-1]
        wait_until(is_other, timeout_s, "idle, or one request fewer")
    return seen[-1]


def health(channel, name="", timeout=10):
    """Return the health of a name, or None for an unknown name."""
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=timeout).status
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return None


def wait_serving(channel, timeout_s=30.0):
    """Poll until the server as a whole is SERVING."""
    wait_until(lambda: health(channel) == SERVING, timeout_s, "SERVING")


def tokenize(channel, text, timeout=30, **fields):
    """Return the token ids of a text."""
    stub = stubs.InferenceStub(channel)
    request = pb.TokenizeRequest(text=text, **fields)
    return [token.id for token in stub.Tokenize(request, timeout=timeout).tokens]


def list_models(channel, timeout=10):
    """Return the models that ListModels names."""
    stub = stubs.ModelsStub(channel)
    return stub.ListModels(pb.ListModelsRequest(), timeout=timeout).models
