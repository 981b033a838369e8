"""Reads an image file's format, size and orientation without decoding it.

Rule 1: every loop here is bounded by a constant or runs in C, whatever the file contains. Rule 2: a
decoder gets only the parts of a file that it needs for the pixels (`Header.data`). Decoders read
the other parts before the size is checked: compressed texts inflate, and 60 KB of EXIF with
overlapping entries took 300 MB before Pillow 13, which logs each entry instead.
"""

from __future__ import annotations

import re
from struct import error as StructError
from struct import unpack_from
from typing import NamedTuple

from engine.images.errors import BadImage

FORMATS = "JPEG, PNG, WebP or GIF"
# The most parts of a file before its pixels: segments of a JPEG, chunks of a PNG, blocks of a GIF.
# A PNG of 16 MiB in chunks of 1 KiB has 16,384; not tuned.
PARTS_MAX = 20_000
EXIF_ENTRIES_MAX = 1000  # most EXIF entries that are read; not tuned: cameras write some fifty
ORIENTATION_TAG = 0x0112  # the number of TIFF's tag Orientation
EXIF_START = b"Exif\0\0"
XMP_START = b"http://ns.adobe.com/xap/1.0/\0"
XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
PNG_START = b"\x89PNG\r\n\x1a\n"
# The chunks of a PNG that its pixels depend on, and eXIf, which may have its orientation.
PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf")
# The beginnings of a PNG's text chunks that may have its orientation.
PNG_TEXTS_KEPT = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")


class Header(NamedTuple):
    """The header of a file. ``data`` is the file without the parts that no pixel depends on.
    ``orientation`` is EXIF's number, 1 to 8; 0 if it is known only after decoding. ``scans`` is the
    number of times that the decoder processes all pixels, several in a progressive JPEG."""

    format: str
    width: int
    height: int
    data: bytes
    orientation: int = 0
    scans: int = 1


def read_header(data: bytes) -> Header:
    """Return the header of an image file.

    Raises:
        BadImage: The file is in an unsupported format, or its header is damaged.
    """
    if not data:
        raise BadImage("is empty")
    for starts, read in (
        ((b"\xff\xd8\xff",), _read_jpeg),
        ((PNG_START,), _read_png),
        ((b"GIF87a", b"GIF89a"), _read_gif),
        ((b"RIFF",), _read_webp),
    ):
        if data.startswith(starts):
            try:
                return read(data)
            except (StructError, IndexError):
                raise BadImage("is cut short") from None
    raise BadImage(f"is {_other_format(data)}; send the bytes of a {FORMATS} file")


def _other_format(data: bytes) -> str:
    """Return a description of a file in an unsupported format, by its first bytes."""
    if data[:5].lower() in (b"http:", b"https", b"data:", b"file:"):
        return "a URL, and the server opens none"
    if data[4:8] == b"ftyp":
        return "a HEIF or AVIF file, or a film"
    if data.startswith((b"II*\0", b"MM\0*")):
        return "a TIFF file"
    return "in no format that is read here"


# ---- JPEG


def _read_jpeg(data: bytes) -> Header:
    """Read the segments before the first scan."""
    kept, at, exif, xmp, size = [b"\xff\xd8"], 2, b"", b"", (0, 0)
    for _ in range(PARTS_MAX):
        at = data.find(b"\xff", at) + 1
        if not at:
            raise IndexError
        marker = data[at]
        if marker == 0xFF:  # a fill byte
            continue
        at += 1
        if marker in (0x00, 0x01, 0xD8) or 0xD0 <= marker <= 0xD7:  # markers without a segment
            continue
        if marker == 0xD9:
            raise BadImage("is a JPEG file without pixels")
        if marker == 0xDA:
            orientation = exif_orientation(exif) or xmp_orientation(xmp) or 1
            rest = b"".join((*kept, b"\xff\xda", data[at:]))
            # Inside a scan, 0xFF is followed by 0, so that this marker stands only where a scan
            # begins, or in a thumbnail.
            return Header("JPEG", *size, rest, orientation, data.count(b"\xff\xda"))
        (length,) = unpack_from(">H", data, at)
        body = data[at + 2 : at + length]
        if len(body) != length - 2:
            raise IndexError
        if marker == 0xE1 and body.startswith(EXIF_START):
            exif = exif or body
        elif marker == 0xE1 and body.startswith(XMP_START):
            xmp = body
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = unpack_from(">HH", body, 1)
            size = (width, height)
        # of the segments APP0 to APP15, only JFIF's and Adobe's are kept: they define the colours
        if marker in (0xE0, 0xEE) or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            kept.append(data[at - 2 : at + length])
        at += length
    raise BadImage("has too many segments before its pixels")


# ---- PNG


def _read_png(data: bytes) -> Header:
    """Read the list of chunks."""
    if data[12:16] != b"IHDR":
        raise BadImage("is damaged: a PNG file begins with IHDR")
    width, height = unpack_from(">II", data, 16)
    kept, at = [PNG_START], len(PNG_START)
    for _ in range(PARTS_MAX):
        length, kind = unpack_from(">I4s", data, at)
        end = at + 12 + length
        if kind in PNG_KEPT or data.startswith(PNG_TEXTS_KEPT, at + 8):
            kept.append(data[at:end])
        if kind == b"IEND" or end >= len(data):
            return Header("PNG", width, height, b"".join(kept))
        at = end
    raise BadImage("has too many chunks")


# ---- GIF


def _read_gif(data: bytes) -> Header:
    """Read the blocks before the first frame. The size covers frame and screen."""
    width, height, flags = unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    kept = [data[:at]]
    control = b""  # the graphic control extension, which names the transparent colour
    parts = 0
    while True:
        kind = data[at]
        if kind == 0x2C:
            left, top, own_width, own_height = unpack_from("<HHHH", data, at + 1)
            size = max(width, left + own_width), max(height, top + own_height)
            return Header("GIF", *size, b"".join((*kept, control, data[at:])), 1)
        if kind != 0x21:
            raise BadImage("is a GIF file without pixels")
        start, at = at, at + 2
        while data[at]:
            at += data[at] + 1
            parts += 1
            if parts > PARTS_MAX:
                raise BadImage("has too many blocks before its first frame")
        at += 1
        parts += 1
        if data[start + 1] == 0xF9:
            control = data[start:at]


# ---- WebP


def _read_webp(data: bytes) -> Header:
    """Read the first chunk. Its decoder allocates two images before it can return the size."""
    kind = data[12:16]
    if data[8:12] != b"WEBP":
        raise BadImage(f"is in no format that is read here; send the bytes of a {FORMATS} file")
    if kind == b"VP8X":
        width, high_width, height, high_height = unpack_from("<HBHB", data, 24)
        size = (width | high_width << 16) + 1, (height | high_height << 16) + 1
    elif kind == b"VP8L":
        (bits,) = unpack_from("<I", data, 21)
        size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = unpack_from("<HH", data, 26)
        size = width & 0x3FFF, height & 0x3FFF
    else:
        raise BadImage("is damaged: a WebP file begins with VP8, VP8L or VP8X")
    return Header("WEBP", *size, data)


# ---- orientation


def exif_orientation(exif: bytes) -> int:
    """Return EXIF's orientation, 1 to 8; 0 if EXIF has none or is damaged."""
    while exif.startswith(EXIF_START):
        exif = exif[len(EXIF_START) :]
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 0
    value = 0
    try:
        (at,) = unpack_from(f"{order}I", exif, 4)
        (count,) = unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * min(count, EXIF_ENTRIES_MAX), 12):
            tag, kind, number = unpack_from(f"{order}HHI", exif, entry)
            if tag == ORIENTATION_TAG and number == 1 and kind in (1, 3, 4):
                (value,) = unpack_from(order + {1: "B", 3: "H", 4: "I"}[kind], exif, entry + 8)
    except StructError:
        pass  # an orientation before the damage counts
    return value if 1 <= value <= 8 else 0


def xmp_orientation(xmp: bytes) -> int:
    """Return XMP's orientation, 0 to 9; 0 if XMP has none."""
    match = XMP_ORIENTATION.search(xmp)
    return int(match[1]) if match else 0
