"""Normalized density estimates of several kinds, mixed with weights that held-out draws choose.

No single estimate is good for all: a kernel exponential family where the distribution is smooth and
light in the tails, kernel density estimates in few dimensions, Student t distributions where tails
are heavy. A mixture of their densities is a density again; its weights maximize the likelihood of
draws that none of them has seen (Smyth and Wolpert 1999).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._base.standardization import standardize_samples
from numpyro_kscore.estimators._base.student import student_log_density
from numpyro_kscore.estimators._density.kernel_density import KernelDensity, NormalReference
from numpyro_kscore.estimators._density.normalization import (
    Normalization,
    draw_proposal,
    importance_sampled,
)
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.estimators._operators.operator_options import Subset

# Samples beyond which the operator of the kernel exponential family is that of a subset.
WHOLE_POINTS = 4096
SUBSET_POINTS = 1024
# Bandwidths over the normal-reference one, which is too wide for most that is not Gaussian.
FACTORS = (0.35, 0.6, 1.0)
DEGREES = (2.0, 5.0, 20.0)
# Steps of the EM algorithm for the weights.
STEPS = 200


@quick_jit
@full_precision
def log_densities(
    samples: jax.Array, points: jax.Array, key: jax.Array, *, num_draws: int
) -> tuple[jax.Array, Normalization]:
    """Log densities at points by every estimate, (m, k), and the constant one of them needed."""
    n = samples.shape[0]
    subset = Subset(SUBSET_POINTS, key=random.fold_in(key, 1)) if n > WHOLE_POINTS else None
    estimator = ScoreEstimator(bandwidth="auto", base="student", subset=subset)
    score = estimator.fit(samples)
    proposal = draw_proposal(score.base, samples, key, num_draws)
    normalization = importance_sampled(score.log_density(proposal.draws), proposal)
    exponential = score.log_density(points) - normalization.log_constant
    smoothed: list[jax.Array] = []
    for correction in ("debiased", "adaptive"):

        def evaluate(factor: jax.Array, correction: str = correction) -> jax.Array:
            estimator = KernelDensity(NormalReference(factor), correction)
            return estimator.fit(samples).log_density(points)

        smoothed += list(lax.map(evaluate, jnp.asarray(FACTORS, samples.dtype)))
    coordinates = standardize_samples(samples, "full")
    z, y = coordinates.to_kernel(samples), coordinates.to_kernel(points)
    heavy = [student_log_density(z, y, nu) - coordinates.log_det() for nu in DEGREES]
    return jnp.stack([exponential, *smoothed, *heavy], axis=1), normalization


@jax.jit
def stacking_weights(values: jax.Array) -> jax.Array:
    """Weights of greatest likelihood for mixed log densities (n, k): log weights (k,), by EM."""
    count = values.shape[1]

    def step(log_weights: jax.Array, _: None) -> tuple[jax.Array, None]:
        shares = jax.nn.softmax(values + log_weights, axis=1)
        return jnp.log(jnp.mean(shares, axis=0)), None

    start = jnp.full(count, -math.log(count), values.dtype)
    return lax.scan(step, start, None, length=STEPS)[0]


def stacked(values: jax.Array, log_weights: jax.Array) -> jax.Array:
    """The log density of the mixture, (n, k) -> (n,)."""
    return jax.nn.logsumexp(values + log_weights, axis=1)
