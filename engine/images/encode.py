"""Writes images as files: PNG, JPEG or WebP.

Meant for threads: the encoders release the GIL.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

FORMATS = ("png", "jpeg", "webp")
DEFAULT_QUALITY = 90  # not tuned: a photograph has a tenth of a PNG's bytes and looks the same


def encode(pixels: bytes, width: int, height: int, file_format: str, quality: int) -> bytes:
    """Return the file of an image of ``width * height`` pixels of RGB, one byte a value.
    ``quality``, 1 to 100, has an effect for JPEG and WebP."""
    from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    # Importing a plugin registers it; otherwise ``save`` would import all that Pillow has.
    kinds: dict[str, Any] = {
        "png": PngImagePlugin.PngImageFile,
        "jpeg": JpegImagePlugin.JpegImageFile,
        "webp": WebPImagePlugin.WebPImageFile,
    }
    options: dict[str, Any] = {} if file_format == "png" else {"quality": quality}
    image, file = Image.frombytes("RGB", (width, height), pixels), BytesIO()
    image.save(file, kinds[file_format].format, **options)
    return file.getvalue()
