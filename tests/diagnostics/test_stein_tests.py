"""Tests of draws against a model: the Stein discrepancy, ratios of spreads."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_kscore.diagnostics import ksd, spread_ratios, stein_discrepancy
from support.gaussian_guides import gaussian_draws


def test_stein_statistics_are_their_definitions():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2)).astype(np.float32)
    found = ksd(x, -x, num_bootstrap=99)
    assert found.u_statistic == pytest.approx(float(stein_discrepancy(x, -x).value), rel=1e-5)
    # V = ((n-1) U + mean of the diagonal)/n, whose diagonal is u(x, x) = |s|² + 2 d |φ'(0)|/h².
    assert found.v_statistic > found.u_statistic
    assert found.v_statistic > 0


def test_level_and_power_of_the_stein_test():
    """Level 5 %: at most 8 of 60 tests reject, with probability .99 (binomial)."""
    rng = np.random.default_rng(0)
    rejected = 0
    for k in range(60):
        x = rng.normal(size=(100, 2)).astype(np.float32)
        rejected += float(ksd(x, -x, rng_key=random.key(k), num_bootstrap=199).p_value) <= 0.05
    assert rejected <= 8
    narrow = 0.5 * rng.normal(size=(100, 2)).astype(np.float32)
    assert float(ksd(narrow, -narrow).p_value) < 0.01


def test_spread_ratios_of_a_gaussian_guide():
    draws = gaussian_draws(jnp.array([0.5, 1.0, 2.0]), n=4_000)
    # The relative error of each is at most √(2/n)/2; no two are near enough to be mixed.
    np.testing.assert_allclose(spread_ratios(draws.samples, draws.scores), [0.5, 1, 2], rtol=0.05)
