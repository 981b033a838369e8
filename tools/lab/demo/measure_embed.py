"""Measures the shipped embedding model against its bars; exits with 1 if one is missed.

    python -m tools.lab.measure_demo embed                prints every figure
    python -m tools.lab.measure_demo embed --verbose      and the triples that are wrong

A triple is right if the first text is nearer, by cosine, to the second than to the third. Held-out
triples have meanings whose combination (frame and the concepts in its first two roles) is in no
training text; `tools/lab/demo/meanings.py` decides which. The model is loaded and run as a user
would do it: by sentence-transformers, in float32, on the CPU.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from sentence_transformers import SentenceTransformer

from tools.lab.demo.figures import Figures, read_options, report, share, size_of
from tools.lab.demo.handwritten import triples as handwritten_triples
from tools.lab.demo.triples import held_out_triple, passage_triple, question_triple

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = Path(__file__).parents[3] / "engine" / "demo" / "embed"
HELD_OUT = 1000
SIDE = 200
BARS = {"held_out_right": 0.95}

Texts = tuple[str, str, str]


def right(model: SentenceTransformer, triples: Sequence[Texts]) -> list[bool]:
    """Return for each triple whether its first text is nearer to the second than to the third."""
    firsts, seconds, thirds = (
        model.encode(list(column), normalize_embeddings=True)
        for column in zip(*triples, strict=True)
    )
    return [bool(ok) for ok in (firsts * seconds).sum(1) > (firsts * thirds).sum(1)]


def nearest(model: SentenceTransformer, triples: Sequence[Texts]) -> list[bool]:
    """Return for each triple whether its own second text is the nearest of all second texts."""
    firsts = model.encode([t[0] for t in triples], normalize_embeddings=True)
    seconds = model.encode([t[1] for t in triples], normalize_embeddings=True)
    return [int(found) == at for at, found in enumerate((firsts @ seconds.T).argmax(1))]


def measure(
    model: SentenceTransformer, folder: Path, seed: int, count: int
) -> tuple[Figures, list[Texts]]:
    """Return every figure, and the triples that are wrong, the handwritten ones first."""
    held_out = [held_out_triple(seed, index) for index in range(count)]
    texts = [t.texts for t in held_out]
    outcomes = right(model, texts)
    hand = handwritten_triples()
    by_hand = right(model, hand)
    figures: Figures = {
        "seed": seed,
        "held_out_triples": count,
        "held_out_right": share(outcomes),
    }
    number = Counter(t.differs for t in held_out)
    for differs, _ in number.most_common():
        of_these = [ok for ok, t in zip(outcomes, held_out, strict=True) if t.differs == differs]
        figures[f"  {differs} ({number[differs]})"] = share(of_these)
    for name, make in (("passages", passage_triple), ("questions", question_triple)):
        drawn = [make(random.Random(f"measured {name}/{seed}/{i}")) for i in range(SIDE)]
        figures[f"{name}_right"] = share(right(model, [t.texts for t in drawn]))
    figures |= {
        "handwritten_triples": len(hand),
        "handwritten_right": share(by_hand),
        "handwritten_nearest": share(nearest(model, hand)),
        "size_bytes": size_of(folder),
    }
    wrong = [t for t, ok in zip([*hand, *texts], by_hand + outcomes, strict=True) if not ok]
    return figures, wrong


def main() -> int:
    """Print the figures and return the exit code."""
    given = read_options(__doc__, MODEL, HELD_OUT)
    model = SentenceTransformer(str(given.model), device="cpu")
    figures, wrong = measure(model, given.model, given.seed, given.count)
    for first, second, third in wrong if given.verbose else ():
        print(f"{first}\n    {second}\n    nearer: {third}")
    return report(figures, BARS, given.json)


if __name__ == "__main__":
    sys.exit(main())
