"""The posteriors of textbooks are what they say they are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import log_density
from test_benchmark_harder import check_parametrizations

from benchmarks.accuracy.posteriors import make_posterior
from benchmarks.accuracy.textbook import TEXTBOOK


def latents(model, *data):
    """All latent and computed sites at a place where chains of NUTS may start."""

    def start(site):
        if site["type"] != "sample" or site["is_observed"]:
            return None
        transform = biject_to(site["fn"].support)
        shape = transform.inverse_shape(site["fn"].shape())
        return transform(jnp.linspace(-0.5, 0.5, np.prod(shape, dtype=int)).reshape(shape))

    trace = handlers.trace(handlers.substitute(model, substitute_fn=start)).get_trace(*data)
    return {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "deterministic" or (site["type"] == "sample" and not site["is_observed"])
    }


@pytest.mark.parametrize("name", TEXTBOOK)
@pytest.mark.thorough
def test_density_is_finite_where_nuts_starts(name):
    target = make_posterior(name).target
    assert target.name == name

    @jax.jit  # one program is compiled faster than its many operations one after another
    def evaluate(*data):
        found = latents(target.nuts_model or target.model, *data)
        draws = target.from_nuts({site: value[None] for site, value in found.items()})
        assert draws.keys() == target.supports().keys()
        values = {site: draw[0] for site, draw in draws.items()}
        return target.unconstrained(draws), log_density(target.model, data, {}, values)[0]

    unconstrained, density = evaluate(*target.args)
    size = int(re.search(r"d = (\d+)\.", TEXTBOOK[name].__doc__)[1])
    assert unconstrained.shape == (1, size)
    assert np.all(np.isfinite(unconstrained))
    assert np.isfinite(density)


@pytest.mark.slow  # each model is compiled in both forms
@pytest.mark.parametrize("name", [n for n in TEXTBOOK if n not in ("pumps", "factor_model")])
def test_both_parametrizations_are_one_posterior(name):
    with jax.enable_x64(True):
        check_parametrizations(TEXTBOOK[name]().target)


@pytest.mark.slow  # operations compile one after another
def test_factors_are_drawn_given_the_rest(x64):
    """Joint density = density without factors x theirs, whose moments the draws have."""
    target = TEXTBOOK["factor_model"]().target
    scores = target.args[0].astype(float)
    rest = latents(target.nuts_model, scores)
    repeated = {site: jnp.broadcast_to(x, (4_000, *x.shape)) for site, x in rest.items()}
    draws = np.asarray(target.from_nuts(repeated)["factors"])
    loadings = np.zeros((8, 2))
    loadings[[0, 1], [0, 1]] = rest["diagonal"]
    loadings[1:, 0], loadings[2:, 1] = np.split(np.asarray(rest["below"]), [7])
    # Regression of factors on scores, by their joint covariance.
    scales = np.asarray(rest["noises"])
    weights = loadings.T @ np.linalg.inv(loadings @ loadings.T + np.diag(scales**2))
    means = np.asarray(scores - rest["means"]) @ weights.T
    covariance = np.eye(2) - weights @ loadings
    conditional = dist.MultivariateNormal(means, covariance)

    kept = {site: rest[site] for site in ("means", "diagonal", "below", "noises")}
    whole = [
        log_density(target.model, (scores,), {}, kept | {"factors": factors})[0]
        - conditional.log_prob(factors).sum()
        for factors in draws[:3]
    ]
    bases = {site: x for site, x in rest.items() if site.endswith("_base")}
    # NUTS's coordinates of order one have the constant Jacobian of their units and, where numbers
    # are positive, the numbers themselves.
    units = 8 * np.log(2.0) + 13 * np.log(2.0) + 2 * np.log(0.3) + 8 * np.log(0.2)
    jacobian = units + np.log(rest["diagonal"]).sum() + np.log(rest["noises"]).sum()
    summed_out = log_density(target.nuts_model, (scores,), {}, bases)[0] - jacobian
    np.testing.assert_allclose(whole, np.full(3, summed_out), rtol=1e-9)

    error = np.sqrt(np.diag(covariance) / len(draws))
    assert np.max(np.abs(draws.mean(0) - means) / error) < 4.5
    deviations = (draws - means).reshape(-1, 2)
    np.testing.assert_allclose(deviations.T @ deviations / len(deviations), covariance, atol=0.01)
