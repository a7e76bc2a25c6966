"""Nested R-hat by its definition, and what errors and trends say of chains that are known."""

import numpy as np
import pytest

from numpyro_kscore.samplers._convergence import (
    LARGEST_INFLUENCE,
    nested_rhat,
    scale_of,
    summarize,
)

RNG = np.random.default_rng(0)


def rhat_by_loops(values):
    """Margossian et al. 2024, equations 7 to 9."""
    num_superchains, num_chains, num_draws = values.shape
    means, within = [], []
    for superchain in values:
        of_chains = [sum(chain) / num_draws for chain in superchain]
        mean = sum(of_chains) / num_chains
        between = sum((m - mean) ** 2 for m in of_chains) / (num_chains - 1)
        inside = [
            sum((x - m) ** 2 for x in chain) / (num_draws - 1)
            for chain, m in zip(superchain, of_chains, strict=True)
        ]
        means.append(mean)
        within.append(between + sum(inside) / num_chains)
    overall = sum(means) / num_superchains
    between = sum((m - overall) ** 2 for m in means) / (num_superchains - 1)
    return (1 + between / (sum(within) / num_superchains)) ** 0.5


def test_nested_rhat_is_that_of_the_paper():
    values = RNG.normal(size=(5, 3, 7)) + RNG.normal(size=(5, 1, 1))
    assert nested_rhat(values) == pytest.approx(rhat_by_loops(values), rel=1e-12)
    together = np.stack([values, 3 * values - 1], axis=-1)
    np.testing.assert_allclose(nested_rhat(together), rhat_by_loops(values), rtol=1e-12)


def test_moments_of_independent_draws():
    draws = np.array([2.0, -1.0]) + np.array([0.1, 5.0]) * RNG.normal(size=(64, 50, 2))
    found = summarize(draws, 16)
    # 3200 draws: errors are 0.018 sd and 1.25 %, themselves known up to 18 %.
    np.testing.assert_allclose((found.mean - [2.0, -1.0]) / [0.1, 5.0], 0.0, atol=4 * 0.018)
    np.testing.assert_allclose(found.sd / [0.1, 5.0], 1.0, atol=4 * 0.0125)
    np.testing.assert_allclose(found.mean_error, 0.018, rtol=0.75)
    np.testing.assert_allclose(found.sd_error, 0.0125, rtol=0.75)
    assert np.all(found.rhat < 1.01)
    assert np.all(found.trend < 4.0)


def test_superchains_that_remember_and_chains_that_move():
    draws = RNG.normal(size=(64, 50, 3))
    # The first coordinate remembers its superchain, the second moves, the spread of the third too.
    draws[:, :, 0] += 0.5 * np.repeat(RNG.normal(size=16), 4)[:, None]
    draws[:, :, 1] += np.linspace(0, 0.5, 50)
    draws[:, :, 2] *= np.linspace(1, 1.5, 50)
    found = summarize(draws, 16)
    assert found.rhat[0] > 1.05
    assert np.all(found.rhat[1:] < 1.01)
    assert found.trend[0] < 4.0
    assert np.all(found.trend[1:] > 4.0)


def test_heavy_tails_have_moments_and_constants_do_no_harm():
    draws = RNG.standard_t(1.0, size=(64, 50, 2))
    draws[:, :, 1] = 3.0
    found = summarize(draws, 16)
    assert all(np.all(np.isfinite(a)) for a in found)
    assert found.mean_error[0] < 0.1
    assert found.mean[1] == 3.0
    assert scale_of(draws[0]).width[1] == 1.0


def test_a_standard_deviation_that_rests_on_one_chain_shows():
    draws = RNG.normal(size=(64, 500, 2))
    # As a distant mode of which one chain has 30 draws, and others one each.
    draws[9, :30, 0] = 15.0
    draws[20:30, 0, 0] = 15.0
    found = summarize(draws, 16)
    without = draws[:, :, 0].reshape(16, -1)
    expected = abs(np.delete(without, 2, axis=0).std() / without.std() - 1)
    assert found.influence[0] == pytest.approx(expected, rel=1e-9)
    assert found.influence[0] > LARGEST_INFLUENCE
    # Of 32000 independent draws without one sixteenth: four standard errors of 0.1 %.
    assert found.influence[1] < 4 * 0.001
