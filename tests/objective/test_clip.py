"""Directions that are too long are shortened: ``ImplicitELBO(clip=…)``."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI
from scipy import stats

from numpyro_kscore import Implicit, ImplicitELBO
from numpyro_kscore._objective.block_gradient import NOISE, typical_length
from support.compiling import default_jit, quick_jit
from support.doubles import GaussianScore

KEY = random.key(0)
DIM, N = 2, 128


def normal_model(scale=1.0):
    def model():
        numpyro.sample("z", dist.Normal(jnp.zeros(DIM), scale).to_event(1))

    return model


def affine_guide():
    loc = numpyro.param("loc", jnp.full(DIM, 1.0))
    sd = numpyro.param("sd", jnp.full(DIM, 0.1), constraint=constraints.softplus_positive)
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(DIM), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    numpyro.sample("z", Implicit(loc + sd * noise, 1))


def elbo_with(clip):
    return ImplicitELBO(N, estimator=GaussianScore(), debias=None, clip=clip)


@quick_jit
def compiled_gradients(loc, sd):

    def one(elbo):
        def loss(params):
            return elbo.loss(KEY, params, normal_model(), affine_guide)

        return jax.value_and_grad(loss)({"loc": loc, "sd": sd})

    return one(elbo_with(4.0)), one(elbo_with(None))


def both_gradients(loc, sd):
    """Losses and gradients, with the default and without, for a place and sd in all directions."""
    return compiled_gradients(np.full(DIM, loc, np.float32), np.full(DIM, sd, np.float32))


@pytest.mark.thorough
def test_a_long_direction_is_shortened_to_the_limit():
    distance = 1e4
    (_, clipped), (_, free) = both_gradients(distance, 1.0)
    factor = clipped["loc"] / free["loc"]
    # The direction at every particle is as long as the distance, in units of the guide's sd, one.
    # The sd of 128 draws is known to 1/sqrt(256); the tolerance is three times that.
    np.testing.assert_allclose(factor, 4.0 * NOISE / (DIM * N**0.5) / distance, rtol=0.19)
    # The direction is the same: everything is scaled by one factor.
    np.testing.assert_allclose(clipped["sd"], free["sd"] * factor, rtol=1e-3)


@pytest.mark.thorough
def test_a_short_direction_is_left_alone():
    (clipped_loss, clipped), (loss, free) = both_gradients(1.0, 1.0)
    assert clipped_loss == loss
    for name in ("loc", "sd"):
        assert np.all(free[name] != 0)
        # The factor is one; operations around the product may be fused and rounded differently.
        np.testing.assert_allclose(clipped[name], free[name], rtol=1e-6)


def test_a_direction_whose_square_overflows():
    """It is 1e15 at a spread of 1e10: 1e25 in units of the guide, and 1e50 is no float."""
    (_, clipped), _ = both_gradients(1e15, 1e10)
    assert np.all(np.isfinite(clipped["loc"]) & (clipped["loc"] > 0))


def test_one_particle_in_a_tail_does_not_make_a_direction_long():
    directions = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)
    lengths = np.sqrt(np.mean(directions.astype(float) ** 2, axis=1))
    directions[3] *= 1e6
    lengths[3] *= 1e6
    np.testing.assert_allclose(typical_length(directions), stats.gmean(lengths), rtol=1e-5)
    # The 128th root of a million is 1.11.
    assert typical_length(directions) < 1.2


def test_typical_length_of_directions_that_vanish_or_overflow():
    directions = jnp.array([[0.0, 0.0], [3e30, 4e30], [3e30, 4e30]])
    assert np.isfinite(typical_length(directions))
    np.testing.assert_allclose(typical_length(directions[1:]), 12.5**0.5 * 1e30, rtol=1e-5)
    for compiled in (typical_length, quick_jit(typical_length), default_jit(typical_length)):
        assert 0 <= compiled(jnp.zeros((3, 2))) < 1e-14


@pytest.mark.slow
def test_a_fit_from_far_off_arrives():
    """Gradients that Adam has seen on the way do not keep it from the spread once it is there.

    The scores fall from 1e4 to 1e2, and Adam's mean of their squares loses a share of 1e-3 a step:
    unshortened, its steps stay far too small for all of the 1000.
    """

    def fitted_sd(clip):
        optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 1000))
        svi = SVI(normal_model(1e-2), affine_guide, optimizer, elbo_with(clip))
        params = svi.run(KEY, 1000, progress_bar=False).params
        return np.asarray(params["sd"])

    np.testing.assert_allclose(fitted_sd(4.0), 1e-2, rtol=0.1)
    assert np.all(fitted_sd(None) > 1.5e-2)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), "4"])
def test_limits_that_are_none(clip):
    with pytest.raises(ValueError, match="clip: expected a positive finite number; got"):
        ImplicitELBO(clip=clip)
