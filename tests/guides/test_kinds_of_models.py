"""Kinds of models that NUTS takes: the guide takes them too, or says by name why not."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore._util.pytree import named_leaves, with_leading
from support.autoguides import KEY


def set_up(model, *args, **settings):
    guide = AutoImplicit(model, warm_start=False, **settings)
    guide.set_up(KEY, *args)
    return guide


class Odd(constraints.Constraint):
    event_dim = 0

    def __call__(self, x):
        return x > 0


class WithoutSupport(dist.Distribution):
    def log_prob(self, value):
        return -(value**2)


@pytest.mark.parametrize("prior", [lambda: dist.ImproperUniform(Odd(), (), ()), WithoutSupport])
def test_a_support_without_a_map_is_named(prior):
    def model():
        numpyro.sample("odd", prior())

    name = type(prior()).__name__
    message = rf"(?s)model: expected a support.*of {name} at site 'odd'"
    with pytest.raises(ValueError, match=message):
        set_up(model)


@pytest.mark.thorough
@pytest.mark.parametrize("in_plate", [False, True])
def test_supports_that_do_not_survive_a_compiled_program(in_plate):
    """Levy keeps its support in a field that JAX does not know."""

    def model():
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 2) if in_plate else handlers.block(hide=[]):
            numpyro.sample("jump", dist.Levy(loc, 1.0))

    guide = set_up(model)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO(4))
    params = svi.get_params(svi.init(KEY))
    draws = guide.sample_posterior(KEY, params, sample_shape=(20,))
    loc = draws["loc"][:, None] if in_plate else draws["loc"]
    assert np.all(draws["jump"] > loc)


@pytest.mark.parametrize("site", ["auto_loc", "auto_scale", "_auto_noise"])
def test_sites_named_as_those_of_the_guide(site):
    def model():
        numpyro.sample(site, dist.Normal(0.0, 1.0))

    guide = AutoImplicit(model, warm_start=False)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO(4))
    with pytest.raises(ValueError, match=rf"prefix: expected.*'{site}'.*another prefix"):
        jax.eval_shape(svi.init, KEY)


def test_another_prefix_makes_room():
    def model():
        numpyro.sample("auto_loc", dist.Normal(0.0, 1.0))
        numpyro.deterministic("auto_scale", 1.0)

    guide = AutoImplicit(model, warm_start=False, prefix="other")
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO(4))
    state = jax.eval_shape(svi.init, KEY)
    assert {"other_loc", "other_scale"} < svi.optim.get_params(state.optim_state).keys()


@pytest.mark.thorough
def test_latents_that_cannot_vary():
    def model():
        numpyro.sample("share", dist.Dirichlet(jnp.ones(1)))
        numpyro.sample("none", dist.Normal(jnp.zeros(0), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"latent that can vary; got \['share', 'none'\]"):
        set_up(model)


def test_loops_without_reverse_mode():
    def model():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 2 * c[1]), (0, x))[1]
        numpyro.factor("y", -(y**2))

    with pytest.raises(ValueError, match="(?s)loop of unknown length.*forward_mode_differentiatio"):
        set_up(model)


def test_observed_values_that_fit_no_distribution():
    def model(y):
        x = numpyro.sample("x", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        numpyro.sample("seen", dist.Normal(x, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"of shape \(3,\) at site 'seen'.*got \(4,\)"):
        set_up(model, jnp.zeros(4))


@pytest.mark.thorough
def test_observed_values_outside_of_a_support():
    def model(y):
        rate = numpyro.sample("rate", dist.HalfNormal(1.0))
        numpyro.sample("wait", dist.Exponential(rate), obs=y)

    with (
        pytest.warns(UserWarning, match="Out-of-support"),
        pytest.raises(RuntimeError, match=r"Observed values of \['wait'\] are outside the support"),
    ):
        set_up(model, -jnp.ones(2))


def normal(y, is_checked):
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(x, -2.0, validate_args=is_checked), obs=y)


def mixture(y, is_checked):
    shares = dist.Categorical(jnp.ones(2) / 2)
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    parts = dist.Normal(x, jnp.array([1.0, -2.0]), validate_args=is_checked)
    numpyro.sample("y", dist.MixtureSameFamily(shares, parts), obs=y)


IN_RANGE = "'scale' of Normal at site 'y' in Positive.*got -2"
IN_LINE = r"in line \d+ of .*test_kinds_of_models.py: .*validate_args=is_checked"


@pytest.mark.parametrize(
    ("model", "is_checked", "message"),
    [
        (normal, None, IN_RANGE),
        (normal, True, IN_LINE),
        pytest.param(normal, False, IN_RANGE, marks=pytest.mark.thorough),
        pytest.param(mixture, None, IN_RANGE, marks=pytest.mark.thorough),
        pytest.param(mixture, False, IN_RANGE, marks=pytest.mark.thorough),
    ],
)
def test_a_parameter_out_of_range(model, is_checked, message):
    with pytest.raises(ValueError, match=rf"(?s)^model: expected .*{message}"):
        set_up(model, 0.5, is_checked)


@pytest.mark.thorough
def test_deterministic_sites_may_be_trees():
    def model():
        x = numpyro.sample("x", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.deterministic("pair", (x.sum(), {"twice": 2 * x}))

    guide = set_up(model)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO(4))
    params = svi.get_params(svi.init(KEY))
    draws = guide.sample_posterior(KEY, params, sample_shape=(5, 3))
    total, rest = draws["pair"]
    np.testing.assert_allclose(total, draws["x"].sum(axis=-1), rtol=1e-6)
    np.testing.assert_allclose(rest["twice"], 2 * draws["x"], rtol=1e-6)
    # Files and ArviZ know arrays by name.
    assert set(named_leaves(draws)) == {"x", "pair[0]", "pair[1]['twice']"}
    middle = jax.eval_shape(lambda p: guide.quantiles(p, [0.1, 0.9]), params)
    assert middle["pair"][1]["twice"].shape == (2, 2)


@pytest.mark.thorough
def test_mutable_values_of_a_model():
    """A normalization keeps running means, which a deterministic site is computed from."""

    def model():
        mean = numpyro.primitives.mutable("mean", {"of": jnp.array(2.0)})
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.deterministic("shifted", x + mean["of"])

    guide = set_up(model)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO(4))
    state = svi.init(KEY)
    params = svi.get_params(state)
    first = guide.sample_posterior(KEY, params, sample_shape=(5,))
    np.testing.assert_allclose(first["shifted"], first["x"] + 2, rtol=1e-6)
    later = guide.sample_posterior(
        KEY, {**params, "mean": {"of": jnp.array(3.0)}}, sample_shape=(5,)
    )
    np.testing.assert_allclose(later["shifted"], first["x"] + 3, rtol=1e-6)


@pytest.mark.thorough
def test_missing_values_are_latents_among_the_data():
    """The search in double precision puts them into data of single precision, without a word."""
    data = jnp.array([1.0, 2.0, 0.0, 0.0])

    def model():
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        missing = numpyro.sample("missing", dist.Normal(mean, 1.0).expand([2]).mask(False))
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=data.at[2:].set(missing))

    guide = AutoImplicit(model)
    guide.set_up(KEY)
    # Two values of variance one, and the prior.
    assert guide.start.gaussian.mean[0] == pytest.approx(1.0, abs=0.01)
    assert guide.start.gaussian.factor[0] @ guide.start.gaussian.factor[0] == pytest.approx(
        1 / 3, abs=0.02
    )


def test_leaves_of_trees_have_names():
    named = named_leaves({"a": np.ones(6), "b": (np.zeros(6), {"c": np.ones((6, 2))})})
    assert {name: leaf.shape for name, leaf in named.items()} == {
        "a": (6,),
        "b[0]": (6,),
        "b[1]['c']": (6, 2),
    }
    assert with_leading((2, 3), named)["b[1]['c']"].shape == (2, 3, 2)
