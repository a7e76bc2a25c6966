"""A posterior that bends: eight schools, centered."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer.reparam import LocScaleReparam

DATA = (
    jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]),
    jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]),
)


def model(effects: Array, errors: Array) -> None:
    """A funnel, because theta is close to mu where tau is small."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(effects)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effects", dist.Normal(theta, errors), obs=effects)


# The neck of the funnel is too narrow for NUTS, which samples (theta - mu) / tau.
noncentered = numpyro.handlers.reparam(model, {"theta": LocScaleReparam(0)})


def flatten(draws: dict[str, Array]) -> Array:
    """Unconstrained coordinates, one row per draw."""
    return jnp.column_stack([draws["mu"], jnp.log(draws["tau"]), draws["theta"]])
