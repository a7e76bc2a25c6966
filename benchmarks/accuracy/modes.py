"""Weights of two distant modes in densities fitted by score matching.

    python -m benchmarks.accuracy.modes [--dims 2 8] [--samples 200 1000 4000] [--seeds 4]
        [--csv FILE] [--quick]

Two modes with weights .3 and .7 are eight standard deviations apart: normals, or bananas. The
weight that a fitted density gives to the smaller one is its integral over a half space, here by
importance sampling, half of the draws from the truth and half from around the samples. The bases
are ``"student"``, ``"auto"`` (the default) and a mixture of normals that scikit-learn fits to
the samples. Errors are root mean
squares over seeds, relative to .3: of the share of the samples themselves, which no estimate can
undo; of the fitted weights; and of the fitted weights from that share. The last column is the error
of the score, as a fraction of the mean square of the true one, at new draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from sklearn.mixture import GaussianMixture

from benchmarks.accuracy.score_targets import Target, banana, normal
from examples.common.tables import Row, fill, markdown_line
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import KernelDensity

WEIGHT = 0.3
HALF_DISTANCE = 4.0
DRAWS = 4096
BASES = ("student", "auto", "scikit-learn")
# Of normals in a mixture of scikit-learn.
NUMBERS = (1, 2, 3, 4)
COLUMNS = ("share", "weight", "effective", "score_error")


def two(mode: Callable[[int], Target], dim: int) -> Target:
    """Two copies of a normalized distribution: 30 % on the left, 70 % on the right."""
    each = mode(dim)
    shift = jnp.zeros(dim).at[0].set(HALF_DISTANCE)

    def draw(key: Array, n: int) -> Array:
        first, second = random.split(key)
        left = random.bernoulli(second, WEIGHT, (n, 1))
        return each.draw(first, n) + jnp.where(left, -shift, shift)

    def log_density(x: Array) -> Array:
        left = jnp.log(WEIGHT) + each.log_density(x + shift)
        return jnp.logaddexp(left, jnp.log1p(-WEIGHT) + each.log_density(x - shift))

    return Target(draw, log_density)


def _normalized(mode: Callable[[int], Target], log_constant: Callable[[int], float]) -> Callable:
    def make(dim: int) -> Target:
        each = mode(dim)
        return each._replace(log_density=lambda x: each.log_density(x) - log_constant(dim))

    return make


TARGETS: dict[str, Callable[[int], Target]] = {
    "normals": _normalized(normal, lambda dim: 0.5 * dim * np.log(2 * np.pi)),
    # One of the two normals that are bent has a conditional variance of 1 - .9².
    "bananas": _normalized(banana, lambda dim: 0.5 * dim * np.log(2 * np.pi) + 0.5 * np.log(0.19)),
}


def mixture_base(samples: np.ndarray) -> dist.Distribution:
    """A mixture of normals fitted to samples (n, d), with the number of them that BIC prefers."""
    fits = [GaussianMixture(k, n_init=3, random_state=0).fit(samples) for k in NUMBERS]
    best = fits[int(np.argmin([fit.bic(samples) for fit in fits]))]
    covariances = jnp.asarray(best.covariances_, jnp.float32)
    components = dist.MultivariateNormal(jnp.asarray(best.means_, jnp.float32), covariances)
    weights = dist.Categorical(jnp.asarray(best.weights_, jnp.float32))
    return dist.MixtureSameFamily(weights, components)


@partial(jax.jit, static_argnames=("target", "dim"))
def measure(key: Array, estimator: ScoreEstimator, samples: Array, target: str, dim: int) -> Array:
    """Fitted weight of the left mode, effective draws and error of the score."""
    truth = two(TARGETS[target], dim)
    log_density = jax.vmap(truth.log_density)
    first, second = random.split(key)
    score = estimator.fit(samples)
    half = DRAWS // 2
    # Half from the truth, half around the samples.
    kernels = KernelDensity().fit(samples)
    rows = random.randint(second, (half,), 0, samples.shape[0])
    noise = (
        kernels.info.bandwidth * random.normal(first, (half, dim)) @ kernels.coordinates.root().T
    )
    points = jnp.concatenate([truth.draw(first, half), samples[rows] + noise])
    proposal = jnp.logaddexp(log_density(points), kernels.log_density(points))
    weights = jax.nn.softmax(score.log_density(points) - proposal)
    new = truth.draw(random.fold_in(key, 1), half)
    exact = jax.vmap(jax.grad(truth.log_density))(new)
    error = jnp.mean((score(new) - exact) ** 2) / jnp.mean(exact**2)
    return jnp.stack([weights @ (points[:, 0] < 0), 1.0 / jnp.sum(weights**2), error])


def compute(target: str, dim: int, samples: int, base: str, seed: int) -> Row:
    """Share of the samples on the left, and what :func:`measure` returns."""
    first, second = random.split(random.key(seed))
    draws = two(TARGETS[target], dim).draw(first, samples)
    given = mixture_base(np.asarray(draws, float)) if base == "scikit-learn" else base
    found = measure(second, ScoreEstimator(base=given), draws, target, dim)
    figures = (jnp.mean(draws[:, 0] < 0), *found)
    return {name: float(value) for name, value in zip(COLUMNS, figures, strict=True)}


def root_mean_square(values: np.ndarray) -> float:
    return float(np.mean(np.square(values)) ** 0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--bases", nargs="+", default=list(BASES), choices=BASES)
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--samples", type=int, nargs="+", default=[200, 1000, 4000])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--csv", type=Path, help="one seed a row; those in it are kept")
    parser.add_argument("--quick", action="store_true", help="one target, two seeds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.targets, options.dims, options.samples, options.seeds = ["normals"], [2], [64], 2

    cells = [
        {"target": target, "dim": dim, "samples": n, "base": base, "seed": seed}
        for dim in options.dims
        for n in options.samples
        for target in options.targets
        for base in options.bases
        for seed in range(options.seeds)
    ]
    rows = fill(cells, compute, COLUMNS, options.csv)
    print("| modes | d | n | base | samples' error | weight's error | from the samples | score |")
    print("|---|---|---|---|---|---|---|---|")
    for k in range(0, len(rows), options.seeds):
        same = rows[k : k + options.seeds]
        share, weight, error = (
            np.array([row[name] for row in same]) for name in ("share", "weight", "score_error")
        )
        figures = (
            root_mean_square(share / WEIGHT - 1.0),
            root_mean_square(weight / WEIGHT - 1.0),
            root_mean_square((weight - share) / WEIGHT),
            float(np.mean(error)),
        )
        names = [same[0][name] for name in ("target", "dim", "samples", "base")]
        print(markdown_line([*names, *(f"{figure:.3f}" for figure in figures)]))


if __name__ == "__main__":
    main()
