"""The constant of a ``KernelExponentialFamily``, by importance sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats

from numpyro_kscore import KernelExponentialFamily, ScoreEstimator
from numpyro_kscore.estimators._density.normalization import (
    Proposal,
    draw_proposal,
    importance_sampled,
)
from numpyro_kscore.regularizers import NuMethod
from support import oracle
from support.compiling import quick_jit

KEY = random.key(3)
RNG = np.random.default_rng(4)
# Two clusters, on which the Gaussian base is far off.
SAMPLES = np.concatenate([RNG.normal(-2, 0.6, (40, 2)), RNG.normal(1, 0.5, (60, 2))])
BASE = dist.Normal(jnp.zeros(2), 2.5).to_event(1)


@quick_jit
def normalized(samples):
    estimator = ScoreEstimator(regularizer=NuMethod(30), standardize="diagonal", base=BASE)
    return KernelExponentialFamily(samples, estimator).normalize(KEY, 4000)


@pytest.mark.thorough
def test_the_constant_is_that_of_quadrature(x64):
    density = normalized(SAMPLES)
    side = jnp.linspace(-20.0, 20.0, 201)
    grid = jnp.stack(jnp.meshgrid(side, side), axis=-1).reshape(-1, 2)
    total = jnp.sum(jnp.exp(quick_jit(lambda p, x: p.log_prob(x))(density, grid))) * 0.2**2
    # Four standard errors; the sum's own error is below 1e-4 at a third of the narrowest scale.
    error = float(density.normalization.standard_error)
    assert abs(np.log(total)) < 4 * error + 1e-4
    assert 1e-4 < error < 0.05
    density.normalization.raise_if_failed()


@pytest.mark.thorough
def test_it_moves_log_prob_only():
    samples = np.float32(SAMPLES)
    density = normalized(samples)
    plain = KernelExponentialFamily(samples, density.score)
    assert plain.normalization is None
    x = samples[:5]

    @quick_jit
    def evaluate(density):
        gradient = jax.grad(density.log_prob)(x[0])
        return density.log_prob(x), gradient, density.sample(KEY, (3,))

    (before, *same), (after, *others) = (map(np.asarray, evaluate(p)) for p in (plain, density))
    np.testing.assert_allclose(
        before - after, density.normalization.log_constant, rtol=1e-4, atol=1e-5
    )
    for ours, theirs in zip(same, others, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_weights_errors_and_effective_draws_are_those_of_the_definition(x64):
    log_density, log_proposal = RNG.normal(size=(2, 30)) + 700.0
    found = importance_sampled(
        jnp.asarray(log_density), Proposal(jnp.zeros((30, 2)), jnp.asarray(log_proposal))
    )
    weights = np.exp(log_density - log_proposal)
    assert found.log_constant == pytest.approx(np.log(weights.mean()), rel=1e-9)
    halves = [weights[:15], weights[15:]]
    variance = sum(np.var(half, ddof=1) / 15 for half in halves) / 4
    assert found.standard_error == pytest.approx(np.sqrt(variance) / weights.mean(), rel=1e-9)
    effective = weights.sum() ** 2 / np.sum(weights**2)
    assert found.effective_sample_size == pytest.approx(effective, rel=1e-9)


@pytest.mark.thorough
def test_the_proposal_is_half_the_base_and_half_a_kernel_density(x64):
    density = normalized(SAMPLES)
    proposal = quick_jit(lambda p: draw_proposal(p.score.base, p.samples, KEY, 4000))(density)
    x = np.asarray(proposal.draws)
    h = (4 / (4 * 100)) ** (1 / 6)
    kernels = oracle.kernel_density(SAMPLES, None, h).values(x[::400])[0]
    normal = np.prod(stats.norm.pdf(x[::400], scale=2.5), axis=1)
    expected = np.log(0.5 * (kernels + normal))
    np.testing.assert_allclose(proposal.log_density[::400], expected, rtol=1e-9)
    # Means and covariances of both halves, to four standard errors of 2000 draws.
    first, second = x[:2000], x[2000:]
    assert np.all(np.abs(first.mean(axis=0)) < 4 * 2.5 / 2000**0.5)
    spread = SAMPLES.std(axis=0) * np.sqrt(1 + h**2)
    assert np.all(np.abs(second.mean(axis=0) - SAMPLES.mean(axis=0)) < 4 * spread / 2000**0.5)
    np.testing.assert_allclose(second.std(axis=0), spread, rtol=4 / 2000**0.5)


@pytest.mark.thorough
def test_too_few_effective_draws_are_reported():
    density = normalized(np.float32(SAMPLES))
    few = density.normalize(KEY, 10)
    assert few.normalization.effective_sample_size <= few.normalization.num_draws == 10
    with pytest.raises(FloatingPointError, match="expected at least 100 effective draws; got"):
        few.normalization.raise_if_failed()
    with pytest.raises(ValueError, match="num_draws: expected an integer of at least 4; got 2"):
        density.normalize(KEY, 2)
