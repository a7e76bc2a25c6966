"""Models that automatic guides can be made for, and those they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, init_to_value
from numpyro.infer.autoguide import AutoGuideList, AutoNormal
from scipy import stats

from numpyro_kscore import AutoImplicit, AutoSemiImplicit, ImplicitELBO
from support.autoguides import KEY, initialized, normal_model, shapes_of
from support.compiling import quick_jit
from support.doubles import GaussianScore
from support.enumerated import chained_sizes
from support.scans import scan_of_one_scale


def ordered_model():
    """The support of one site depends on the values of two others."""
    low = numpyro.sample("low", dist.Normal(0.0, 1.0))
    width = numpyro.sample("width", dist.LogNormal(0.0, 1.0))
    numpyro.sample("place", dist.Uniform(low, low + width))


@pytest.mark.thorough
def test_dynamic_supports_hold_in_the_guide_and_in_its_draws():
    guide, _, _, params = initialized(ordered_model, init_scale=1.0)

    @quick_jit
    def draw(keys):
        call = lambda key: handlers.seed(handlers.substitute(guide, data=params), key)()  # noqa: E731
        drawn = guide.sample_posterior(random.key(1), params, sample_shape=(4000,))
        return jax.vmap(call)(keys), drawn

    called, drawn = draw(random.split(KEY, 4000))
    predicted = Predictive(guide, params=params, num_samples=4000)(random.key(2))
    for draws in (drawn, called, predicted):
        assert np.all(draws["place"] >= draws["low"])
        assert np.all(draws["place"] <= draws["low"] + draws["width"])
    for name in ("low", "width", "place"):
        # Quartiles, because a log-normal's moments scatter too much; quartiles scatter by about
        # 1.4 sd/√n.
        first, second = (np.quantile(d[name], [0.25, 0.5, 0.75]) for d in (drawn, called))
        spread = first[2] - first[0]
        # For the difference of two sets that is .02 of the spread, .04 at a log-normal's upper
        # quartile; the largest of nine was .02 with this key, and .01 to .09 over twenty keys.
        assert np.all(np.abs(first - second) < 0.1 * spread), name


def plated_model():
    with numpyro.plate("rows", 3, dim=-2), numpyro.plate("columns", 2, dim=-1):
        numpyro.sample("cells", dist.Exponential(1.0))
    with numpyro.plate("columns", 2, dim=-1):
        numpyro.sample("vectors", dist.Normal(jnp.zeros(4), 1.0).to_event(1))


def test_plates():
    guide, svi, state, params = initialized(plated_model)
    draws = quick_jit(lambda p: guide.sample_posterior(KEY, p, sample_shape=(5,)))(params)
    assert shapes_of(draws) == {"cells": (5, 3, 2), "vectors": (5, 2, 4)}
    assert np.all(draws["cells"] > 0)


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_improper_priors():
    """A site with an improper prior, which cannot be drawn from, starts where NumPyro starts it."""

    def model(y):
        place = numpyro.sample("place", dist.ImproperUniform(constraints.real_vector, (), (2,)))
        width = numpyro.sample("width", dist.ImproperUniform(constraints.positive, (), ()))
        numpyro.sample("y", dist.Normal(place, width).to_event(1), obs=y)

    start = init_to_value(values={"width": 2.0})
    guide, svi, state, params = initialized(model, jnp.ones(2), init_loc_fn=start)
    assert np.isfinite(quick_jit(svi.evaluate)(state, jnp.ones(2)))
    draws = guide.sample_posterior(KEY, params, jnp.ones(2), sample_shape=(50,))
    assert draws["place"].shape == (50, 2)
    assert abs(np.mean(draws["width"]) - 2.0) < 0.2


@pytest.mark.thorough
def test_discrete_latents_are_summed_out():
    def model():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(x + kind, 1.0), obs=0.5)

    # NumPyro's own, as NUTS gives it.
    with pytest.warns(FutureWarning, match="automatically enumerate.*kind"):
        guide, svi, state, params = initialized(model)
    assert np.isfinite(quick_jit(svi.evaluate)(state))
    assert set(guide.sample_posterior(KEY, params, sample_shape=(2,))) == {"x"}


def test_discrete_latents_without_a_last_value_are_refused():
    def model():
        numpyro.sample("count", dist.Poisson(numpyro.sample("x", dist.LogNormal(0.0, 1.0))))

    with pytest.raises(ValueError, match="AutoImplicit: expected discrete.*'count' from Poisson"):
        initialized(model)


def test_masked_latents_are_refused():
    def model():
        seen = jnp.array([True, False])
        with numpyro.plate("rows", 2):
            numpyro.sample("y", dist.Normal(0.0, 1.0), obs=jnp.ones(2), obs_mask=seen)

    with pytest.raises(ValueError, match=r"got \['y_unobserved'\] under.*of its own"):
        initialized(model)


def test_a_density_of_ones_own_is_a_factor_at_a_masked_latent():
    mean = jnp.array([3.0, -2.0])

    def model():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1).mask(False))
        numpyro.factor("own", dist.Normal(mean, 0.5).log_prob(x).sum())

    guide = AutoImplicit(model)
    guide.set_up(KEY)
    # The Gaussian of the factor alone; with that of the site variances would be .2. The start is
    # matched to random draws.
    np.testing.assert_allclose(guide.start.gaussian.mean, mean, atol=1e-3)
    factor = guide.start.gaussian.factor
    np.testing.assert_allclose(factor @ factor.T, 0.25 * np.eye(2), atol=0.02)


def test_models_without_latents_are_refused():
    def model():
        numpyro.sample("x", dist.Normal(0.0, 1.0), obs=0.3)

    with pytest.raises(ValueError, match="model: expected at least one continuous latent"):
        initialized(model)


@pytest.mark.thorough
def test_models_with_loops_are_initialized_in_forward_mode():
    def model(data):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        double = lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, 2.0 * c[1]), (0, z))[1]
        numpyro.sample("data", dist.Normal(double, 1.0), obs=data)

    guide = AutoImplicit(model, forward_mode_differentiation=True, warm_start=False)
    elbo = ImplicitELBO(4, estimator=GaussianScore(), forward_mode_differentiation=True)
    svi = SVI(model, guide, optax.adam(1e-2), elbo)
    update = functools.partial(svi.update, forward_mode_differentiation=True)
    _, loss = quick_jit(lambda key: update(svi.init(key, 1.0), 1.0))(KEY)
    assert np.isfinite(loss)


@pytest.mark.parametrize(
    "kind", [AutoImplicit, pytest.param(AutoSemiImplicit, marks=pytest.mark.slow)]
)
@pytest.mark.thorough
def test_state_space_models(kind):
    """NumPyro's `scan` replays every value of a guide, its parameters too."""

    def model(data):
        def step(x, y):
            x = numpyro.sample("x", dist.Normal(x, 0.5))
            numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
            return x, None

        scan(step, numpyro.sample("start", dist.Normal(0.0, 1.0)), data)

    data = jnp.arange(5.0)
    guide, svi, state, params = initialized(model, data, guide=kind(model, warm_start=False))
    after, loss = quick_jit(svi.update)(state, data)
    assert np.isfinite(loss)
    assert np.any(svi.get_params(after)["auto_loc"] != params["auto_loc"])
    draw = functools.partial(guide.sample_posterior, sample_shape=(3,))
    draws = jax.eval_shape(draw, KEY, params)
    assert shapes_of(draws) == {"start": (3,), "x": (3, 5)}


@pytest.mark.thorough
def test_a_chain_of_states_with_positive_latents_in_a_plate():
    """NumPyro's own scan has no log-Jacobians where states are summed out, nor factors."""
    guide = AutoImplicit(chained_sizes, warm_start=False)
    guide.set_up(KEY)
    assert guide._shapes == (("rate", ()), ("sizes", (7, 2)))


@pytest.mark.thorough
def test_blocked_models_in_a_list_of_guides():
    guide = AutoGuideList(normal_model)
    guide.append(AutoImplicit(handlers.block(normal_model, hide=["b"]), warm_start=False))
    guide.append(AutoNormal(handlers.block(normal_model, hide=["a"]), prefix="normal"))
    _, svi, state, params = initialized(normal_model, guide=guide)
    assert {"auto_loc", "b_normal_loc"} <= set(params)
    after, loss = quick_jit(svi.update)(state)
    assert np.isfinite(loss)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), params, svi.get_params(after))
    # All but the hidden layers, whose gradient is zero as long as the last layer is zero.
    still = [path for path, value in jax.tree.leaves_with_path(moved) if not value]
    assert all("auto_layers" in str(path) for path in still)

    def summaries(params):
        draws = guide.sample_posterior(KEY, params, sample_shape=(4,))
        return draws, guide.median(params), guide.quantiles(params, [0.2, 0.8])

    draws, median, quantiles = jax.eval_shape(summaries, params)
    assert shapes_of(draws) == {"a": (4,), "b": (4, 2)}
    assert shapes_of(median) == {"a": (), "b": (2,)}
    assert shapes_of(quantiles) == {"a": (2,), "b": (2, 2)}


@pytest.mark.thorough
def test_a_latent_of_a_scan_has_a_start_in_hierarchical_coordinates():
    """Its prior depends on another latent; the evidence is a quadrature over that one."""
    y = np.array([0.3, 0.5, 0.1, 0.9])
    guide = AutoImplicit(scan_of_one_scale, hidden_dims=(4,))
    guide.set_up(random.key(0), jnp.asarray(y))
    grid = np.linspace(-8.0, 6.0, 2801)
    of_data = stats.norm.logpdf(y, scale=np.sqrt(1 + np.exp(2 * grid))[:, None]).sum(axis=1)
    evidence = np.logaddexp.reduce(of_data + stats.norm.logpdf(grid)) + np.log(grid[1] - grid[0])
    # A Gaussian loses little here; the error of the bound is that of 64 draws.
    assert evidence - 0.3 < guide.start.elbo < evidence + 0.1
    # NumPyro's scan takes the shapes of all values of the guide, its announcements too.
    svi = SVI(scan_of_one_scale, guide, numpyro.optim.Adam(1e-2), ImplicitELBO(4))
    state = jax.eval_shape(svi.init, KEY, jnp.asarray(y))
    assert jax.eval_shape(svi.update, state, jnp.asarray(y))[1].shape == ()
