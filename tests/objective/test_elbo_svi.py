"""``ImplicitELBO`` under NumPyro's contract: runs, optimizers, parameters and networks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from jax.example_libraries import stax
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI

from numpyro_kscore import Implicit, ImplicitELBO, ScoreEstimator
from numpyro_kscore.estimators import Median
from numpyro_kscore.regularizers import NuMethod
from support.affine import (
    AFFINE,
    FEW,
    KEY,
    affine_guide,
    assert_close,
    draw_noise,
    is_finite,
    loss_and_gradient,
    quick_loss_and_gradient,
    standard_model,
)
from support.compiling import quick_jit
from support.doubles import GaussianScore
from support.fits import quiet_fit

CHEAP = ImplicitELBO(FEW, estimator=GaussianScore(), debias=None)


@pytest.mark.parametrize("progress_bar", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_svi_run(progress_bar, capsys):
    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(standard_model(), affine_guide(), optax.adam(5e-2), elbo)
    result = svi.run(KEY, 60, progress_bar=progress_bar)
    assert result.losses.shape == (60,)
    # The loss falls from KL(N(.5, .49) ‖ N(0, 1)) = 0.227 to 0, up to the noise of the estimate.
    assert np.abs(result.params["loc"]) < 0.25
    assert np.all(np.isfinite(result.losses))
    assert ("100%" in capsys.readouterr().err) == progress_bar


@pytest.mark.thorough
def test_local_coordinates_in_a_fit():
    """Sixteen particles in two dimensions, moved by next to nothing: the loss is the divergence.

    That of N(.5, .49) from N(0, 1), .227 a dimension. A loss has a variance of about
    ``(1.6 + d/2)/16`` of the entropy and .03 of the log joint density: four errors of the mean.
    """
    estimator = ScoreEstimator(standardize="local", regularizer=NuMethod(45), bandwidth=Median(0.8))
    elbo = ImplicitELBO(FEW, estimator=estimator)
    svi = SVI(standard_model(2), affine_guide(2), optax.adam(1e-5), elbo)
    result = quiet_fit(svi, KEY, max_steps=20, chunk_size=10, progress_bar=False)
    assert len(result.losses) == 20
    assert is_finite(result.params)
    assert abs(np.mean(result.losses) - 2 * 0.227) < 4 * (0.195 / 20) ** 0.5


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-2),
        pytest.param(numpyro.optim.ClippedAdam(1e-2), marks=pytest.mark.thorough),
        pytest.param(optax.chain(optax.clip(1.0), optax.sgd(1e-2)), marks=pytest.mark.slow),
        pytest.param(numpyro.optim.Adam(1e-2), marks=pytest.mark.slow),
    ],
)
def test_optimizers_and_updates(optimizer):
    svi = SVI(standard_model(), affine_guide(), optimizer, CHEAP)
    state = svi.init(KEY)
    new_state, loss = quick_jit(svi.update)(state)
    assert_close(quick_jit(svi.evaluate)(state), loss)
    stable_state, stable_loss = quick_jit(svi.stable_update)(state)
    assert_close(stable_loss, loss)
    before, after = svi.get_params(state), svi.get_params(new_state)
    assert_close(svi.get_params(stable_state), after)
    assert after["loc"] != before["loc"]
    assert after["sd"] != before["sd"]


def test_init_params_are_taken():
    svi = SVI(standard_model(), affine_guide(), optax.sgd(0.0), CHEAP)
    init_params = {"loc": jnp.array([3.0]), "sd": jnp.array([0.2])}
    state, _ = quick_jit(svi.update)(svi.init(KEY, init_params=init_params))
    # Up to rounding in the map of a positive parameter to the real line and back.
    assert_close(svi.get_params(state), init_params)


def test_old_style_keys_are_accepted():
    @quick_jit
    def run(key):
        return loss_and_gradient(standard_model(), affine_guide(), AFFINE, CHEAP, key=key)

    assert is_finite(run(random.PRNGKey(0)))


def test_a_parameter_that_model_and_guide_share_gets_both_gradients():
    def model(data):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        shared = numpyro.param("shared", jnp.ones(1))
        numpyro.sample("data", dist.Normal(shared, 1.0).to_event(1), obs=data)
        numpyro.factor("tilt", z.sum())

    def guide(data):
        shared = numpyro.param("shared", jnp.ones(1))
        numpyro.sample("z", Implicit(shared + draw_noise(1), event_dim=1))

    elbo = ImplicitELBO(FEW, estimator=GaussianScore(mean=jnp.ones(1), sd=jnp.ones(1)))
    _, gradient = quick_loss_and_gradient(
        model, guide, {"shared": jnp.ones(1)}, elbo, jnp.full(1, 3.0)
    )
    # From the guide E[(ŝ_q - s_p)] = E[(1 - z) - (1 - z)] = 0, from the model 1 - 3.
    assert_close(gradient["shared"], jnp.array([-2.0]))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(3)(x)))


def guide_with_flax():
    network = flax_module("network", Network(), input_shape=(2,))
    numpyro.sample("z", Implicit(network(draw_noise(2)), event_dim=1))


def guide_with_stax():
    network = numpyro.module("network", stax.serial(stax.Dense(3), stax.Tanh, stax.Dense(1)), (2,))
    numpyro.sample("z", Implicit(network(draw_noise(2)), event_dim=1))


@pytest.mark.parametrize(
    "guide", [guide_with_flax, pytest.param(guide_with_stax, marks=pytest.mark.slow)]
)
def test_network_parameters_in_the_guide_are_learned(guide):
    svi = SVI(standard_model(), guide, optax.sgd(0.1), CHEAP)
    state = svi.init(KEY)
    before, after = svi.get_params(state), svi.get_params(quick_jit(svi.update)(state)[0])
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert len(jax.tree.leaves(changed)) == 4
    assert all(jax.tree.leaves(changed))


def test_network_parameters_in_the_model_are_learned():
    inputs = random.normal(KEY, (5, 2))

    def model(targets):
        network = flax_module("network", Network(), input_shape=(2,))
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        mean = network(inputs)[:, 0] + z
        numpyro.sample("targets", dist.Normal(mean, 1.0).to_event(1), obs=targets)

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(model, affine_guide(), optax.sgd(0.1), elbo)
    state = svi.init(KEY, jnp.arange(5.0))
    before = svi.get_params(state)["network$params"]
    after, _ = quick_jit(svi.update)(state, jnp.arange(5.0))
    after = svi.get_params(after)["network$params"]
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(changed))
