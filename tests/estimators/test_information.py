"""Entropies and divergences from samples, and the densities they rest on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import optimize, special, stats

from numpyro_kscore._util.keys import host_generator
from numpyro_kscore.estimators import entropy, kl_divergence
from numpyro_kscore.estimators._base.student import student_log_density
from numpyro_kscore.estimators._density import information as information
from numpyro_kscore.estimators._density.normalization import Normalization
from numpyro_kscore.estimators._density.stacking import log_densities, stacked, stacking_weights
from support.compiling import quick_jit

RNG = np.random.default_rng(0)
LOG_TWO_PI = np.log(2 * np.pi)


def test_student_is_that_of_greatest_likelihood(x64):
    """Against scipy's density at the parameters where its likelihood is stationary."""
    z = stats.multivariate_t.rvs(np.zeros(2), np.eye(2), df=3, size=60, random_state=1)
    degrees = 5.0
    found = quick_jit(lambda z: student_log_density(z, z, degrees))(z)

    def loss(parameters):
        root = np.array([[np.exp(parameters[2]), 0.0], [parameters[4], np.exp(parameters[3])]])
        return -np.sum(stats.multivariate_t.logpdf(z, parameters[:2], root @ root.T, df=degrees))

    best = optimize.minimize(loss, np.zeros(5), options={"gtol": 1e-8})
    assert -np.sum(found) == pytest.approx(best.fun, rel=1e-9)


def test_weights_are_those_of_greatest_likelihood(x64):
    values = RNG.normal(size=(50, 3)) + np.array([0.0, 0.3, -8.0])
    log_weights = np.asarray(quick_jit(stacking_weights)(values))
    total = np.mean(stacked(jnp.asarray(values), jnp.asarray(log_weights)))

    def loss(logits):
        return -np.mean(special.logsumexp(values + special.log_softmax(logits), axis=1))

    best = optimize.minimize(loss, np.zeros(3), method="BFGS")
    assert np.sum(np.exp(log_weights)) == pytest.approx(1.0, rel=1e-9)
    # EM creeps toward weights of zero; its likelihood does not.
    assert total == pytest.approx(-best.fun, abs=1e-4)


@quick_jit
def gaussian_log_densities(samples, points, key, num_draws):
    """One Gaussian of the samples' moments in place of all estimates."""
    mean, variance = jnp.mean(samples, axis=0), jnp.var(samples, axis=0)
    value = -0.5 * jnp.sum((points - mean) ** 2 / variance + jnp.log(variance) + LOG_TWO_PI, axis=1)
    return value[:, None], Normalization(*jnp.array([0.0, 1e-3, 500.0, 1.0]))


@pytest.fixture
def gaussians(monkeypatch):
    monkeypatch.setattr(information, "log_densities", gaussian_log_densities)


def held_out(parts):
    """Mean log density at each part of the Gaussian fitted to the others, and elsewhere."""
    fits = []
    for k in range(len(parts)):
        own = np.concatenate([part for j, part in enumerate(parts) if j != k])
        fits.append((own.mean(axis=0), own.std(axis=0)))
    return np.concatenate(
        [np.sum(stats.norm.logpdf(p, *f), axis=1) for p, f in zip(parts, fits, strict=True)]
    ), fits


def order_of_rows(key, count):
    """The order in which an estimate with this key takes the rows of its parts."""
    return host_generator(random.split(key, 7)[0]).permutation(count)


@pytest.mark.thorough
def test_entropy_and_divergence_are_extrapolated_from_parts(gaussians, x64):
    p, q = RNG.normal(size=(40, 2)), 1.0 + 1.5 * RNG.normal(size=(32, 2))
    key = random.key(5)
    order = order_of_rows(key, 40)
    pairs = [held_out(np.split(p[order], k))[0] for k in (4, 2)]
    each = 3 * pairs[0] - 2 * pairs[1]
    gain = np.mean(each) - np.mean(pairs[0])
    found = entropy(p, key=key)
    assert found.value == pytest.approx(-np.mean(each), rel=1e-9)
    assert found.extrapolation == pytest.approx(-gain, rel=1e-9)
    # Each fit's constant has an error of 1e-3, with all weight on it.
    constants = 1e-6 * (9 / 4 + 4 / 2)
    error = np.sqrt(np.var(each, ddof=1) / 40 + gain**2 / 4 + constants)
    assert found.standard_error == pytest.approx(error, rel=1e-9)
    assert found.effective_sample_size == 500

    first, second = random.split(key)
    order = order_of_rows(first, 40)
    pairs = [held_out(np.split(p[order], k))[0] for k in (4, 2)]
    of_p, gain_p = 3 * pairs[0] - 2 * pairs[1], 2 * np.mean(pairs[0] - pairs[1])
    order = order_of_rows(second, 32)
    logs = [
        [np.sum(stats.norm.logpdf(p, *fit), axis=1) for fit in held_out(np.split(q[order], k))[1]]
        for k in (4, 2)
    ]
    means = [np.mean(log, axis=0) for log in logs]
    of_q, gain_q = 3 * means[0] - 2 * means[1], 2 * np.mean(means[0] - means[1])
    found = kl_divergence(p, q, key=key)
    assert found.value == pytest.approx(np.mean(of_p) - np.mean(of_q), rel=1e-9)
    assert found.extrapolation == pytest.approx(gain_p - gain_q, rel=1e-9)
    # Each sample of p with itself.
    inverse = order_of_rows(first, 40).argsort()
    variance = np.var(of_p[inverse] - of_q, ddof=1) / 40 + (gain_p**2 + gain_q**2) / 4
    variance += 3 * np.var([np.mean(log) for log in logs[0]]) + 2 * constants
    assert found.standard_error == pytest.approx(np.sqrt(variance), rel=1e-9)


@pytest.mark.slow
def test_numbers_of_samples_that_parts_do_not_divide(gaussians):
    x = np.float32(RNG.normal(size=(403, 1)))
    found = entropy(x)
    exact = 0.5 * (LOG_TWO_PI + 1)
    # Four standard errors, of which one is sqrt(1/(2n)) = .035.
    assert abs(found.value - exact) < 0.14
    assert found.standard_error == pytest.approx(0.035, rel=0.3)
    assert jnp.result_type(found.value) == jnp.float32


def test_wrong_input_is_named():
    x = np.zeros((20, 2), np.float32)
    with pytest.raises(ValueError, match="samples: expected at least 16 rows"):
        entropy(x[:9])
    with pytest.raises(ValueError, match=r"samples_q: expected 2 column\(s\)"):
        kl_divergence(x, x[:, :1])
    with pytest.raises(ValueError, match="num_draws: expected an integer of at least 4"):
        entropy(x, num_draws=0)


@pytest.mark.slow
@pytest.mark.optimized
def test_estimates_are_within_their_errors():
    """The samples are skewed, with a known entropy; errors are below three standard errors."""
    rng = np.random.default_rng(2)
    p = np.log(rng.gamma(2.0, size=(800, 2)))
    exact = 2 * (special.gammaln(2.0) - 2.0 * special.digamma(2.0) + 2.0)
    found = entropy(np.float32(p))
    assert abs(found.value - exact) < 3 * found.standard_error
    assert found.standard_error < 0.1
    q = np.float32(np.log(rng.gamma(2.0, size=(800, 2))))
    same = kl_divergence(np.float32(p), q)
    assert abs(same.value) < 3 * same.standard_error
    values, _ = log_densities(q[:400], q[400:], random.key(0), num_draws=1000)
    assert bool(jnp.all(jnp.isfinite(jax.device_get(values))))
