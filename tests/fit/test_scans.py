"""Fits of models whose latents are inside a scan, against quadrature and NUTS."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS, SVI
from scipy import stats

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from support.scans import scan_of_one_scale

Y = jnp.array([0.3, 0.5, 0.1, 0.9, 1.4, 0.8])


def of_one_scale(y=Y):
    scan_of_one_scale(y)


def growing(y=Y, standardized=False):
    """A positive level that wanders, and two columns of observations, shifted, in a plate."""
    scale = numpyro.sample("scale", dist.HalfNormal(0.5))

    def step(last, y):
        if standardized:
            level = last * jnp.exp(scale * numpyro.sample("of_level", dist.Normal()))
            level = numpyro.deterministic("level", level)
        else:
            level = numpyro.sample("level", dist.LogNormal(jnp.log(last), scale))
        with numpyro.plate("columns", 2):
            if standardized:
                shift = scale * numpyro.sample("of_shift", dist.Normal())
                shift = numpyro.deterministic("shift", shift)
            else:
                shift = numpyro.sample("shift", dist.Normal(0.0, scale))
            numpyro.sample("y", dist.Normal(level + shift, 0.5), obs=y)
        return level, None

    scan(step, 1.0, y)


def fitted_draws(model):
    guide = AutoImplicit(model)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO())
    result = fit(svi, random.key(0), progress_bar=False)
    assert result.info.converged, result.info.reason
    return guide.sample_posterior(random.key(1), result.params, sample_shape=(10_000,))


@pytest.mark.optimized
@pytest.mark.slow
def test_moments_are_those_of_a_quadrature():
    """Given the scale s the latents are independent and normal, of mean r y and variance r.

    Here r is s² / (1 + s²).
    """
    grid, y = np.linspace(-12.0, 8.0, 4001), np.asarray(Y)
    log_weights = stats.norm.logpdf(grid) + stats.norm.logpdf(
        y, scale=np.sqrt(1 + np.exp(2 * grid))[:, None]
    ).sum(axis=1)
    weights = np.exp(log_weights - np.logaddexp.reduce(log_weights))
    share = np.exp(2 * grid) / (1 + np.exp(2 * grid))
    mean, square = weights @ share * y, weights @ share + weights @ share**2 * y**2
    of_scale = weights @ grid, weights @ grid**2
    draws = fitted_draws(of_one_scale)
    for name, (exact, second) in {"log_scale": of_scale, "z": (mean, square)}.items():
        found, sd = np.asarray(draws[name]), np.sqrt(second - exact**2)
        # The limits of a fit that is right, and three errors of 10 000 draws.
        np.testing.assert_allclose((found.mean(0) - exact) / sd, 0.0, atol=0.18)
        np.testing.assert_allclose(found.std(0) / sd, 1.0, atol=0.12)


@pytest.mark.optimized
@pytest.mark.slow
def test_moments_are_those_of_nuts():
    """NUTS in standardized coordinates: in those of the model it misses small scales."""
    draws = fitted_draws(growing)
    kernel = NUTS(partial(growing, standardized=True), target_accept_prob=0.9)
    chains = MCMC(kernel, num_warmup=1_000, num_samples=10_000, progress_bar=False)
    chains.run(random.key(2))
    of_chains = chains.get_samples()
    for name, found in draws.items():
        pair = found, of_chains[name]
        found, exact = (np.asarray(jnp.log(a) if name == "scale" else a) for a in pair)
        # The limits of a fit that is right, .15 and 10 %, and three errors of NUTS with some 5000
        # effective draws: .042 for means, 3 % for standard deviations.
        shift = (found.mean(0) - exact.mean(0)) / exact.std(0)
        np.testing.assert_allclose(shift, 0.0, atol=0.2)
        np.testing.assert_allclose(found.std(0) / exact.std(0), 1.0, atol=0.13)


def test_latents_that_a_model_draws_anew_are_refused():
    """In a scan under a scope, NumPyro's own density does not depend on them either."""

    def scoped(y):
        def step(last, y):
            with handlers.scope(prefix="inner"):
                level = numpyro.sample("level", dist.Normal(last, 1.0))
            numpyro.sample("y", dist.Normal(level, 1.0), obs=y)
            return level, None

        scan(step, 0.0, y)

    # Inside of the step a scope does no harm.
    AutoImplicit(scoped, warm_start=False).set_up(random.key(0), Y)
    outer = handlers.scope(of_one_scale, "outer")
    with pytest.raises(ValueError, match=r"it draws \['outer/z'\] anew.*scope inside of the scan"):
        AutoImplicit(outer, warm_start=False).set_up(random.key(0), Y)
