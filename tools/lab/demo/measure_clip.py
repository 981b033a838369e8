"""Measures the shipped model that embeds drawings and texts; exits with 1 if a bar is missed.

    python -m tools.lab.measure_demo clip            prints every figure
    python -m tools.lab.measure_demo clip --verbose  and the descriptions that are preferred wrongly

In each group, 20 held-out drawings and 20 descriptions belong to each other, each description being
true of one drawing alone. A drawing is right if its own description has the nearest vector, and a
description is right if its own drawing has. A pair is harder: of two drawings that differ in one
respect, such as in which is left, the described one must be the nearer. The model is loaded and run
as a user would do it: by sentence-transformers, in float32, on the CPU.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sentence_transformers import SentenceTransformer

from tools.lab.demo.drawing_words import describe
from tools.lab.demo.drawings import held_out_drawing, paint, similar_drawing
from tools.lab.demo.figures import Figures, print_measured, read_options, share, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.lab.demo.drawings import Drawing

    Vectors = np.ndarray[Any, np.dtype[np.float32]]

MODEL = Path(__file__).parents[3] / "engine" / "demo" / "clip"
GROUPS, GROUP = 50, 20
BARS = {"descriptions_found": 0.9, "drawings_found": 0.9}


class Group(NamedTuple):
    """Drawings and their descriptions."""

    drawings: tuple[Drawing, ...]
    texts: tuple[str, ...]


def held_out_group(seed: int, index: int) -> Group:
    """Return held-out drawings with descriptions, each of which is true of one drawing only."""
    rng = random.Random(f"group/{seed}/{index}")
    drawings: list[Drawing] = []
    said: list[Any] = []
    texts: list[str] = []
    at = 1000 * index
    while len(drawings) < GROUP:
        drawing, at = held_out_drawing(seed, at), at + 1
        text, facts = describe(rng, drawing.scene)
        is_mixed_up = any(facts.is_true_of(other.scene) for other in drawings)
        if not is_mixed_up and not any(other.is_true_of(drawing.scene) for other in said):
            drawings.append(drawing)
            said.append(facts)
            texts.append(text)
    return Group(tuple(drawings), tuple(texts))


def held_out_pair(seed: int, index: int) -> Group:
    """Return a held-out drawing, a similar one, and a description that only fits the first."""
    rng = random.Random(f"pair/{seed}/{index}")
    drawing = held_out_drawing(seed, index)
    text, facts = describe(rng, drawing.scene)
    other = similar_drawing(rng, drawing.scene)
    while facts.is_true_of(other.scene):
        text, facts = describe(rng, drawing.scene)
        other = similar_drawing(rng, drawing.scene)
    return Group((drawing, other), (text,))


def cosines(model: SentenceTransformer, groups: Sequence[Group]) -> list[Vectors]:
    """Return for each group the cosines of drawings and texts, [drawings, texts] float32."""
    images = model.encode([paint(one) for group in groups for one in group.drawings],
                          normalize_embeddings=True)  # fmt: skip
    texts = model.encode([text for group in groups for text in group.texts],
                         normalize_embeddings=True)  # fmt: skip
    found: list[Vectors] = []
    first_image = first_text = 0
    for group in groups:
        last_image, last_text = first_image + len(group.drawings), first_text + len(group.texts)
        found.append(images[first_image:last_image] @ texts[first_text:last_text].T)
        first_image, first_text = last_image, last_text
    return found


def measure(
    model: SentenceTransformer, folder: Path, seed: int, count: int
) -> tuple[Figures, list[str]]:
    """Return every figure, and a line for each drawing whose description is not the nearest."""
    groups = [held_out_group(seed, index) for index in range(count)]
    pairs = [held_out_pair(seed, index) for index in range(count * GROUP)]
    alike = cosines(model, groups)
    own = np.arange(GROUP)
    figures: Figures = {
        "seed": seed,
        "groups": count,
        "group": GROUP,
        "descriptions_found": share(np.concatenate([one.argmax(1) == own for one in alike])),
        "drawings_found": share(np.concatenate([one.argmax(0) == own for one in alike])),
        "pairs_right": share(one[0, 0] > one[1, 0] for one in cosines(model, pairs)),
        "size_bytes": size_of(folder),
    }
    wrong = [
        f"{group.texts[at]}\n    preferred: {group.texts[best]}"
        for group, one in zip(groups, alike, strict=True)
        for at, best in enumerate(one.argmax(1))
        if at != best
    ]
    return figures, wrong


def main() -> int:
    """Print the figures and return the exit code."""
    given = read_options(__doc__, MODEL, GROUPS)
    model = SentenceTransformer(str(given.model), device="cpu")
    measured = measure(model, given.model, given.seed, given.count)
    return print_measured(given, measured, BARS)


if __name__ == "__main__":
    sys.exit(main())
