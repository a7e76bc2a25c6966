"""Moves along rays show what lies beyond draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_kscore.diagnostics._rays import move_along_rays

COUNT = 2048


@jax.jit
def of_normal(samples, key):
    return move_along_rays(lambda x: -0.5 * jnp.sum(x**2), samples, key)


@pytest.mark.parametrize("dim", [1, 3, 50])
def test_draws_of_the_model_stay_as_they_are(dim):
    samples = random.normal(random.key(dim), (COUNT, dim))
    (shift, width), (shift_error, width_error) = of_normal(samples, random.key(1))
    # The largest of 200 numbers is four errors away with a chance of 1 %.
    assert np.all(np.abs(shift) < 4 * shift_error)
    assert np.all(np.abs(width) < 4 * width_error)
    assert np.all(width_error < 0.03)


@pytest.mark.parametrize("scale", [0.7, 1.5])
def test_a_width_moves_to_that_of_the_model(scale):
    samples = scale * random.normal(random.key(0), (COUNT, 2))
    (_, width), (_, error) = of_normal(samples, random.key(1))
    # Lengths have the model's distribution after one step, whatever they had before.
    np.testing.assert_allclose(width, -np.log(scale), atol=4 * float(error.max()))


def test_thin_tails_are_seen_which_fulfil_steins_identities():
    """A normal guide with E x s(x) = -1 at its draws, of a Student distribution."""
    student = dist.StudentT(3.0)
    density, score = student.log_prob, jax.vmap(jax.grad(lambda x: student.log_prob(x)))
    unit = random.normal(random.key(0), (COUNT,))
    scales = jnp.linspace(0.3, 3.0, 2_000)
    identity = jax.vmap(lambda s: jnp.mean(s * unit * score(s * unit)))(scales)
    samples = scales[jnp.argmin(jnp.abs(identity + 1))] * unit[:, None]
    moments = move_along_rays(lambda x: density(x[0]), samples, random.key(1))
    # The variance is 3.
    assert float(jnp.var(samples)) < 1.8
    assert float(moments[0, 1, 0] - 4 * moments[1, 1, 0]) > 0.2


def test_what_is_not_finite_does_not_count():
    samples = random.normal(random.key(0), (COUNT, 2)).at[:5].set(jnp.nan)

    def density(x):
        return jnp.where(x[0] > 3.0, jnp.nan, -0.5 * jnp.sum(x**2))

    moments = jax.jit(lambda s, k: move_along_rays(density, s, k))(samples, random.key(1))
    assert np.all(np.isfinite(moments))
    assert np.all(np.abs(moments[0]) < 0.05)
