"""Draws with widened noise, against closed forms."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, init_to_value
from numpyro.infer.svi import SVIRunResult
from scipy.stats import norm

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO
from numpyro_kscore._model.defense import (
    FARTHEST,
    WIDTH,
    choose_columns,
    log_shares,
    normal_noise,
    widen,
)
from numpyro_kscore._model.program import Program, inspect_program
from numpyro_kscore._model.weights import Weigher, draw_weighted
from numpyro_kscore.diagnostics._fitted import fitted_guide
from numpyro_kscore.diagnostics._weighing import weigh

# Logarithms of exponential numbers: the left tail is exponential.
MEAN, SD = -np.euler_gamma, np.pi / 6**0.5
NUM = 8_000


def tailed(y):
    numpyro.sample("x", dist.Exponential(1.0))
    numpyro.sample("other", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


@pytest.fixture(scope="module")
def fitted():
    """A Gaussian guide, whose spread in log x is 1, and 1.28 in the model."""
    values = {"x": jnp.exp(MEAN), "other": jnp.zeros(())}
    guide = AutoImplicit(
        tailed, warm_start=False, hidden_dims=(2,), init_loc_fn=init_to_value(values=values),
        init_scale=1.0,
    )  # fmt: skip
    svi = SVI(tailed, guide, optax.adam(1e-2), ImplicitELBO(4))
    state = svi.init(random.key(0), 0.0)
    result = SVIRunResult(svi.get_params(state), state, jnp.zeros(1))
    return fitted_guide(svi, result, (0.0,), {}, random.key(0))


def weighed(fitted, **kwargs):
    draws = draw_weighted(random.key(1), fitted.program, fitted.layout, NUM, **kwargs)
    return draws, weigh(draws)


@pytest.mark.thorough
def test_more_draws_go_on_where_the_first_ended(fitted):
    weigher = Weigher(random.key(1), fitted.program, fitted.layout)
    few, more = weigher.draw(500), weigher.draw(2_000)
    whole = draw_weighted(random.key(1), fitted.program, fitted.layout, 2_000)
    np.testing.assert_array_equal(more.samples[:500], few.samples)
    for one, other in zip(more[:4], whole[:4], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(more.is_own, whole.is_own)
    assert np.all(few.is_own)
    assert not np.all(more.is_own)


@pytest.mark.thorough
def test_a_tail_beyond_the_guides_own_draws_is_weighed(fitted):
    draws, found = weighed(fitted)
    assert 0.7 < np.mean(draws.is_own) < 0.8
    # Its error is that of some two thousand draws in the tail.
    assert abs(np.log(found.ratio[0] * SD)) < 3 * found.ratio_error[0] < 0.1
    assert abs(found.ratio[1] - 1) < 0.03
    assert abs(found.evidence.value - norm.logpdf(0.0)) < 3 * found.evidence.error
    # A few of the guide's own draws weigh most.
    plain, own = weighed(fitted, is_defended=False)
    assert np.all(plain.is_own)
    assert not np.any(plain.log_shares)
    assert own.ratio_error[0] > 3 * found.ratio_error[0]
    assert own.evidence.error > 2 * found.evidence.error


@pytest.mark.thorough
def test_averages_by_shares_are_those_of_the_guide(fitted):
    draws, _ = weighed(fitted)
    noise = draws.samples - draws.shares @ draws.samples
    # Three standard errors of a second moment of 8000 normal draws are .05.
    np.testing.assert_allclose(draws.shares @ noise**2, 1.0, atol=0.05)


def test_shares_are_ratios_of_densities():
    noise = np.random.default_rng(0).normal(size=(6, 3)) * 3
    noise[0, 2] = FARTHEST + 0.1
    inside = norm.cdf(FARTHEST / WIDTH) - norm.cdf(-FARTHEST / WIDTH)
    wide = np.where(np.abs(noise) < FARTHEST, norm.pdf(noise, scale=WIDTH) / inside, 0.0)
    ratios = wide / norm.pdf(noise)
    expected = -np.log(0.8 + 0.2 * (ratios[:, 0] + ratios[:, 2]) / 2)
    np.testing.assert_allclose(log_shares(noise, np.array([0, 2]), 0.2), expected, rtol=1e-6)


def test_widened_noise_has_that_distribution():
    noise = np.asarray(widen(random.key(0), jnp.zeros((4_000, 3)), jnp.array([2, 0])))
    assert not noise[:, 1].any()
    assert np.all(np.sum(noise != 0, axis=1) == 1)
    assert np.abs(noise).max() <= FARTHEST
    # The error of a share of 4000 is .008.
    assert abs(np.mean(noise[:, 0] != 0) - 0.5) < 0.03
    values = noise.sum(axis=1)
    within = 1 - 2 * norm.cdf(-FARTHEST / WIDTH)
    expected = (norm.cdf(0.5) - norm.cdf(-0.5)) / within
    assert abs(np.mean(np.abs(values) < 0.5 * WIDTH) - expected) < 0.03


def test_the_column_is_found_on_which_weights_depend():
    noise = np.random.default_rng(0).normal(size=(1_000, 30))
    # Only the spread of the weights depends on it, as where the others' Gaussian is wrong there.
    spread = np.where(np.abs(noise[:, 17]) > 1.5, 1.0, 0.1)
    log_weights = spread * np.random.default_rng(1).normal(size=1_000)
    assert choose_columns(noise, log_weights)[0] == 17


def test_noise_of_other_guides_is_left_alone():
    """Noise that no map of the package's pushes has no density to widen."""

    def guide(y):
        scale = numpyro.sample("x", dist.Gamma(2.0, 2.0))
        numpyro.sample("other", dist.Normal(0.0, scale))

    svi = SVI(tailed, guide, optax.adam(1e-2), ImplicitELBO(4))
    state = svi.init(random.key(0), 0.0)
    result = SVIRunResult({}, state, jnp.zeros(1))
    found = fitted_guide(svi, result, (0.0,), {}, random.key(0))
    assert not normal_noise(random.key(0), found.program, found.layout)


@pytest.mark.parametrize(
    ("noise", "name"),
    [
        (dist.Normal(jnp.zeros(2), 1.0).to_event(1), "e"),
        (dist.Normal(0.0, 1.0).expand([2]).to_event(1), "e"),
        (dist.Normal(1.0, 2.0).expand([2]).to_event(1), ""),
        (dist.LogNormal(0.0, 1.0).expand([2]).to_event(1), ""),
    ],
)
def test_only_standard_normal_noise_is_widened(noise, name):
    """Shares are ratios of its density; that of other noise is another."""

    def guide(y):
        e = numpyro.sample("e", noise, infer={"is_auxiliary": True})
        numpyro.sample("x", Implicit(jnp.exp(e[0])))
        numpyro.sample("other", Implicit(e[1]))

    program = Program({}, tailed, guide, (0.0,), {}, {})
    layout = inspect_program(random.key(0), program)
    assert layout.noise_sites == ("e",)
    assert normal_noise(random.key(0), program, layout) == name
