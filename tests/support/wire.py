"""A synchronous gRPC client for the tests: requests, whole streams, statuses with their details.

Rule: every call is bounded. One that has no deadline of its own is cancelled after `CALL_LIMIT_S`,
and its test then fails by the status CANCELLED.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY

from grpc_service._generated.triolet.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)

CALL_LIMIT_S = 60.0
POLL_S = 0.005
# A proxy named in the environment cannot reach this machine's own loopback.
NO_PROXY = (("grpc.enable_http_proxy", 0),)
# A client whose window closes after a few KB: the window is the receiver's to set.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH


def wait_until(condition, timeout_s=10.0, what=""):
    """Poll until ``condition()`` is true, and return what it gave."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {timeout_s} s: {what or condition}"
        time.sleep(POLL_S)
    return found


@contextlib.contextmanager
def connect(address, *options):
    """A channel of its own connection."""
    own = ("grpc.use_local_subchannel_pool", 1)
    with grpc.insecure_channel(address, options=[*NO_PROXY, own, *options]) as channel:
        yield channel


def details(error):
    """The google.rpc details of a call's end, by message name; {} for a status that is not the
    server's own (a client's timer, a lost connection, grpc's own refusals)."""
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
    """The ErrorInfo's reason, "" where there is none."""
    found = details(error)
    return found["ErrorInfo"].reason if found else ""


def broken_fields(error):
    """The fields that a BadRequest names."""
    return [v.field for v in details(error)["BadRequest"].field_violations]


def error_of(call):
    """The error that ``call()`` ends with."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"no error but {answer}")


# ---- generate --------------------------------------------------------------------------------


def generate_request(**fields):
    """A GenerateRequest; a ``prompt_ids`` list stands for token_ids, ``sampling`` fields may be
    given at the top."""
    sampling = dict(fields.pop("sampling", {}))
    for name in ("max_tokens", "min_tokens", "temperature", "stop", "seed", "stop_token_ids"):
        if name in fields:
            sampling[name] = fields.pop(name)
    if "prompt_ids" in fields:
        fields["token_ids"] = {"ids": list(fields.pop("prompt_ids"))}
    elif not fields.keys() & {"text", "token_ids", "chat"}:
        fields["text"] = "Once"
    return inference_pb2.GenerateRequest(sampling=sampling, **fields)


@dataclass
class Heard:
    """What a client heard of one request. ``error`` is None for a success."""

    messages: list = field(default_factory=list)
    error: grpc.RpcError | None = None

    @property
    def kinds(self):
        return [message.WhichOneof("event") for message in self.messages]

    @property
    def started(self):
        return self.messages[0].started

    @property
    def deltas(self):
        return [message.delta for message in self.messages if message.HasField("delta")]

    def text(self, choice=0):
        return "".join(delta.text for delta in self.deltas if delta.choice == choice)

    def ids(self, choice=0):
        return [i for delta in self.deltas if delta.choice == choice for i in delta.token_ids]

    def finished(self, choice=0):
        [one] = [
            message.finished
            for message in self.messages
            if message.HasField("finished") and message.finished.choice == choice
        ]
        return one


class Generation:
    """A Generate call under way, read at the test's pace. Leaving it as a context cancels it.

    Token ids are asked for unless ``output`` is given.
    """

    def __init__(self, channel, *, timeout=None, **fields):
        fields.setdefault("output", {"token_ids": True})
        self.heard = Heard()
        stub = inference_pb2_grpc.InferenceStub(channel)
        self.call = stub.Generate(generate_request(**fields), timeout=timeout)
        self._limit = threading.Timer(CALL_LIMIT_S, self.call.cancel)
        self._limit.daemon = True
        self._limit.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cancel()

    def cancel(self):
        self.call.cancel()
        self._limit.cancel()
        self._limit.join()

    def read(self):
        """The next message, or None at the end."""
        try:
            message = next(self.call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            self.heard.error = error
            return None
        self.heard.messages.append(message)
        return message

    def read_deltas(self, count):
        """Read until so many Deltas have come in all."""
        while len(self.heard.deltas) < count:
            assert self.read() is not None, f"ended: {self.heard.error}"
        return self

    def finish(self):
        """Read to the end."""
        try:
            while self.read() is not None:
                pass
        finally:
            self._limit.cancel()
            self._limit.join()
        return self.heard


def generate(channel, *, timeout=None, **fields):
    """A whole Generate call."""
    return Generation(channel, timeout=timeout, **fields).finish()


# ---- the other calls -------------------------------------------------------------------------


def stats(channel, timeout=10):
    """Control.GetStats' totals."""
    stub = control_pb2_grpc.ControlStub(channel)
    return stub.GetStats(control_pb2.GetStatsRequest(), timeout=timeout).totals


def ended(channel):
    """Requests ended since the server's start, by how; those that are not 0."""
    totals = stats(channel).requests_total
    return {field.name: count for field, count in totals.ListFields()}


def is_idle(totals):
    """No request lives, and every block is free."""
    live = totals.running + totals.waiting + totals.parked + totals.ending
    return not live and totals.free_blocks == totals.total_blocks > 0


def wait_idle(channel, timeout_s=10.0):
    """Poll until the server is idle; the totals then."""
    found = []

    def look():
        found[:] = [stats(channel)]
        return is_idle(found[0])

    wait_until(look, timeout_s, f"idle: {found}")
    return found[0]


def health(channel, name="", timeout=10):
    """The health of a name, or None for one that is not known."""
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
    """The ids of a text."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.TokenizeRequest(text=text, **fields)
    return [token.id for token in stub.Tokenize(request, timeout=timeout).tokens]


def list_models(channel, timeout=10):
    stub = models_pb2_grpc.ModelsStub(channel)
    return stub.ListModels(models_pb2.ListModelsRequest(), timeout=timeout).models
