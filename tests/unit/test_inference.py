"""What the handlers of the inference RPCs give to the engine."""

from types import SimpleNamespace

import pytest

from engine.errors import ShuttingDown
from grpc_service._generated.triolet.v1 import images_pb2, inference_pb2, vectors_pb2
from grpc_service.access.interceptor import Interceptor
from grpc_service.services import encode_codec, image_generation_codec, text_codec
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import methods
from tests.support.rpc_calls import serving

DECODERS = {
    "Generate": (text_codec, "decode_generate", inference_pb2.GenerateRequest(text="a")),
    "Embed": (
        encode_codec,
        "decode_embed",
        vectors_pb2.EmbedRequest(inputs=[vectors_pb2.EmbedInput(text="a")]),
    ),
    "Rerank": (
        encode_codec,
        "decode_rerank",
        vectors_pb2.RerankRequest(query="q", documents=["d"]),
    ),
    "GenerateImage": (
        image_generation_codec,
        "decode_generate_image",
        images_pb2.GenerateImageRequest(prompt="a"),
    ),
}


@pytest.mark.parametrize("name", DECODERS)
async def test_decoding_a_request_takes_from_its_timeout(name, autojump_clock, monkeypatch):
    """Red if the engine counts the timeout from the end of the decoding: the call's own deadline
    would pass first, and the request would count as cancelled by its client."""

    submitted = []

    def submit(request, *, arrived_at, **_fields):
        submitted.append((request.timeout_s, arrived_at))
        raise ShuttingDown("enough was seen")

    codec, function, request = DECODERS[name]
    decode = getattr(codec, function)

    def decode_slowly(*args):
        asked = decode(*args)
        autojump_clock.jump(5)
        return asked

    monkeypatch.setattr(codec, function, decode_slowly)
    engine = SimpleNamespace(submit=submit, config=SimpleNamespace(stream_buffer=8))
    backend = SimpleNamespace(engine=engine, unread_calls=None)
    async with serving(Interceptor(methods(backend, 2**20), None, status_of).serve) as server:
        client = await server.connect()
        began_at = autojump_clock.current_time()
        await client.request(
            f"triolet.v1.Inference/{name}",
            request.SerializeToString(),
            headers={"grpc-timeout": "500m"},
        )
    assert submitted == [(0.5, began_at)]
