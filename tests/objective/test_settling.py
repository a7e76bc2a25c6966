"""The objective with which a fit settles: more particles, and where there are none."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO, ScoreEstimator
from numpyro_kscore._model.program import Program, inspect_program

KEY = random.key(0)
ROWS = 37  # no other size of the program is a multiple of it
X = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
PARAMS = {"shift": jnp.zeros(2)}


def model(size=None):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=size) as rows:
        numpyro.sample("y", dist.Normal(jnp.asarray(X)[rows] @ z, 10.0), obs=jnp.zeros(len(rows)))


def guide(size=None):
    shift = numpyro.param("shift", jnp.zeros(2))
    noise = numpyro.sample(
        "noise", dist.Normal().expand([2]).to_event(1), infer={"is_auxiliary": True}
    )
    numpyro.sample("z", Implicit(shift + noise, event_dim=1))


def layout_of(model, guide, params, *args):
    return inspect_program(KEY, Program(params, model, guide, args, {}, {}))


def settling(elbo=None):
    return (elbo or ImplicitELBO()).settling(layout_of(model, guide, PARAMS))


def gradients(elbo, shift):
    """Gradients in the mean of the guide, with 8 keys, (8, 2)."""

    def one(key):
        return jax.grad(lambda s: elbo.loss(key, {"shift": s}, model, guide))(shift)

    return np.asarray(jax.jit(jax.vmap(one))(random.split(KEY, 8)))


def test_the_gradient_vanishes_at_the_posterior_and_points_there_from_elsewhere():
    at_mean, away = (gradients(settling(), jnp.array(s)) for s in ([0.0, 0.0], [0.5, -1.0]))
    # Scores of 1024 draws have a mean with an error of at most 1.7 / √1024; 8 of them average.
    np.testing.assert_allclose(at_mean.mean(0), 0.0, atol=4 * 1.7 / (8 * 1024) ** 0.5)
    # The gradient for two Gaussians is the precision times the error of the mean. An operator of a
    # part of the particles overshoots by a fifth, which is nothing but a longer step.
    exact = (np.eye(2) + X.T @ X / 100) @ [0.5, -1.0]
    found = away.mean(0)
    assert found @ exact > 0.99 * np.linalg.norm(found) * np.linalg.norm(exact)
    assert 0.8 < np.linalg.norm(found) / np.linalg.norm(exact) < 1.3


@pytest.mark.thorough
def test_the_model_is_evaluated_at_as_many_particles_at_once_as_before():
    elbo = settling()
    assert elbo.num_particles == 1024
    program = jax.jit(lambda p: elbo.loss(KEY, p, model, guide)).lower(PARAMS).compile()
    shapes = [
        [int(size) for size in shape.split(",")]
        for shape in re.findall(r"f32\[([\d,]+)\]", program.as_text())
    ]
    sizes = [math.prod(shape) for shape in shapes if ROWS in shape]
    assert 128 * ROWS in sizes
    assert max(sizes) < 1024 * ROWS


@pytest.mark.parametrize(
    "given", [{"num_particles": 64}, {"estimator": ScoreEstimator()}, {"base": "gaussian"}]
)
def test_settings_of_the_user_are_kept(given):
    elbo = ImplicitELBO(**given)
    assert settling(elbo) is elbo


def test_nothing_is_gained_in_minibatches_or_with_known_densities():
    elbo = ImplicitELBO()
    assert elbo.settling(layout_of(model, guide, PARAMS, 5)) is elbo
    known = AutoImplicit(model, warm_start=False)
    trace = handlers.trace(handlers.seed(known, KEY)).get_trace()
    params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    with_scores = layout_of(model, known, params)
    part = with_scores.parts[0]._replace(has_local=True, has_local_score=True)
    assert elbo.settling(with_scores._replace(parts=(part,))) is elbo
