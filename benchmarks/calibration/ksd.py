"""False alarms and power of the Stein test of draws against a model.

    python -m benchmarks.calibration.ksd --csv FILE [--runs 200] [--draws 1000] [--cases right ...]
        [--quick]

The level is 5 %. On exact draws the rate of false alarms should be 3 to 7 %; 200 runs find 2 to 8 %
with probability 95 %. The power against a standard deviation of 0.8 should be at least 90 %. In
``dropped 4``, one of two unit Gaussians is missing whose centers are 4 apart. From 6 apart the
kernel Stein discrepancy cannot detect this, like any function of the scores at the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from examples.common.tables import Row, fill, make_parser
from numpyro_kscore.diagnostics import ksd

DIM = 2
LEVEL = 0.05


class Case(NamedTuple):
    """A sampler, ``key, n -> (n, 2)``, and the log density its draws are tested against."""

    draw: Callable[[Array, int], Array]
    log_density: Callable[[Array], Array]


def normal(scale: float = 1.0) -> Callable[[Array, int], Array]:
    return lambda key, n: scale * random.normal(key, (n, DIM))


def standard(x: Array) -> Array:
    return -0.5 * jnp.sum(x**2)


def pair(gap: float) -> Callable[[Array], Array]:
    """Two unit Gaussians with equal weights, ``gap`` apart."""
    center = jnp.array([gap / 2, 0.0])
    return lambda x: jnp.logaddexp(standard(x - center), standard(x + center))


def both_modes(gap: float, weight: float) -> Callable[[Array, int], Array]:
    """A sampler of a pair whose first mode has the given weight."""

    def draw(key: Array, n: int) -> Array:
        first, second = random.split(key)
        side = jnp.where(random.bernoulli(second, weight, (n,)), 1.0, -1.0)
        return random.normal(first, (n, DIM)) + side[:, None] * jnp.array([gap / 2, 0.0])

    return draw


def bent(x: Array) -> Array:
    return standard(x.at[1].add(1 - x[0] ** 2))


def bent_draws(key: Array, n: int) -> Array:
    x = random.normal(key, (n, DIM))
    return x.at[:, 1].add(x[:, 0] ** 2 - 1)


CASES = {
    "right": Case(normal(), standard),
    "right, bent": Case(bent_draws, bent),
    "right, two modes": Case(both_modes(4.0, 0.5), pair(4.0)),
    "right, modes 8 apart": Case(both_modes(8.0, 0.5), pair(8.0)),
    "sd .8": Case(normal(0.8), standard),
    "dropped 4": Case(both_modes(4.0, 1.0), pair(4.0)),
    "dropped 5": Case(both_modes(5.0, 1.0), pair(5.0)),
    "dropped 6": Case(both_modes(6.0, 1.0), pair(6.0)),
    "dropped 8": Case(both_modes(8.0, 1.0), pair(8.0)),
    "shares .7, 8 apart": Case(both_modes(8.0, 0.7), pair(8.0)),
}


def compute(case: str, num_draws: int, seed: int) -> Row:
    """One run: the p-value of the test."""
    draw, log_density = CASES[case]
    first, second = random.split(random.key(seed))
    x = draw(first, num_draws)
    scores = jax.vmap(jax.grad(log_density))(x)
    local = ksd(x, scores, rng_key=second, num_bootstrap=499)
    return {"ksd": round(float(local.p_value), 4)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the test and print how often it rejects."""
    parser = make_parser(__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="runs of every case")
    parser.add_argument("--draws", type=int, default=1_000, help="draws of every run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.draws = 2, 100
    cells = [
        {"case": case, "num_draws": options.draws, "seed": options.seed + run}
        for case in options.cases
        for run in range(options.runs)
    ]
    rows = fill(cells, compute, ("ksd",), options.csv)
    print(f"{'fraction of runs that reject':28}{'runs':>6}{'KSD':>8}")
    for case in options.cases:
        part = [row for row in rows if row["case"] == case]
        found = np.mean([row["ksd"] <= LEVEL for row in part])
        print(f"{case:28}{len(part):6}{found:8.1%}")


if __name__ == "__main__":
    main()
