"""Positions and metrics for samplers, in their order of coordinates, whatever the model's is."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from blackjax.mcmc import hmc
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_kscore import Implicit, ImplicitELBO, warm_start
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore.samplers._guide import open_guide
from support.coordinates import coordinates_of

KEY = random.key(0)
METRIC = "adapt_state.inverse_mass_matrix"
# In the order of the model: z, b (2), a; sorted: a, b, z. A common factor correlates all of them.
SDS = {"z": np.array(100.0), "b": np.array([0.1, 10.0]), "a": np.array(0.001)}
FACTOR = 3.0


def model():
    """Correlated normal latents of different sizes, in an order that is not sorted."""
    common = 0.0
    for name, sd in SDS.items():
        u = numpyro.sample(name, dist.Normal(FACTOR * sd * common, sd).to_event(sd.ndim))
        common = u / 100.0 if name == "z" else common


def guide():
    """The same: an exact fit."""
    numpyro.param("nothing", 0.0)
    model()


def exact_covariance():
    """Sds and covariance of a, b, z: all but z are moved by z/100, times three of their sds."""
    sds = np.concatenate([np.ravel(SDS[name]) for name in sorted(SDS)])
    slopes = np.array([FACTOR, FACTOR, FACTOR, 1.0])
    covariance = np.outer(slopes, slopes) + np.diag([1.0, 1.0, 1.0, 0.0])
    return sds, sds[:, None] * covariance * sds


def fitted(model, guide, params, loss=None):
    svi = SVI(model, guide, optax.adam(1e-2), loss or Trace_ELBO())
    return svi, SVIRunResult(params, SVIState(None, None, KEY), jnp.zeros(1))


@pytest.fixture(scope="module")
def start():
    return warm_start(*fitted(model, guide, {"nothing": jnp.zeros(())}), 3)


@pytest.mark.thorough
def test_the_metric_is_the_covariance_in_sorted_order(start):
    sds, covariance = exact_covariance()
    # 10000 draws: an entry has an error of 1 % of the product of the standard deviations.
    scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    found = np.asarray(start.inverse_mass_matrix, np.float64)
    np.testing.assert_allclose(found / scale, covariance / scale, atol=0.06)
    assert {name: value.shape for name, value in start.positions.items()} == {
        "z": (3,), "b": (3, 2), "a": (3,),
    }  # fmt: skip
    flat = jax.vmap(lambda z: ravel_pytree(z)[0])(start.positions)
    # Every position is a draw: within five standard deviations.
    assert np.all(np.abs(flat) < 5 * np.sqrt(np.diag(covariance)))
    assert len(np.unique(flat[:, 0])) == 3


@pytest.mark.slow
def test_nuts_takes_few_steps_in_that_metric(start):
    """The wrong order of coordinates would take hundreds of steps: scales differ by 100 000."""
    mcmc = MCMC(start.nuts(), num_warmup=30, num_samples=100, progress_bar=False)
    first = {name: value[0] for name, value in start.positions.items()}
    mcmc.run(KEY, init_params=first, extra_fields=("num_steps", METRIC))
    fields = mcmc.get_extra_fields()
    assert np.mean(fields["num_steps"]) <= 7
    (name,) = fields[METRIC]
    assert name == ("a", "b", "z")
    draws = mcmc.get_samples()
    # 100 draws are at most as good as independent ones: an error of 0.1 and a factor of 3 more.
    assert abs(np.mean(draws["z"])) < 0.5 * 100
    assert 0.6 < np.std(draws["z"]) / 100 < 1.5


def test_blackjax_takes_what_is_there(start):
    state = jax.jit(jax.vmap(lambda z: hmc.init(z, start.log_density)))(start.positions)
    at = {name: np.asarray(value) for name, value in start.positions.items()}
    common = at["z"] / 100
    exact = -0.5 * common**2 - 0.5 * (at["a"] / 0.001 - FACTOR * common) ** 2
    exact -= 0.5 * np.sum((at["b"] / SDS["b"] - FACTOR * common[:, None]) ** 2, axis=1)
    exact -= np.log(100.0 * 0.1 * 10.0 * 0.001) + 2 * np.log(2 * np.pi)
    np.testing.assert_allclose(state.logdensity, exact, rtol=1e-4, atol=1e-3)
    kernel = hmc.build_kernel()
    step = jax.jit(lambda s: kernel(KEY, s, start.log_density, 0.1, start.inverse_mass_matrix, 2))
    moved, info = step(jax.tree.map(lambda a: a[0], state))
    assert info.acceptance_rate > 0.9
    assert np.all(np.isfinite(moved.position["b"]))


def test_one_chain_has_no_axis(start):
    one = start._replace(positions={name: v[:1] for name, v in start.positions.items()})
    assert one.init_params["b"].shape == (2,)
    assert start.init_params["b"].shape == (3, 2)


def schools():
    spread = numpyro.sample("spread", dist.HalfNormal(5.0))
    with numpyro.plate("schools", 4):
        effect = numpyro.sample("effect", dist.Normal(3.0, spread))
        numpyro.sample("y", dist.Normal(effect, 10.0), obs=jnp.array([28.0, 8.0, -3.0, 7.0]))


def non_centered():
    """Draws of the spread, and of effects less 3 and divided by it."""
    log_spread, *rest = (
        numpyro.sample(f"noise{k}", dist.Normal(), infer={"is_auxiliary": True}) for k in range(5)
    )
    z = jnp.stack(rest)
    spread = numpyro.sample("spread", Implicit(jnp.exp(log_spread), 0))
    with numpyro.plate("schools", 4):
        effect = 3.0 + spread * z
        numpyro.sample("effect", Implicit(effect, 0, unconstrained=z))
    zeros = {"effect": Centering(np.zeros(4), np.zeros(4), np.zeros(4))}
    coordinates_of({"spread": 0.0, "effect": z}, zeros).announce("_coordinates")


@pytest.mark.thorough
def test_coordinates_of_hierarchical_guides_are_left_behind():
    """Effects are non-centered in the guide, and unconstrained values of the model here."""
    svi, result = fitted(schools, non_centered, {}, ImplicitELBO())
    opened = open_guide(svi, result, (), {}, KEY, 1)
    layout = opened.layout
    assert layout.transformed == ("effect",)
    x = jnp.asarray(opened.draws[:64])
    sites = opened.target.constrain(x)
    u = jax.vmap(layout.unravel)(opened.unconstrained(x))
    np.testing.assert_allclose(u["effect"], sites["effect"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(u["spread"], np.log(sites["spread"]), rtol=1e-4, atol=1e-4)
    # As drawn: means and sizes of the effects are those of the prior.
    z = np.asarray(jax.vmap(layout.unravel)(x)["effect"])
    exact = 3.0 + np.asarray(sites["spread"])[:, None] * z
    np.testing.assert_allclose(sites["effect"], exact, rtol=1e-4, atol=1e-4)


def test_errors():
    svi, result = fitted(model, guide, {"nothing": jnp.zeros(())})
    with pytest.raises(ValueError, match="num_chains: expected an integer of at least 1; got 0"):
        warm_start(svi, result, 0)
    with pytest.raises(TypeError, match="rng_key: expected one random key"):
        warm_start(svi, result, 2, rng_key=3)
    with pytest.raises(TypeError, match="result: expected what svi.run or fit returns"):
        warm_start(svi, {"nothing": 0.0}, 2)
