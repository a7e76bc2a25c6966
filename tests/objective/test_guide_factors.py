"""Factors and observed sites of a guide, and its latents under ``.mask(False)``."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO

from numpyro_kscore import Implicit, ImplicitELBO, evaluate_guide, log_evidence
from support.affine import (
    AFFINE,
    FEW,
    KEY,
    assert_close,
    draw_noise,
    quick_loss_and_gradient,
    standard_model,
)
from support.doubles import GaussianScore

MANY = 4_096
PENALTY, PLACE = 50.0, 0.2


def add_factor(z):
    numpyro.factor("penalty", PENALTY * (z - PLACE) ** 2)


def add_scaled_and_masked(z):
    """The same as half of it in each of two rows out of four."""
    with numpyro.plate("rows", 4), handlers.scale(scale=0.5), handlers.mask(mask=jnp.arange(4) < 2):
        numpyro.factor("penalty", PENALTY * (z - PLACE) ** 2)


def add_observed(z):
    numpyro.sample("seen", dist.Normal(z, 0.1), obs=PLACE)


def guide_of(is_implicit, add=None, mask=True):
    def guide():
        loc, sd = numpyro.param("loc", AFFINE["loc"]), numpyro.param("sd", AFFINE["sd"])
        if is_implicit:
            fn = Implicit(loc + sd * draw_noise(1), event_dim=1)
        else:
            fn = dist.Normal(loc, sd).to_event(1)
        z = numpyro.sample("z", fn.mask(mask))
        if not mask:
            numpyro.factor("q", dist.Normal(loc, sd).to_event(1).log_prob(z))
        if add is not None:
            add(z[0])

    return guide


def implicit_elbo(count=MANY, **kwargs):
    return ImplicitELBO(count, estimator=GaussianScore(), **kwargs)


def kl(params):
    """KL(N(loc, sd²) | N(0, 1)), with its derivatives in loc and sd."""
    loc, sd = (float(params[name][0]) for name in ("loc", "sd"))
    return 0.5 * (loc**2 + sd**2 - 1) - np.log(sd), np.array([loc, sd - 1 / sd])


def numbers(gradient):
    return np.array([float(gradient[name][0]) for name in ("loc", "sd")])


@pytest.mark.parametrize(
    ("is_implicit", "add"),
    [(True, add_factor), (False, add_factor), (True, add_scaled_and_masked), (True, add_observed)],
)
def test_factors_and_observed_sites_count_as_in_trace_elbo(is_implicit, add):
    """E[w (z - place)² + c] is added to the loss, with its gradient."""
    weight, constant = PENALTY, 0.0
    if add is add_observed:
        weight, constant = -PENALTY, -np.log(0.1) - 0.5 * np.log(2 * np.pi)
    guide = guide_of(is_implicit, add)
    loss, gradient = quick_loss_and_gradient(standard_model(), guide, AFFINE, implicit_elbo())
    loc, sd = (float(AFFINE[name][0]) for name in ("loc", "sd"))
    expected, exact = kl(AFFINE)
    expected += weight * ((loc - PLACE) ** 2 + sd**2) + constant
    exact = exact + 2 * weight * np.array([loc - PLACE, sd])
    # The sds of 50 (z - .2)² and its derivatives are 46, 70 and 103 here; four standard errors.
    np.testing.assert_allclose(loss, expected, atol=4 * 46 / MANY**0.5)
    np.testing.assert_allclose(numbers(gradient), exact, atol=4 * 103 / MANY**0.5)
    if add is add_observed:
        trace = Trace_ELBO(MANY).loss(KEY, AFFINE, standard_model(), guide_of(False, add))
        np.testing.assert_allclose(loss, trace, atol=4 * 2**0.5 * 46 / MANY**0.5)


def test_directions_are_whole_where_a_factor_balances_them():
    """At the optimum, 50 (z - .2)² makes N(0, 1) N(20/101, 1/101), and the gradient is zero."""
    optimum = {"loc": jnp.array([20 / 101]), "sd": jnp.array([101**-0.5])}
    args = standard_model(), guide_of(True, add_factor), optimum, implicit_elbo()
    # Derivatives of KL and factor are up to 20 here with sds of 10 and 14; clipped, they do not
    # cancel.
    np.testing.assert_allclose(
        numbers(quick_loss_and_gradient(*args)[1]), 0.0, atol=4 * 14 / MANY**0.5
    )


def test_a_density_of_ones_own_is_a_factor_at_a_masked_latent_of_the_guide():
    guide = guide_of(True, mask=False)
    loss, gradient = quick_loss_and_gradient(standard_model(), guide, AFFINE, implicit_elbo())
    expected, exact = kl(AFFINE)
    # Both densities have derivatives with an sd of up to 2; four standard errors.
    np.testing.assert_allclose(loss, expected, atol=4 * 1 / MANY**0.5)
    np.testing.assert_allclose(numbers(gradient), exact, atol=4 * 2 / MANY**0.5)


def test_a_masked_latent_with_bounds_is_that_without_a_mask():
    def guide(mask):
        fn = dist.LogNormal(numpyro.param("loc", 0.3), 0.5)
        z = numpyro.sample("z", fn.mask(mask))
        if not mask:
            numpyro.factor("q", fn.log_prob(z))

    def model(mask):
        numpyro.sample("z", dist.Gamma(2.0, 1.0))

    plain, masked = (
        quick_loss_and_gradient(model, guide, {"loc": 0.3}, implicit_elbo(FEW), mask)
        for mask in (True, False)
    )
    assert_close(masked, plain)


@pytest.mark.thorough
def test_the_density_of_draws_is_without_factors():
    """A penalty is part of the objective, but not of the guide's density."""
    svi = SVI(standard_model(), guide_of(False, add_factor), optax.sgd(0.0), implicit_elbo(FEW))
    result = svi.run(KEY, 2, progress_bar=False)
    draws = evaluate_guide(svi, result, num_samples=8)
    loc, sd = (float(AFFINE[name][0]) for name in ("loc", "sd"))
    exact = dist.Normal(loc, sd).log_prob(draws.samples[:, 0])
    np.testing.assert_allclose(draws.log_q, exact, rtol=1e-5)


@pytest.mark.thorough
def test_the_density_of_draws_under_a_mask_is_not_known():
    svi = SVI(standard_model(), guide_of(False, mask=False), optax.sgd(0.0), implicit_elbo(FEW))
    result = svi.run(KEY, 2, progress_bar=False)
    assert evaluate_guide(svi, result, num_samples=8).log_q is None
    with pytest.raises(ValueError, match=r"log_evidence: expected a guide whose density is known"):
        log_evidence(svi, result)


def test_masked_latents_apart_from_estimated_ones():
    def model():
        for name in "ab":
            numpyro.sample(name, dist.Normal(0.0, 1.0))

    def guide():
        noise = draw_noise(2)
        numpyro.sample("a", Implicit(noise[0]).mask(False))
        numpyro.sample("b", Implicit(noise[1] + noise[0]))

    with pytest.raises(
        ValueError, match=r"(?s)mask\(False\) apart.*got 'a'.*\['b'\] share.*Mask all"
    ):
        implicit_elbo(FEW).loss(KEY, {}, model, guide)
