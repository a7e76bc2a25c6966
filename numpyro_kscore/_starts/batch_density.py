"""A model's density over batches: the mean of some, and expansions of the mean of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_kscore._starts.candidates import Density
from numpyro_kscore._starts.density import batched_density
from numpyro_kscore._starts.streamed import Expand, Quadratic
from numpyro_kscore._tracing.coupling import Centering
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.compiling import quick_jit

__all__ = ["batch_expansions", "sample_density"]

# From a point, its centering and another one, and arguments and keyword arguments of the model, to
# the energy and what else is seen there.
Energy = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Array, Array]]
# Most dimensions of an expansion to second order.
MOST_CURVED = 128


def sample_density(energy: Energy, batches: Batches, forward_mode: bool) -> Density:
    """The mean density of a sample of the batches.

    Args:
        energy: the model's, which scales from a batch to all data.
        batches: the batches.
        forward_mode: differentiate in forward mode.
    """

    def mean(*at: Any) -> tuple[Array, Array]:
        def one(batch: Any) -> tuple[Array, Array]:
            return energy(at, *batches.arguments(batch))

        values, seen = jax.vmap(one)(batches.sample)
        return jnp.mean(values), seen[0]

    return batched_density(mean, forward_mode)


def batch_expansions(
    energy: Energy, batches: Batches, forward_mode: bool, is_double: bool
) -> tuple[Expand, Expand]:
    """Expansions of the mean density of the sample, and of that of all batches.

    Args:
        energy: as for :func:`sample_density`.
        batches: the batches.
        forward_mode: differentiate in forward mode.
        is_double: whether in double precision; sums over batches are.
    """
    differentiate = jax.jacfwd if forward_mode else jax.grad

    def one(batch: Any, point: Array, centering: Centering) -> Any:
        def value(x: Array) -> Array:
            return energy((x, centering, centering), *batches.arguments(batch))[0]

        slope, bend = differentiate(value), None
        if len(point) <= MOST_CURVED:
            directions = jnp.eye(len(point), dtype=point.dtype)
            bend = jax.vmap(lambda v: jax.jvp(slope, (point,), (v,))[1])(directions)
        return value(point), slope(point), bend

    @quick_jit
    def of_each(stack: Any, point: Array, centering: Centering) -> Any:
        return lax.map(lambda batch: one(batch, point, centering), stack)

    def expand(mean: Callable[..., Any], point: np.ndarray, centering: Centering) -> Quadratic:
        with jax.enable_x64(is_double):
            return Quadratic(*mean(lambda stack: of_each(stack, point, centering)))

    return (
        lambda point, centering: expand(batches.sample_mean, point, centering),
        lambda point, centering: expand(batches.mean, point, centering),
    )
