"""Gaussian guides of a standard normal model, by their draws."""

import jax.numpy as jnp
import numpy as np

from numpyro_kscore.diagnostics import GuideDraws


def gaussian_draws(scale, dim=3, n=1_000, seed=0, shift=0.0):
    """A Gaussian guide N(shift, scale²) of the model N(0, I)."""
    z = np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)
    x = jnp.asarray(shift + scale * z)
    factor = np.cov(np.asarray(x).T, bias=True)
    return GuideDraws(
        x,
        -0.5 * jnp.sum(x**2, axis=1),
        -x,
        jnp.full(n, -np.trace(np.atleast_2d(factor)), jnp.float32),
        -0.5 * jnp.sum(jnp.asarray(z) ** 2, axis=1),
    )
