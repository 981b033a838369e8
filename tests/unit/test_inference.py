"""What the handlers of the inference RPCs give to the engine."""

from types import SimpleNamespace

import pytest

from grpc_service._generated.triolet.v1 import images_pb2, inference_pb2
from grpc_service.services import draw_codec, encode_codec, text_codec
from grpc_service.services.inference import Inference

DECODERS = {
    "Generate": (text_codec, "decode_generate", inference_pb2.GenerateRequest(text="a")),
    "Embed": (
        encode_codec,
        "decode_embed",
        inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="a")]),
    ),
    "Rerank": (
        encode_codec,
        "decode_rerank",
        inference_pb2.RerankRequest(query="q", documents=["d"]),
    ),
    "GenerateImage": (draw_codec, "decode_draw", images_pb2.GenerateImageRequest(prompt="a")),
}


class Submitted(Exception):
    """What was submitted, instead of a stream."""


@pytest.mark.parametrize("name", DECODERS)
async def test_decoding_a_request_takes_from_its_timeout(name, autojump_clock, monkeypatch):
    """Red if the engine counts the timeout from the end of the decoding: then the call's own
    deadline comes first, and the request counts as cancelled."""

    def submit(request, *, arrived_at, **_fields):
        raise Submitted(request.timeout_s, arrived_at)

    codec, function, request = DECODERS[name]
    decode = getattr(codec, function)

    def decode_slowly(*args):
        asked = decode(*args)
        autojump_clock.jump(5)
        return asked

    monkeypatch.setattr(codec, function, decode_slowly)
    began_at = autojump_clock.current_time()
    engine = SimpleNamespace(submit=submit, config=SimpleNamespace(stream_buffer=8))
    backend = SimpleNamespace(engine=engine, unread_calls=None)
    rpc = SimpleNamespace(
        call=SimpleNamespace(time_remaining=lambda: 0.5), request_id="", quota=None
    )
    with pytest.raises(Submitted) as found:
        await getattr(Inference(backend), name)(request, rpc)
    assert found.value.args == (0.5, began_at)
