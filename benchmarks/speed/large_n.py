"""Very many samples: errors of subsets and landmarks against the full fit, and resident memory.

    python -m benchmarks.speed.large_n [--csv FILE] [--samples 20000] [--resident 100000]
        [--part full|subset|landmarks] [--quick]

The distribution is d/2 independent bananas, whose score is known. Errors are mean squares per
dimension at 1000 new draws; each estimate is compared with the truth and with the fit to all
samples. Resident memory is the peak of a separate process, JAX and samples included, that fits as
many samples as ``--resident`` says.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import Array, random

from benchmarks.speed.measuring import Row, make_parser, row_of_a_process, write_table
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Landmarks, Subset
from numpyro_kscore.regularizers import NuMethod

CURVATURE = 0.5
TEST_POINTS = 1000
DIMENSIONS = (2, 8, 16)
NUM_STEPS = (30, 100)
SUBSETS = (512, 2048)
# The factorized matrix has m d rows; more of them would take minutes.
LANDMARKS = {2: (64, 256), 8: (64, 256), 16: (64,)}
RESIDENT_DIM = 16
RESIDENT = {
    "full": ScoreEstimator(regularizer=NuMethod(50)),
    "subset": ScoreEstimator(subset=Subset(2048)),
    "landmarks": ScoreEstimator(regularizer=NuMethod(50), landmarks=Landmarks(64)),
}


def bananas(key: Array, n: int, dim: int) -> Array:
    """Draws, (n, d): each odd coordinate is bent along the one before."""
    noise = random.normal(key, (n, dim))
    return noise.at[:, 1::2].add(CURVATURE * (noise[:, 0::2] ** 2 - 1))


@jax.vmap
def score_of_bananas(x: Array) -> Array:
    """The score of the distribution of :func:`bananas`."""

    def log_density(x: Array) -> Array:
        straight = x.at[1::2].add(-CURVATURE * (x[0::2] ** 2 - 1))
        return -0.5 * jnp.sum(straight**2)

    return jax.grad(log_density)(x)


def error_rows(n: int, dim: int, num_steps: int) -> Iterator[Row]:
    """A full fit and its approximations."""
    x, y = bananas(random.key(0), n, dim), bananas(random.key(1), TEST_POINTS, dim)
    truth = score_of_bananas(y)
    full = ScoreEstimator(regularizer=NuMethod(num_steps))
    estimators = {"all samples": (full, x)}
    for b in SUBSETS:
        estimators[f"operator of {b}"] = (dataclasses.replace(full, subset=Subset(b)), x)
        estimators[f"{b} samples alone"] = (full, x[:b])
    for m in LANDMARKS[dim]:
        estimators[f"{m} landmarks"] = (dataclasses.replace(full, landmarks=Landmarks(m)), x)
    reference = None
    for what, (estimator, samples) in estimators.items():
        start = time.perf_counter()
        # Seconds include compilation, because a fit of this size is made once.
        score = jax.block_until_ready(estimator.fit(samples))
        seconds = time.perf_counter() - start
        values = score(y)
        reference = values if reference is None else reference
        yield {
            "what": what,
            "n": n,
            "d": dim,
            "ν-steps": num_steps,
            "error": float(jnp.mean((values - truth) ** 2)),
            "from all": float(jnp.mean((values - reference) ** 2)),
            "seconds": seconds,
        }


def peak_megabytes() -> float:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, kibibytes elsewhere.
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def resident(part: str, n: int) -> Row:
    """Fit in this process; its seconds and peak memory."""
    x = bananas(random.key(0), n, RESIDENT_DIM)
    start = time.perf_counter()
    score = RESIDENT[part].fit(x)
    jax.block_until_ready(score.expansion.coefficients)
    seconds = time.perf_counter() - start
    score.info.raise_if_failed()
    return {
        "what": part,
        "n": n,
        "d": RESIDENT_DIM,
        "seconds": seconds,
        "resident MB": peak_megabytes(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=20_000, help="samples behind the errors")
    parser.add_argument("--resident", type=int, default=100_000, help="samples behind the memory")
    parser.add_argument("--part", choices=RESIDENT, help="only the memory of one fit")
    options = parser.parse_args(arguments)
    if options.part:
        write_table(None, [resident(options.part, options.resident)])
        return
    dimensions, steps, parts = DIMENSIONS, NUM_STEPS, list(RESIDENT)
    if options.quick:
        options.samples, options.resident = 2_500, 2_500
        dimensions, steps, parts = dimensions[:1], steps[:1], ["subset"]
    table: list[Row] = []
    for dim in dimensions:
        for num_steps in steps:
            found = list(error_rows(options.samples, dim, num_steps))
            table += found
            write_table(options.csv, table, shown=found)
    memory: list[Row] = []
    size = str(options.resident)
    path = options.csv and options.csv.with_stem(options.csv.stem + "_resident")
    for part in parts:
        memory.append(row_of_a_process(__spec__.name, "--part", part, "--resident", size))
        write_table(path, memory, shown=memory[-1:])


if __name__ == "__main__":
    main()
