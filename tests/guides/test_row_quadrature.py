"""Rows integrated out by quadrature, against sums over fine grids in double precision."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers

from numpyro_kscore._guides.marginal import Marginal, normal_noise
from numpyro_kscore._guides.row_modes import find_row_modes
from numpyro_kscore._guides.row_quadrature import integrate_rows
from numpyro_kscore._guides.rows import Amortized
from numpyro_kscore._model.target import Target
from support.compiling import quick_jit

RNG = np.random.default_rng(3)
LOADINGS = RNG.normal(0.0, 1.0, (6, 3))
ANSWERS = RNG.integers(0, 2, (4, 6)).astype(float)


def binary(xp, rows, dim):
    """Six binary items, explained by some standard normal latents: (..., k) and answers (6,)."""
    logits = rows @ xp.asarray(LOADINGS[:, :dim]).T
    prior = -0.5 * (rows**2).sum(-1) - 0.5 * dim * np.log(2 * np.pi)
    return lambda answers: prior + (answers * logits - xp.logaddexp(0, logits)).sum(-1)


@pytest.mark.parametrize(("dim", "fine", "coarse"), [(1, 1e-5, 5e-3), (2, 8e-4, 6e-3)])
def test_integrals_are_those_of_a_grid(dim, fine, coarse):
    """The tolerances are the errors of the rules here, in double precision, twice."""
    axis = np.arange(-8.0, 8.0, 1 / 12)
    grid = np.array(list(itertools.product(axis, repeat=dim)))
    of_grid = binary(np, grid, dim)
    cell = (axis[1] - axis[0]) ** dim
    exact = np.log([np.exp(of_grid(answers)).sum() * cell for answers in ANSWERS])

    def by_row(rows):
        return binary(jnp, rows, dim)(jnp.asarray(ANSWERS))

    @jax.jit
    def integrals():
        gaussians = find_row_modes(lambda rows: jnp.sum(by_row(rows)), jnp.zeros((4, dim)))
        return [integrate_rows(by_row, gaussians, coarse=coarse) for coarse in (False, True)]

    found, roughly = integrals()
    np.testing.assert_allclose(found, exact, rtol=0, atol=2 * fine)
    np.testing.assert_allclose(roughly, exact, rtol=0, atol=2 * coarse)


COUNTS = jnp.array([0.0, 2.0, 9.0])


def poisson():
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", 3):
        rate = numpyro.sample("rate", dist.LogNormal(level, 1.0))
        numpyro.sample("y", dist.Poisson(rate), obs=COUNTS)


def exact_log_density(level):
    z = np.linspace(level - 9, level + 9, 20_001)
    counts = np.asarray(COUNTS)[:, None]
    log_factorials = np.array([0.0, np.log(2.0), np.log(362880.0)])
    terms = counts * z - np.exp(z) - 0.5 * (z - level) ** 2 - 0.5 * np.log(2 * np.pi)
    rows = np.log(np.exp(terms).sum(1) * (z[1] - z[0])) - log_factorials
    return rows.sum() - 0.5 * (level / 2) ** 2 - 0.5 * np.log(8 * np.pi)


@pytest.mark.thorough
def test_the_density_of_globals_needs_no_network_and_the_network_still_learns():
    """Value, score and curvature are exact at any parameters of the guide of rows."""
    marginal = Marginal(Amortized(poisson, ("rows",), "auto"), normal_noise)
    name = "auto_rows_layers"

    @quick_jit
    def layers_at_first():
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            handlers.condition(marginal, {"level": jnp.zeros(())})()
        return trace[name]["value"]

    start = layers_at_first()
    wrong = start + 0.2 * random.normal(random.key(1), start.shape)

    @quick_jit
    def derivatives(level, layers):
        def density(level, layers):
            model = handlers.seed(handlers.substitute(marginal, {name: layers}), random.key(2))
            return Target(model, (), {}).log_density({"level": level})

        value, slopes = jax.value_and_grad(density, argnums=(0, 1))(level, layers)
        return value, slopes, jax.hessian(density)(level, layers)

    level, h = 0.4, 1e-3
    below, middle, above = (exact_log_density(level + shift) for shift in (-h, 0.0, h))
    slope, curvature = (above - below) / (2 * h), (above - 2 * middle + below) / h**2
    for layers in (start, wrong):
        value, (found, of_layers), second = derivatives(jnp.asarray(level), layers)
        # Fifteen nodes are exact to 1e-6 here; the rest is rounding in float32.
        np.testing.assert_allclose(value, middle, atol=1e-4)
        np.testing.assert_allclose(found, slope, atol=1e-3)
        np.testing.assert_allclose(second, curvature, atol=1e-2)
        assert np.abs(of_layers).max() > 0.01
