"""Wrong input of ``fit``."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO, fit, initial_gaussian
from numpyro_kscore._model.call_checks import check_data, misspelled
from numpyro_kscore._model.supports import check_within_supports
from support.fits import DATA, KEY, MEAN, QUICK, guide, make_svi, model


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_steps": 0}, ValueError, "max_steps: expected an integer of at least 5; got 0"),
        ({"chunk_size": 2.5}, TypeError, "chunk_size: expected an integer"),
        ({"tol": 0.0}, ValueError, "tol: expected a positive finite number"),
        ({"patience": 0}, ValueError, "patience: expected an integer of at least 1"),
        ({"criterion": "elbo"}, ValueError, "criterion: expected one of 'stein', 'loss'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        fit(make_svi(), KEY, DATA, **settings)


def test_a_point_needs_the_loss_as_its_criterion():
    def point(data):
        numpyro.sample("z", dist.Delta(numpyro.param("loc", jnp.zeros(2)), event_dim=1))

    svi = make_svi(guide=point)
    with pytest.raises(ValueError, match="got a point without any") as caught:
        fit(svi, KEY, DATA, **QUICK)
    assert any("criterion='loss'" in note for note in caught.value.__notes__)
    result = fit(svi, KEY, DATA, criterion="loss", **QUICK)
    assert result.info.converged
    assert np.all(np.isnan(result.info.discrepancy))
    np.testing.assert_allclose(result.params["loc"], MEAN, atol=1e-2)


def test_a_fit_needs_parameters():
    def fixed(data):
        unit = dist.Normal(jnp.zeros(2), 1.0).to_event(1)
        noise = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
        numpyro.sample("z", Implicit(noise))

    with pytest.raises(ValueError, match="svi: expected parameters to fit.*got none"):
        fit(make_svi(guide=fixed), KEY, DATA, criterion="loss", **QUICK)


def scaled(data):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("x", dist.Normal(0.0, scale), obs=data)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_values_outside_a_support_are_named(is_drawn):
    """NumPyro says that the likelihood got an invalid scale, and not from where."""

    def negative(data):
        loc = numpyro.param("loc", -9.0)
        if is_drawn:
            loc = loc + numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        numpyro.sample("scale", Implicit(loc))

    svi = SVI(scaled, negative, optax.adam(1e-2), ImplicitELBO())
    with pytest.raises(ValueError, match=r"'scale' within its support.*100% of.*jnp.exp"):
        fit(svi, KEY, jnp.ones(3), **QUICK)


@pytest.mark.thorough
def test_values_that_are_sometimes_outside_are_named():
    """The first draw may be inside: then no step is finite, and more draws tell why."""

    def around_zero(data):
        noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        numpyro.sample("scale", Implicit(numpyro.param("width", 1.0) * noise))

    svi = SVI(scaled, around_zero, optax.adam(1e-2), ImplicitELBO(8))
    state = svi.init(KEY, jnp.ones(3))
    # Half of the draws are outside: 5 standard errors of a share of 100 are .25.
    with pytest.raises(ValueError, match=r"'scale' within its support.*got [3-6]\d% of") as raised:
        fit(svi, KEY, jnp.ones(3), init_state=state, **QUICK)
    assert isinstance(raised.value.__cause__, FloatingPointError)


def test_a_parameter_out_of_range_is_named():
    """A scale that is any number is negative at half of the draws, which no support forbids."""

    def regression(y):
        slope = numpyro.sample("slope", dist.Normal())
        numpyro.sample("y", dist.Normal(0.0, slope), obs=y)

    def normal(y):
        numpyro.sample("slope", dist.Normal(numpyro.param("loc", 0.0), 1.0))

    message = r"(?s)'scale' of Normal at site 'y' in Positive.*[3-6]\d% of the guide.*HalfNormal"
    with pytest.raises(ValueError, match=message):
        check_within_supports(regression, normal, (jnp.ones(3),), {}, {}, FloatingPointError("fit"))


def test_a_setting_of_another_function_is_not_suggested_for_itself():
    given = {"progress_bar": False}
    assert misspelled("refine", ("progress_bar", "num_samples"), scaled, given) is None


def test_classes_in_place_of_instances():
    optimizer = optax.adam(1e-2)
    with pytest.raises(TypeError, match=r"loss: expected an instance, ImplicitELBO\(\)"):
        fit(SVI(model, guide, optimizer, ImplicitELBO), KEY, DATA)
    with pytest.raises(TypeError, match=r"guide: expected an instance, AutoImplicit\(model\)"):
        fit(SVI(model, AutoImplicit, optimizer, ImplicitELBO()), KEY, DATA)


@pytest.mark.filterwarnings("ignore:.*Out-of-support values:UserWarning")
@pytest.mark.thorough
def test_observed_values_that_are_missing_are_named():
    svi = SVI(model, AutoImplicit(model), optax.adam(1e-2), ImplicitELBO())
    with pytest.raises(RuntimeError, match=r"Observed values of \['y'\] are not finite"):
        fit(svi, KEY, jnp.full_like(DATA, jnp.nan), **QUICK)


def counts(exposure, y=None, extra=()):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", len(exposure)):
        numpyro.sample("y", dist.Poisson(rate * exposure), obs=y)


def prior(scale):
    numpyro.sample("z", dist.Normal(0.0, scale))


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [((), "'y'"), ((None,), "'y'"), ((None, {"more": None}), "'y', 'extra'")],
)
def test_data_that_were_forgotten(arguments, missing):
    """Not the prior, and not a discrete latent to be summed out: at once and by name."""
    svi = SVI(counts, AutoImplicit(counts), optax.adam(1e-2), ImplicitELBO())
    message = rf"(?s)expected data; got nothing observed.*\['rate', 'y'\].*\[{missing}\] is None"
    with pytest.raises(ValueError, match=message):
        fit(svi, KEY, jnp.ones(3), *arguments)


def test_a_prior_is_fitted_with_a_warning():
    svi = SVI(prior, AutoImplicit(prior), optax.adam(1e-2), ImplicitELBO())
    with pytest.warns(UserWarning, match=r"model: expected data; got nothing.*\['z'\].*the prior"):
        check_data(svi.model, (1.0,), {})


def test_a_factor_or_one_observed_site_is_enough():
    def by_factor(y=None):
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.factor("density", -(x**4))

    check_data(by_factor, (), {})
    check_data(counts, (np.ones(3), np.ones(3, int)), {})
    check_data(counts, (), {"exposure": np.ones(3), "y": np.ones(3, int)})


def test_a_count_that_is_one_of_several_outcomes_may_be_data():
    def both(x, y=None):
        counts(x, y)
        numpyro.sample("x", dist.Normal(), obs=0.5)

    svi = SVI(both, AutoImplicit(both), optax.adam(1e-2), ImplicitELBO())
    with pytest.raises(ValueError, match=r"(?s)got 'y' from Poisson.*If it is data.*obs=None"):
        fit(svi, KEY, jnp.ones(3), **QUICK)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((DATA,), {"num_steps": 9}, r"fit: expected settings.*'num_steps'.*mean 'max_steps'"),
        ((DATA,), {"chunksize": 9}, r"fit: .*'chunksize'.*Did you mean 'chunk_size'"),
        ((), {"dta": DATA}, r"fit: .*'dta'.*Did you mean 'data'"),
        ((), {}, r"fit: expected the arguments of the model, \(data\); got 0 positional.*missing"),
        ((DATA, DATA), {}, r"fit: expected the arguments.*got 2 positional.*too many.*unpacked"),
        (
            ({"y": DATA},),
            {},
            r"model: expected .*got 'data': a dict with the keys \['y'\]",
        ),
        ((["a", "b"],), {}, r"model: expected arguments.*'data': a list of 2.*Convert them"),
        ((np.array([1.0, "b"], object),), {}, "model: expected .*'data': an array of objects"),
        (([[1.0], [1.0, 2.0]],), {}, r"model: expected arguments.*'data': a list of 2"),
    ],
)
def test_arguments_of_other_kinds_are_named(arguments, settings, message):
    with pytest.raises(TypeError, match=f"(?s){message}"):
        fit(make_svi(), KEY, *arguments, **settings)


def test_rows_against_columns_are_refused():
    """A mean (3, 1) and data (3,) would give nine terms of a likelihood."""

    def crossed(y):
        mean = numpyro.sample("mean", dist.Normal())
        numpyro.sample("y", dist.Normal(mean * jnp.ones((3, 1)), 1.0), obs=y)

    def normal(y):
        numpyro.sample("mean", dist.Normal(numpyro.param("loc", 0.0), 1.0))

    svi = SVI(crossed, normal, optax.adam(1e-2), ImplicitELBO())
    message = r"model: expected observed values of shape \(3, 1\) at site 'y'.*got \(3,\).*\(3, 3\)"
    with pytest.raises(ValueError, match=message):
        fit(svi, KEY, jnp.ones(3), **QUICK)
    with pytest.raises(ValueError, match=message):
        svi.run(KEY, 2, jnp.ones(3), progress_bar=False)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (lambda z: numpyro.deterministic("z", z), r"\['z'\] are deterministic.*Implicit\(value\)"),
        (lambda z: numpyro.sample("z", dist.Normal(z).to_event(1), obs=z), r"\['z'\] are observed"),
        (lambda z: None, r"guide: expected a sample site for every latent.*none for \['z'\]"),
    ],
    ids=["deterministic", "observed", "none"],
)
def test_a_latent_that_the_guide_does_not_sample(site, message):
    def without(data):
        site(numpyro.param("loc", jnp.zeros(2)))

    with pytest.raises(ValueError, match=f"(?s){message}"):
        fit(make_svi(guide=without), KEY, DATA, **QUICK)


def test_guides_and_starts_name_the_arguments_too():
    svi = SVI(model, AutoImplicit(model), optax.adam(1e-2), ImplicitELBO())
    with pytest.raises(TypeError, match=r"AutoImplicit: expected the arguments.*\(data\); got 0"):
        svi.run(KEY, 2, progress_bar=False)
    with pytest.raises(TypeError, match=r"(?s)model: expected .*'data': a list of 2, with which"):
        svi.run(KEY, 2, ["a", "b"], progress_bar=False)
    with pytest.raises(TypeError, match=r"initial_gaussian: .*'init_fn'.*mean 'init_loc_fn'"):
        initial_gaussian(KEY, model, DATA, init_fn=None)


def test_a_class_under_svi_run():
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO)
    with pytest.raises(TypeError, match=r"loss: expected an instance, ImplicitELBO\(\)"):
        svi.run(KEY, 2, DATA, progress_bar=False)
    unconditional = SVI(lambda: model(DATA), lambda: guide(DATA), optax.adam(1e-2), ImplicitELBO)
    with pytest.raises(TypeError, match=r"loss: expected an instance, ImplicitELBO\(\)"):
        unconditional.run(KEY, 2, progress_bar=False)


def test_an_aggregate_needs_the_loss_as_its_criterion():
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(aggregate="rows"))
    with pytest.raises(ValueError, match="criterion: expected 'loss' for an objective with aggreg"):
        fit(svi, KEY, DATA)


def test_wrong_objects_are_refused():
    with pytest.raises(TypeError, match="svi: expected SVI.model, guide, .*got a str"):
        fit("svi", KEY, DATA)
    with pytest.raises(TypeError, match=r"rng_key: expected one random key such as .*; got 0"):
        fit(make_svi(), 0, DATA)
    with pytest.raises(TypeError, match=r"got an array of float32, shape .* before the data"):
        fit(make_svi(), jnp.asarray(DATA))
    svi = SVI(model, guide, numpyro.optim.Minimize(), Trace_ELBO())
    with pytest.raises(TypeError, match="state holds the parameters.*got Minimize"):
        fit(svi, KEY, DATA)
    with pytest.raises(TypeError, match="outside of jit and vmap.*Use svi.run there"):
        jax.vmap(lambda key: fit(make_svi(), key, DATA).losses)(jax.random.split(KEY, 2))
