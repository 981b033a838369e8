"""Fixtures of several files."""

import logging

import pytest


@pytest.fixture
def quiet():
    """Have nothing logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
