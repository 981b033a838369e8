# Written by tools/regen_faces.py from grpc_service/client/aio.py; do not edit.
"""A client for threads that block: `Client`, and the streams that its calls return.

A method has its RPC's name, takes the RPC's request message, or a mapping or text in its place
(`grpc_service.client.requests`), and returns the response message or a stream of them. ``timeout``
is in seconds and becomes the server's deadline; without it the call has no deadline. A status other
than OK is raised as a `CallError`, and an argument that a method cannot take as a TypeError or
ValueError that names it, before a call is made.

Rule: threads may share a client. One thread reads a stream, and any thread may cancel it.
"""

from __future__ import annotations

import threading
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from grpc_service.client import messages
from grpc_service.client.channel import key_metadata, open_channel
from grpc_service.client.errors import CallError, Cancelled, call_error
from grpc_service.client.requests import (
    chat_request,
    checked,
    completion_request,
    request_of,
    requests_of,
    seconds_of,
)
from grpc_service.client.resumption import RESUME_S, method_of, resumption_of
from grpc_service.client.stubs import ControlStub, InferenceStub, ModelsStub

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self, Unpack

    from google.protobuf.message import Message

    from grpc_service.client.channel import ChannelSettings
    from grpc_service.client.requests import Conversation, EmbedRequests, Given
    from grpc_service.client.resumption import OnBreak, Resumption

Response = TypeVar("Response")


class Stream(Generic[Response]):
    """The messages of one call, in the order in which they come.

    Iterating ends after the last message of a call that succeeded, and raises the `CallError` of
    one that did not. Leaving the stream as a context cancels the call, and the server's work with
    it; a stream that has ended is not affected.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages = call.__iter__()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Response:
        try:
            message: Response = next(self._messages)
        except grpc.RpcError as error:
            raise call_error(error) from error
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the call, from any thread. A thread that reads the stream gets `Cancelled`."""
        self._call.cancel()


class TextStream(Stream[messages.GenerateResponse]):
    """The events of a Generate request. A stream that breaks goes on in another call
    (`Client.generate`)."""

    def __init__(
        self,
        start: Callable[[Message, float | None], Any],
        resumption: Resumption,
        timeout: float | None,
    ) -> None:
        super().__init__(start(resumption.request, timeout))
        self._start = start
        self._resumption = resumption
        self._is_cancelled = threading.Event()

    def __next__(self) -> messages.GenerateResponse:
        while True:
            try:
                event = super().__next__()
            except CallError as error:
                self._go_on(error)
                continue
            shown = self._resumption.take(event)
            if shown is not None:
                return shown

    def _go_on(self, error: CallError) -> None:
        """Make the call that continues the stream after ``error``, or raise it.

        Raises:
            StopIteration: all choices have ended. CallError: the stream cannot go on.
        """
        if self._resumption.is_whole and self._resumption.is_resumable(error):
            raise StopIteration
        next_call = None if self._is_cancelled.is_set() else self._resumption.next_call(error)
        if next_call is None:
            raise error
        self._is_cancelled.wait(next_call.delay_s)
        if not self._is_cancelled.is_set():
            self._call = self._start(next_call.request, next_call.timeout)
            self._messages = self._call.__iter__()
        if self._is_cancelled.is_set():  # cancelled, perhaps before `cancel` knew this call
            self._call.cancel()
            raise Cancelled(grpc.StatusCode.CANCELLED, "the call was cancelled") from error

    def cancel(self) -> None:
        """End the request, from any thread. A thread that reads the stream gets `Cancelled`."""
        self._is_cancelled.set()
        super().cancel()

    def text(self, choice: int = 0) -> str:
        """Read to the end, and return the text of one choice.

        Raises:
            CallError: the call failed.
        """
        checked("choice", choice, int, "a whole number")
        return "".join([event.delta.text for event in self if event.delta.choice == choice])


class ImageStream(Stream[messages.GenerateImageResponse]):
    """The events of a GenerateImage request."""

    def files(self) -> list[bytes]:
        """Read to the end, and return the files of the images, in order.

        Raises:
            CallError: the call failed.
        """
        files: dict[int, bytearray] = {}
        for event in self:
            if event.HasField("part"):
                files.setdefault(event.part.index, bytearray()).extend(event.part.data)
        return [bytes(data) for _, data in sorted(files.items())]


class Client:
    """A client of one server, which connects with the first call. Threads may share it.

    ``address`` is ``HOST``, ``HOST:PORT`` or ``unix:PATH``. ``api_key`` is sent with every call;
    over a network it needs ``tls``, because others could read it otherwise. For the other settings
    see `ChannelSettings`. ``models`` and ``control`` have the calls for operators.

    A Generate stream that breaks because the server cannot be reached, or shuts down, goes on where
    it was, with any server at the address that has the same model. It fails if
    nothing new has come for ``resume_s`` seconds; with 0, a stream that breaks fails at once.

    Raises:
        PemError: a TLS file is wrong.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        resume_s: float = RESUME_S,
        **settings: Unpack[ChannelSettings],
    ) -> None:
        self._resume_s = checked("resume_s", resume_s, Real, "seconds")
        self._channel = open_channel(address, **settings)
        self._calls = _Calls(InferenceStub(self._channel), api_key)
        self.models = ModelsClient(_Calls(ModelsStub(self._channel), api_key))
        self.control = ControlClient(_Calls(ControlStub(self._channel), api_key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and cancel the calls that are under way."""
        self._channel.close()

    def generate(
        self,
        request: Given[messages.GenerateRequest] | str,
        *,
        timeout: float | None = None,
        on_break: OnBreak | None = None,
    ) -> TextStream:
        """Continue a prompt or answer a chat. ``on_break`` is called whenever the stream breaks and
        is about to go on, with the error and the seconds until then. A text is a prompt."""
        timeout = seconds_of(timeout)
        resumption = resumption_of(request, timeout, self._resume_s, on_break)

        def start(message: Message, left: float | None) -> Any:
            return self._calls.start(method_of(message), message, left)

        return TextStream(start, resumption, timeout)

    def attach(
        self, request: Given[messages.AttachRequest] | str, *, timeout: float | None = None
    ) -> Stream[messages.GenerateResponse]:
        """Continue a stream whose call was lost. `generate` does so by itself."""
        return Stream(self._calls.start("attach", request, timeout))

    def complete(
        self,
        request: Given[messages.GenerateRequest] | str,
        *,
        timeout: float | None = None,
        **sampling: Any,
    ) -> str:
        """Return the whole text for a prompt, or for a request of one choice. ``sampling`` are
        fields of `messages.SamplingParams`, and override the request's."""
        message = completion_request(request, sampling)
        with self.generate(message, timeout=timeout) as stream:
            return stream.text()

    def chat(
        self,
        conversation: Conversation,
        *,
        model: str = "",
        sampling: Given[messages.SamplingParams] | None = None,
        timeout: float | None = None,
        on_break: OnBreak | None = None,
        **options: Any,
    ) -> TextStream:
        """Answer a conversation: a text, or turns, each a message or a mapping with ``role`` and
        ``content``. ``options`` are fields of ``sampling``, and override it. `generate` takes
        everything else that a chat may have."""
        request = chat_request(conversation, model, sampling, options)
        return self.generate(request, timeout=timeout, on_break=on_break)

    def embed(
        self, request: Given[messages.EmbedRequest], *, timeout: float | None = None
    ) -> Stream[messages.EmbedResponse]:
        """Turn each input into a vector. Vectors come as they are ready, in any order."""
        return Stream(self._calls.start("embed", request, timeout))

    def embed_stream(
        self, requests: EmbedRequests, *, timeout: float | None = None
    ) -> Stream[messages.EmbedStreamResponse]:
        """Turn any number of inputs into vectors. The first of ``requests`` has the parameters;
        they are taken as fast as the server takes them, and the results come in any order."""
        return Stream(self._calls.start_stream("embed_stream", requests, timeout))

    def rerank(
        self, request: Given[messages.RerankRequest], *, timeout: float | None = None
    ) -> Stream[messages.RerankResponse]:
        """Score documents by how well they answer a query. Scores come in any order,
        unless ``top_n`` is set."""
        return Stream(self._calls.start("rerank", request, timeout))

    def classify(
        self, request: Given[messages.ClassifyRequest], *, timeout: float | None = None
    ) -> Stream[messages.ClassifyResponse]:
        """Label each input, or find its entities. Results come as they are ready, in any order."""
        return Stream(self._calls.start("classify", request, timeout))

    def generate_image(
        self, request: Given[messages.GenerateImageRequest] | str, *, timeout: float | None = None
    ) -> ImageStream:
        """Draw images of a prompt. Their progress comes first, then the parts of their files."""
        return ImageStream(self._calls.start("generate_image", request, timeout))

    def tokenize(
        self, request: Given[messages.TokenizeRequest] | str, *, timeout: float | None = None
    ) -> messages.TokenizeResponse:
        """Split a text or a chat into tokens."""
        return self._calls.ask("tokenize", request, timeout)

    def detokenize(
        self, request: Given[messages.DetokenizeRequest], *, timeout: float | None = None
    ) -> messages.DetokenizeResponse:
        """Turn token ids into text."""
        return self._calls.ask("detokenize", request, timeout)


class ModelsClient:
    """Lists, loads and unloads models; `Client.models`."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls

    def list_models(self, *, timeout: float | None = None) -> messages.ListModelsResponse:
        """List every model that the server knows, loaded or not."""
        return self._calls.ask("list_models", {}, timeout)

    def get_model(
        self, request: Given[messages.GetModelRequest] | str, *, timeout: float | None = None
    ) -> messages.GetModelResponse:
        """Describe one model."""
        return self._calls.ask("get_model", request, timeout)

    def load_model(
        self, request: Given[messages.LoadModelRequest] | str, *, timeout: float | None = None
    ) -> Stream[messages.LoadModelResponse]:
        """Load a model, and stream the stages of the load. The server goes on loading
        when the stream is left."""
        return Stream(self._calls.start("load_model", request, timeout))

    def unload_model(
        self, request: Given[messages.UnloadModelRequest] | str, *, timeout: float | None = None
    ) -> messages.UnloadModelResponse:
        """Unload a model, and return when its memory is free."""
        return self._calls.ask("unload_model", request, timeout)

    def load_adapter(
        self, request: Given[messages.LoadAdapterRequest], *, timeout: float | None = None
    ) -> messages.LoadAdapterResponse:
        """Load an adapter as a model of its own, or replace it, and return when it is loaded."""
        return self._calls.ask("load_adapter", request, timeout)

    def unload_adapter(
        self, request: Given[messages.UnloadAdapterRequest] | str, *, timeout: float | None = None
    ) -> messages.UnloadAdapterResponse:
        """Forget an adapter, and return when its memory is free."""
        return self._calls.ask("unload_adapter", request, timeout)


class ControlClient:
    """Watches and steers a running server; `Client.control`."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls

    def get_stats(self, *, timeout: float | None = None) -> messages.GetStatsResponse:
        """Return the server's figures."""
        return self._calls.ask("get_stats", {}, timeout)

    def watch_stats(
        self, *, timeout: float | None = None
    ) -> Stream[messages.GetStatsResponse]:
        """Stream the server's figures, about once a second."""
        return Stream(self._calls.start("watch_stats", {}, timeout))

    def pause(
        self, request: Given[messages.PauseRequest], *, timeout: float | None = None
    ) -> messages.PauseResponse:
        """Pause one model or all. A step that runs at that moment still ends."""
        return self._calls.ask("pause", request, timeout)

    def resume(
        self, request: Given[messages.ResumeRequest] | str, *, timeout: float | None = None
    ) -> messages.ResumeResponse:
        """End a pause."""
        return self._calls.ask("resume", request, timeout)

    def abort(
        self, request: Given[messages.AbortRequest] | str, *, timeout: float | None = None
    ) -> messages.AbortResponse:
        """End requests by their ids."""
        return self._calls.ask("abort", request, timeout)

    def drain(
        self, request: Given[messages.DrainRequest], *, timeout: float | None = None
    ) -> messages.DrainResponse:
        """Refuse new requests, and return when the last one has ended."""
        return self._calls.ask("drain", request, timeout)

    def reset_prefix_cache(
        self,
        request: Given[messages.ResetPrefixCacheRequest] | str,
        *,
        timeout: float | None = None,
    ) -> messages.ResetPrefixCacheResponse:
        """Forget every cached prefix. Running requests keep their blocks."""
        return self._calls.ask("reset_prefix_cache", request, timeout)

    def explain(
        self, request: Given[messages.ExplainRequest] | str, *, timeout: float | None = None
    ) -> messages.ExplainResponse:
        """Return what a live request does, and what it waits for."""
        return self._calls.ask("explain", request, timeout)

    def get_usage(
        self, request: Given[messages.GetUsageRequest], *, timeout: float | None = None
    ) -> messages.GetUsageResponse:
        """Return what ended requests have used, by holder and model."""
        return self._calls.ask("get_usage", request, timeout)


class _Calls:
    """Makes the calls of a service by its ``stub``. Calls send the API key."""

    def __init__(self, stub: Any, api_key: str) -> None:
        self._stub = stub
        self._metadata = key_metadata(api_key)

    def start(self, method: str, request: Any, timeout: float | None) -> Any:
        name = method.title().replace("_", "")
        message = request_of(method, getattr(messages, f"{name}Request"), request)
        call = getattr(self._stub, name)
        return call(message, timeout=seconds_of(timeout), metadata=self._metadata)

    def start_stream(self, method: str, requests: Any, timeout: float | None) -> Any:
        call = getattr(self._stub, method.title().replace("_", ""))
        return call(requests_of(requests), timeout=seconds_of(timeout), metadata=self._metadata)

    def ask(self, method: str, request: Any, timeout: float | None) -> Any:
        try:
            return self.start(method, request, timeout)
        except grpc.RpcError as error:
            raise call_error(error) from error
