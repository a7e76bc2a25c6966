"""Importance weights: smoothing, effective number of draws, resampling."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_kscore import khat
from numpyro_kscore.diagnostics import importance_resample, pareto_smooth, weight_ess
from support.gaussian_guides import gaussian_draws

KEY = random.key(0)


def test_pareto_shape_of_pareto_weights():
    """Weights u^-k have shape k; PSIS estimates it from 3 √n tail draws."""
    u = np.random.default_rng(0).uniform(size=4_000)
    for k in (0.2, 0.5, 0.9):
        estimate = pareto_smooth(-k * np.log(u))[1]
        # sd of a shape from 190 exceedances is (1 + k)/√190; shrunk toward 1/2 by 10 in 200.
        assert abs(estimate - k) < 3 * (1 + k) / 190**0.5


def test_smoothed_weights_are_normalized_and_ordered():
    weights = np.random.default_rng(0).standard_t(2, size=500)
    smoothed, _ = pareto_smooth(weights)
    assert np.isclose(np.exp(smoothed).sum(), 1.0)
    # The order is that of the raw weights, whichever sign the library's argument has.
    assert stats.spearmanr(weights, smoothed).statistic > 0.999


def test_a_huge_shape_does_not_overflow():
    """An energy of draws in a plane gives such weights: their logarithms have a heavy tail."""
    weights = -10.0 * np.arange(400)
    smoothed, shape = pareto_smooth(weights)
    assert shape > 10
    assert np.isfinite(smoothed).all()
    assert np.isclose(np.exp(smoothed).sum(), 1.0)


def test_equal_weights_have_no_tail():
    smoothed, shape = pareto_smooth(np.full(100, 3.0))
    assert shape == -np.inf
    np.testing.assert_allclose(np.exp(smoothed), 0.01)
    assert weight_ess(np.zeros(100)) == pytest.approx(100)
    assert weight_ess(np.array([0.0, -1e9])) == pytest.approx(1)
    assert weight_ess(np.array([0.0, 0.0, -np.inf])) == pytest.approx(2)
    assert weight_ess(np.full(3, -np.inf)) == 0.0
    for bad in ([0.0, np.nan], [0.0, np.inf], [], [[0.0]]):
        with pytest.raises(ValueError, match=r"log_weights: expected .* of shape \(n,\); got"):
            weight_ess(np.array(bad))
    perfect = khat(gaussian_draws(1.0, dim=2, n=400))
    assert perfect.verdict == "good"
    assert str(perfect).startswith("k̂ = -inf (all weights are equal), 90 % interval")


def test_resampling_corrects_a_wide_guide():
    draws = gaussian_draws(1.3, dim=2, n=4_000)
    weights = draws.log_density - draws.log_q
    values = {"x": draws.samples, "index": jnp.arange(4_000)}
    resampled = importance_resample(KEY, values, weights)
    effective = weight_ess(pareto_smooth(weights)[0])
    # sd of a standard deviation from m draws is 1/√(2m).
    assert np.all(np.abs(np.std(resampled["x"], axis=0) - 1) < 4 / (2 * effective) ** 0.5)
    np.testing.assert_array_equal(resampled["x"], draws.samples[resampled["index"]])
    with pytest.raises(ValueError, match="values: expected 4000 draws"):
        importance_resample(KEY, draws.samples[:10], weights)
