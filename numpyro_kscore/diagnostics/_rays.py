"""How far a model moves draws along rays from their mean: what lies beyond the draws.

Stein's identities hold the model against draws where these are, and thin tails fulfil them. The
model's density along the ray through a draw is known up to a constant, at any distance. A radius
drawn from it is a step of a Gibbs sampler: it leaves draws of the model as they are in
distribution, and shows tails, widths and shifts of others. Its mean needs no draw.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

# Points on a ray; logarithm of the farthest distance over the draw's own; and the width, times √d,
# of the part in which they are dense, since lengths vary less in more dimensions.
NUM_POINTS, FARTHEST, DENSE = 32, 3.5, 0.25


def move_along_rays(
    log_density: Callable[[Array], Array], samples: Array, key: Array, batch: int = 64
) -> Array:
    """Measure how one step along rays changes means and standard deviations.

    Args:
        log_density: that of the model, up to a constant, of a point (d,).
        samples: draws (n, d). One that is not finite does not count, nor does a ray on which no
            density is.
        key: random key; every ray has points of its own, so that their coarseness is noise.
        batch: points that are evaluated at once.

    Returns:
        Changes of means, in standard deviations, and of log standard deviations, and then the
        standard errors of both, (2, 2, d).

    Cost: 32 values of the model for each draw.
    """
    n, dim = samples.shape
    valid = jnp.all(jnp.isfinite(samples), axis=1)
    weight = valid / jnp.maximum(jnp.sum(valid), 1)
    samples = jnp.where(valid[:, None], samples, samples[jnp.argmax(valid)])
    mean = weight @ samples
    offset = samples - mean

    dense = DENSE / dim**0.5
    end = jnp.arcsinh(FARTHEST / dense)
    place = jnp.arange(NUM_POINTS) + jax.random.uniform(key, (n, 1), samples.dtype)
    place = end * (2 * place / NUM_POINTS - 1)
    log_length, log_spacing = dense * jnp.sinh(place), jnp.log(jnp.cosh(place))
    points = mean + jnp.exp(log_length)[:, :, None] * offset[:, None, :]
    values = lax.map(log_density, points.reshape(-1, dim), batch_size=batch).reshape(n, NUM_POINTS)
    # The volume between two lengths grows with their d-th power.
    values = jnp.where(jnp.isfinite(values), values, -jnp.inf) + dim * log_length + log_spacing
    known = valid & jnp.any(jnp.isfinite(values), axis=1)
    shares = jax.nn.softmax(jnp.where(known[:, None], values, 0.0), axis=1)

    weight = known / jnp.maximum(jnp.sum(known), 1)
    first, second = (
        jnp.sum(shares * jnp.expm1(power * log_length), axis=1)[:, None] for power in (1, 2)
    )
    variance = jnp.maximum(weight @ offset**2, jnp.finfo(samples.dtype).tiny)
    shift, growth = offset * first / jnp.sqrt(variance), offset**2 * second / variance
    changes = [weight @ shift, weight @ growth]
    errors = [
        jnp.sqrt(weight @ (change - center) ** 2 / jnp.maximum(jnp.sum(known), 1))
        for change, center in zip((shift, growth), changes, strict=True)
    ]
    # A variance that grows by a part g has a log standard deviation of log(1 + g)/2 more.
    least = jnp.maximum(1 + changes[1], jnp.finfo(samples.dtype).eps)
    return jnp.stack(
        [changes[0], 0.5 * jnp.log(least), errors[0], 0.5 * errors[1] / least]
    ).reshape(2, 2, dim)
