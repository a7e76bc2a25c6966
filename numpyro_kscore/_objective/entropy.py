"""A nearest-neighbor estimate of differential entropy, for the reported loss only."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._util.compiling import AS_IT_IS
from numpyro_kscore.estimators._base.gaussian import fit_gaussian
from numpyro_kscore.estimators._base.standardization import (
    WHITENING_CHOICES,
    Coordinates,
    regress_out,
    standardize_samples,
)
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances

# Number of simulated sets of draws that a bias is averaged over. Rows of a plate share one bias,
# whose error adds up over them; where sets are cheap, this many give it to less than .01.
CALIBRATION_SETS = 1024
CALIBRATION_PAIRS = 32 * 1024 * 1024
# Single blocks have sets that are not cheap, and 32 sets of up to 1024 draws are enough for them.
FEWEST_SETS = 32
FEWEST_DRAWS = 32 * 1024


def entropy(
    nearest: jax.Array,
    coordinates: Coordinates,
    standardize: str,
    num_samples: int,
    nearest_context: jax.Array | None = None,
    context_size: int = 0,
) -> jax.Array:
    """Estimate a differential entropy from samples, in nats; not differentiated.

    The estimate is Kozachenko and Leonenko's with one neighbor, in standardized coordinates, less
    its bias on Gaussian samples of the same n and d. It is unbiased for Gaussians in any dimension,
    where the plain estimator is off by many nats, and nearly so for distributions close to one. Its
    standard deviation is about ``sqrt((1.6 + d/2)/n)``. Copies of a point and a collapsed sample
    give a low, finite value.

    ``nearest`` are squared distances of samples to their nearest others, in standardized units; of
    ``num_samples`` samples some may be left out. ``standardize="gaussian"`` is the shrunk
    Gaussian's whitening. With a context the result is the entropy given the context, the joint
    entropy less the context's: ``nearest`` have the context's distance added, and
    ``nearest_context`` are those of the context alone.
    """
    dim = coordinates.mean.shape[0]
    joint = _raw(nearest, dim + context_size) + coordinates.log_det()
    if nearest_context is not None:
        joint = joint - _raw(nearest_context, context_size)
    bias = _gaussian_bias(
        num_samples, nearest.shape[0], dim, context_size, standardize, nearest.dtype.name
    )
    return lax.stop_gradient(joint) - bias


def _raw(nearest: jax.Array, dim: int) -> jax.Array:
    """``d mean(log distance to the nearest)``: the entropy up to a constant, standardized."""
    # Floor at what rounding can resolve, so that copies of a point give a finite value.
    floor = jnp.finfo(nearest.dtype).eps ** 2 * dim
    log_distance = 0.5 * jnp.log(jnp.maximum(nearest, floor))
    return dim * jnp.mean(log_distance)


@functools.lru_cache(maxsize=256)
def _gaussian_bias(
    n: int, num_nearest: int, dim: int, context_size: int, standardize: str, dtype: str
) -> float:
    """Mean of the raw estimate on standard normal samples of that size, less the truth.

    Samples have the precision of the real ones: rounding of the smallest distances adds bias.
    """

    @jax.jit
    def raw(samples: jax.Array, context: jax.Array) -> jax.Array:
        total = within = jnp.zeros((), dtype)
        if context_size:
            context = standardize_samples(context, standardize).to_kernel(context)
            if standardize in WHITENING_CHOICES:
                samples = regress_out(samples, context)
            within = squared_distances(context, context, cancels(context))
            total = -_raw(nearest_squared(within), context_size)
        if standardize == "gaussian":
            coordinates = fit_gaussian(samples).coordinates
        else:
            coordinates = standardize_samples(samples, standardize)
        z = coordinates.to_kernel(samples[:num_nearest])
        s = squared_distances(z, z, cancels(z)) + within
        return total + _raw(nearest_squared(s), dim + context_size) + coordinates.log_det()

    # It is compiled by hand: it may be called while another program is traced, and must not become
    # a part of that; jax.ensure_compile_time_eval would compile each operation by itself.
    shapes = [jax.ShapeDtypeStruct((n, size), dtype) for size in (dim, context_size)]
    # The program runs so seldom that only its compilation takes time.
    compiled = raw.lower(*shapes).compile(AS_IT_IS)
    generator = np.random.default_rng(0)
    # Two sets are enough where each has so many draws that sets hardly differ.
    fewest = max(2, min(FEWEST_SETS, FEWEST_DRAWS // n))
    affordable = CALIBRATION_PAIRS // (n * num_nearest * (dim + context_size))
    num_sets = max(fewest, min(CALIBRATION_SETS, affordable))
    draws = generator.standard_normal((num_sets, n, dim + context_size)).astype(dtype)
    estimates = [float(compiled(x[:, :dim], x[:, dim:])) for x in draws]
    return float(np.mean(estimates)) - 0.5 * dim * float(np.log(2 * np.pi * np.e))
