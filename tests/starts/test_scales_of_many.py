"""Scales of more than 150 latents that data hardly tell from zero, against quadrature."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO

GROUPS, ROWS = 160, 6
SLOPES, LEVELS, NOISES = (
    np.linspace(*ends) for ends in ((-12, 0.5, 251), (-0.65, 0.25, 13), (-0.15, 0.15, 21))
)


def lines(x, y):
    slope_scale = numpyro.sample("slope_scale", dist.HalfNormal(1.0))
    level_scale = numpyro.sample("level_scale", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(2.0))
    with numpyro.plate("groups", GROUPS):
        slope = numpyro.sample("slope", dist.Normal(0, slope_scale))
        level = numpyro.sample("level", dist.Normal(0, level_scale))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(level + slope * x, noise), obs=y)


def data():
    """Levels that vary, and slopes that hardly do."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, GROUPS))
    slope, level = 0.2 * rng.normal(size=GROUPS), 0.8 * rng.normal(size=GROUPS)
    return x, level + slope * x + rng.normal(size=(ROWS, GROUPS))


def masses(x, y):
    """The distribution of the logarithm of the scale of slopes on its line."""
    s, level, noise = np.meshgrid(SLOPES, LEVELS, NOISES, indexing="ij")
    variance, of_slopes, of_levels = np.exp(2 * noise), np.exp(2 * s), np.exp(2 * level)
    found = s + level + noise - 0.5 * (of_slopes + of_levels + variance / 4)
    found = found - 0.5 * (x.size - 2 * GROUPS) * np.log(variance)
    found = found - 0.5 * np.sum(y**2) / variance
    for column, values in zip(x.T, y.T, strict=True):
        # The two numbers of a group, integrated out; all multiplied by the variance of the noise.
        of_level = ROWS + variance / of_levels
        of_slope = column @ column + variance / of_slopes
        both, one, other = column.sum(), values.sum(), column @ values
        determinant = of_level * of_slope - both**2
        fit = of_slope * one**2 - 2 * both * one * other + of_level * other**2
        found += 0.5 * fit / determinant / variance
        found -= 0.5 * np.log(determinant * of_slopes * of_levels)
    shares = np.exp(found - found.max()).sum(axis=(1, 2))
    return shares / shares.sum()


@pytest.mark.thorough
def test_a_scale_of_many_effects_has_its_tail():
    """A sixth of the posterior of its logarithm is far out, where the noise hardly follows."""
    args = tuple(jnp.asarray(a) for a in data())
    exact = masses(*data())
    mean = exact @ SLOPES
    sd = np.sqrt(exact @ (SLOPES - mean) ** 2)
    guide = AutoImplicit(lines)
    svi = SVI(lines, guide, optax.adam(1e-2), ImplicitELBO())
    params = svi.get_params(svi.init(random.key(0), *args))
    draws = guide.sample_posterior(random.key(1), params, *args, sample_shape=(40_000,))
    found = np.log(np.asarray(draws["slope_scale"], float))
    # It was .76 without looks at tails, and with a noise that moved with the stretched scale.
    assert found.std() / sd == pytest.approx(1, abs=0.08)
    assert found.mean() == pytest.approx(mean, abs=0.05 * sd)
