"""Models whose latents are in a ``scan`` of NumPyro."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan


def scan_of_one_scale(y):
    """Latents of one unknown scale, in a scan, with noise of sd 1."""
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 1.0))

    def step(carry, y):
        z = numpyro.sample("z", dist.Normal(0.0, jnp.exp(log_scale)))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
        return carry, None

    scan(step, None, y)
