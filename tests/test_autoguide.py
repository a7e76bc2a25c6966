"""``AutoImplicit`` under NumPyro's contract of an automatic guide."""

import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from compiling import quick_jit
from jax import lax, random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints
from numpyro.infer import (
    SVI,
    Predictive,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from numpyro.infer.autoguide import AutoGuideList, AutoNormal

from numpyro_kscore import AutoImplicit, AutoSemiImplicit, ImplicitELBO, ScoreEstimator, Tikhonov

pytestmark = pytest.mark.quick_compilation

KEY = random.key(0)
NUM_DRAWS = 20_000
DATA = jnp.array([0.5, -1.0, 2.0])


def mixed_model(data=None):
    """Sites of several shapes and supports; at module level, so that it can be pickled."""
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    matrix = numpyro.sample("matrix", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    with numpyro.plate("rows", 3):
        effects = numpyro.sample("effects", dist.Normal(level, scale))
        numpyro.deterministic("shifted", effects + matrix.sum() + shares[0])
        numpyro.sample("data", dist.Normal(effects, 1.0), obs=data)


SHAPES = {
    "level": (),
    "scale": (),
    "shares": (3,),
    "matrix": (2, 2),
    "effects": (3,),
    "shifted": (3,),
}
LATENT_DIM = 1 + 1 + 2 + 4 + 3


def normal_model():
    numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def initialized(model, *args, guide=None, key=KEY, **options):
    """A guide that has seen its model, SVI and the parameters it starts from."""
    guide = AutoImplicit(model, **options) if guide is None else guide
    # Tikhonov without the correction compiles fast; what is estimated does not matter here.
    elbo = ImplicitELBO(16, estimator=ScoreEstimator(regularizer=Tikhonov(1e-2)), debias=None)
    svi = SVI(model, guide, optax.adam(1e-2), elbo)
    state = svi.init(key, *args)
    return guide, svi, state, svi.get_params(state)


@pytest.fixture(scope="module")
def mixed():
    guide, _, _, params = initialized(mixed_model, DATA)
    return guide, params


def shapes_of(draws):
    return {name: np.shape(value) for name, value in draws.items()}


# --------------------------------------------------------------------------- draws and summaries


@pytest.mark.parametrize("sample_shape", [(), (5,), (2, 3)])
def test_sample_posterior_shapes(mixed, sample_shape):
    guide, params = mixed
    draws = guide.sample_posterior(KEY, params, DATA, sample_shape=sample_shape)
    assert shapes_of(draws) == {name: sample_shape + shape for name, shape in SHAPES.items()}


def test_draws_are_independent_and_follow_the_key(mixed):
    guide, params = mixed
    draws = guide.sample_posterior(KEY, params, sample_shape=(3,))
    again = guide.sample_posterior(KEY, params, sample_shape=(3,))
    other = guide.sample_posterior(random.key(1), params, sample_shape=(3,))
    assert len(np.unique(draws["level"])) == 3
    np.testing.assert_array_equal(draws["level"], again["level"])
    assert not np.any(draws["level"] == other["level"])


def test_deterministic_sites_belong_to_the_draws(mixed):
    guide, params = mixed
    draws = guide.sample_posterior(KEY, params, sample_shape=(5,))
    expected = draws["effects"] + (draws["matrix"].sum((1, 2)) + draws["shares"][:, 0])[:, None]
    np.testing.assert_allclose(draws["shifted"], expected, rtol=1e-5, atol=1e-5)


def test_sample_posterior_under_jit(mixed):
    guide, params = mixed
    draw = functools.partial(guide.sample_posterior, sample_shape=(4,))
    expected = draw(KEY, params)
    for name, value in jax.jit(draw)(KEY, params).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)


def test_median_and_quantiles(mixed):
    guide, params = mixed
    median, levels = guide.median(params), [0.1, 0.5, 0.9]
    quantiles = guide.quantiles(params, levels)
    assert shapes_of(median) == SHAPES
    assert shapes_of(quantiles) == {name: (3, *shape) for name, shape in SHAPES.items()}
    assert shapes_of(guide.quantiles(params, 0.5)) == SHAPES
    for name in ("level", "scale", "effects", "matrix"):
        # Between two draws of an even number of them the map to the support is not linear.
        np.testing.assert_allclose(quantiles[name][1], median[name], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.sum(median["shares"]), 1.0, rtol=1e-5)
    # The start is N(loc, .01) in every unconstrained coordinate, so its quantiles are known; those
    # of 10 000 draws scatter by .0013 in the middle and .0017 at 10 and 90 %.
    normal = dist.Normal(median["level"], 0.1)
    for level, value in zip(levels, quantiles["level"], strict=True):
        assert abs(value - normal.icdf(level)) < 5 * 0.003
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(NUM_DRAWS,))
    for name in SHAPES:
        share_below = np.mean(np.asarray(draws[name]) < quantiles[name][0], axis=0)
        assert np.all(np.abs(share_below - 0.1) < 5 * 0.3 * (1e-4 + 1 / NUM_DRAWS) ** 0.5)


def test_quantiles_rise_where_the_map_to_the_support_falls():
    def model():
        numpyro.sample("below", dist.TruncatedNormal(0.0, 1.0, high=0.0))

    guide, _, _, params = initialized(model)
    low, middle, high = guide.quantiles(params, [0.05, 0.5, 0.95])["below"]
    assert low < middle < high < 0
    np.testing.assert_allclose(guide.median(params)["below"], middle, rtol=1e-4)


@pytest.mark.parametrize("level", [-0.1, 1.5])
def test_quantile_levels_out_of_range_are_refused(mixed, level):
    guide, params = mixed
    with pytest.raises(ValueError, match=r"(?s)quantiles: expected.*got"):
        guide.quantiles(params, [0.5, level])


def test_predictive_with_the_guide_and_with_draws(mixed):
    guide, params = mixed
    by_guide = Predictive(mixed_model, guide=guide, params=params, num_samples=7)(KEY)
    assert by_guide["data"].shape == (7, 3)
    assert np.all(np.isfinite(by_guide["data"]))
    draws = guide.sample_posterior(KEY, params, sample_shape=(7,))
    by_draws = Predictive(mixed_model, posterior_samples=draws)(KEY)
    assert by_draws["data"].shape == (7, 3)
    sites = Predictive(guide, params=params, num_samples=7)(KEY)
    expected = {name: (7, *shape) for name, shape in SHAPES.items() if name != "shifted"}
    assert shapes_of(sites).items() >= expected.items()


def test_values_returned_by_the_guide_are_its_sites(mixed):
    guide, params = mixed
    seeded = handlers.seed(handlers.substitute(guide, data=params), KEY)
    trace = handlers.trace(seeded).get_trace(DATA)
    values = handlers.seed(handlers.substitute(guide, data=params), KEY)(DATA)
    assert set(values) == set(SHAPES) - {"shifted"}
    for name, value in values.items():
        np.testing.assert_array_equal(value, trace[name]["value"])
    (noise,) = [name for name, site in trace.items()
                if site["type"] == "sample" and site["infer"].get("is_auxiliary")]  # fmt: skip
    assert noise.startswith("_auto")


# ----------------------------------------------------------------------------- where it starts


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
    # A Gaussian's fourth moment is 3, that of 20 000 draws scatters by sqrt(96/n).
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
def test_initial_values_follow_the_strategy(init_loc_fn, low, high):
    guide, _, _, params = initialized(normal_model, init_loc_fn=init_loc_fn, init_scale=1e-4)
    draw = guide.sample_posterior(KEY, params)
    values = np.append(draw["b"], draw["a"])
    assert np.all((values > low - 1e-3) & (values < high + 1e-3))
    assert low == high or len(np.unique(values)) == 3


@pytest.mark.parametrize("with_network", [False, True])
@pytest.mark.parametrize("kind", [AutoImplicit, AutoSemiImplicit])
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


# ------------------------------------------------------------------------------------ networks


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.tanh(nn.Dense(8)(x)))


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
def test_networks_of_the_user_are_trained(network, num_arrays):
    guide, svi, state, before = initialized(normal_model, network=network, noise_dim=2)
    assert len(jax.tree.leaves(before)) == num_arrays
    after = svi.get_params(quick_jit(svi.update)(state)[0])
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(moved))
    draws = guide.sample_posterior(KEY, after, sample_shape=(4,))
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
    """Also where it could be broadcast: one number would be the mean of all latents."""
    with pytest.raises(ValueError, match=rf"network: expected.*shape \(3,\).*got {shape}"):
        initialized(normal_model, guide=kind(normal_model, network=network))


def test_too_little_noise_is_refused():
    guide = AutoImplicit(normal_model, noise_dim=2)
    # The second time as well: the guide must not remember half of a refused set-up.
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


# -------------------------------------------------------------------------------------- models


def ordered_model():
    """The support of one site depends on the values of two others."""
    low = numpyro.sample("low", dist.Normal(0.0, 1.0))
    width = numpyro.sample("width", dist.LogNormal(0.0, 1.0))
    numpyro.sample("place", dist.Uniform(low, low + width))


def test_dynamic_supports_hold_in_the_guide_and_in_its_draws():
    guide, _, _, params = initialized(ordered_model, init_scale=1.0)

    @quick_jit
    @jax.vmap
    def call(key):
        return handlers.seed(handlers.substitute(guide, data=params), key)()

    called = call(random.split(KEY, 4000))
    drawn = guide.sample_posterior(random.key(1), params, sample_shape=(4000,))
    predicted = Predictive(guide, params=params, num_samples=4000)(random.key(2))
    for draws in (drawn, called, predicted):
        assert np.all(draws["place"] >= draws["low"])
        assert np.all(draws["place"] <= draws["low"] + draws["width"])
    for name in ("low", "width", "place"):
        # Quartiles, since a log-normal's moments scatter too much; theirs is 1.4 sd/√n or so.
        first, second = (np.quantile(d[name], [0.25, 0.5, 0.75]) for d in (drawn, called))
        spread = first[2] - first[0]
        # Of two sets that is .02 of the spread, .04 at a log-normal's upper quartile; the largest
        # of nine was .02 with this key, and .01 to .09 over twenty.
        assert np.all(np.abs(first - second) < 0.1 * spread), name


def plated_model():
    with numpyro.plate("rows", 3, dim=-2), numpyro.plate("columns", 2, dim=-1):
        numpyro.sample("cells", dist.Exponential(1.0))
    with numpyro.plate("columns", 2, dim=-1):
        numpyro.sample("vectors", dist.Normal(jnp.zeros(4), 1.0).to_event(1))


def test_plates():
    guide, svi, state, params = initialized(plated_model)
    draws = guide.sample_posterior(KEY, params, sample_shape=(5,))
    assert shapes_of(draws) == {"cells": (5, 3, 2), "vectors": (5, 2, 4)}
    assert np.all(draws["cells"] > 0)


def test_sample_shape_sites():
    """NumPyro's own guides take a site drawn with ``sample_shape``."""

    def model():
        numpyro.sample("x", dist.Normal(0.0, 1.0), sample_shape=(3,))

    guide, svi, state, params = initialized(model)
    assert guide.sample_posterior(KEY, params)["x"].shape == (3,)
    # KL(N(m, .01) ‖ N(0, 1)) at |m| < 2 in each of three coordinates, up to the entropy's noise.
    assert -2 < quick_jit(svi.evaluate)(state) < 15


def test_local_latents_are_refused():
    def model():
        with numpyro.plate("rows", 10, subsample_size=3):
            numpyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(
        ValueError, match="AutoImplicit: expected .* outside subsampled plates; got"
    ):
        initialized(model)


def test_improper_priors():
    """What cannot be drawn from starts where NumPyro starts it."""

    def model(y):
        place = numpyro.sample("place", dist.ImproperUniform(constraints.real_vector, (), (2,)))
        width = numpyro.sample("width", dist.ImproperUniform(constraints.positive, (), ()))
        numpyro.sample("y", dist.Normal(place, width).to_event(1), obs=y)

    start = init_to_value(values={"width": 2.0})
    guide, svi, state, params = initialized(model, jnp.ones(2), init_loc_fn=start)
    assert np.isfinite(svi.evaluate(state, jnp.ones(2)))
    draws = guide.sample_posterior(KEY, params, jnp.ones(2), sample_shape=(50,))
    assert draws["place"].shape == (50, 2)
    assert abs(np.mean(draws["width"]) - 2.0) < 0.2


def test_discrete_latents_are_refused_before_numpyro_would_enumerate_them():
    def model():
        kind = numpyro.sample(
            "kind", dist.Categorical(jnp.ones(3) / 3), infer={"enumerate": "parallel"}
        )
        numpyro.sample("x", dist.Normal(kind, 1.0))

    with pytest.raises(ValueError, match=r"AutoImplicit: expected continuous.*discrete \['kind'\]"):
        initialized(model)


def test_masked_latents_are_refused():
    def model():
        seen = jnp.array([True, False])
        with numpyro.plate("rows", 2):
            numpyro.sample("y", dist.Normal(0.0, 1.0), obs=jnp.ones(2), obs_mask=seen)

    with pytest.raises(ValueError, match=r"without a mask; got \['y_unobserved'\].*of its own"):
        initialized(model)


def test_models_without_latents_are_refused():
    def model():
        numpyro.sample("x", dist.Normal(0.0, 1.0), obs=0.3)

    with pytest.raises(ValueError, match="model: expected at least one latent sample site; got"):
        initialized(model)


def test_models_with_loops_are_initialised_in_forward_mode():
    def model(data):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        double = lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, 2.0 * c[1]), (0, z))[1]
        numpyro.sample("data", dist.Normal(double, 1.0), obs=data)

    guide = AutoImplicit(model, forward_mode_differentiation=True)
    elbo = ImplicitELBO(4, forward_mode_differentiation=True)
    svi = SVI(model, guide, optax.adam(1e-2), elbo)
    state = svi.init(KEY, 1.0)
    update = functools.partial(svi.update, forward_mode_differentiation=True)
    state, loss = quick_jit(update)(state, 1.0)
    assert np.isfinite(loss)


@pytest.mark.parametrize("kind", [AutoImplicit, AutoSemiImplicit])
def test_state_space_models(kind):
    """NumPyro's `scan` replays every value of a guide, its parameters too."""

    def model(data):
        def step(x, y):
            x = numpyro.sample("x", dist.Normal(x, 0.5))
            numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
            return x, None

        scan(step, numpyro.sample("start", dist.Normal(0.0, 1.0)), data)

    data = jnp.arange(5.0)
    guide, svi, state, params = initialized(model, data, guide=kind(model))
    after, loss = quick_jit(svi.update)(state, data)
    assert np.isfinite(loss)
    assert np.any(svi.get_params(after)["auto_loc"] != params["auto_loc"])
    draws = guide.sample_posterior(KEY, params, sample_shape=(3,))
    assert shapes_of(draws) == {"start": (3,), "x": (3, 5)}


def test_blocked_models_in_a_list_of_guides():
    guide = AutoGuideList(normal_model)
    guide.append(AutoImplicit(handlers.block(normal_model, hide=["b"])))
    guide.append(AutoNormal(handlers.block(normal_model, hide=["a"]), prefix="normal"))
    _, svi, state, params = initialized(normal_model, guide=guide)
    assert {"auto_loc", "b_normal_loc"} <= set(params)
    after, loss = quick_jit(svi.update)(state)
    assert np.isfinite(loss)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), params, svi.get_params(after))
    # All but the hidden layers, whose gradient is zero while the last layer is.
    still = [path for path, value in jax.tree.leaves_with_path(moved) if not value]
    assert all("auto_layers" in str(path) for path in still)
    draws = guide.sample_posterior(KEY, params, sample_shape=(4,))
    assert shapes_of(draws) == {"a": (4,), "b": (4, 2)}
    assert shapes_of(guide.median(params)) == {"a": (), "b": (2,)}
    assert shapes_of(guide.quantiles(params, [0.2, 0.8])) == {"a": (2,), "b": (2, 2)}


# ------------------------------------------------------------------------------------ pickling


def test_pickling_before_use():
    guide = pickle.loads(pickle.dumps(AutoImplicit(normal_model, hidden_dims=(8,), prefix="p")))
    restored, _, _, params = initialized(normal_model, guide=guide)
    assert "p_loc" in params
    assert restored.sample_posterior(KEY, params)["b"].shape == (2,)


def test_pickling_after_a_step():
    guide, svi, state, _ = initialized(normal_model)
    params = svi.get_params(quick_jit(svi.update)(state)[0])
    restored, restored_params = pickle.loads(pickle.dumps((guide, params)))
    expected = guide.sample_posterior(KEY, params, sample_shape=(3,))
    for name, value in restored.sample_posterior(KEY, restored_params, sample_shape=(3,)).items():
        np.testing.assert_array_equal(value, expected[name])
    # And it can be fitted further.
    svi = SVI(normal_model, restored, optax.adam(1e-2), svi.loss)
    state = svi.init(KEY, init_params=restored_params)
    assert np.isfinite(quick_jit(svi.update)(state)[1])


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("method", ["get_base_dist", "get_transform", "get_posterior"])
def test_what_needs_a_density_is_refused(mixed, method):
    guide, params = mixed
    args = () if method == "get_base_dist" else (params,)
    with pytest.raises(NotImplementedError, match=r"(?s)expected.*sample_posterior"):
        getattr(guide, method)(*args)


@pytest.mark.parametrize("method", ["median", "quantiles", "sample_posterior"])
def test_a_guide_that_has_not_seen_its_model_says_so(method):
    guide = AutoImplicit(normal_model)
    args = {"median": ({},), "quantiles": ({}, [0.5]), "sample_posterior": (KEY, {})}[method]
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)expected.*got.*init"):
        getattr(guide, method)(*args)


# ------------------------------------------------------------------------------ semi-implicit

FACTOR = np.array([[1.0, 0.0], [0.8, 0.5], [-0.4, 1.0], [0.0, 0.7], [0.6, -0.6]])
REST = np.array([0.3, 0.5, 0.4, 0.6, 0.3])
FACTOR_COVARIANCE = FACTOR @ FACTOR.T + np.diag(REST**2)


def factor_model():
    covariance = jnp.asarray(FACTOR_COVARIANCE, jnp.float32)
    numpyro.sample("z", dist.MultivariateNormal(jnp.arange(5.0), covariance))


def test_fewer_noise_than_latents_in_a_mixture():
    """Two factors and independent rests: what a mixture over two dimensions of noise can be."""
    guide = AutoSemiImplicit(factor_model, noise_dim=2, hidden_dims=(32,))
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, 1500))
    svi = SVI(factor_model, guide, optimizer, ImplicitELBO())
    result = svi.run(random.key(0), 1500, progress_bar=False)
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(20_000,))["z"]
    sd = np.sqrt(np.diag(FACTOR_COVARIANCE))
    # 20 000 draws scatter a mean by .007 sd and an sd by .005 of itself; the rest is the fit's.
    # Over five keys means were within .02 sd, sds .01 to .04 short, correlations within .026.
    assert np.all(np.abs(np.mean(draws, axis=0) - np.arange(5.0)) < 0.04 * sd)
    assert np.all(np.abs(np.std(draws, axis=0) / sd - 1) < 0.07)
    expected = FACTOR_COVARIANCE / np.outer(sd, sd)
    assert np.all(np.abs(np.corrcoef(draws.T) - expected) < 0.07)


def test_mixtures_start_as_the_narrow_gaussian():
    guide = AutoSemiImplicit(factor_model, noise_dim=2, init_loc_fn=init_to_median)
    svi = SVI(factor_model, guide, optax.adam(1e-2), ImplicitELBO(16))
    params = svi.get_params(svi.init(random.key(0)))
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(4000,))["z"]
    # Four standard errors of a deviation, 1/sqrt(8000).
    assert np.all(np.abs(np.std(draws, axis=0) / 0.1 - 1) < 4 / np.sqrt(8000))
    correlations = np.corrcoef(draws.T) - np.eye(5)
    assert np.all(np.abs(correlations) < 4 / np.sqrt(4000))


def test_networks_of_the_user_in_a_mixture():
    def network(noise):
        weight = numpyro.param("weight", jnp.ones((3, 5)))
        return noise @ weight

    guide = AutoSemiImplicit(factor_model, noise_dim=3, network=network)
    svi = SVI(factor_model, guide, optax.adam(1e-2), ImplicitELBO(16))
    state, loss = svi.update(svi.init(random.key(0)))
    assert np.isfinite(loss)
    assert set(svi.get_params(state)) == {"weight", "auto_loc", "auto_scale"}
    median = guide.median(svi.get_params(state))["z"]
    assert median.shape == (5,)
