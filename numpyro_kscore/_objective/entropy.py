"""A nearest-neighbor estimate of differential entropy, for the reported loss only."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore.estimators._coordinates import Coordinates, regress_out, standardize_samples
from numpyro_kscore.estimators._gaussian import fit_gaussian
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances

__all__ = ["entropy"]

# Simulated samples behind a bias: sets of as many draws as the guide's. Rows of a plate share one
# bias, whose error adds up over them: where a set is cheap it is known to less than a hundredth.
CALIBRATION_SETS = 1024
CALIBRATION_PAIRS = 32 * 1024 * 1024
# Where it is not, there is a single block, and 32 sets of up to 1024 draws are enough.
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
    """Differential entropy of the distribution of some samples, in nats; not differentiated.

    Kozachenko and Leonenko's estimator with one neighbor, in standardized coordinates, less its
    bias on Gaussian samples of the same n and d. That makes it right on average for Gaussians
    in any dimension, where the plain estimator is off by many nats, and about right for what is
    near one. Its standard deviation is about ``sqrt((1.6 + d/2)/n)``. Copies of a point and a
    collapsed sample give a low, finite value.

    With a context it is the entropy given the context: that of both less that of the context.

    Args:
        nearest: squared distance of each sample to its nearest other, standardized and with that
            of the context added, (n,).
        coordinates: how the samples were standardized.
        standardize: by which rule; ``"gaussian"`` is the shrunk Gaussian's whitening.
        num_samples: how many samples gave the coordinates; more than are in ``nearest`` where
            only some are looked at.
        nearest_context: the same of the context alone.
        context_size: dimension of the context.
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
    """``d mean(log distance to the nearest)``: H up to a constant, in standardized units."""
    # Points closer than rounding resolves count as that close: copies stay finite.
    floor = jnp.finfo(nearest.dtype).eps ** 2 * dim
    log_distance = 0.5 * jnp.log(jnp.maximum(nearest, floor))
    return dim * jnp.mean(log_distance)


@functools.lru_cache(maxsize=256)
def _gaussian_bias(
    n: int, num_nearest: int, dim: int, context_size: int, standardize: str, dtype: str
) -> float:
    """Mean of the raw estimate on standard normal samples of that size, less the truth.

    In the precision of the samples: what rounding does to the smallest distances is bias too.
    """

    @jax.jit
    def raw(samples: jax.Array, context: jax.Array) -> jax.Array:
        total = jnp.zeros((), dtype)
        within = jnp.zeros((), dtype)
        if context_size:
            context = standardize_samples(context, standardize).to_kernel(context)
            if standardize == "full":
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

    # Compiled by hand: what is asked for while another program is traced must not become a part
    # of it, and jax.ensure_compile_time_eval would compile each of its operations by itself.
    shapes = (
        jax.ShapeDtypeStruct((n, dim), dtype),
        jax.ShapeDtypeStruct((n, context_size), dtype),
    )
    # Run so seldom that only the time to compile counts.
    options: dict[str, Any] = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    compiled = raw.lower(*shapes).compile(options)
    generator = np.random.default_rng(0)
    # At least two: the spread over sets of so many draws is small by itself.
    fewest = max(2, min(FEWEST_SETS, FEWEST_DRAWS // n))
    affordable = CALIBRATION_PAIRS // (n * num_nearest * (dim + context_size))
    num_sets = max(fewest, min(CALIBRATION_SETS, affordable))
    draws = generator.standard_normal((num_sets, n, dim + context_size)).astype(dtype)
    estimates = [float(compiled(x[:, :dim], x[:, dim:])) for x in draws]
    return float(np.mean(estimates)) - 0.5 * dim * float(np.log(2 * np.pi * np.e))
