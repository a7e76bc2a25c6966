"""Counts of separate groups of samples: those found, and the true ones.

    python -m benchmarks.accuracy.groups [--csv FILE] [--dims 2 8 20 32] [--samples 100 200 1000]
        [--sets 64] [--quick]

Targets with one group are those of the table of scores, among them ridges that bend: an arc, a
ring, a spiral, a curve. Those with several are normals four or eight standard deviations apart, in
a triangle, a line or a square, two bananas, and skewed modes whose tails point at each other. The
table has how many of the sets of samples are taken for one, two, three and four groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from benchmarks.accuracy import modes, score_targets
from benchmarks.accuracy.score_targets import CELLS, along
from examples.common.tables import Row, fill, markdown_line
from numpyro_kscore.estimators._base.groups import MOST_GROUPS, find_groups

Draw = Callable[[Array, int], Array]
APART = 8.0
COLUMNS = tuple(f"found_{k}" for k in range(1, MOST_GROUPS + 1))
# Dimensions in which several groups are looked for.
OF_SEVERAL = (2, 8)


def normals(places: Sequence[tuple[float, float]]) -> Callable[[int], Draw]:
    """Standard normals at places in the plane of the first two coordinates, in units of APART."""

    return lambda dim: along(APART * np.array(places), 1.0, dim).draw


def facing(dim: int) -> Draw:
    """Logarithms of gamma variables, six apart, with their long tails toward each other."""

    def draw(key: Array, n: int) -> Array:
        first, second, third = random.split(key, 3)
        height = jnp.log(random.gamma(first, 1.0, (n,))) + 3.0
        sign = 1.0 - 2.0 * random.bernoulli(second, 0.5, (n,))
        return random.normal(third, (n, dim)).at[:, 0].set(sign * height)

    return draw


SEVERAL: dict[str, tuple[int, Callable[[int], Draw]]] = {
    "mixture": (2, lambda dim: score_targets.mixture(dim).draw),
    "far modes": (2, lambda dim: score_targets.far_modes(dim).draw),
    "bananas": (2, lambda dim: modes.two(modes.TARGETS["bananas"], dim).draw),
    "facing": (2, facing),
    "triangle": (3, normals([(0, 0), (1, 0), (0.5, 3**0.5 / 2)])),
    "three in a line": (3, normals([(-1, 0), (0, 0), (1, 0)])),
    "square": (4, normals([(0, 0), (1, 0), (0, 1), (1, 1)])),
    "four in a line": (4, normals([(0, 0), (1, 0), (2, 0), (3, 0)])),
}
# Among them the grid, whose normals overlap so much that they are no groups.
ONE = [name for name in CELLS if name not in SEVERAL]


def of_target(name: str, dim: int) -> tuple[int, Draw]:
    """The number of groups of a target, and its draws."""
    if name in SEVERAL:
        number, make = SEVERAL[name]
        return number, make(dim)
    return 1, score_targets.TARGETS[name](dim).draw


@jax.jit
def numbers(sets: Array) -> Array:
    """Numbers of groups found in sets of samples (s, n, d), one for each set."""
    return lax.map(lambda samples: find_groups(samples).number, sets)


def compute(target: str, dim: int, samples: int, sets: int) -> Row:
    """Counts of sets by the number of groups found in them."""
    draw = of_target(target, dim)[1]
    drawn = jnp.stack([draw(random.key(seed), samples) for seed in range(sets)])
    counts = np.bincount(np.asarray(numbers(drawn)), minlength=MOST_GROUPS + 1)
    return dict(zip(COLUMNS, counts[1:].tolist(), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 8, 20, 32])
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 200, 1000])
    parser.add_argument("--sets", type=int, default=64)
    parser.add_argument("--csv", type=Path, help="those in it are kept")
    parser.add_argument("--quick", action="store_true", help="two sets of a ring and two modes")
    options = parser.parse_args(arguments)
    names = [*ONE, *SEVERAL]
    if options.quick:
        names, options.dims, options.samples, options.sets = ["ring", "far modes"], [2], [200], 2
    cells = [
        {"target": name, "dim": dim, "samples": n, "sets": options.sets}
        for dim in options.dims
        for n in options.samples
        for name in names
        if dim in (OF_SEVERAL if name in SEVERAL else CELLS[name])
    ]
    rows = fill(cells, compute, COLUMNS, options.csv)
    print(markdown_line(["target", "groups", "d", "n", *map(str, range(1, MOST_GROUPS + 1))]))
    print("|---" * (4 + MOST_GROUPS) + "|")
    for row in rows:
        given = [row["target"], of_target(row["target"], row["dim"])[0], row["dim"], row["samples"]]
        print(markdown_line([*given, *(int(row[name]) or "" for name in COLUMNS)]))


if __name__ == "__main__":
    main()
