"""Fixtures of several suites, and the marks of all tests of models."""

from pathlib import Path

import pytest

MARKS = (
    pytest.mark.model,
    # diffusers 0.42 warns with numpy 2.4
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
)


def pytest_itemcollected(item):
    """Mark this folder's tests, but not those of HTTP/2 in the folder below."""
    if item.path.parent == Path(__file__).parent:
        for mark in MARKS:
            item.add_marker(mark)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    from tests.support.model_zoo import Zoo

    zoo = Zoo(tmp_path_factory.mktemp("zoo"))
    yield zoo
    zoo.close()


@pytest.fixture(scope="module", params=["markers are tokens", "markers are text"])
def marked(request):
    """Yield a tokenizer and its compiler of constraints. Markers of answers are tokens, or not."""
    from tests.support.grammar_walks import MARKERS, compiler_of, tokenizer_with

    tokenizer = tokenizer_with(MARKERS if "tokens" in request.param else ())
    grammars = compiler_of(tokenizer)
    yield tokenizer, grammars
    grammars.close()


@pytest.fixture(scope="module")
def llama(zoo):
    return zoo.load("llama")


@pytest.fixture(scope="module")
def plain(zoo):
    """Yield an engine of the tiny model that drafts nothing."""
    from engine import blocking
    from tests.support.draft_rows import config_of

    with blocking.open_engine(config_of(zoo.directory("llama"), "off")) as engine:
        yield engine


@pytest.fixture
def scales_in_halves(monkeypatch):
    """Expand quantized weights with scales and offsets in half precision, as the kernels read
    them."""
    from engine.worker.quantized.weight import QuantizedWeight

    expand = QuantizedWeight.expand
    monkeypatch.setattr(QuantizedWeight, "expand", lambda self: expand(self.in_halves()))
