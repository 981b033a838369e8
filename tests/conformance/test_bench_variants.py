"""The bench's rows of other processors' kernels have bars against our own build and the peer."""

from tools.lab.bench import variants
from tools.lab.bench.step import STEPS, Case

CASE = Case("s135", "decode", 1, 129, None)


class Engine:
    """Stands in for a process that decodes in ``seconds``."""

    name = "engine"

    def __init__(self, seconds):
        self.seconds = seconds

    def ask(self, *_arguments, **_settings):
        """Return an answer as an engine's process does."""
        return {"seconds": self.seconds, "first": []}


def rows(*seconds):
    """Return the rows that compare three engines (our own build, one variant of it and the peer),
    in a dict by the ends of the rows' names."""
    found = variants.compare(CASE, "int4", ["x86-64-v3"], [Engine(one) for one in seconds])
    return {row.name.partition(" int4: ")[2]: row for row in found}


def test_a_variant_has_bars_against_our_own_build_and_the_peer():
    found = rows(1.0, 1.25, 1.0)
    assert found["this processor's"].value == STEPS
    own, peer = (found[f"x86-64-v3 against {n}"] for n in ("this processor's", variants.PEER))
    assert (own.value, own.bar, own.passed) == (0.8, 0.6, True)
    assert (peer.value, peer.bar, peer.passed) == (0.8, 1.0, False)


def test_without_the_peer_its_row_has_no_figure():
    found = rows(1.0, 2.0)
    assert found["x86-64-v3 against this processor's"].passed is False
    assert found[f"x86-64-v3 against {variants.PEER}"].value is None
