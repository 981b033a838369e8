"""The error of an image that is not read."""

from __future__ import annotations


class BadImage(ValueError):
    """The bytes of an image are refused. The message completes the sentence "the image …", says
    what to do where that is not clear, and holds nothing but numbers of the file's content."""
