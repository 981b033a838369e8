"""The bytes of a request's images are counted before the request is parsed."""

import random
import time

import pytest

from grpc_service.client import messages as pb
from grpc_service.rpc.errors import MessageTooLarge
from grpc_service.services.image_bytes import EMBED, FIELDS_MAX, image_bytes_of, judge_of
from grpc_service.services.methods import IMAGE_FIELDS, INFERENCE


def embed(*inputs, **fields):
    return pb.EmbedRequest(inputs=inputs, **fields).SerializeToString()


def test_only_images_count():
    image = bytes(range(256)) * 20
    mixed = [
        {"text": "x" * 300},
        {"image": image},
        {"token_ids": {"ids": [7, 300]}},
        {"image": b"a"},
    ]
    data = embed(*mixed, model="m", dimensions=300, normalize=True, priority=-1)
    assert image_bytes_of(data) == len(image) + 1
    assert image_bytes_of(embed({"text": "a\x1a" * 300})) == 0
    assert image_bytes_of(b"") == 0


def test_a_field_behind_an_image_in_its_input_makes_it_count_as_none():
    """protobuf takes the last field of a oneof: here a large text would pass for an image."""
    one = (
        pb.EmbedInput(image=b"abc").SerializeToString()
        + pb.EmbedInput(text="x" * 9).SerializeToString()
    )
    data = pb.EmbedRequest(inputs=[pb.EmbedInput.FromString(b"")]).SerializeToString()
    hidden = data[:1] + bytes([len(one)]) + one
    assert pb.EmbedRequest.FromString(hidden).inputs[0].text == "x" * 9
    assert image_bytes_of(hidden) == 0


def test_a_request_within_the_limit_is_not_looked_at_and_images_come_on_top():
    judge = judge_of(EMBED, 1000)
    judge(b"\xff" * 1000)
    judge(embed({"text": "x" * 900}, {"image": bytes(10**6)}))
    for data in (
        embed({"text": "x" * 1001}, {"image": bytes(10**6)}),
        embed(*[{"image": b""}] * 600),
        b"\xff" * 1001,
    ):
        with pytest.raises(MessageTooLarge, match="beside its images, of at most 1000"):
            judge(data)


def test_millions_of_fields_cost_no_more_than_thousands():
    data = embed({"image": b""}) * 2_000_000
    started = time.thread_time()
    with pytest.raises(MessageTooLarge):
        judge_of(EMBED, 4 * 2**20)(data)
    assert time.thread_time() - started < 0.5
    assert image_bytes_of(embed({"image": b"a"}) * (FIELDS_MAX + 100)) == FIELDS_MAX


@pytest.mark.parametrize("seed", range(20))
def test_no_bytes_make_it_fail(seed):
    rng = random.Random(seed)
    whole = embed({"text": "abc"}, {"image": bytes(200)}, model="m")
    for _ in range(200):
        data = bytearray(whole[: rng.randrange(len(whole) + 1)] + rng.randbytes(rng.randrange(20)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        assert 0 <= image_bytes_of(bytes(data)) <= len(data)


def paths_to_images(message):
    """Yield the path of field numbers to each field of a message type that holds an image."""
    for one in message.fields:
        if one.message_type is not None and one.message_type.file.package == "triolet.v1":
            yield from ((one.number, *rest) for rest in paths_to_images(one.message_type))
        elif one.name == "image":
            yield (one.number,)


def test_every_request_may_have_large_images_where_it_has_images():
    found = {
        method.name: path
        for method in INFERENCE.methods
        for path in paths_to_images(method.input_type)
    }
    assert found == IMAGE_FIELDS
