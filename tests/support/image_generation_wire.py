"""A synchronous client of GenerateImage, with the rule of `tests.support.wire`."""

from io import BytesIO

from PIL import Image

from engine.core.image_generation.types import Drawing
from engine.worker.fakes.image_generation import FAKE_INFO, image_of
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.wire import StreamingCall

ARTIST = {"name": "artist", "capability": "text-to-image"}


def draw_request(prompt="a cat", **fields):
    """Return a GenerateImageRequest, with a seed."""
    return pb.GenerateImageRequest(**{"prompt": prompt, "seed": 5} | fields)


class Draw(StreamingCall):
    """A GenerateImage call."""

    def __init__(self, channel, request, *, timeout=None, server_timeout=None):
        self.request = request
        method = stubs.InferenceStub(channel).GenerateImage
        super().__init__(method, request, timeout=timeout, server_timeout=server_timeout)

    def read_until(self, name):
        """Read until a message of this kind has come, and return it; None if none comes."""
        while (message := self.read()) is not None:
            if message.WhichOneof("event") == name:
                return message
        return None

    def of(self, name):
        """Return the events of one kind that have come."""
        return [getattr(m, name) for m in self.messages if m.WhichOneof("event") == name]

    def files(self):
        """Return the files that are complete, each made of parts that follow one another."""
        files, data = {}, b""
        for part in self.of("part"):
            assert part.index == len(files), "images come in order"
            assert len(part.data) <= 256 * 1024
            data += part.data
            if part.last:
                files[part.index], data = data, b""
        return files

    def check(self):
        """Check that a whole stream has everything, in order, and the right pixels."""
        assert self.error is None, self.error
        kinds = [message.WhichOneof("event") for message in self.messages]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"
        [started], [finished] = self.of("started"), self.of("finished")
        steps = started.steps
        assert kinds == [
            "started",
            *["progress"] * steps,
            *["part"] * (len(kinds) - steps - 2),
            kinds[-1],
        ]
        assert [one.step for one in self.of("progress")] == list(range(1, steps + 1))
        assert finished.seed == started.seed
        assert finished.usage.steps == steps
        files = self.files()
        count = self.request.n or 1
        assert len(files) == finished.usage.images == count
        if self.request.format in (pb.IMAGE_FORMAT_UNSPECIFIED, pb.IMAGE_FORMAT_PNG):
            drawing = drawing_of(self.request, started)
            for index, data in files.items():
                assert pixels_of(data) == image_of(drawing, steps, index).pixels


def drawing_of(request, started):
    """Return the drawing that the worker got, for a request without a source."""
    guidance = request.guidance if request.HasField("guidance") else FAKE_INFO.default_guidance
    return Drawing(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=started.width,
        height=started.height,
        steps=request.steps or FAKE_INFO.default_steps,
        guidance_scale=guidance,
        seed=started.seed,
        num_images=request.n or 1,
        scheduler=request.scheduler,
    )


def pixels_of(data):
    """Return the pixels of an image file, as RGB."""
    return Image.open(BytesIO(data)).convert("RGB").tobytes()


def draw(channel, request, *, timeout=None):
    """Make a GenerateImage call, read it to the end, and return what came."""
    with Draw(channel, request, timeout=timeout) as call:
        return call.finish()
