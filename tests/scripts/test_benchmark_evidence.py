"""The closed forms of the evidence benchmark, and its bridge, are right."""

import numpy as np
import pytest
from scipy import integrate, stats

from benchmarks.calibration import evidence


def test_rates_and_coins_agree_with_quadrature():
    found = evidence.rates(np.random.default_rng(0), 1)
    (counts,) = found.args

    def density(rate):
        return stats.gamma(1.5, scale=2.0).pdf(rate) * np.prod(stats.poisson(rate).pmf(counts))

    value = integrate.quad(density, 0, 60, points=[1.0, 5.0], limit=200)[0]
    assert found.truth == pytest.approx(np.log(value), abs=1e-6)

    found = evidence.coins(np.random.default_rng(0), 1)
    heads = found.args[0].sum()
    value = integrate.quad(
        lambda p: stats.beta(1, 2).pdf(p) * p**heads * (1 - p) ** (12 - heads), 0, 1
    )[0]
    assert found.truth == pytest.approx(np.log(value), abs=1e-6)


def test_a_normal_sample_agrees_with_quadrature():
    found = evidence.normal(np.random.default_rng(0), 2)
    (y,) = found.args
    n = len(y)

    def density(variance):
        # Given the variance, data have mean 0 and covariance variance · (I + 4).
        covariance = variance * (np.eye(n) + 4.0)
        own = stats.multivariate_normal(np.zeros(n), covariance).pdf(y.astype(float))
        return stats.invgamma(3.0, scale=2.0).pdf(variance) * own

    value = integrate.quad(density, 1e-3, 200, points=[1.0, 5.0, 20.0], limit=200)[0]
    assert found.truth == pytest.approx(np.log(value), abs=1e-5)


def test_a_bridge_finds_a_known_constant():
    """A skewed density in two dimensions, e^7 times one that is normalized."""
    rng = np.random.default_rng(0)
    draws = np.log(rng.gamma(3.0, size=(4_000, 2)))
    prior = stats.loggamma(3.0)
    value, error = evidence.bridge(
        lambda x: 7.0 + prior.logpdf(x).sum(1), draws[:2_000], draws[2_000:], rng
    )
    assert abs(value - 7.0) < 4 * error
    assert error < 0.03


def test_tables_count_what_is_within_two_errors():
    row = {"case": "coins", "dim": 3, "truth": 0.0, "truth_error": 0.0, "khat": 0.1}
    rows = [row | {"estimate": e, "error": 0.1, "effective": 9_000} for e in (0.1, 0.15, 0.3)]
    assert evidence.conjugate_table(rows)[-1].split()[:3] == ["all", "3", "67%"]
    assert "beyond" in evidence.other_table(rows)[-1]
    assert "beyond" not in evidence.other_table([row | rows[0] | {"estimate": 0.01}])[-1]
