"""Models of hundreds of latents of many kinds, by exact weights, and one by quadrature."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS, SVI, init_to_value

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit, log_evidence

GROUPS, ROWS = 400, 5
GROUP = np.repeat(np.arange(GROUPS), ROWS)


def sparse_counts(y):
    mean = numpyro.sample("mean", dist.Normal(0, 3))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("y", dist.Poisson(jnp.exp(mean + scale * z[GROUP])), obs=y)


def student_effects(y):
    mean = numpyro.sample("mean", dist.Normal(0, 3))
    scale, noise = (numpyro.sample(name, dist.HalfNormal(2)) for name in ("scale", "noise"))
    freedom = numpyro.sample("freedom", dist.Gamma(2, 0.2))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.StudentT(freedom, mean, scale))
    numpyro.sample("y", dist.Normal(effect[GROUP], noise), obs=y)


def correlated_slopes(x, y):
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([3]).to_event(1))
    factor = numpyro.sample("factor", dist.LKJCholesky(3, 2.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("groups", GROUPS):
        fn = dist.MultivariateNormal(means, scale_tril=scales[:, None] * factor)
        slopes = numpyro.sample("slopes", fn)
    numpyro.sample("y", dist.Normal((x * slopes[GROUP]).sum(-1), noise), obs=y)


def factors(y):
    """Loadings times scores: no Gaussian, but scores are, given all loadings and noises."""
    loadings = numpyro.sample("loadings", dist.Normal(0, 1).expand([6]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1).expand([6]).to_event(1))
    with numpyro.plate("rows", GROUPS):
        score = numpyro.sample("score", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(score[:, None] * loadings, noise).to_event(2), obs=y)


def without_scores(y):
    """The same model with its scores integrated out."""
    loadings = numpyro.sample("loadings", dist.Normal(0, 1).expand([6]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1).expand([6]).to_event(1))
    covariance = jnp.outer(loadings, loadings) + jnp.diag(noise**2)
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance).expand([GROUPS]), obs=y)


def data_of(model):
    rng = np.random.default_rng(0)
    if model is sparse_counts:
        return (rng.poisson(np.exp(-2.2 + 1.6 * rng.normal(size=GROUPS)[GROUP])),)
    if model is student_effects:
        effects = 2 + 0.6 * rng.standard_t(4, GROUPS)
        return (effects[GROUP] + rng.normal(size=len(GROUP)),)
    if model is factors:
        loadings = np.array([1.2, -1.0, 0.9, 0.7, 0.5, -0.4])
        return (rng.normal(size=(GROUPS, 1)) * loadings + 0.5 * rng.normal(size=(GROUPS, 6)),)
    x = np.concatenate([np.ones((len(GROUP), 1)), rng.normal(size=(len(GROUP), 2))], axis=1)
    slopes = rng.normal(size=(GROUPS, 3)) * [0.8, 0.5, 0.3]
    return x, np.sum(x * slopes[GROUP], axis=1) + 0.7 * rng.normal(size=len(GROUP))


def exact_log_scale(y):
    """Mean and standard deviation of the log scale of sparse counts, by quadrature."""
    totals, repeats = np.unique(y.reshape(GROUPS, ROWS).sum(axis=1), return_counts=True)
    z = np.linspace(-8.0, 8.0, 401)
    means, logs = np.linspace(-3.5, -1.2, 61), np.linspace(-0.2, 1.2, 61)
    found = np.zeros((len(means), len(logs)))
    for i, mean in enumerate(means):
        for j, log_scale in enumerate(logs):
            eta = mean + np.exp(log_scale) * z
            terms = totals[:, None] * eta - ROWS * np.exp(eta) - 0.5 * z**2
            prior = -0.5 * (mean / 3) ** 2 - 0.5 * (np.exp(log_scale) / 2) ** 2 + log_scale
            found[i, j] = repeats @ np.logaddexp.reduce(terms, axis=1) + prior
    weights = np.exp(found - found.max()).sum(axis=0)
    mean = weights @ logs / weights.sum()
    return mean, np.sqrt(weights @ (logs - mean) ** 2 / weights.sum())


@pytest.mark.slow
@pytest.mark.parametrize("model", [sparse_counts, student_effects, correlated_slopes, factors])
def test_weights_hold_for_it(model):
    guide, data = AutoImplicit(model), [jnp.asarray(a) for a in data_of(model)]
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    result = fit(svi, random.key(0), *data, progress_bar=False)
    assert result.info.steps == 0
    evidence = log_evidence(svi, result, *data)
    assert evidence.khat < 0.7
    # A tenth of a nat of divergence leaves 8200 of 10 000; tails of scales take more.
    assert evidence.num_effective > 4_000
    if model is sparse_counts:
        draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(4_000,))
        mean, sd = exact_log_scale(np.asarray(data[0]))
        logs = np.log(draws["scale"])
        # Their mean has a standard error of .016 sd, and their sd one of .011.
        assert abs(logs.mean() - mean) < 0.1 * sd
        assert abs(logs.std() / sd - 1) < 0.08
    if model is factors:
        nuts = NUTS(without_scores, init_strategy=init_to_value(values=_signs_of(guide, result)))
        chains = MCMC(nuts, num_warmup=500, num_samples=2_000, progress_bar=False)
        chains.run(random.key(2), *data)
        plain, weighted = (
            guide.sample_posterior(
                random.key(1), result.params, sample_shape=(4_000,), resample=resample
            )
            for resample in (False, True)
        )
        for name in ("loadings", "noise"):
            exact = np.asarray(chains.get_samples()[name])
            # With 1000 effective draws of NUTS means have an error of .035 sd, and sds of .025.
            error = (plain[name].mean(0) - exact.mean(0)) / exact.std(0)
            assert np.max(np.abs(error)) < 0.15
            for draws in (plain, weighted):
                np.testing.assert_allclose(draws[name].std(0) / exact.std(0), 1, atol=0.1)


def _signs_of(guide, result):
    """Values of the mode that a fit is at: signs of all loadings together are free."""
    draws = guide.sample_posterior(random.key(3), result.params, sample_shape=(100,))
    return {name: draws[name].mean(0) for name in ("loadings", "noise")}
