"""All estimators of scores on all targets, under one protocol: the table of docs/accuracy.

    python -m benchmarks.accuracy.score_table [--csv FILE] [--samples 100 1000 10000]
                                              [--targets NAME ...] [--estimators NAME ...] [--quick]

Errors are means of ``(ŝ - s)ᵀ Σ (ŝ - s)/d`` with Σ the covariance of the target, which no change of
units or axes alters: at the samples, and at new draws. "All three" is the default with whitened
coordinates, a Gaussian base and the median distance. A published estimator, with a star, has the
setting with the least error at new draws, on average over the seeds, out of those of its paper: a
choice that needs the true score. Seconds are those of one fit and of its values at the new draws,
compiled and on the cores at hand; megabytes are the program's working memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from benchmarks.accuracy.score_targets import CELLS, TARGETS, root_of
from examples.common.tables import Row, fill, markdown_line
from examples.paper.grid import FRACTIONS, LAMBDAS, LARGEST, STEPS, nu_steps
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import (
    AutoBandwidth,
    KernelDensity,
    Landmarks,
    RandomFeatures,
    Subset,
    kef_cg,
    nkef,
    ssge,
    stein,
)
from numpyro_kscore.kernels import CurlFree, Diagonal, Gaussian
from numpyro_kscore.regularizers import LandweberIteration, Tikhonov

TEST_POINTS = 1000
# Repetitions by number of samples.
SEEDS = {100: 16, 1000: 4, 10_000: 1}
COLUMNS = ("at_samples", "at_new", "log_density", "setting", "seconds", "megabytes")
DEFAULT = "ScoreEstimator()"
# An error this close to the least counts as the best; one this far as this far.
NEAR, WORST = 1.05, 1000.0


# Multiples of the median distance, the reference first.
BANDWIDTHS = (1.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
# Columns of the printed table; the file has all.
SHOWN = (
    *("one group", "all three", "Tikhonov", "without base", "diagonal kernel", "256 features"),
    *("KDE, debiased", "KDE, debiased, auto", "Stein*", "SSGE*", "KEF-CG*", "ν-method*"),
)


class Estimator(NamedTuple):
    """A row of the table.

    Attributes:
        make: setting, which may be traced -> estimator.
        settings: tried with the true score at hand; one if there is nothing to choose.
        applies: ``(n, d)`` -> whether it can be computed, and is meant for such sizes.
    """

    make: Callable[[Any], Any]
    settings: tuple[Any, ...] = (0,)
    applies: Callable[[int, int], bool] = lambda n, dim: True


def fixed(estimator: Any, applies: Callable[[int, int], bool] = lambda n, dim: True) -> Estimator:
    return Estimator(lambda _: estimator, applies=applies)


def few(n: int, dim: int) -> bool:
    """Sizes at which nine settings can be tried."""
    return n <= 1000


ESTIMATORS = {
    DEFAULT: fixed(ScoreEstimator()),
    "Tikhonov": fixed(ScoreEstimator(regularizer=Tikhonov("auto"))),
    "Landweber": fixed(ScoreEstimator(regularizer=LandweberIteration("auto"))),
    "without base": fixed(ScoreEstimator(base=None)),
    "Gaussian kernel": fixed(ScoreEstimator(CurlFree(Gaussian()))),
    "diagonal kernel": fixed(ScoreEstimator(Diagonal())),
    "Gaussian base": fixed(ScoreEstimator(base="gaussian")),
    "one group": fixed(ScoreEstimator(base="student")),
    "whitened": fixed(ScoreEstimator(standardize="full")),
    "median": fixed(ScoreEstimator(bandwidth="median")),
    "seven bandwidths": fixed(ScoreEstimator(bandwidth=AutoBandwidth(BANDWIDTHS))),
    "all three": fixed(ScoreEstimator(bandwidth="median", standardize="full", base="gaussian")),
    "landmarks": fixed(ScoreEstimator(landmarks=Landmarks(100)), lambda n, d: n > 100 and d <= 8),
    "subset": fixed(ScoreEstimator(subset=Subset(1024)), lambda n, dim: n > 1024),
    "256 features": fixed(ScoreEstimator(features=RandomFeatures(256))),
    "1024 features": fixed(ScoreEstimator(features=RandomFeatures(1024)), lambda n, dim: n >= 1000),
    "KDE": fixed(KernelDensity()),
    "KDE, auto": fixed(KernelDensity("auto")),
    "KDE, debiased": fixed(KernelDensity(correction="debiased")),
    "KDE, debiased, auto": fixed(KernelDensity("auto", "debiased")),
    "KDE, Laplace": fixed(KernelDensity(correction="laplace")),
    "KDE, adaptive": fixed(KernelDensity(correction="adaptive")),
    "KDE, adaptive, auto": fixed(KernelDensity("auto", "adaptive")),
    "Stein*": Estimator(stein, LAMBDAS, few),
    "SSGE*": Estimator(ssge, FRACTIONS, few),
    "NKEF*": Estimator(
        partial(nkef, landmarks=Landmarks(fraction=0.1)),
        LAMBDAS,
        lambda n, dim: few(n, dim) and 0.1 * n * dim <= LARGEST,
    ),
    "KEF-CG*": Estimator(kef_cg, LAMBDAS, few),
    "ν-method*": Estimator(nu_steps, STEPS, few),
}


class Data(NamedTuple):
    """Draws of one target, for each seed, and the truth."""

    samples: Array
    points: Array
    at_samples: Array
    at_points: Array
    root: Array


@cache
def data(target: str, dim: int, n: int) -> Data:
    """Samples (seeds, n, d), new draws, scores at both, and Σ^(1/2)."""
    each = TARGETS[target](dim)

    @partial(jax.jit, static_argnums=1)
    def draw(key: Array, count: int) -> tuple[Array, Array]:
        points = each.draw(key, count)
        return points, lax.map(jax.grad(each.log_density), points, batch_size=1000)

    pairs = []
    for seed in range(SEEDS[n]):
        first, second = random.split(random.key(seed))
        pairs.append((*draw(first, n), *draw(second, TEST_POINTS)))
    samples, at_samples, points, at_points = (jnp.stack(a) for a in zip(*pairs, strict=True))
    return Data(samples, points, at_samples, at_points, root_of(each))


@partial(jax.jit, static_argnames=("name",))
def measure(name: str, every: Data) -> tuple[Array, Array, Array]:
    """Errors at the samples and at new draws, (seeds, settings), and mean log densities there."""
    row = ESTIMATORS[name]

    def one(pair: Data) -> tuple[Array, Array, Array]:
        def error(estimates: Array, truth: Array) -> Array:
            return jnp.mean(jnp.square((estimates - truth) @ every.root))

        def with_setting(setting: Any) -> tuple[Array, Array, Array]:
            estimator = row.make(setting)
            score = estimator.fit(pair.samples)
            log_density = jnp.asarray(jnp.nan)
            if isinstance(estimator, KernelDensity):
                at_samples = score.at_samples
                log_density = jnp.mean(score.log_density(pair.points))
            else:
                at_samples = score(pair.samples)
            at_new = error(score(pair.points), pair.at_points)
            return error(at_samples, pair.at_samples), at_new, log_density

        if len(row.settings) == 1:
            return jax.tree.map(lambda a: a[None], with_setting(row.settings[0]))
        return lax.map(with_setting, jnp.array(row.settings))

    return lax.map(one, every._replace(root=jnp.zeros(every.samples.shape[0])))


def compute(target: str, dim: int, samples: int, estimator: str) -> Row:
    """One entry of the table."""
    every = data(target, dim, samples)
    program = measure.lower(estimator, every).compile()
    start = time.perf_counter()
    results = jax.block_until_ready(program(every))
    seconds = time.perf_counter() - start
    at_samples, at_new, log_density = (np.mean(np.asarray(a, float), axis=0) for a in results)
    best = int(np.argmin(np.where(np.isfinite(at_new), at_new, np.inf)))
    settings = ESTIMATORS[estimator].settings
    memory = program.memory_analysis().temp_size_in_bytes / 1e6
    return {
        "at_samples": float(at_samples[best]),
        "at_new": float(at_new[best]),
        "log_density": float(log_density[best]),
        "setting": settings[best],
        "seconds": seconds / SEEDS[samples] / len(settings),
        "megabytes": memory,
    }


def cells_of(options: argparse.Namespace) -> list[Row]:
    """Entries that are asked for: those of one size after each other, since they share programs."""
    dims = sorted({dim for each in CELLS.values() for dim in each})
    return [
        {"target": target, "dim": dim, "samples": n, "estimator": name}
        for n in options.samples
        for dim in options.dims or dims
        for name in options.estimators
        for target in options.targets
        if dim in CELLS[target] and ESTIMATORS[name].applies(n, dim)
    ]


def cells_in(rows: Sequence[Row], column: str) -> dict[tuple[int, int, str], dict[str, float]]:
    """Values by size, target and estimator; those that are not finite count as infinite."""
    found: dict[tuple[int, int, str], dict[str, float]] = {}
    for row in rows:
        value = float(row[column])
        cell = found.setdefault((row["samples"], row["dim"], row["target"]), {})
        cell[row["estimator"]] = value if np.isfinite(value) else np.inf
    return found


def table(rows: Sequence[Row], column: str) -> list[str]:
    """One line a cell: errors of some estimators over the default's, the least in bold."""
    cells = cells_in(rows, column)
    names = [name for name in SHOWN if any(name in cell for cell in cells.values())]
    lines = [
        markdown_line(["n", "d", "target", DEFAULT, *names, "best of all"]),
        markdown_line(["---"] * (len(names) + 5)),
    ]
    for (n, dim, target), cell in cells.items():
        if DEFAULT not in cell:
            continue
        own, best = cell[DEFAULT], min(cell, key=cell.__getitem__)
        ratios = [f"{cell[name] / own:.2f}" if name in cell else "" for name in names]
        ratios = [
            f"**{text}**" if name == best else text
            for name, text in zip(names, ratios, strict=True)
        ]
        value = f"**{own:.3g}**" if best == DEFAULT else f"{own:.3g}"
        lines.append(
            markdown_line([n, dim, target, value, *ratios, f"{best}, {cell[best] / own:.2f}"])
        )
    return lines


def summary(rows: Sequence[Row], column: str) -> list[str]:
    """One line for each estimator: in how many cells it is near the best, and how far from it."""
    cells = cells_in(rows, column)
    lines = [
        markdown_line(["estimator", "cells", "best or within 5 %", "without * rows", "mean ratio"]),
        markdown_line(["---"] * 5),
    ]
    for name in ESTIMATORS:
        held = [cell for cell in cells.values() if name in cell]
        if not held:
            continue
        blind = [{k: v for k, v in cell.items() if not k.endswith("*")} for cell in held]
        over = np.array([cell[name] / min(cell.values()) for cell in held])
        over_blind = np.array(
            [cell[name] / min(every.values()) for cell, every in zip(held, blind, strict=True)]
        )
        near = f"{np.sum(over <= NEAR)}"
        near_blind = "" if name.endswith("*") else f"{np.sum(over_blind <= NEAR)}"
        mean = float(np.exp(np.mean(np.log(np.minimum(over, WORST)))))
        lines.append(markdown_line([name, len(held), near, near_blind, f"{mean:.2f}"]))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, help="the entries; those in it are not computed again")
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 1000], choices=SEEDS)
    parser.add_argument("--dims", type=int, nargs="+", help="only these")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument(
        "--estimators", nargs="+", default=list(ESTIMATORS), choices=list(ESTIMATORS)
    )
    parser.add_argument("--quick", action="store_true", help="two targets and estimators")
    options = parser.parse_args(arguments)
    if options.quick:
        options.samples, options.dims, options.targets = [100], [2], ["normal", "student"]
        options.estimators = [DEFAULT, "KDE", "Stein*"]
    rows = fill(cells_of(options), compute, COLUMNS, options.csv)
    for column, what in (("at_new", "new draws"), ("at_samples", "the samples")):
        print(f"\nErrors at {what}, over that of {DEFAULT}")
        print(*table(rows, column), "", *summary(rows, column), sep="\n")


if __name__ == "__main__":
    main()
