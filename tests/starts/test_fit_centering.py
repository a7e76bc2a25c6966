"""Degrees of centering, against normal posteriors whose effects have one spread."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_kscore._model.target import Target
from numpyro_kscore._starts.fit_centering import fit_centering
from numpyro_kscore._starts.from_model import _values

# Means of the data of four effects and their standard errors; mean and spread of the effects.
DATA, NOISE = np.array([1.5, -2.0, 0.4, 3.0]), np.array([0.02, 0.4, 1.0, 100.0])
LOC, LOG_SCALE, COUNT = 0.5, np.log(0.8), 4_000


def draws(log_scale_sd, seed=0):
    """Draws of the posterior, log spreads and means with errors of their own."""
    rng = np.random.default_rng(seed)
    log_scale = rng.normal(LOG_SCALE, log_scale_sd, (COUNT, 1))
    loc = rng.normal(LOC, 0.05, (COUNT, 1))
    precision = np.exp(-2 * log_scale) + 1 / NOISE**2
    mean = (loc * np.exp(-2 * log_scale) + DATA / NOISE**2) / precision
    u = mean + rng.normal(size=(COUNT, 4)) / precision**0.5
    v = (u - loc) * np.exp(-log_scale)
    wide = np.ones((1, 4))
    return v, u, loc * wide, log_scale * wide


@pytest.mark.parametrize("log_scale_sd", [0.05, 0.3])
def test_degrees_are_shares_of_the_data_whatever_the_scale_does(log_scale_sd):
    found = fit_centering(*draws(log_scale_sd), np.ones(4, bool))
    expected = 1 / (1 + NOISE**2 * np.exp(-2 * LOG_SCALE))
    # A variance of 4000 draws, of which 3200 count, has an error of 2.5 %; the share at other
    # scales is another one, by second order some .01 on average at the largest sd here.
    allowed = 4.5 * (1 - expected) * 0.025 + 0.02
    assert np.all(np.abs(found.degrees - expected) < allowed)
    # The last effect is hardly known: the prior alone.
    assert found.degrees[3] == found.log_scales[3] == found.locs[3] == 0
    np.testing.assert_allclose(found.log_scales[:3], LOG_SCALE, atol=0.02)
    # Errors of a mean of 3200 draws, in units of a share of the data.
    error = (1 - expected[:3]) ** 0.5 * 0.8 / expected[:3] / 3_200**0.5
    np.testing.assert_array_less(np.abs(found.locs[:3] - DATA[:3]), 4.5 * error + 0.08)


def test_latents_that_are_not_hierarchical_stay_as_they_are():
    found = fit_centering(*draws(0.1), np.array([True, False, True, False]))
    np.testing.assert_array_equal(found.degrees[[1, 3]], 1)
    assert not np.any(found.log_scales[[1, 3]])
    assert not np.any(found.locs[[1, 3]])


def test_draws_that_overflow_do_not_count():
    moved, *rest = draws(0.1)
    few, many = moved.copy(), moved.copy()
    few[: COUNT // 3, 0] = np.inf
    many[: 2 * COUNT // 3, 0] = np.nan
    assert np.all(np.isfinite(fit_centering(few, *rest, np.ones(4, bool))))
    assert fit_centering(many, *rest, np.ones(4, bool)) is None


def test_positive_latents_are_told_by_their_support():
    """Vectors too, whose support wraps that of their elements; probabilities are none."""
    priors = {
        "scale": dist.HalfNormal(1.0),
        "scales": dist.HalfCauchy(jnp.ones(3)).to_event(1),
        "bounded": dist.Uniform(0.0, 5.0).expand([2]).to_event(1),
        "above": dist.TruncatedNormal(0.0, 1.0, low=0.0),
    }
    others = {
        "share": dist.Beta(1.0, 1.0),
        "mean": dist.Normal(0.0, 1.0),
        "around": dist.Uniform(-1.0, 1.0),
        "weights": dist.Dirichlet(jnp.ones(2)),
    }

    def model():
        for name, prior in (priors | others).items():
            numpyro.sample(name, prior)

    sizes = {"scales": 3, "bounded": 2}
    latents = {
        name: jnp.zeros((sizes[name],) if name in sizes else (1,) if name == "weights" else ())
        for name in priors | others
    }
    assert _values(Target(model, (), {}), latents)[1] == set(priors)
