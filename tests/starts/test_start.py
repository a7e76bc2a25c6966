"""Draws of a start by which a fit tells that it needs no step."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore._fit.programs import look_at_exact_draws, make_look
from numpyro_kscore._fit.svi import inspect_svi
from numpyro_kscore._starts.start import FARTHEST, NUM_DRAWS, divergence_of, draw_exactly
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.transport import Chain
from support.autoguides import first_state

KEY = random.key(0)
MEAN, FACTOR = np.array([1.0, -2.0, 0.5]), np.array([[2.0, 0, 0], [1.0, 0.5, 0], [0, 0.3, 0.1]])
EXACT = Affine(MEAN, FACTOR)


def energies(points):
    """Energies of the Gaussian, of total mass e, with gradients."""
    z = np.linalg.solve(FACTOR, (points - MEAN).T).T
    normal = 0.5 * np.sum(z**2 + np.log(2 * np.pi), axis=1) + EXACT.log_det
    return normal - 1.0, np.linalg.solve(FACTOR.T, z.T).T


# Everything twice as wide, of a Gaussian half as wide as the standard one.
DOUBLED = Affine(MEAN, 2 * FACTOR)
HALF = Affine(np.zeros(3), 0.5 * np.eye(3))


@pytest.mark.parametrize("steps", [(EXACT,), (HALF, DOUBLED)])
def test_a_start_that_is_the_model_has_its_evidence_as_gap_everywhere(steps):
    found = draw_exactly(energies, Chain(steps), np.random.default_rng(0))
    assert found.points.shape == (NUM_DRAWS, 3)
    np.testing.assert_allclose(found.gaps, 1.0, atol=1e-10)
    np.testing.assert_allclose(found.scores, -found.points, atol=1e-10)
    at = EXACT.push(found.points)
    np.testing.assert_allclose(found.log_density, -energies(at)[0], atol=1e-10)


def test_a_start_that_is_off_takes_few_gradients():
    counts = []

    def counted(points):
        counts.append(len(points))
        return energies(points)

    far = Affine(MEAN + FACTOR[:, 0], FACTOR)
    assert draw_exactly(counted, Chain((far,)), np.random.default_rng(0)) is None
    assert counts == [64]

    def broken(points):
        values, gradients = energies(points)
        return np.where(points[:, 0] > MEAN[0] + 4, np.nan, values), gradients

    assert draw_exactly(broken, Chain((EXACT,)), np.random.default_rng(0)) is None


def test_divergence_of_a_shift():
    """Gaps of a mean off by δ are normal with variance δ², and the divergence is half of that."""
    rng = np.random.default_rng(0)
    gaps = 5.0 + 0.3 * rng.normal(size=100_000)
    # The error of the mean of the gaps is .3 / √100000 = .001, of half their variance .0002.
    assert divergence_of(gaps) == pytest.approx(0.045, abs=0.001)
    assert np.isnan(divergence_of(np.array([0.0, np.nan])))


def groups(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("groups", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


@pytest.mark.thorough
def test_a_look_at_them_sees_what_one_at_the_guide_sees():
    y = jnp.asarray(np.random.default_rng(3).normal(size=8) * 2)
    guide = AutoImplicit(groups)
    svi = SVI(groups, guide, optax.adam(1e-2), ImplicitELBO())
    state = first_state(svi, y)
    draws = guide.prepare(KEY, (y,), {})
    assert draws.divergence == divergence_of(draws.gaps) < FARTHEST
    near = look_at_exact_draws(draws)
    look = make_look(inspect_svi(svi, state, ((y,), {})), False, random.key(1))
    seen = look(state, jnp.array(True), None, None)
    assert seen.gaps.shape == near.gaps.shape
    ours, theirs = near.numbers, seen.numbers
    assert set(ours) == set(theirs)
    for name in ("bound", "log_density", "discrepancy"):
        error = np.hypot(ours[f"{name}_error"], theirs[f"{name}_error"])
        assert abs(ours[name] - theirs[name]) < 4 * error, name
    # The error of the divergence is that of the variance of some gaps with a heavy tail.
    # A start this near leaves only the rounding of log densities in single precision.
    of_guide = float(theirs["divergence"])
    assert ours["divergence"] == pytest.approx(of_guide, rel=0.5, abs=1e-4)
    assert max(float(ours[name]) for name in ("shift", "width")) < 0.1
    # Of other data, or another start, nothing is known.
    assert guide.prepare(KEY, (y,), {}, is_start=False) is None
    with pytest.warns(UserWarning, match="expected the data that the guide was set up on"):
        assert guide.prepare(KEY, (y + 1,), {}) is None
    assert AutoImplicit(groups, warm_start=False).prepare(KEY, (y,), {}) is None
