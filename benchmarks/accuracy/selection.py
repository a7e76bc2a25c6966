"""Error and time of the automatic choice of the regularization parameter.

    python -m benchmarks.accuracy.selection [--dims 2 8 32 64] [--samples 128] [--seeds 8] [--quick]

For each target, ``ScoreEstimator()`` is compared with the best member of the path it chooses from:
the one with the smallest true error on average over the seeds. Errors are mean squares per
dimension at 512 new draws. The last table compares the time of an automatic fit with that of a fit
with a given λ; both are jitted and timed alternately in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators._selection import PathMember
from numpyro_kscore.regularizers import NuMethod, Regularizer, Tikhonov

TEST_POINTS = 512


class Target(NamedTuple):
    """A distribution that can be drawn from and whose score is known.

    Attributes:
        draw: ``(key, n) -> (n, d)``.
        log_density: log density of one point, up to a constant.
    """

    draw: Callable[[Array, int], Array]
    log_density: Callable[[Array], Array]


def gaussian(dim: int) -> Target:
    """The standard normal, where the base score is the truth."""
    return Target(lambda key, n: random.normal(key, (n, dim)), lambda x: -0.5 * jnp.sum(x * x))


def correlated(dim: int) -> Target:
    """A normal with standard deviations from 1 to 0.1 along random directions."""
    rotation = np.linalg.qr(np.random.default_rng(1).standard_normal((dim, dim)))[0]
    sd = np.logspace(0, -1, dim)
    root = jnp.asarray((rotation * sd) @ rotation.T)
    precision = jnp.asarray((rotation / sd**2) @ rotation.T)
    return Target(
        lambda key, n: random.normal(key, (n, dim)) @ root.T, lambda x: -0.5 * x @ precision @ x
    )


def banana(dim: int) -> Target:
    """A banana in the first two coordinates, normal in the others."""
    precision = jnp.asarray(np.linalg.inv([[1.0, 0.9], [0.9, 1.0]]))

    def draw(key: Array, n: int) -> Array:
        z = random.normal(key, (n, dim))
        second = 0.9 * z[:, 0] + np.sqrt(0.19) * z[:, 1] - z[:, 0] ** 2 - 1.0
        return z.at[:, 1].set(second)

    def log_density(x: Array) -> Array:
        u = jnp.stack([x[0], x[1] + x[0] ** 2 + 1.0])
        return -0.5 * u @ precision @ u - 0.5 * jnp.sum(x[2:] ** 2)

    return Target(draw, log_density)


def mixture(dim: int) -> Target:
    """Two normals, four standard deviations apart in the first coordinate."""
    mean = jnp.zeros(dim).at[0].set(2.0)

    def draw(key: Array, n: int) -> Array:
        first, second = random.split(key)
        signs = random.rademacher(second, (n, 1), jnp.float32)
        return random.normal(first, (n, dim)) + signs * mean

    def log_density(x: Array) -> Array:
        return jnp.logaddexp(-0.5 * jnp.sum((x - mean) ** 2), -0.5 * jnp.sum((x + mean) ** 2))

    return Target(draw, log_density)


def grid(dim: int) -> Target:
    """A mixture of d normals at random corners of the unit cube."""
    corners = jnp.asarray(np.random.default_rng(1).integers(0, 2, (dim, dim)), jnp.float32)

    def draw(key: Array, n: int) -> Array:
        first, second = random.split(key)
        return corners[random.randint(first, (n,), 0, dim)] + random.normal(second, (n, dim))

    def log_density(x: Array) -> Array:
        return jax.scipy.special.logsumexp(-0.5 * jnp.sum((x - corners) ** 2, axis=1))

    return Target(draw, log_density)


TARGETS = {
    "gaussian": gaussian,
    "correlated": correlated,
    "banana": banana,
    "mixture": mixture,
    "grid": grid,
}


@jax.jit
def _errors(samples: Array, points: Array, scores: Array) -> tuple[Array, Array]:
    """Errors of every member of the path, (p,), base first, and of the automatic choice."""

    def error(regularizer: Regularizer) -> Array:
        estimator = ScoreEstimator(regularizer=regularizer)
        return jnp.mean(jnp.square(estimator.fit(samples)(points) - scores))

    family, dim = NuMethod("auto"), samples.shape[1]
    path = PathMember(family, jnp.asarray(0), 1.0 / dim)
    members = jnp.arange(len(family.path(path.bound)) + 1)
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
