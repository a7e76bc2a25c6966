"""A million samples: random features, a subset, and the Gaussian base; seconds, memory, errors.

    python -m benchmarks.speed.million [--csv FILE] [--samples N] [--quick]

The distribution is that of :mod:`benchmarks.speed.large_n` in 16 dimensions, d/2 independent
bananas. Errors are mean squares per dimension at 1000 new draws, against the true score. Every fit
runs in a process of its own, of which the peak of resident memory is shown, JAX and samples
included. Seconds include compilation; those of all cores, which other work on the machine changes
less, also drawing the samples. ``stream`` takes the samples in batches that exist one at a
time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import random

from benchmarks.speed.large_n import TEST_POINTS, bananas, peak_megabytes, score_of_bananas
from benchmarks.speed.measuring import Row, make_parser, row_of_a_process, write_table
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Median, RandomFeatures, Score, Subset
from numpyro_kscore.regularizers import NuMethod

DIM = 16
SAMPLES, BATCH = 1_000_000, 10_000
QUICK_SAMPLES = 20_000
FITS = {
    "1024 features": ScoreEstimator(features=RandomFeatures(1024)),
    "2048 features": ScoreEstimator(features=RandomFeatures()),
    "2048 features, stream": ScoreEstimator(features=RandomFeatures()),
    "2048 features, twice the bandwidth": ScoreEstimator(
        features=RandomFeatures(), bandwidth=Median(2.0)
    ),
    "4096 features": ScoreEstimator(features=RandomFeatures(4096)),
    "operator of 2048": ScoreEstimator(subset=Subset(2048)),
    "operator of 2048, 150 ν-steps": ScoreEstimator(regularizer=NuMethod(150), subset=Subset(2048)),
}
QUICK = ("2048 features", "2048 features, stream", "operator of 2048")


def fit(name: str, n: int) -> tuple[Score, float]:
    """A fit, and its seconds without those of drawing the samples."""
    estimator = FITS[name]
    if not name.endswith("stream"):
        x = jax.block_until_ready(bananas(random.key(0), n, DIM))
        start = time.perf_counter()
        score = estimator.fit(x)
        jax.block_until_ready(score)
        return score, time.perf_counter() - start
    seconds, state = 0.0, None
    for k in range(n // BATCH):
        batch = jax.block_until_ready(bananas(random.fold_in(random.key(0), k), BATCH, DIM))
        start = time.perf_counter()
        if state is None:
            state = estimator.init_stream(batch)
        else:
            state = estimator.partial_fit(state, batch)
        jax.block_until_ready(state)
        seconds += time.perf_counter() - start
    start = time.perf_counter()
    score = jax.block_until_ready(estimator.finish(state))
    return score, seconds + time.perf_counter() - start


def row(name: str, n: int) -> Row:
    """One fit in this process."""
    start = time.process_time()
    score, seconds = fit(name, n)
    cpu_seconds = time.process_time() - start
    score.info.raise_if_failed()
    # Before the evaluation, which is not part of a fit.
    memory = peak_megabytes()
    y = bananas(random.key(1), TEST_POINTS, DIM)
    truth = score_of_bananas(y)
    selection = score.info.selection
    return {
        "what": name,
        "n": n,
        "d": DIM,
        "seconds": seconds,
        "CPU seconds": cpu_seconds,
        "resident MB": memory,
        "ν-steps": 150 if selection is None else int(selection.strength),
        "error": float(jnp.mean((score(y) - truth) ** 2)),
        "error of the base": float(jnp.mean((score.base.score(y) - truth) ** 2)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, help="number of samples, a multiple of 10 000")
    parser.add_argument("--part", choices=FITS, help="only one fit, in this process")
    options = parser.parse_args(arguments)
    n = options.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    if options.part:
        write_table(None, [row(options.part, n)])
        return
    table: list[Row] = []
    for name in QUICK if options.quick else FITS:
        table.append(row_of_a_process(__spec__.name, "--part", name, "--samples", str(n)))
        write_table(options.csv, table, shown=table[-1:])


if __name__ == "__main__":
    main()
