"""Choose rows that cover every pair of values of every two factors, greedily and reproducibly."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

CANDIDATES = 3  # rows tried for each row that is kept


def pairwise(factors: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows that together have every pair; each row has one value of each factor."""
    rng = random.Random(seed)
    sizes = {name: len(values) for name, values in factors.items()}
    missing = {
        (one, i, two, j)
        for one, two in combinations(sizes, 2)
        for i in range(sizes[one])
        for j in range(sizes[two])
    }
    rows = []
    while missing:
        first = min(missing)
        tries = [_row(sizes, missing, first, rng) for _ in range(CANDIDATES)]
        best = max(tries, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


def _row(
    sizes: Mapping[str, int],
    missing: set[tuple[str, int, str, int]],
    first: tuple[str, int, str, int],
    rng: random.Random,
) -> dict[str, int]:
    """Return a row with one missing pair, and each other factor at the value that adds most."""
    row = {first[0]: first[1], first[2]: first[3]}
    for name in rng.sample(list(sizes), len(sizes)):
        if name not in row:
            values = rng.sample(range(sizes[name]), sizes[name])
            row[name] = max(values, key=lambda v, n=name: _gain(n, v, row, missing, sizes))
    return {name: row[name] for name in sizes}


def _gain(
    name: str,
    value: int,
    row: Mapping[str, int],
    missing: set[tuple[str, int, str, int]],
    sizes: Mapping[str, int],
) -> int:
    order = {one: place for place, one in enumerate(sizes)}
    return sum(
        ((other, i, name, value) if order[other] < order[name] else (name, value, other, i))
        in missing
        for other, i in row.items()
    )


def _pairs(row: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
    return {(one, row[one], two, row[two]) for one, two in combinations(row, 2)}
