"""The normalizing constant of a density that is known up to one, by importance sampling.

Half of the draws come from the Gaussian (or other distribution) that the density is a perturbation
of, and half from a kernel density estimate of the samples, which is close to it wherever the
samples are. The weights are the ratios to the mixture of both (Owen and Zhou 2000), so that none is
more than twice what it would be with draws from either alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import random

from numpyro_kscore.estimators._base.base_scores import Base, DistributionBase, EllipticalBase
from numpyro_kscore.estimators._base.mixture import MixtureBase
from numpyro_kscore.estimators._density.kernel_density import KernelDensity


class Normalization(NamedTuple):
    """A normalizing constant estimated by importance sampling.

    Attributes:
        log_constant: logarithm of the estimate of ``∫ exp(f)``.
        standard_error: of ``log_constant``; itself trustworthy only with many effective draws.
        effective_sample_size: ``(Σw)²/Σw²`` of the weights w, from 1 to ``num_draws``; below a
            hundred, take more draws, or distrust the constant.
        num_draws: number of draws.

    Example::

        from numpyro_kscore import KernelExponentialFamily

        prior = KernelExponentialFamily(samples).normalize(random.key(1))
        prior.normalization.raise_if_failed()
        prior.normalization.standard_error < 0.01  # True
    """

    log_constant: jax.Array
    standard_error: jax.Array
    effective_sample_size: jax.Array
    num_draws: jax.Array

    def raise_if_failed(self) -> None:
        """Raise ``FloatingPointError`` for a constant not to be trusted. Call outside ``jit``."""
        size = float(self.effective_sample_size)
        # Written so that NaN fails too.
        if not size >= FEWEST_EFFECTIVE:
            raise FloatingPointError(
                f"normalization: expected at least {FEWEST_EFFECTIVE} effective draws; got "
                f"{size:.3g} of {int(self.num_draws)}. Give more draws, or do without the constant"
            )


# Effective draws with which the standard error of a mean weight is known to about 20 %.
FEWEST_EFFECTIVE = 100


class Proposal(NamedTuple):
    """Draws of two distributions, m of each, (2m, d), and the log density of their mixture."""

    draws: jax.Array
    log_density: jax.Array


def draw_proposal(base: Base, samples: jax.Array, key: jax.Array, num_draws: int) -> Proposal:
    """Draws of the base and of a kernel density estimate of the samples, half of each."""
    first, second, third = random.split(key, 3)
    shape = (num_draws // 2, samples.shape[1])
    if isinstance(base, EllipticalBase | MixtureBase):
        from_base = base.draw(first, shape[0])
    elif isinstance(base, DistributionBase):
        from_base = base.distribution.sample(first, shape[:1]).astype(samples.dtype)
    else:
        raise TypeError(f"base: expected one with a density; got {type(base).__name__}")
    kernels = KernelDensity().fit(samples)
    rows = random.randint(second, shape[:1], 0, samples.shape[0])
    noise = kernels.info.bandwidth * random.normal(third, shape, samples.dtype)
    mean, root = kernels.coordinates.mean, kernels.coordinates.root()
    around = samples[rows] + (mean + noise @ root.T) - mean
    draws = jnp.concatenate([from_base, around])
    log_density = jnp.logaddexp(base.log_density(draws), kernels.log_density(draws))
    return Proposal(draws, log_density - jnp.log(2.0))


def importance_sampled(log_density: jax.Array, proposal: Proposal) -> Normalization:
    """The constant of a density from its logarithm at the draws, (2m,)."""
    log_weights = log_density - proposal.log_density
    largest = jnp.max(log_weights)
    weights = jnp.exp(log_weights - largest)
    mean = jnp.mean(weights)
    # The variance within parts of equal size, which is less than that of the whole.
    parts = weights.reshape(2, -1)
    variance = jnp.mean(jnp.var(parts, axis=1, ddof=1)) / weights.shape[0]
    return Normalization(
        largest + jnp.log(mean),
        jnp.sqrt(variance) / mean,
        jnp.sum(weights) ** 2 / jnp.sum(weights**2),
        jnp.asarray(weights.shape[0]),
    )
