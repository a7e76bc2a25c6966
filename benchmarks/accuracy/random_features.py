"""Errors of random features against the exact estimate and the truth, next to landmarks.

    python -m benchmarks.accuracy.random_features [--csv FILE] [--samples N] [--quick]

The distribution is d/2 independent bananas (:mod:`benchmarks.speed.large_n`). All estimates have
the same kernel, λ, coordinates and base. Errors are mean squares per dimension at 1000 new draws,
against the fit to all samples with all of their pairs, and against the true score. Seconds are
those of a second fit, without compilation: compare features and landmarks in lines of equal time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import random

from benchmarks.speed.large_n import TEST_POINTS, bananas, score_of_bananas
from benchmarks.speed.measuring import Row, make_parser, write_table
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Landmarks, RandomFeatures
from numpyro_kscore.regularizers import Tikhonov
from numpyro_kscore.solvers import Krylov

SAMPLES, QUICK_SAMPLES = 2_000, 400
# λ over the bound 1/d of the spectrum.
RELATIVE_STRENGTH = 2.0**-8
FEATURES = (64, 256, 1024)
LANDMARKS = {2: (16, 64, 256), 8: (16, 64), 16: (16, 64)}


def rows(dim: int, n: int, features: Sequence[int], landmarks: Sequence[int]) -> Iterator[Row]:
    """The exact fit and its approximations in one dimension d."""
    x, y = bananas(random.key(0), n, dim), bananas(random.key(1), TEST_POINTS, dim)
    truth = score_of_bananas(y)
    exact = ScoreEstimator(regularizer=Tikhonov(RELATIVE_STRENGTH / dim), solver=Krylov(100))
    estimators = {"all samples": exact}
    for m in features:
        estimators[f"{m} features"] = dataclasses.replace(exact, features=RandomFeatures(m))
    for m in landmarks:
        estimators[f"{m} landmarks"] = dataclasses.replace(exact, landmarks=Landmarks(m))
    reference = None
    for what, estimator in estimators.items():
        jax.block_until_ready(estimator.fit(x))
        start = time.perf_counter()
        score = jax.block_until_ready(estimator.fit(x))
        seconds = time.perf_counter() - start
        values = score(y)
        reference = values if reference is None else reference
        residual = jnp.mean((reference - score.base.score(y)) ** 2)
        difference = jnp.mean((values - reference) ** 2)
        yield {
            "what": what,
            "n": n,
            "d": dim,
            "from exact": float(difference),
            "relative": float(jnp.sqrt(difference / residual)),
            "error": float(jnp.mean((values - truth) ** 2)),
            "error of the base": float(jnp.mean((score.base.score(y) - truth) ** 2)),
            "seconds": seconds,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, help="number of samples")
    options = parser.parse_args(arguments)
    n = options.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    table: list[Row] = []
    for dim, landmarks in LANDMARKS.items():
        if options.quick and dim > 2:
            break
        features = FEATURES[:2] if options.quick else FEATURES
        found = list(rows(dim, n, features, landmarks[:1] if options.quick else landmarks))
        table += found
        write_table(options.csv, table, shown=found)


if __name__ == "__main__":
    main()
