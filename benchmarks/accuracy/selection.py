"""Error and time of the automatic choice of the regularization parameter.

    python -m benchmarks.accuracy.selection [--dims 2 8 32 64] [--samples 128] [--seeds 8] [--quick]

For each target, the automatic strength at the median distance is compared with the best member of
the path it is chosen from: the one with the smallest true error on average over the seeds. Errors
are mean squares per dimension at 512 new draws. The last table compares the time of
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
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators._path import path_for
from numpyro_kscore.regularizers import NuMethod, Regularizer, Tikhonov

TEST_POINTS = 512
TARGETS = {
    name: score_targets.TARGETS[name]
    for name in ("normal", "correlated", "banana", "mixture", "grid")
}


@jax.jit
def _errors(samples: Array, points: Array, scores: Array) -> tuple[Array, Array]:
    """Errors of every member of the path, (p,), base first, and of the automatic choice."""

    def error(regularizer: Regularizer) -> Array:
        estimator = ScoreEstimator(regularizer=regularizer, bandwidth="median")
        return jnp.mean(jnp.square(estimator.fit(samples)(points) - scores))

    family, dim = NuMethod("auto"), samples.shape[1]
    path = path_for(family, dim, normalize=True)
    members = jnp.arange(len(path.strengths(jnp.float32)))
    fixed = lax.map(lambda k: error(dataclasses.replace(path, index=k)), members)
    return fixed, error(family)


def errors_of(
    names: Sequence[str], dim: int, num_samples: int, seeds: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each target the errors of all members, (seeds, p), and of the choice, (seeds,)."""
    results = {}
    for name in names:
        target = TARGETS[name](dim)
        score = jax.jit(jax.vmap(jax.grad(target.log_density)))
        pairs = []
        for seed in range(seeds):
            first, second = random.split(random.key(seed))
            samples, points = target.draw(first, num_samples), target.draw(second, TEST_POINTS)
            pairs.append(_errors(samples, points, score(points)))
        fixed, auto = (np.array(values) for values in zip(*pairs, strict=True))
        results[name] = fixed, auto
    return results


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
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=8, help="0: times only")
    parser.add_argument("--repetitions", type=int, default=30, help="timed fits of each kind")
    parser.add_argument("--quick", action="store_true", help="one dimension, two seeds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.dims, options.samples, options.seeds, options.repetitions = [2], 64, 2, 2

    ratios: dict[str, list[float]] = {name: [] for name in TARGETS}
    print("| target | d | n | base | best fixed | auto | ratio |\n|---|---|---|---|---|---|---|")
    for dim in options.dims if options.seeds else ():
        for name, cell in errors_of(tuple(TARGETS), dim, options.samples, options.seeds).items():
            fixed, auto = cell
            means = fixed.mean(axis=0)
            ratios[name].append(auto.mean() / means.min())
            numbers = f"{means[0]:.4f} | {means.min():.4f} | {auto.mean():.4f}"
            row = f"| {name} | {dim} | {options.samples} | {numbers} | {ratios[name][-1]:.2f} |"
            print(row, flush=True)
    for name, values in ratios.items() if options.seeds else ():
        print(f"mean ratio, {name}: {np.mean(values):.3f}")
    print("\n| d | n | auto, ms | λ given, ms | ratio |\n|---|---|---|---|---|")
    for dim in options.dims:
        auto, given = 1e3 * least_times(dim, options.samples, options.repetitions)
        row = f"| {dim} | {options.samples} | {auto:.2f} | {given:.2f} | {auto / given:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
