"""Rates at which errors of kernel density estimates fall with the number of samples.

    python -m benchmarks.accuracy.rates [--dims 1 2 3] [--seeds 8] [--csv FILE] [--quick]

Scores: the mean squared error per dimension of ``KernelDensity`` with the bandwidth
``c n^(-1/(d+4))`` of Wibisono, Wu and Yang (2024), whose theorem is n^(-2/(d+4)) for the worst
density with a Lipschitz score. The worst one depends on n: "ripples" are normal coordinates whose
score has waves as long as the bandwidth, of amplitude proportional to it, so that its Lipschitz
constant is the same for all n; bias and variance are then both as the theorem has them. "kinks" is
one fixed density, flat with normal tails, whose score has two kinks in each coordinate, and the
score of "normal" is smooth. Errors are averaged where the density is not small, over the middle
90 % of each coordinate: the theorem is up to logarithms, and those come from the tails.

Densities: the mean integrated squared error on normal samples, with the reference bandwidths, of
the plain estimate, n^(-4/(d+4)), and of those with a correction of fourth order, n^(-8/(d+8)).

Slopes are fitted to logarithms of means over the seeds; their standard errors are the jackknife's.
For the plain estimate and the one shifted by the exact score the mean integrated squared error is
known at every n, and "exact" is the slope of that.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from scipy import stats

from numpyro_kscore.estimators import KernelDensity
from numpyro_kscore.estimators._density.kernel_density import reference_bandwidth

TEST_POINTS = 1000
# Least and largest number of samples; estimates with a pilot of their own take all pairs of them.
SIZES, PAIRED_SIZES = (4000, 256_000), (1000, 16_000)
NUM_SIZES = 5
# Of the bandwidth, over n^(-1/(d+4)). The normal reference is about one in units of the spread.
CONSTANT = {"ripples": 0.5, "kinks": 0.5, "normal": 0.5}
MIDDLE = 0.9


class Marginal(NamedTuple):
    """One coordinate; all are independent and alike.

    Attributes:
        grid: points, fine enough to interpolate between.
        cdf: at the grid.
        score: of one coordinate.
    """

    grid: np.ndarray
    cdf: np.ndarray
    score: Callable[[np.ndarray], np.ndarray]

    def draw(self, rng: np.random.Generator, shape: tuple[int, int], share: float) -> np.ndarray:
        """Draws from the middle ``share`` of the distribution."""
        levels = 0.5 + share * (rng.random(shape) - 0.5)
        return np.interp(levels, self.cdf, self.grid)


def marginal(
    log_density: Callable[[np.ndarray], np.ndarray], score: Callable[[np.ndarray], np.ndarray]
) -> Marginal:
    grid = np.linspace(-12.0, 12.0, 400_001)
    cdf = np.cumsum(np.exp(log_density(grid)))
    return Marginal(grid, cdf / cdf[-1], score)


def ripples(h: float) -> Marginal:
    """A normal coordinate; its score has waves of length 2πh and amplitude h."""
    return marginal(lambda x: -0.5 * x**2 + h**2 * np.cos(x / h), lambda x: -x - h * np.sin(x / h))


def kinks(_: float) -> Marginal:
    """Flat between -1 and 1, with tails of normals of variance 1/4."""
    return marginal(
        lambda x: -2.0 * np.square(np.maximum(np.abs(x) - 1.0, 0.0)),
        lambda x: -4.0 * np.sign(x) * np.maximum(np.abs(x) - 1.0, 0.0),
    )


def normal(_: float) -> Marginal:
    return marginal(lambda x: -0.5 * x**2, lambda x: -x)


SCORE_TARGETS = {"ripples": ripples, "kinks": kinks, "normal": normal}
DENSITY_ESTIMATORS = {
    "plain": KernelDensity(standardize="none"),
    "debiased, exact score": KernelDensity(
        correction="debiased", pilot=lambda x: -x, standardize="none"
    ),
    "debiased, own score": KernelDensity(correction="debiased", standardize="none"),
    "laplace": KernelDensity(correction="laplace", standardize="none"),
    "adaptive": KernelDensity(correction="adaptive", standardize="none"),
}


def sizes_of(span: tuple[int, int]) -> np.ndarray:
    return np.round(np.geomspace(*span, NUM_SIZES)).astype(int)


@jax.jit
def scores(h: float, samples: jax.Array, points: jax.Array) -> jax.Array:
    return KernelDensity(h, standardize="none").fit(samples)(points)


@jax.jit
def density(estimator: KernelDensity, samples: jax.Array, points: jax.Array) -> jax.Array:
    return estimator.fit(samples).density(points)


def score_errors(target: str, dim: int, sizes: np.ndarray, seeds: int) -> np.ndarray:
    """Mean squared errors per dimension, (seeds, sizes)."""
    errors = np.empty((seeds, len(sizes)))
    for column, n in enumerate(sizes):
        h = CONSTANT[target] * n ** (-1 / (dim + 4))
        each = SCORE_TARGETS[target](h)
        for seed in range(seeds):
            rng = np.random.default_rng([seed, dim, n])
            samples = each.draw(rng, (n, dim), 1.0).astype(np.float32)
            points = each.draw(rng, (TEST_POINTS, dim), MIDDLE).astype(np.float32)
            difference = scores(h, samples, points) - each.score(points)
            errors[seed, column] = np.mean(np.square(difference))
    return errors


def density_errors(name: str, dim: int, sizes: np.ndarray, seeds: int) -> np.ndarray:
    """Integrated squared errors on normal samples, (seeds, sizes), by importance sampling."""
    errors = np.empty((seeds, len(sizes)))
    for column, n in enumerate(sizes):
        for seed in range(seeds):
            rng = np.random.default_rng([seed, dim, n])
            samples = rng.standard_normal((n, dim)).astype(np.float32)
            points = 1.5 * rng.standard_normal((TEST_POINTS, dim))
            exact = np.prod(stats.norm.pdf(points), axis=1)
            proposal = np.prod(stats.norm.pdf(points, scale=1.5), axis=1)
            found = density(DENSITY_ESTIMATORS[name], samples, points.astype(np.float32))
            errors[seed, column] = np.mean(np.square(found - exact) / proposal)
    return errors


def slope(sizes: np.ndarray, errors: np.ndarray) -> tuple[float, float]:
    """The slope of the log mean error in log n, and its jackknife standard error over the seeds."""

    def fitted(rows: np.ndarray) -> float:
        return np.polyfit(np.log(sizes), np.log(np.mean(rows, axis=0)), 1)[0]

    count = len(errors)
    left_out = [fitted(np.delete(errors, k, axis=0)) for k in range(count)]
    return float(fitted(errors)), float(np.std(left_out) * (count - 1) ** 0.5)


def exact_slope(name: str, dim: int, sizes: np.ndarray) -> float:
    """The slope of the mean integrated squared error on normal samples; NaN where unknown."""
    n, centers = sizes.astype(float), np.ones(len(sizes))
    h = np.array([reference_bandwidth(size, dim, None, False) for size in sizes])
    if name == "debiased, exact score":
        h = np.array([reference_bandwidth(size, dim, "debiased", True) for size in sizes])
        # The variance of x + (h²/2) s(x).
        centers = (1 - h**2 / 2) ** 2
    elif name != "plain":
        return float("nan")
    smoothed = centers + h**2
    # Integrals of products of normal densities, over (4π)^(-d/2).
    squares = 1 / (n * h**dim) + (1 - 1 / n) * smoothed ** (-dim / 2)
    cross = ((1 + smoothed) / 2) ** (-dim / 2)
    return float(np.polyfit(np.log(n), np.log(squares - 2 * cross + 1), 1)[0])


def rate_of(name: str, dim: int) -> float:
    if name in SCORE_TARGETS:
        return -2 / (dim + 4)
    return -4 / (dim + 4) if name in ("plain", "adaptive") else -8 / (dim + 8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 2, 3], choices=(1, 2, 3))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--csv", type=Path, help="the table, as a file")
    parser.add_argument("--quick", action="store_true", help="one dimension, small sizes")
    options = parser.parse_args(arguments)
    if options.quick:
        options.dims, options.seeds = [1], 2

    rows: list[list[str]] = []
    print("| error of | case | d | n | theorem | exact | slope | ± |")
    print("|---|---|---|---|---|---|---|---|")
    for dim in options.dims:
        cases = [("score", score_errors, name) for name in SCORE_TARGETS]
        cases += [("density", density_errors, name) for name in DENSITY_ESTIMATORS]
        for kind, errors_of, name in cases:
            span = PAIRED_SIZES if name in ("debiased, own score", "adaptive") else SIZES
            sizes = np.array([200, 400, 800]) if options.quick else sizes_of(span)
            errors = errors_of(name, dim, sizes, options.seeds)
            mean, error = slope(sizes, errors)
            exact = exact_slope(name, dim, sizes)
            known = "" if np.isnan(exact) else f"{exact:.3f}"
            numbers = [f"{rate_of(name, dim):.3f}", known, f"{mean:.3f}", f"{error:.3f}"]
            rows.append([kind, name, str(dim), f"{sizes[0]}-{sizes[-1]}", *numbers])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            columns = ["error_of", "case", "dim", "samples", "theorem", "exact", "slope"]
            writer.writerow([*columns, "standard_error"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
