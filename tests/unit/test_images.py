"""Image files become pixels, or are refused with a reason, at a bounded cost."""

import io
import random
import struct
import time
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, ImageOps

from engine.images.anyres_preprocessor import AnyresPreprocessor
from engine.images.decode import decode, to_rgb
from engine.images.errors import BadImage
from engine.images.fit import ImageFit, read_as
from engine.images.grid_preprocessor import GridPreprocessor
from engine.images.preprocessor import SquarePreprocessor, TiledPreprocessor
from tests.support.images import (
    BOMBS,
    FORMATS,
    animated,
    chunk,
    encoded,
    exif,
    gif_of_size,
    hostile,
    jpeg_of_size,
    picture,
    pixels,
    png_of_size,
    png_of_two_sizes,
    segment,
    webp_of_size,
    with_segments,
)

MOST = 2**20
SQUARE = ImageFit(num_tokens=1, max_pixels=MOST, size=(32, 32))


def librarys(data):
    """Return what transformers' ``load_image`` makes of a file."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def same(got, want):
    """Return whether two images have the same mode and pixels."""
    return (got.mode, got.size, got.tobytes()) == (want.mode, want.size, want.tobytes())


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_decoded_as_the_library_does(kind):
    data = picture(41, 30, kind)
    assert same(decode(data, MOST), librarys(data))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_each_mode_becomes_rgb_as_the_library_makes_it(mode):
    image = pixels(20, 17).convert(mode)
    options = {"transparency": bytes(range(0, 256, 2))} if mode == "P" else {}
    data = encoded(image, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # Pillow warns of the palette
        want = librarys(data)
    assert same(decode(data, MOST), want)


# Two pixels in each of Pillow's modes, and their RGB values by the mode's definition.
IN_EACH_MODE = {
    "1": (b"\x40", (0, 0, 0), (255, 255, 255)),
    "L": (bytes([7, 200]), (7, 7, 7), (200, 200, 200)),
    "LA": (bytes([7, 0, 200, 255]), (7, 7, 7), (200, 200, 200)),
    "La": (bytes([40, 100, 200, 255]), (102, 102, 102), (200, 200, 200)),
    "P": (bytes([3, 250]), (3, 252, 6), (250, 5, 244)),
    "PA": (bytes([3, 0, 250, 255]), (3, 252, 6), (250, 5, 244)),
    "RGB": (bytes([1, 2, 3, 254, 5, 6]), (1, 2, 3), (254, 5, 6)),
    "RGBA": (bytes([1, 2, 3, 0, 254, 5, 6, 255]), (1, 2, 3), (254, 5, 6)),
    "RGBa": (bytes([40, 20, 60, 100, 254, 5, 6, 255]), (102, 51, 153), (254, 5, 6)),
    "RGBX": (bytes([1, 2, 3, 9, 254, 5, 6, 9]), (1, 2, 3), (254, 5, 6)),
    "CMYK": (bytes([255, 0, 0, 0, 0, 0, 0, 55]), (0, 255, 255), (200, 200, 200)),
    "YCbCr": (bytes([100, 128, 128, 76, 85, 255]), (100, 100, 100), (254, 0, 0)),
    "LAB": (bytes([0, 0, 0, 255, 0, 0]), (0, 0, 0), (255, 255, 255)),
    "HSV": (bytes([0, 255, 255, 85, 255, 200]), (255, 0, 0), (0, 200, 0)),
    "F": (struct.pack("<2f", 7, 300), (7, 7, 7), (255, 255, 255)),
    "I": (struct.pack("<2i", 255, 0x1234), (0, 0, 0), (18, 18, 18)),
    "I;16": (struct.pack("<2H", 255, 0x1234), (0, 0, 0), (18, 18, 18)),
    "I;16L": (struct.pack("<2H", 256, 0x1234), (1, 1, 1), (18, 18, 18)),
    "I;16N": (struct.pack("=2H", 255, 65535), (0, 0, 0), (255, 255, 255)),
    "I;16B": (struct.pack(">2H", 511, 0x1234), (1, 1, 1), (18, 18, 18)),
}
PALETTE = [value for index in range(256) for value in (index, 255 - index, 2 * index % 256)]


def test_the_table_has_each_of_pillows_modes():
    assert set(IN_EACH_MODE) == set(Image.MODES)


@pytest.mark.parametrize("mode", IN_EACH_MODE)
def test_pixels_of_each_mode_become_rgb_by_the_modes_definition(mode):
    stored, *want = IN_EACH_MODE[mode]
    image = Image.frombytes(mode, (2, 1), stored)
    if mode in ("P", "PA"):
        image.putpalette(PALETTE)
    difference = np.array(to_rgb(image), np.int16)[0] - np.array(want)
    assert np.abs(difference).max() <= (mode == "LAB")  # LAB is computed in floats


# The colour types of PNG by their numbers: samples of a pixel, and the bits that each may have.
PNG_TYPES = {0: (1, (1, 2, 4, 8, 16)), 2: (3, (8, 16)), 3: (1, (1, 2, 4, 8)),
             4: (2, (8, 16)), 6: (4, (8, 16))}  # fmt: skip


@pytest.mark.parametrize(
    ("colour", "bits"), [(kind, bits) for kind, (_, each) in PNG_TYPES.items() for bits in each]
)
def test_each_form_of_png_has_the_pixels_that_its_samples_say(colour, bits):
    """Samples of fewer than 8 bits are stretched to 0 … 255; of 16 bits the upper 8 count."""
    samples, width = PNG_TYPES[colour][0], 16
    rows = np.random.default_rng(bits).integers(0, 1 << bits, (5, width, samples))
    if bits == 16:
        packed = [row.astype(">u2").tobytes() for row in rows]
    else:
        flat = (rows.reshape(5, -1, 1) >> np.arange(bits)[::-1] & 1).astype(np.uint8)
        packed = [np.packbits(row).tobytes() for row in flat.reshape(5, -1)]
    header = struct.pack(">IIBBBBB", width, 5, bits, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"PLTE", bytes(PALETTE[: 3 << min(bits, 8)]))]
    body = zlib.compress(b"".join(b"\0" + row for row in packed))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(parts[: 2 if colour == 3 else 1])
    data += chunk(b"IDAT", body) + chunk(b"IEND", b"")
    if colour == 3:
        want = np.array(PALETTE).reshape(-1, 3)[rows[..., 0]]
    else:
        levels = rows >> 8 if bits == 16 else rows * 255 // ((1 << bits) - 1)
        want = levels[..., :3] if samples > 2 else levels[..., :1].repeat(3, axis=2)
    assert decode(data, MOST).tobytes() == want.astype(np.uint8).tobytes()


def test_every_reader_takes_the_upper_half_of_16_bit_grey():
    """Encoders, chats and drawings read equal pixels from scans of 16 bits and copies of 8."""
    grey = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 64 + 17
    scan = encoded(Image.fromarray(grey))
    plain = encoded(Image.fromarray((grey >> 8).astype(np.uint8)))
    grid = GridPreprocessor(MOST, 3, "i", 1, 2, 1, 16, 1024)
    anyres = AnyresPreprocessor(MOST, 3, "i", 1, 16, ((32, 32),), 4, 16)
    tiled = TiledPreprocessor(MOST, 3, "i", 1, 32, 16, 4, 16, True)
    for read in (
        SQUARE.read,
        lambda data: read_as(data, (32, 32), MOST),
        SquarePreprocessor(SQUARE, "i", "i", 1, 4, 16).read,
        grid.read,
        anyres.read,
        tiled.read,
    ):
        assert read(scan) == read(plain)


def test_a_progressive_jpeg_of_the_most_pixels_is_decoded_as_the_library_does():
    data = picture(1024, 1024, "JPEG", progressive=True)
    assert same(decode(data, MOST), librarys(data))


def test_a_jpeg_of_four_colours_is_decoded_as_the_library_does():
    data = encoded(pixels(20, 17).convert("CMYK"), "JPEG")
    assert same(decode(data, MOST), librarys(data))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_picture_of_an_animation_counts(kind):
    data = animated(kind)
    assert same(decode(data, MOST), librarys(data))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("orientation", range(10))
def test_exif_turns_an_image_as_the_library_does(kind, order, orientation):
    start = b"Exif\0\0" if kind == "JPEG" else b""
    data = picture(21, 14, kind, exif=start + exif(orientation, order))
    got, want = decode(data, MOST), librarys(data)
    assert same(got, want)
    assert (got.size == (14, 21)) == (5 <= orientation <= 8)


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_xmp_turns_an_image_that_has_no_exif(orientation):
    xmp = b'<x:xmpmeta><d tiff:Orientation="%d"/></x:xmpmeta>' % orientation
    start = b"http://ns.adobe.com/xap/1.0/\0"
    jpeg = with_segments(picture(21, 14, "JPEG"), segment(0xE1, start + xmp))
    for data in (jpeg, picture(21, 14, "WEBP", xmp=xmp)):
        assert same(decode(data, MOST), librarys(data))


def test_damaged_exif_does_not_turn_an_image_nor_refuse_it():
    whole, plain = b"Exif\0\0" + exif(6), picture(21, 14, "JPEG")
    for cut in range(len(whole) - 4):
        data = with_segments(plain, segment(0xE1, whole[:cut]))
        assert decode(data, MOST).size in ((21, 14), (14, 21))
    assert decode(with_segments(plain, segment(0xE1, whole)), MOST).size == (14, 21)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"https://example.com/cat.png", "is a URL, and the server opens none"),
        (b"data:image/png;base64,iVBORw0KGgo=", "is a URL"),
        (b"\0\0\0\x18ftypheic", "is a HEIF or AVIF file"),
        (b"II*\0" + bytes(20), "is a TIFF file"),
        (b"hello", "send the bytes of a JPEG, PNG, WebP or GIF file"),
        (b"\xff\xd8\xff", "is cut short"),
        (b"\xff\xd8\xff\xd9", "is a JPEG file without pixels"),
        (b"GIF89a", "is cut short"),
        (b"GIF89a" + bytes(7) + b";", "is a GIF file without pixels"),
        (b"RIFF\0\0\0\0WAVEfmt ", "is in no format that is read here"),
        (picture()[:60], "is a PNG file that is damaged or cut short"),
        (picture(kind="JPEG")[:-200], "is a JPEG file that is damaged or cut short"),
        (picture(kind="WEBP")[:-20], "is a WEBP file that is damaged or cut short"),
        (picture(kind="GIF")[:-200], "is a GIF file that is damaged or cut short"),
        (png_of_size(0, 5), "has no pixels"),
        (png_of_size(1025, 1024), "1025 × 1024 pixels, of at most 1048576 (--max-image-pixels)"),
        (png_of_two_sizes(), "has 65535 × 65535 pixels"),
        (jpeg_of_size(2000, 2000), "has 2000 × 2000 pixels"),
        (gif_of_size(2000, 2000), "has 2000 × 2000 pixels"),
        (webp_of_size(2**24, 2), "has 16777216 × 2 pixels"),
        (BOMBS["a JPEG of 5,000 scans"], "scans; save it as a baseline JPEG"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_wrong(data, says):
    with pytest.raises(BadImage) as caught:
        decode(data, MOST)
    assert says in str(caught.value)


def test_a_gif_whose_first_frame_is_larger_than_its_screen_has_the_frames_size():
    data = bytearray(picture(16, 16, "GIF"))
    data[6:10] = b"\1\0\1\0"
    assert decode(bytes(data), MOST).size == (16, 16)
    with pytest.raises(BadImage, match="has 16 × 16 pixels, of at most 255"):
        decode(bytes(data), 255)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_read_at_a_bounded_cost(name):
    """Red if a decoder reads more than it needs, or anything before the size is checked."""
    data = BOMBS[name]
    decode(picture(), MOST)  # imports the decoders
    tracemalloc.start()
    started = time.process_time()
    try:
        with suppress(BadImage):
            decode(data, MOST)
    finally:
        seconds = time.process_time() - started
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 3 * len(data) + 2 * 2**20
    assert seconds < 1


def test_a_decoder_sees_no_exif_and_so_warns_of_none():
    data = BOMBS["EXIF that overlaps itself"]
    assert same(decode(data, MOST), decode(picture(16, 16, "JPEG"), MOST))


def test_an_image_that_would_become_too_long_is_refused():
    fit = ImageFit(num_tokens=1, max_pixels=MOST, shortest_edge=224, crop=(224, 224))
    with pytest.raises(BadImage, match="the model would read it as 448000 × 224"):
        fit.read(picture(2000, 1))
    assert len(fit.read(picture(20, 1)).pixels) == 3 * 224 * 224


def test_a_fitted_image_is_no_larger_than_the_fit_says():
    for fit in (
        SQUARE,
        ImageFit(1, MOST, shortest_edge=8, crop=(12, 12)),
        ImageFit(1, MOST, patch_size=4, max_patches=9),
    ):
        for width, height in ((1, 1), (100, 3), (3, 100), (37, 41)):
            got = fit.read(picture(width, height))
            assert len(got.pixels) == 3 * got.height * got.width <= fit.max_bytes


def fuzz(seed, count):
    """Read drawn files. Return how many were accepted."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(count):
        data = hostile(rng)
        with suppress(BadImage):
            assert len(SQUARE.read(data).pixels) == SQUARE.max_bytes
            accepted += 1
    return accepted


@pytest.mark.parametrize("seed", range(3))
def test_drawn_files_are_read_or_refused(seed):
    assert 6 < fuzz(seed, 60) < 54
