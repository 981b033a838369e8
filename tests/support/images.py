"""Image files for tests: good ones, by format and content, and hostile ones, drawn."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")


def pixels(width, height, seed=0):
    """Return an RGB image of soft colours and a few hard edges, different for each seed."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
    image = np.array(small.resize((width, height), Image.Resampling.BICUBIC))
    image[: height // 3, : width // 4] = rng.integers(0, 256, 3)
    return Image.fromarray(image)


def encoded(image, kind="PNG", **options):
    """Return an image as the bytes of a file."""
    file = io.BytesIO()
    if kind == "WEBP":
        options = {"lossless": True} | options
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width=40, height=30, kind="PNG", seed=0, **options):
    """Return the bytes of an image file."""
    return encoded(pixels(width, height, seed), kind, **options)


def chunk(kind, data):
    """Return a chunk of a PNG."""
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png_of_size(width, height, data=b"\0"):
    """Return a PNG whose header names a size and whose pixels are ``data``, compressed."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def png_of_two_sizes():
    """Return a PNG with a second header, which is larger."""
    png = picture(16, 16)
    return png[:33] + png_of_size(65535, 65535)[8:33] + png[33:]


def jpeg_of_size(width, height):
    """Return a JPEG whose header names a size that its pixels do not have."""
    data = bytearray(picture(16, 16, "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def gif_of_size(width, height):
    """Return a GIF whose header names a size."""
    data = bytearray(picture(16, 16, "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def webp_of_size(width, height):
    """Return a WebP whose extended header names a size of up to 2^24."""
    body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"VP8X" + struct.pack("<I", 10) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def segment(marker, body):
    """Return a segment of a JPEG."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def with_segments(data, *segments):
    """Return a JPEG with segments after its beginning."""
    return data[:2] + b"".join(segments) + data[2:]


def exif(orientation, order="<"):
    """Return EXIF that has an orientation."""
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    entry = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    return start + struct.pack(order + "H", 1) + entry + struct.pack(order + "I", 0)


def animated(kind, frames=3):
    """Return an animation; only its first frame counts."""
    first, *rest = (pixels(20, 20, seed) for seed in range(frames))
    return encoded(first, kind, save_all=True, append_images=rest, duration=50)


def _make_bombs():
    """Return files that would take far more memory or time than their size shows, by name."""
    small = picture(16, 16, "JPEG")
    white = encoded(Image.new("RGB", (1000, 1000)), "JPEG", progressive=True)
    scan = white[white.rindex(b"\xff\xda") : -2]
    (length,) = struct.unpack(">H", small[4:6])
    without_jfif = small[:2] + small[4 + length :]  # without JFIF, Pillow asks EXIF for the density
    entries = b"".join(struct.pack("<HHII", 1000 + i, 7, 59_000, 8) for i in range(5000))
    overlapping = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 5000) + entries
    comments = b"!\xfe" + b"\x01x" * 60_000 + b"\0"
    gif = picture(16, 16, "GIF")
    at = 13 + (3 << (gif[10] & 7) + 1)
    texts = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(10**6))) * 50
    png = picture(16, 16)
    return {
        "a PNG of 65535 × 65535": png_of_size(65535, 65535),
        "a PNG of zeros": png_of_size(2**31 - 1, 1),
        "a JPEG of 65500 × 65500": jpeg_of_size(65500, 65500),
        "a GIF of 65535 × 65535": gif_of_size(65535, 65535),
        "a WebP of 2^24 × 255": webp_of_size(2**24, 255),
        "a JPEG of 5,000 scans": white[:-2] + scan * 5000 + b"\xff\xd9",
        "a JPEG of empty segments": with_segments(small, segment(0xFE, b"") * 50_000),
        "a JPEG of fill bytes": small[:2] + b"\xff" * 10**6 + small[3:],
        "EXIF that overlaps itself": with_segments(
            without_jfif, segment(0xE1, b"Exif\0\0" + overlapping[:65_000])
        ),
        "a GIF of comments": gif[:at] + comments + gif[at:],
        "a PNG of empty chunks": png[:33] + chunk(b"teXt", b"") * 50_000 + png[33:],
        "a PNG of texts that inflate": png[:33] + texts + png[33:],
    }


def hostile(rng):
    """Return a drawn file that is damaged, has a wrong header or an odd size, or is no image."""
    kind = rng.choice(FORMATS)
    width, height = rng.choice([(1, 1), (1, 40), (40, 1), (33, 17), (16, 16), (2000, 1)])
    data = rng.choice(
        [picture, picture, lambda *_, **__: animated(rng.choice(["GIF", "WEBP"]), 2)]
    )(width, height, kind, seed=rng.randrange(50))
    if rng.random() < 0.1:
        image = pixels(width, height).convert(rng.choice(["L", "1", "P", "LA", "RGBA"]))
        data = encoded(image, "PNG", **({"transparency": 0} if image.mode == "P" else {}))
    match rng.randrange(9):
        case 0:
            return data
        case 1:
            return data[: rng.randrange(len(data))]
        case 2 | 3:
            changed = bytearray(data)
            for _ in range(rng.randint(1, 20)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case 4:
            changed = bytearray(data)
            for at in range(min(40, len(changed))):
                if rng.random() < 0.3:
                    changed[at] = rng.randrange(256)
            return bytes(changed)
        case 5:
            other = picture(16, 16, rng.choice(FORMATS))
            return other[: rng.randrange(30)] + data[rng.randrange(30) :]
        case 6:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(rng.randint(1, 200)) + data[at:]
        case 7:
            of_size = rng.choice([png_of_size, jpeg_of_size, gif_of_size, webp_of_size])
            return of_size(rng.choice([1, 65500, 65535]), rng.choice([1, 7, 65500, 65535]))
    return rng.choice(list(BOMBS.values())) if rng.random() < 0.3 else rng.randbytes(100)


BOMBS = _make_bombs()
