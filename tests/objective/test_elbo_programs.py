"""The program of a step of ``ImplicitELBO``: its cost, and how it maps over the particles."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, ScoreEstimator
from numpyro_kscore.regularizers import Tikhonov
from support.affine import (
    AFFINE,
    FEW,
    KEY,
    affine_guide,
    assert_close,
    quick_loss_and_gradient,
    standard_model,
)
from support.compiling import quick_jit
from support.doubles import GaussianScore


@pytest.mark.parametrize("vectorize", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_one_value_and_gradient_of_the_model_a_step(vectorize):
    """The likelihood's two products with the data, forward and backward, appear once each."""
    rows = 37  # no other dimension of the program is a multiple of it
    features = random.normal(KEY, (rows, 2))

    def model(targets):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("targets", dist.Normal(features @ z, 1.0).to_event(1), obs=targets)

    elbo = ImplicitELBO(FEW, estimator=GaussianScore(), vectorize_particles=vectorize)
    svi = SVI(model, affine_guide(2), optax.adam(1e-2), elbo)
    targets = features @ jnp.ones(2)
    state = svi.init(KEY, targets)
    program = jax.jit(svi.update).lower(state, targets).compile().as_text()
    types = dict(re.findall(r"(%[\w.-]+) = (\w+\[[\d,]*\])", program))
    products = [
        (result, *(types.get(name, "") for name in re.findall(r"%[\w.-]+", operands)))
        for result, operands in re.findall(r" = (\w+\[[\d,]*\])\S* dot\((.*?)\)", program)
    ]
    with_data = [product for product in products if re.search(rf"\b{rows}\b", str(product))]
    assert len(with_data) == 2, products


def test_no_retrace_over_steps():
    traces = {"model": 0, "guide": 0}

    def model():
        traces["model"] += 1
        numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))

    def guide():
        traces["guide"] += 1
        return affine_guide()()

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(model, guide, optax.adam(1e-2), elbo)
    update = jax.jit(svi.update)
    state, _ = update(svi.init(KEY))
    after_one_step = dict(traces)
    for _ in range(3):
        state, loss = update(state)
    assert traces == after_one_step
    assert np.isfinite(loss)


def test_default_number_of_particles_follows_the_dimension():
    class SeenError(Exception):
        pass

    def stop(fn, xs):
        raise SeenError(jax.tree.leaves(xs)[0].shape[0])

    elbo = ImplicitELBO(vectorize_particles=stop)
    for dim, expected in ((1, 128), (40, 320), (1000, 512)):
        params = {"loc": jnp.zeros(dim), "sd": jnp.ones(dim)}
        with pytest.raises(SeenError) as seen:
            elbo.loss(KEY, params, standard_model(dim), affine_guide(dim))
        assert seen.value.args == (expected,)


@pytest.mark.thorough
def test_ways_to_go_through_the_particles_agree():
    calls = []

    def in_turn(fn, xs):
        calls.append(jax.tree.leaves(xs)[0].shape[0])
        return lax.map(fn, xs, batch_size=4)

    results = []
    for vectorize in (True, False, in_turn):
        elbo = ImplicitELBO(FEW, estimator=GaussianScore(), vectorize_particles=vectorize)
        results.append(quick_loss_and_gradient(standard_model(), affine_guide(), AFFINE, elbo))
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert_close(results[2], results[0], rtol=1e-4, atol=1e-4)
    assert set(calls) == {FEW}


def looping_model(data):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
    double = lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, 2.0 * c[1]), (0, z))[1]
    numpyro.sample("data", dist.Normal(double + numpyro.param("shift", 0.1), 1.0), obs=data)


@pytest.mark.thorough
def test_forward_mode_for_models_with_loops():
    def unrolled_model(data):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        numpyro.sample("data", dist.Normal(2.0 * z + numpyro.param("shift", 0.1), 1.0), obs=data)

    data = jnp.ones(1)
    states = []
    for model, forward in ((looping_model, True), (unrolled_model, False)):
        elbo = ImplicitELBO(FEW, estimator=GaussianScore(), forward_mode_differentiation=forward)
        svi = SVI(model, affine_guide(), optax.sgd(0.1), elbo)
        update = functools.partial(svi.update, forward_mode_differentiation=forward)
        state, loss = quick_jit(update)(svi.init(KEY, data), data)
        states.append((svi.get_params(state), loss))
    assert_close(states[0], states[1], rtol=1e-4, atol=1e-4)


def test_float64(x64):
    elbo = ImplicitELBO(FEW, estimator=ScoreEstimator(regularizer=Tikhonov(1e-2)), debias=None)
    svi = SVI(standard_model(), affine_guide(), optax.adam(1e-2), elbo)

    def step(key):
        state, loss = svi.update(svi.init(key))
        return svi.get_params(state), loss

    params, loss = jax.eval_shape(step, KEY)
    assert loss.dtype == jnp.float64
    for value in params.values():
        assert value.dtype == jnp.float64


def test_the_first_call_may_come_from_a_compiled_program():
    """No tracer of a program may stay behind in an automatic guide."""
    guide = AutoImplicit(standard_model(2), hidden_dims=(4,), warm_start=False)
    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(standard_model(2), guide, optax.adam(1e-2), elbo)
    init, update = quick_jit(svi.init), quick_jit(svi.update)
    losses = [update(init(key))[1] for key in random.split(KEY, 2)]
    assert np.all(np.isfinite(losses))
