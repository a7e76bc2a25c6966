"""Chains make poor fits exact, and say when they cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_kscore import refine

KEY = random.key(0)
# A regression whose posterior is Gaussian, with a correlation of -0.95.
X = np.arange(1.0, 13.0)
Y = 2.0 - 0.5 * X + np.sin(X)
PRIOR_SD = np.array([10.0, 10.0])


def regression(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, PRIOR_SD[0]))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, PRIOR_SD[1]))
    numpyro.deterministic("at_zero", 2 * intercept)
    numpyro.sample("y", dist.Normal(intercept + slope * x, 1.0), obs=y)


def exact_posterior():
    """Mean and covariance of slope and intercept."""
    design = np.stack([X, np.ones(len(X))], axis=1)
    covariance = np.linalg.inv(design.T @ design + np.diag(PRIOR_SD**-2))
    return covariance @ design.T @ Y, covariance


def independent(sites):
    """A guide of independent normal latents, with parameters for them."""

    def guide(*args):
        for name in sites:
            loc, scale = (numpyro.param(f"{name}_{part}", 1.0) for part in ("loc", "scale"))
            numpyro.sample(name, dist.Normal(loc, scale))

    return guide


def fitted(model, locs, scales):
    svi = SVI(model, independent(locs), optax.adam(1e-2), Trace_ELBO())
    params = {f"{name}_loc": jnp.asarray(loc) for name, loc in locs.items()}
    params |= {f"{name}_scale": jnp.asarray(scale) for name, scale in scales.items()}
    return svi, SVIRunResult(params, SVIState(None, None, KEY), jnp.zeros(1))


def poor_fit():
    """Three standard deviations off and far too narrow."""
    mean, covariance = exact_posterior()
    sd = np.sqrt(np.diag(covariance))
    names = ("slope", "intercept")
    off = {n: float(m + 3 * s) for n, m, s in zip(names, mean, sd, strict=True)}
    return fitted(regression, off, {n: float(0.2 * s) for n, s in zip(names, sd, strict=True)})


def check_regression(found):
    mean, covariance = exact_posterior()
    sd = np.sqrt(np.diag(covariance))
    assert found.verdict == "good"
    assert found.codes == ("settled",)
    assert found.converged
    assert found.names == ("slope", "intercept")
    chains, draws = found.samples["slope"].shape
    assert chains == 64
    x = np.stack([found.samples[name].ravel() for name in found.names], axis=1)
    # Errors are known from 16 superchains, up to 18 %: five of them.
    np.testing.assert_array_less(np.abs(x.mean(0) - mean) / sd, 5 * found.mean_error)
    np.testing.assert_array_less(np.abs(x.std(0) / sd - 1), 5 * found.sd_error)
    # R-hat of 1.01 in means over superchains.
    assert np.all(found.mean_error < (2.01 * 0.01 / 16) ** 0.5 * 1.01)
    # What was done to the guide is what is reported.
    error = 5 * found.mean_error
    np.testing.assert_array_less(np.abs(found.mean_change + 3), error + 3 * 5 * found.sd_error)
    np.testing.assert_array_less(np.abs(found.sd_change / 5 - 1), 5 * found.sd_error + 0.03)
    assert found.num_gradients < 100_000


@pytest.fixture(scope="module")
def refined():
    return refine(*poor_fit(), X, Y, num_chains=64, search_modes=False)


@pytest.mark.thorough
def test_a_poor_fit_becomes_exact(refined):
    check_regression(refined)
    correlation = np.corrcoef(*(refined.samples[name].ravel() for name in refined.names))[0, 1]
    _, covariance = exact_posterior()
    exact = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    assert correlation == pytest.approx(exact, abs=0.02)
    np.testing.assert_allclose(refined.samples["at_zero"], 2 * refined.samples["intercept"])
    np.testing.assert_array_equal(refined.superchain, np.repeat(np.arange(16), 4))
    assert refined.num_transitions > refined.samples["slope"].shape[1]
    printed = str(refined)
    assert "verdict: good" in printed
    assert "modes were not searched for" in printed


def test_chains_for_arviz(refined):
    tree = refined.to_arviz()
    np.testing.assert_array_equal(tree["posterior"]["slope"], refined.samples["slope"])
    assert tree["posterior"]["slope"].dims == ("chain", "draw")
    assert tree["observed_data"]["y"].shape == (12,)
    stats = tree["sample_stats"]
    np.testing.assert_array_equal(stats["superchain"][:, 0], refined.superchain)
    assert stats.attrs["verdict"] == "good"
    assert stats.attrs["nested_rhat"] == pytest.approx(refined.rhat.max())


@pytest.mark.thorough
def test_double_precision():
    with jax.enable_x64(True):
        found = refine(*poor_fit(), X, Y, num_chains=64, search_modes=False)
        assert found.samples["slope"].dtype == np.float64
    check_regression(found)


def far_modes():
    """N(-6, 1) and N(6, 1) with equal weights: chains do not get from one to the other."""
    flat = dist.ImproperUniform(dist.constraints.real, (), ())
    z = numpyro.sample("z", flat)
    numpyro.factor("density", jnp.logaddexp(-0.5 * (z - 6.0) ** 2, -0.5 * (z + 6.0) ** 2))


@pytest.mark.thorough
def test_a_mode_that_is_out_of_reach():
    svi, result = fitted(far_modes, {"z": 6.0}, {"z": 1.0})
    found = refine(svi, result, num_chains=64)
    assert found.verdict == "bad"
    assert found.codes == ("mode missed",)
    # The chains themselves have settled, in their mode.
    assert found.converged
    assert np.all(found.samples["z"] > 0)
    assert found.modes.num_missed == 1
    out = str(found)
    assert "the draws cover only some of several modes" in out
    assert "start several fits from other init_loc_fn values" in out


@pytest.mark.thorough
def test_modes_whose_weights_stay_those_of_the_guide():
    svi, result = fitted(far_modes, {"z": 0.0}, {"z": 6.0})
    found = refine(svi, result, num_chains=64, max_gradients=40_000, search_modes=False)
    assert found.verdict == "cannot tell"
    assert not found.converged
    assert "chains apart" in found.codes
    assert found.rhat[0] > 1.1
    # It gives up within a window of the limit.
    assert found.num_gradients <= 50_000
    assert any("weights are the guide's" in finding for finding in found.findings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_chains": 100}, "num_chains: expected a multiple of num_superchains, 16; got 100"),
        ({"num_chains": 16}, "num_chains: expected an integer of at least 32; got 16"),
        ({"num_superchains": 2}, "num_superchains: expected an integer of at least 4; got 2"),
        ({"max_gradients": 0}, "max_gradients: expected an integer of at least 1; got 0"),
        ({"tol": 0.0}, "tol: expected a positive finite number; got 0.0"),
    ],
)
def test_numbers_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        refine(*poor_fit(), X, Y, **settings)
