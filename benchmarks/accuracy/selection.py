"""Error and time of the automatic choice of the regularization parameter.

    python -m benchmarks.accuracy.selection [--dims 2 8 32] [--samples 128] [--seeds 8] [--quick]
        [--targets normal correlated banana ...] [--base student]

For each target, the automatic strength at the median distance is compared with the best member of
the path it is chosen from: the one with the smallest true error on average over the seeds. So are
its neighbors: the stronger one is what suits the halves that the choice is made from, up to 2048
samples. Errors are mean squares per dimension at 512 new draws, in coordinates that whiten the
target, as in ``score_table``. The last table compares the time of
``ScoreEstimator()``, which chooses a bandwidth too, with that of a fit with a given λ; both are
jitted and timed alternately in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from benchmarks.accuracy import score_targets
from examples.common.tables import markdown_line
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators._fit.path import path_for
from numpyro_kscore.regularizers import NuMethod, Regularizer, Tikhonov

TEST_POINTS = 512
TARGETS = ("normal", "correlated", "banana", "mixture", "grid")
# Members of the path next to the chosen one: with twice the λ, and with half of it.
NEIGHBORS = (-1, 0, 1)


@partial(jax.jit, static_argnums=4)
def _errors(
    samples: Array, points: Array, scores: Array, root: Array, base: str
) -> tuple[Array, Array]:
    """Errors of every member of the path, (p,), base first, and the index of the one chosen."""

    def error(regularizer: Regularizer) -> Array:
        estimator = ScoreEstimator(regularizer=regularizer, bandwidth="median", base=base)
        return jnp.mean(jnp.square((estimator.fit(samples)(points) - scores) @ root))

    family, dim = NuMethod("auto"), samples.shape[1]
    path = path_for(family, dim, normalize=True)
    members = jnp.arange(len(path.strengths(jnp.float32)))
    fixed = lax.map(lambda k: error(dataclasses.replace(path, index=k)), members)
    estimator = ScoreEstimator(regularizer=family, bandwidth="median", base=base)
    return fixed, estimator.fit(samples).info.selection.column


def errors_of(
    names: Sequence[str], dim: int, num_samples: int, seeds: int, base: str = "auto"
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Errors of all members for each target, (seeds, p), and those chosen, (seeds,)."""
    results = {}
    for name in names:
        target = score_targets.TARGETS[name](dim)
        score = jax.jit(jax.vmap(jax.grad(target.log_density)))
        root = score_targets.root_of(target)
        pairs = []
        for seed in range(seeds):
            first, second = random.split(random.key(seed))
            samples, points = target.draw(first, num_samples), target.draw(second, TEST_POINTS)
            pairs.append(_errors(samples, points, score(points), root, base))
        fixed, chosen = (np.array(values) for values in zip(*pairs, strict=True))
        results[name] = fixed, chosen
    return results


def errors_near(fixed: np.ndarray, chosen: np.ndarray, apart: int) -> np.ndarray:
    """Errors (seeds,) of members some places from those chosen; the base alone has no neighbors."""
    members = np.clip(chosen + apart, 0, fixed.shape[1] - 1)
    return fixed[np.arange(len(fixed)), np.where(chosen > 0, members, 0)]


def least_times(dim: int, num_samples: int, repetitions: int) -> np.ndarray:
    """Seconds of an automatic fit and of one with λ = 1e-3: the minimum over the repetitions."""
    samples = random.normal(random.key(0), (num_samples, dim))
    functions = [
        partial(jax.jit(estimator.fit), samples)
        for estimator in (ScoreEstimator(), ScoreEstimator(regularizer=Tikhonov(1e-3)))
    ]
    for function in functions:
        jax.block_until_ready(function())  # compilation
    times = np.empty((repetitions, 2))
    # Alternately, so that a change of the machine's speed or load affects both.
    for row in times:
        for k, function in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(function())
            row[k] = time.perf_counter() - start
    # Disturbances only make runs longer.
    return np.min(times, axis=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument(
        "--targets", nargs="+", default=list(TARGETS), choices=list(score_targets.TARGETS)
    )
    parser.add_argument("--seeds", type=int, default=8, help="0: times only")
    parser.add_argument("--base", default="auto", choices=("auto", "student", "gaussian"))
    parser.add_argument("--repetitions", type=int, default=30, help="timed fits of each kind")
    parser.add_argument("--quick", action="store_true", help="one dimension, two seeds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.dims, options.samples, options.seeds, options.repetitions = [2], 64, 2, 2

    ratios = []
    names = ("target", "d", "n", "base", "best", "chosen", "over the best", "stronger", "weaker")
    print(markdown_line(names), markdown_line(["---"] * len(names)), sep="\n")
    for dim in options.dims if options.seeds else ():
        targets = [name for name in options.targets if dim in score_targets.CELLS[name]]
        for name, cell in errors_of(
            targets, dim, options.samples, options.seeds, options.base
        ).items():
            means = cell[0].mean(axis=0)
            near = np.array([errors_near(*cell, apart).mean() for apart in NEIGHBORS])
            ratios.append(near / means.min())
            numbers = [f"{value:.4f}" for value in (means[0], means.min(), near[1])]
            over = [f"{ratios[-1][k]:.2f}" for k in (1, 0, 2)]
            print(markdown_line([name, dim, options.samples, *numbers, *over]), flush=True)
    if ratios:
        means = np.exp(np.mean(np.log(ratios), axis=0))
        print("geometric means:", ", ".join(f"{means[k]:.3f}" for k in (1, 0, 2)))
    print("\n| d | n | auto, ms | λ given, ms | ratio |\n|---|---|---|---|---|")
    for dim in options.dims:
        auto, given = 1e3 * least_times(dim, options.samples, options.repetitions)
        row = f"| {dim} | {options.samples} | {auto:.2f} | {given:.2f} | {auto / given:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
