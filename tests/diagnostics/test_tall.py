"""Fits in minibatches, looked at with all data, or with a few rows that stand for all."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_kscore import Implicit, ImplicitELBO, evaluate_guide
from numpyro_kscore._model.coreset import choose_rows
from numpyro_kscore._model.tall_density import ACCURATE, errors_of_moments
from numpyro_kscore.diagnostics._codes import MEAN_LIMIT, SD_LIMIT
from numpyro_kscore.diagnostics._fitted import fitted_guide, model_density
from support.compiling import quick_jit

KEY = random.key(0)
NUM_GROUPS = 4
# The last group is in five rows of twenty thousand.
GROUPS = np.repeat(np.arange(NUM_GROUPS), [12_000, 7_000, 995, 5])
COUNTS = np.random.default_rng(0).poisson(np.exp(0.1 * GROUPS))


def model(groups, counts, batch=None):
    """Poisson counts with a rate for each group."""
    with numpyro.plate("groups", NUM_GROUPS):
        rates = numpyro.sample("rates", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(counts), subsample_size=batch) as rows:
        numpyro.sample("counts", dist.Poisson(jnp.exp(rates[groups[rows]])), obs=counts[rows])


def guide(groups, counts, batch=None):
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(NUM_GROUPS), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    rates = numpyro.param("loc", jnp.zeros(NUM_GROUPS)) + numpyro.param("sd", jnp.ones(4)) * noise
    with numpyro.plate("groups", NUM_GROUPS):
        numpyro.sample("rates", Implicit(rates))


def fitted():
    """The guide at Laplace's approximation of the posterior."""
    totals = np.bincount(GROUPS, COUNTS)
    sizes = np.bincount(GROUPS)
    loc = np.log(totals / sizes)
    for _ in range(20):
        curvature = sizes * np.exp(loc) + 1.0
        loc = loc + (totals - sizes * np.exp(loc) - loc) / curvature
    params = {"loc": jnp.asarray(loc), "sd": jnp.asarray(curvature**-0.5)}
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    return svi, SVIRunResult(params, SVIState(None, None, KEY), jnp.zeros(1))


@pytest.mark.thorough
def test_rows_of_a_minibatch_stand_for_all():
    svi, result = fitted()
    data = jnp.asarray(GROUPS), jnp.asarray(COUNTS)
    whole = fitted_guide(svi, result, data, {}, KEY)
    assert whole.tall is None
    part = fitted_guide(svi, result, (*data, 100), {}, KEY)
    found = model_density(part, KEY)
    assert found.error((MEAN_LIMIT, SD_LIMIT)) <= ACCURATE
    sd = result.params["sd"]
    points = result.params["loc"] + sd * random.normal(random.key(1), (64, NUM_GROUPS))
    exact, scores = quick_jit(jax.vmap(model_density(whole, KEY).evaluate))(points)
    values, few_scores = quick_jit(jax.vmap(found.evaluate))(points)
    # The five rows are taken for certain; the terms of third order of the others are those of a
    # twentieth of the rows, and about sd/6 each where all rows count, a hundredth.
    np.testing.assert_allclose(values - values[0], exact - exact[0], atol=0.02)
    np.testing.assert_allclose(few_scores * sd, scores * sd, atol=0.02)


@pytest.mark.thorough
def test_all_rows_are_taken_where_there_are_not_many():
    svi, result = fitted()
    some = np.r_[0:50, 12_000:12_050, 19_000:19_050, 19_995:20_000]
    data = jnp.asarray(GROUPS[some]), jnp.asarray(COUNTS[some])
    whole, part = (
        evaluate_guide(svi, result, *data, batch, num_samples=20) for batch in (None, 10)
    )
    for ours, theirs in zip(part[:3], whole[:3], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_models_that_are_handed_a_batch_are_refused():
    def handed(groups, counts):
        with numpyro.plate("groups", NUM_GROUPS):
            rates = numpyro.sample("rates", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 20_000, subsample_size=2):
            numpyro.sample("counts", dist.Poisson(jnp.exp(rates[groups])), obs=counts)

    _, result = fitted()
    svi = SVI(handed, guide, optax.adam(1e-2), ImplicitELBO())
    with pytest.raises(ValueError, match="indices of the plate 'rows'; got one that draws 2 of"):
        evaluate_guide(svi, result, jnp.asarray(GROUPS[:2]), jnp.asarray(COUNTS[:2]))


def test_rows_that_matter_are_certain_and_weights_add_up():
    sizes = np.r_[np.full(30, 100.0), np.random.default_rng(1).exponential(size=9_970)]
    chosen = choose_rows(sizes, 500)
    assert len(chosen.rows) == pytest.approx(500, abs=1)
    np.testing.assert_array_equal(chosen.rows[:30], np.arange(30))
    np.testing.assert_array_equal(chosen.weights[:30], 1.0)
    # Estimates of sums: of the number of rows, and of what decides how many are taken. Weights vary
    # by less than their mean, which would give 1/√470 for independent draws.
    assert np.sum(chosen.weights) == pytest.approx(10_000, rel=3 / 470**0.5)
    assert chosen.weights @ sizes[chosen.rows] == pytest.approx(sizes.sum(), rel=3 / 470**0.5)


def test_errors_of_moments_are_those_of_a_gaussian():
    root = np.array([[1.0, 0.0], [3.0, 2.0]])
    draws = np.random.default_rng(0).normal(size=(4_000, 2)) @ root.T
    covariance = np.cov(draws.T, bias=True)
    sd = np.diag(covariance) ** 0.5
    slope, bend = np.array([0.1, -0.02]), np.array([[0.05, 0.01], [0.01, -0.02]])
    # The density exp(slope x + x bend x / 2) times that of the draws is Gaussian, too.
    centered = draws - draws.mean(0)
    shift, width = errors_of_moments(jnp.asarray(draws), jnp.asarray(slope + centered @ bend))
    np.testing.assert_allclose(shift, covariance @ slope / sd, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        width, 0.5 * np.diag(covariance @ bend @ covariance) / sd**2, rtol=1e-4
    )
