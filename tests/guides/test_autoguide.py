"""``AutoImplicit`` under NumPyro's contract of an automatic guide: draws, summaries, pickling."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, Predictive
from numpyro.infer.svi import SVIRunResult

from numpyro_kscore import AutoImplicit
from support.autoguides import KEY, NUM_DRAWS, initialized, normal_model, shapes_of
from support.compiling import quick_jit

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


@pytest.fixture(scope="module")
def mixed():
    guide, _, _, params = initialized(mixed_model, DATA)
    return guide, params


# ---------------------------------------------------------------------------- draws and summaries


@pytest.mark.parametrize("sample_shape", [(), (5,), (2, 3)])
def test_sample_posterior_shapes(mixed, sample_shape):
    guide, params = mixed
    draw = functools.partial(guide.sample_posterior, sample_shape=sample_shape)
    draws = jax.eval_shape(draw, KEY, params, DATA)
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


def test_parameters_are_asked_for_by_name(mixed):
    guide, params = mixed
    with pytest.raises(TypeError, match=r"such as result\.params; got SVIRunResult"):
        guide.sample_posterior(KEY, SVIRunResult(params, None, None))


def test_sample_posterior_under_jit(mixed):
    guide, params = mixed
    draw = functools.partial(guide.sample_posterior, sample_shape=(4,))
    expected = draw(KEY, params)
    for name, value in jax.jit(draw)(KEY, params).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_median_and_quantiles(mixed):
    guide, params = mixed
    levels = [0.1, 0.5, 0.9]

    @quick_jit
    def summarize(params):
        draws = guide.sample_posterior(random.key(1), params, sample_shape=(NUM_DRAWS,))
        return guide.median(params), guide.quantiles(params, levels), draws

    median, quantiles, draws = summarize(params)
    assert shapes_of(median) == SHAPES
    assert shapes_of(quantiles) == {name: (3, *shape) for name, shape in SHAPES.items()}
    of_one_level = jax.eval_shape(lambda p: guide.quantiles(p, 0.5), params)
    assert shapes_of(of_one_level) == SHAPES
    for name in ("level", "scale", "effects", "matrix"):
        # The median of an even number of draws lies between two, where the map to the support is
        # not linear.
        np.testing.assert_allclose(quantiles[name][1], median[name], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.sum(median["shares"]), 1.0, rtol=1e-5)
    # The start is N(loc, .01) in every unconstrained coordinate, so its quantiles are known;
    # quantiles of 10 000 draws scatter by .0013 in the middle and .0017 at 10 and 90 %.
    normal = dist.Normal(median["level"], 0.1)
    for level, value in zip(levels, quantiles["level"], strict=True):
        assert abs(value - normal.icdf(level)) < 5 * 0.003
    for name in SHAPES:
        share_below = np.mean(np.asarray(draws[name]) < quantiles[name][0], axis=0)
        assert np.all(np.abs(share_below - 0.1) < 5 * 0.3 * (1e-4 + 1 / NUM_DRAWS) ** 0.5)


@pytest.mark.thorough
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


# --------------------------------------------------------------------------------------- pickling


def test_pickling_before_use():
    guide = pickle.loads(
        pickle.dumps(AutoImplicit(normal_model, hidden_dims=(8,), warm_start=False, prefix="p"))
    )
    restored, _, _, params = initialized(normal_model, guide=guide)
    assert "p_loc" in params
    assert restored.sample_posterior(KEY, params)["b"].shape == (2,)


@pytest.mark.thorough
def test_pickling_after_a_step():
    guide, svi, state, params = initialized(normal_model, compiled=False)
    jax.eval_shape(svi.update, state)
    restored, restored_params = pickle.loads(pickle.dumps((guide, params)))
    expected = guide.sample_posterior(KEY, params, sample_shape=(3,))
    for name, value in restored.sample_posterior(KEY, restored_params, sample_shape=(3,)).items():
        np.testing.assert_array_equal(value, expected[name])
    # The copy can be fitted further.
    svi = SVI(normal_model, restored, optax.adam(1e-2), svi.loss)
    state = svi.init(KEY, init_params=restored_params)
    assert np.isfinite(quick_jit(svi.update)(state)[1])


# ----------------------------------------------------------------------------------------- errors


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
