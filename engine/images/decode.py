"""Decodes an image file: its first picture, upright, in RGB.

Rule 1: no decoder runs before the size is known and allowed. Rule 2: the pixels are those that
transformers loads, except for grey of 16 bits: colour profiles are not applied, and transparent
pixels keep their stored colour. Rule 3: an error's message contains no text of a decoder, which may
contain addresses and paths.

Meant for threads: the decoders release the GIL. Decoding takes up to `BYTES_PER_PIXEL` for each
pixel.
"""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

from engine.images.errors import BadImage
from engine.images.headers import (
    Header,
    exif_orientation,
    read_header,
    xmp_orientation,
)

if TYPE_CHECKING:
    from PIL import Image

# The most memory that decoding takes, which a WebP needs: the decoder's two images and its result,
# Pillow's image, and a turned or converted copy, each of 4 bytes a pixel.
BYTES_PER_PIXEL = 20
# The most scans of a JPEG of the largest size; a smaller JPEG may have more. Encoders write about
# ten scans. A scan of 33 million pixels takes at least 60 ms, however short it is in the file, so
# that a file of 1 MB could take hours.
SCANS_MAX = 16


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Return the first picture of a JPEG, PNG, WebP or GIF file, upright, in RGB.

    Raises:
        BadImage: The file is in another format, damaged, cut short, or has no pixels or more than
            ``max_pixels``.
    """
    header = read_header(data)
    _check_size(header.width, header.height, max_pixels)
    if header.scans * header.width * header.height > SCANS_MAX * max_pixels:
        raise BadImage(f"has {header.scans} scans; save it as a baseline JPEG")
    image = _open(header)
    _check_size(*image.size, max_pixels)
    try:
        image.load()
        orientation = header.orientation or _orientation_of(image.info)
        image.info.clear()  # otherwise Pillow warns of some palettes' transparency
        method = _TURNS.get(orientation)
        return to_rgb(image if method is None else image.transpose(method))
    except MemoryError:
        raise BadImage("takes more memory than there is") from None
    except Exception:
        raise _damaged(header) from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any of Pillow's modes in RGB. Of 16-bit grey the upper 8 bits are taken,
    as in coloured files; Pillow's own conversion makes all values above 255 white."""
    from PIL import Image

    if image.mode == "I":  # 16 bits in 32
        image = image.convert("I;16")
    if image.mode.startswith("I;16"):
        upper = 0 if image.mode == "I;16B" else 1  # the index of a number's upper byte
        return Image.frombytes("L", image.size, image.tobytes()[upper::2]).convert("RGB")
    if image.mode == "La":  # Pillow converts this mode to LA only
        image = image.convert("LA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if not width or not height:
        raise BadImage("has no pixels")
    if width * height > max_pixels:
        raise BadImage(
            f"has {width} × {height} pixels, of at most {max_pixels} (--max-image-pixels); send a "
            "smaller copy"
        )


def _open(header: Header) -> Image.Image:
    """Return an image that is not decoded yet. Pillow's own ``open`` would try other formats, and
    warns of sizes that the operator allows."""
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    kinds: dict[str, Any] = {
        "JPEG": JpegImagePlugin.JpegImageFile,
        "PNG": PngImagePlugin.PngImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "WEBP": WebPImagePlugin.WebPImageFile,
    }
    try:
        image: Image.Image = kinds[header.format](BytesIO(header.data))
    except Exception:
        raise _damaged(header) from None
    return image


def _damaged(header: Header) -> BadImage:
    return BadImage(f"is a {header.format} file that is damaged or cut short")


def _orientation_of(info: dict[Any, Any]) -> int:
    """Return EXIF's orientation of a decoded PNG or WebP; 1 if the file has none. EXIF takes
    precedence over XMP."""
    exif = info.get("exif", b"")
    if not exif and "Raw profile type exif" in info:
        with suppress(ValueError, TypeError):
            exif = bytes.fromhex("".join(info["Raw profile type exif"].split("\n")[3:]))
    xmp = info.get("XML:com.adobe.xmp") or info.get("xmp") or b""
    xmp = xmp.encode(errors="replace") if isinstance(xmp, str) else xmp
    return exif_orientation(exif) or xmp_orientation(xmp) or 1


# EXIF's orientations, as operations of `Image.transpose`: numbers of Pillow's class Transpose.
_TURNS: dict[int, Any] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
