"""Densities, draws and parameters that are not finite, coincide, or have extreme scales."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from numpyro.infer import SVI

from numpyro_kscore import Implicit, ImplicitELBO
from support.affine import (
    AFFINE,
    FEW,
    KEY,
    affine_guide,
    assert_close,
    draw_noise,
    is_finite,
    loss_and_gradient,
    quick_loss_and_gradient,
    standard_model,
)
from support.compiling import quick_jit
from support.doubles import GaussianScore


def breaking_model(value, where):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
    numpyro.factor("trouble", jnp.sum(jnp.where(z > where, value, 0.0)))


def steps_of(model, guide, *args):
    """Parameters before a step, after each kind of step, and the losses."""
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(FEW))
    state = svi.init(KEY, *args)
    steps = [svi.update(state, *args), svi.stable_update(state, *args)]
    states, losses = zip(*steps, strict=True)
    return [svi.get_params(s) for s in (state, *states)], losses


steps_with_trouble = quick_jit(partial(steps_of, breaking_model, affine_guide()))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0.5, -np.inf], ids=["some", "all"])
@pytest.mark.thorough
def test_bad_densities_leave_parameters_finite(value, where):
    (before, updated, stable), losses = steps_with_trouble(value, where)
    assert np.all(np.isnan(losses))
    assert is_finite(updated)
    assert_close(stable, before, rtol=0, atol=0)


@pytest.mark.slow
def test_a_step_outside_of_jit_is_the_compiled_one():
    """One operation after another, as users take it when they look for what is wrong."""
    (_, expected, _), _ = steps_with_trouble(np.nan, 0.5)
    svi = SVI(breaking_model, affine_guide(), optax.adam(1e-2), ImplicitELBO(FEW))
    state = svi.init(KEY, np.nan, 0.5)
    after, loss = svi.update(state, np.nan, 0.5)
    assert np.isnan(loss)
    assert np.isnan(svi.evaluate(state, np.nan, 0.5))
    assert_close(svi.get_params(after), expected)


@pytest.mark.thorough
def test_infinite_gradients_count_as_bad():
    def model():
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        # Finite everywhere, with an infinite derivative below 0.5.
        numpyro.factor("root", jnp.sum(jnp.sqrt(jnp.maximum(z - 0.5, 0.0))))

    loss, gradient = quick_loss_and_gradient(model, affine_guide(), AFFINE, ImplicitELBO(FEW))
    assert np.isnan(loss)
    assert is_finite(gradient)


def test_bad_particles_contribute_nothing_to_model_parameters():
    def model(trouble):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        shift = numpyro.param("shift", jnp.array(0.3))
        # NaN above z = .5 only, in value and derivative: a NaN in the branch of a where that is not
        # taken would spoil the derivatives of good particles too.
        root = jnp.sqrt(jnp.where(trouble, 0.5 - z, 1.0))
        numpyro.factor("f", jnp.sum(shift * (1.0 + 0.0 * root)))

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    params = {**AFFINE, "shift": jnp.array(0.3)}
    _, gradient = quick_loss_and_gradient(model, affine_guide(), params, elbo, True)
    # d/dshift of -log p is -1 at every good particle.
    assert_close(gradient["shift"], -1.0)


def test_infinite_draws_leave_parameters_finite():
    def guide():
        sd = numpyro.param("sd", jnp.full(1, 0.7))
        numpyro.sample("z", Implicit(jnp.expm1(300.0 * sd * draw_noise(1)), event_dim=1))

    (before, updated, stable), losses = quick_jit(partial(steps_of, standard_model(), guide))()
    assert np.all(np.isnan(losses))
    assert is_finite(updated)
    assert_close(stable, before, rtol=0, atol=0)


@pytest.mark.thorough
def test_collapsed_guides_and_duplicates_are_finite():
    collapsed = {"loc": jnp.full(1, 0.5), "sd": jnp.zeros(1)}
    loss, gradient = quick_loss_and_gradient(
        standard_model(), affine_guide(), collapsed, ImplicitELBO(FEW)
    )
    assert is_finite((loss, gradient))
    # All particles at 0.5 move together, toward the mode.
    assert_close(gradient["loc"], jnp.array([0.5]), rtol=1e-2)

    def two_points():
        loc, sd = numpyro.param("loc", jnp.zeros(1)), numpyro.param("sd", jnp.ones(1))
        numpyro.sample("z", Implicit(loc + sd * jnp.sign(draw_noise(1)), event_dim=1))

    assert is_finite(
        quick_loss_and_gradient(standard_model(), two_points, AFFINE, ImplicitELBO(FEW))
    )


@quick_jit
def in_units(unit):
    """The loss of a model whose latent has another unit, and its gradient times that."""

    def model():
        numpyro.sample("z", dist.Normal(jnp.zeros(1), unit).to_event(1))

    params = {name: unit * value for name, value in AFFINE.items()}
    loss, gradient = loss_and_gradient(model, affine_guide(), params, ImplicitELBO(FEW))
    return loss, {name: unit * value for name, value in gradient.items()}


@pytest.mark.parametrize("scale", [1e6, 1e-6])
def test_units_of_a_latent_do_not_matter(scale):
    """The loss of a model in other units is the same, and the gradient its inverse."""
    assert_close(in_units(scale), in_units(1.0), rtol=1e-3, atol=1e-4)


def test_large_parameters_cost_the_reported_loss_no_digits():
    def model(weight):
        numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        w = numpyro.param("w", jnp.asarray(weight))
        # Adds nothing but a gradient of one.
        numpyro.factor("f", w - lax.stop_gradient(w))

    @quick_jit
    def at(weight):
        params = {**AFFINE, "w": weight}
        return loss_and_gradient(partial(model, weight), affine_guide(), params, ImplicitELBO(FEW))

    losses = []
    for weight in (0.0, 1e8):
        loss, gradient = at(weight)
        assert float(gradient["w"]) == pytest.approx(-1.0)
        losses.append(float(loss))
    assert losses[0] == losses[1]
