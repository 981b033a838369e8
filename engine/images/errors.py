"""The error of an image file that is refused."""

from __future__ import annotations


class BadImage(ValueError):
    """The bytes of an image are refused. The message continues "the image …", names a remedy where
    that is not clear, and contains only numbers of the file's content."""
