"""The starts of automatic guides, and the networks in them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import (
    SVI,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)

from numpyro_kscore import AutoImplicit, AutoSemiImplicit, ImplicitELBO
from support.autoguides import KEY, NUM_DRAWS, initialized, normal_model, shapes_of
from support.compiling import quick_jit

# -------------------------------------------------------------------------------- where it starts


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.tanh(nn.Dense(8)(x)))


@pytest.mark.parametrize("options", [{}, {"noise_dim": 5}, {"hidden_dims": ()}])
def test_starts_as_the_stated_gaussian(options):
    values = {"a": 0.7, "b": jnp.array([-2.0, 3.0])}
    guide, _, _, params = initialized(
        normal_model, init_loc_fn=init_to_value(values=values), init_scale=0.3, **options
    )
    draws = guide.sample_posterior(KEY, params, sample_shape=(NUM_DRAWS,))
    draws = np.column_stack([draws["a"], draws["b"]])
    mean_error = draws.mean(0) - np.array([0.7, -2.0, 3.0])
    assert np.all(np.abs(mean_error) < 5 * 0.3 / NUM_DRAWS**0.5)
    assert np.all(np.abs(draws.std(0) / 0.3 - 1) < 5 / (2 * NUM_DRAWS) ** 0.5)
    assert np.all(np.abs(np.corrcoef(draws.T) - np.eye(3)) < 5 / NUM_DRAWS**0.5)
    # A Gaussian's fourth moment is 3; for 20 000 draws it scatters by sqrt(96/n).
    kurtosis = np.mean(((draws - draws.mean(0)) / draws.std(0)) ** 4, axis=0)
    assert np.all(np.abs(kurtosis - 3) < 5 * (96 / NUM_DRAWS) ** 0.5)


@pytest.mark.parametrize(
    ("init_loc_fn", "low", "high"),
    [
        (init_to_value(values={"b": jnp.array([1.0, 1.0]), "a": 1.0}), 1.0, 1.0),
        (init_to_feasible, 0.0, 0.0),
        (init_to_mean, 0.0, 0.0),
        (init_to_median(num_samples=500), -0.3, 0.3),
        (init_to_sample, -5.0, 5.0),
        (init_to_uniform(radius=0.5), -0.5, 0.5),
    ],
)
@pytest.mark.thorough
def test_initial_values_follow_the_strategy(init_loc_fn, low, high):
    guide, _, _, params = initialized(normal_model, init_loc_fn=init_loc_fn, init_scale=1e-4)
    draw = guide.sample_posterior(KEY, params)
    values = np.append(draw["b"], draw["a"])
    assert np.all((values > low - 1e-3) & (values < high + 1e-3))
    assert low == high or len(np.unique(values)) == 3


@pytest.mark.parametrize("with_network", [False, True])
@pytest.mark.parametrize("kind", [AutoImplicit, AutoSemiImplicit])
@pytest.mark.thorough
def test_a_guide_that_is_used_again_starts_from_the_same_weights(kind, with_network):
    guide = kind(normal_model, network=Linen() if with_network else None)
    svi = SVI(normal_model, guide, optax.adam(1e-2), ImplicitELBO(4))
    first, again, other = (svi.get_params(svi.init(key)) for key in (KEY, KEY, random.key(1)))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    differs = jax.tree.map(lambda a, b: bool(np.any(a != b)), first, other)
    assert any(jax.tree.leaves(differs))


def test_prefix_names_parameters_and_noise():
    _, svi, state, params = initialized(normal_model, prefix="mine")
    assert params
    assert all(name.startswith("mine_") for name in params)


# --------------------------------------------------------------------------------------- networks


def own_network(noise):
    weight = numpyro.param("weight", 0.3 * jnp.ones((2, 3)))
    scale = numpyro.param("scale", jnp.ones(3), constraint=constraints.positive)
    extra = numpyro.sample(
        "extra", dist.Normal(jnp.zeros(3), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    return noise @ weight + scale * extra


@pytest.mark.parametrize(
    ("network", "num_arrays"), [(own_network, 2), (Linen(), 4)], ids=["callable", "linen"]
)
@pytest.mark.thorough
def test_networks_of_the_user_are_trained(network, num_arrays):
    guide, svi, state, before = initialized(normal_model, network=network, noise_dim=2)
    assert len(jax.tree.leaves(before)) == num_arrays
    after = svi.get_params(quick_jit(svi.update)(state)[0])
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(moved))
    draws = jax.eval_shape(lambda p: guide.sample_posterior(KEY, p, sample_shape=(4,)), after)
    assert shapes_of(draws) == {"a": (4,), "b": (4, 2)}


def test_a_module_whose_parameters_numpyro_cannot_see_is_refused():
    """Called as a plain function, an nnx module would keep its initial weights for ever."""
    nnx = pytest.importorskip("flax.nnx")
    network = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"(?s)network: expected.*got.*"):
        initialized(normal_model, network=network)


@pytest.mark.parametrize(
    ("network", "shape"), [(lambda noise: noise[0], r"\(\)"), (lambda noise: noise[:2], r"\(2,\)")]
)
@pytest.mark.parametrize("kind", [AutoImplicit, AutoSemiImplicit])
def test_networks_with_a_wrong_output_are_refused(kind, network, shape):
    """Even where it could be broadcast: one number would be the mean of all latents."""
    with pytest.raises(ValueError, match=rf"network: expected.*shape \(3,\).*got {shape}"):
        initialized(normal_model, guide=kind(normal_model, network=network, warm_start=False))


def test_too_little_noise_is_refused():
    guide = AutoImplicit(normal_model, noise_dim=2, warm_start=False)
    # At the second call too: the guide must not keep half of a refused set-up.
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?s)noise_dim: expected at least.*3; got 2"):
            initialized(normal_model, guide=guide)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "hidden_dims: expected.*at least 1; got 0", {"hidden_dims": (0,)}),
        (TypeError, "hidden_dims: expected an integer; got 2.5", {"hidden_dims": (2.5,)}),
        (TypeError, "hidden_dims: expected.*got 64", {"hidden_dims": 64}),
        (ValueError, "noise_dim: expected.*at least 1; got 0", {"noise_dim": 0}),
        (TypeError, "noise_dim: expected an integer; got 1.5", {"noise_dim": 1.5}),
        (ValueError, "init_scale: expected a positive.*got 0", {"init_scale": 0.0}),
        (ValueError, "init_scale: expected a positive.*got -1", {"init_scale": -1.0}),
        (TypeError, "network: expected a callable.*got 3", {"network": 3}),
    ],
)
def test_bad_options_are_refused(error, match, options):
    with pytest.raises(error, match=match):
        AutoImplicit(normal_model, **options)
