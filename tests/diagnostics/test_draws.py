"""Draws of a fitted guide and the model at them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.importance import psis_diagnostic
from numpyro.infer.svi import SVIRunResult, SVIState
from numpyro.infer.util import potential_energy

from numpyro_kscore import Implicit, ImplicitELBO, diagnose, evaluate_guide, khat
from numpyro_kscore._transports.centering import Centering
from support.compiling import quick_jit
from support.coordinates import coordinates_of

KEY = random.key(0)


def model(data, sd=0.5):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(z, sd).to_event(1), obs=data)


def implicit_guide(data, sd=0.5):
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(2), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    loc, scale = numpyro.param("loc", jnp.zeros(2)), numpyro.param("scale", jnp.ones(2))
    numpyro.sample("z", Implicit(loc + scale * noise, 1))


def explicit_guide(data, sd=0.5):
    loc, scale = numpyro.param("loc", jnp.zeros(2)), numpyro.param("scale", jnp.ones(2))
    numpyro.sample("z", dist.Normal(loc, scale).to_event(1))


DATA = np.array([1.0, -1.0], np.float32)
# Mean and standard deviation of the posterior, which is Gaussian.
MEAN, SD = 0.8 * DATA, 0.2**0.5


def fitted(guide, scale=SD, loss=None):
    params = {"loc": MEAN, "scale": scale * jnp.ones(2)}
    svi = SVI(model, guide, optax.adam(1e-2), loss or ImplicitELBO())
    return svi, SVIRunResult(params, SVIState(None, None, KEY), jnp.array([2.0, 1.0]))


@pytest.mark.thorough
def test_evaluated_guide_against_closed_form():
    svi, result = fitted(implicit_guide)
    found = evaluate_guide(svi, result, DATA, num_samples=300)
    x = np.asarray(found.samples)
    np.testing.assert_allclose(found.scores, -(x - MEAN) / SD**2, atol=1e-4)
    density = -0.5 * np.sum((x - MEAN) ** 2, axis=1) / SD**2
    np.testing.assert_allclose(np.ptp(np.asarray(found.log_density) - density), 0.0, atol=1e-4)
    # The Hessian is -I/SD²: in whitened coordinates the trace of the draws' covariance over SD².
    np.testing.assert_allclose(
        found.laplacian, -np.trace(np.cov(x.T, bias=True)) / SD**2, rtol=1e-4
    )
    assert found.log_q is None
    assert found.num_lost == 0


@pytest.mark.thorough
def test_explicit_guide_has_exact_weights():
    """Its k̂ is NumPyro's, up to the noise of other draws: a scale of .6 has shape 1 - .36."""
    svi, result = fitted(explicit_guide, scale=0.6 * SD, loss=Trace_ELBO())
    draws = evaluate_guide(svi, result, DATA, num_samples=2_000)
    z = (np.asarray(draws.samples) - MEAN) / (0.6 * SD)
    exact = -0.5 * np.sum(z**2, axis=1) - 2 * np.log(0.6 * SD) - np.log(2 * np.pi)
    np.testing.assert_allclose(draws.log_q, exact, atol=1e-4)
    found = khat(draws, num_bootstrap=20)
    theirs = psis_diagnostic(KEY, result.params, model, explicit_guide, DATA, num_particles=2_000)
    # Each has an error of (1 + k)/√134.
    assert abs(found.value - theirs) < 3 * 2**0.5 * 1.6 / 134**0.5


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((), TypeError, "args: expected the arguments the guide was fitted with"),
        ((None,), ValueError, r"model: expected data at \['y'\].*got none"),
    ],
)
def test_missing_data_is_named(args, error, message):
    svi, result = fitted(implicit_guide)
    with pytest.raises(error, match=message):
        evaluate_guide(svi, result, *args)


def test_wrong_objects_are_named():
    svi, result = fitted(implicit_guide)
    with pytest.raises(ValueError, match="num_samples: expected an integer of at least 100; got 9"):
        diagnose(svi, result, DATA, num_samples=9)
    with pytest.raises(TypeError, match="svi: expected SVI.model"):
        evaluate_guide(model, result, DATA)
    with pytest.raises(TypeError, match="result: expected what svi.run or fit returns"):
        evaluate_guide(svi, result.params, DATA)


def schools():
    spread = numpyro.sample("spread", dist.HalfNormal(5.0))
    with numpyro.plate("schools", 4):
        effect = numpyro.sample("effect", dist.LogNormal(3.0, spread))
        numpyro.sample("y", dist.Normal(jnp.log(effect), 10.0), obs=jnp.array([28.0, 8.0, -3, 7]))


def non_centered():
    """Draws of the spread, and of effects as standardized logarithms, with their density."""
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(5), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    log_spread, z = 0.5 * noise[0], noise[1:]
    log_density = jnp.sum(dist.Normal().log_prob(noise)) - jnp.log(0.5)
    numpyro.sample("spread", Implicit(jnp.exp(log_spread), local_log_density=log_density))
    with numpyro.plate("schools", 4):
        effect = jnp.exp(3.0 + jnp.exp(log_spread) * z)
        numpyro.sample("effect", Implicit(effect, 0, unconstrained=z))
    zeros = {"effect": Centering(np.zeros(4), np.zeros(4), np.zeros(4))}
    coordinates_of({"spread": 0.0, "effect": z}, zeros).announce("_coordinates")


@pytest.mark.thorough
def test_draws_of_hierarchical_guides_are_unconstrained_values():
    """Effects are standardized in the guide, and logarithms of the model's values here."""
    svi = SVI(schools, non_centered, optax.adam(1e-2), ImplicitELBO())
    result = SVIRunResult({}, SVIState(None, None, KEY), jnp.zeros(2))
    found = evaluate_guide(svi, result, num_samples=40)

    @quick_jit
    @jax.vmap
    def exact(u):
        def log_density(u):
            return -potential_energy(schools, (), {}, {"spread": u[0], "effect": u[1:]})

        log_q = dist.Normal(0.0, 0.5).log_prob(u[0])
        log_q += jnp.sum(dist.Normal(3.0, jnp.exp(u[0])).log_prob(u[1:]))
        return *jax.value_and_grad(log_density)(u), log_q

    log_density, scores, log_q = exact(found.samples)
    np.testing.assert_allclose(found.log_density, log_density, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found.log_q, log_q, rtol=1e-4, atol=1e-3)
    # The effects are around 3, with a mean square of the spread; far from standardized ones.
    scaled = (found.samples[:, 1:] - 3.0) / np.exp(found.samples[:, :1])
    np.testing.assert_allclose(np.mean(scaled), 0.0, atol=4 / 160**0.5)
    np.testing.assert_allclose(np.std(scaled), 1.0, atol=4 / 320**0.5)
