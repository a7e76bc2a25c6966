"""``to_arviz``: groups, names and numbers, on whichever ArviZ is installed."""

import importlib
import sys
import warnings
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.svi import SVIRunResult, SVIState
from scipy import stats

from numpyro_kscore import Implicit, ImplicitELBO, evaluate_guide, khat, to_arviz
from numpyro_kscore.diagnostics._energy import FAMILIES

IS_OLD = int(version("arviz").split(".")[0]) < 1
SCHOOLS = list("ABCD")
Y, SIGMA = jnp.array([1.0, -1.0, 0.5, 2.0]), jnp.array([1.0, 1.5, 1.0, 2.0])
NUM = 60


def model(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("school", 4):
        z = numpyro.sample("z", dist.Normal())
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def implicit_guide(sigma, y=None):
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(6), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    scale = numpyro.param("scale", jnp.ones(()))
    numpyro.sample("mu", Implicit(0.5 + scale * noise[0]))
    numpyro.sample("tau", Implicit(jnp.exp(-0.5 + 0.5 * noise[1])))
    with numpyro.plate("school", 4):
        numpyro.sample("z", Implicit(scale * noise[2:]))


def explicit_guide(sigma, y=None):
    scale = numpyro.param("scale", jnp.ones(()))
    numpyro.sample("mu", dist.Normal(0.5, scale))
    numpyro.sample("tau", dist.LogNormal(-0.5, 0.5))
    with numpyro.plate("school", 4):
        numpyro.sample("z", dist.Normal(0, scale))


def fitted(guide, loss):
    svi = SVI(model, guide, optax.adam(1e-2), loss)
    state = SVIState(None, None, random.key(0))
    return svi, SVIRunResult({"scale": jnp.ones(())}, state, jnp.array([3.0, 2.0, 1.5]))


def quiet(call, *args, **kwargs):
    """A call into ArviZ without its warnings, which are about the small number of draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


@pytest.fixture(scope="module")
def az():
    """ArviZ: imported where a test takes it, since that takes a second."""
    # Some versions announce their successor, or name a dependency's.
    return quiet(importlib.import_module, "arviz")


@pytest.fixture(scope="module")
def found():
    svi, result = fitted(implicit_guide, ImplicitELBO())
    draws = evaluate_guide(svi, result, SIGMA, Y, num_samples=NUM * 2)
    with pytest.MonkeyPatch.context() as patch:
        # Closed forms only: the quality of the energy does not matter here.
        closed = tuple(family for family in FAMILIES if not family.kernel)
        patch.setattr("numpyro_kscore.diagnostics._khat.FAMILIES", closed)
        return khat(draws._replace(laplacian=None), num_bootstrap=20, num_repeats=2)


@pytest.fixture(scope="module")
def tree(found):
    svi, result = fitted(implicit_guide, ImplicitELBO())
    return quiet(
        to_arviz,
        svi,
        result,
        SIGMA,
        y=Y,
        num_samples=NUM,
        log_likelihood=True,
        posterior_predictive=True,
        prior=True,
        coords={"school": SCHOOLS},
        khat=found,
    )


def dataset(tree, group):
    part = tree[group]
    return part if IS_OLD else part.to_dataset()


def groups(tree):
    return set(tree.groups()) if IS_OLD else {name.strip("/") for name in tree.groups} - {""}


@pytest.mark.thorough
def test_groups_names_and_dimensions(tree):
    assert groups(tree) == {
        "posterior", "sample_stats", "log_likelihood", "posterior_predictive", "prior",
        "prior_predictive", "observed_data", "constant_data",
    }  # fmt: skip
    posterior = dataset(tree, "posterior")
    assert set(posterior.data_vars) == {"mu", "tau", "z", "theta"}
    assert posterior["mu"].dims == ("chain", "draw")
    assert posterior["z"].dims == ("chain", "draw", "school")
    assert posterior.sizes["chain"] == 1
    assert posterior.sizes["draw"] == NUM
    assert list(posterior["school"].values) == SCHOOLS
    for group, shape in (("posterior_predictive", (1, NUM, 4)), ("prior_predictive", (1, NUM, 4))):
        values = dataset(tree, group)["obs"]
        assert values.shape == shape
        # Draws, not the observations themselves.
        assert float(values.std("draw").min()) > 0.1
    assert set(dataset(tree, "prior").data_vars) == {"mu", "tau", "z", "theta"}
    np.testing.assert_array_equal(dataset(tree, "observed_data")["obs"], Y)
    np.testing.assert_array_equal(dataset(tree, "constant_data")["sigma"], SIGMA)


@pytest.mark.thorough
def test_numbers_belong_to_the_draws(tree):
    """Densities recomputed from the draws, by formula."""
    from scipy import stats

    posterior, stats_ = dataset(tree, "posterior"), dataset(tree, "sample_stats")
    mu, tau, z, theta = (posterior[name].values[0] for name in ("mu", "tau", "z", "theta"))
    # Where the terms cancel, their rounding is left.
    np.testing.assert_allclose(theta, mu[:, None] + tau[:, None] * z, rtol=1e-5, atol=1e-6)
    likelihood = stats.norm.logpdf(np.asarray(Y), theta, np.asarray(SIGMA))
    np.testing.assert_allclose(
        dataset(tree, "log_likelihood")["obs"].values[0], likelihood, rtol=1e-4, atol=1e-5
    )
    # In unconstrained coordinates: tau = exp(u) adds log tau.
    prior = stats.norm.logpdf(mu, 0, 2) + stats.halfnorm.logpdf(tau) + np.log(tau)
    prior = prior + stats.norm.logpdf(z).sum(axis=1)
    np.testing.assert_allclose(stats_["lp"].values[0], prior + likelihood.sum(axis=1), rtol=1e-4)
    np.testing.assert_array_equal(stats_["losses"], [3.0, 2.0, 1.5])
    assert stats_.attrs["num_steps"] == 3
    assert stats_.attrs["log_q_normalized"] == 0
    assert np.all(np.isfinite(stats_["log_q"]))
    assert float(stats_["khat_low"]) <= float(stats_["khat"]) <= float(stats_["khat_high"])


def test_statistics_work_on_it(az, tree):
    summary = quiet(az.summary, tree, var_names=["mu", "theta"])
    assert "theta[A]" in summary.index
    loo = quiet(az.loo, tree)
    assert np.isfinite(loo.elpd_loo if IS_OLD else loo.elpd)
    assert len(quiet(az.compare, {"one": tree, "two": tree})) == 2
    if not IS_OLD:
        part = dataset(tree, "sample_stats")
        corrected = quiet(az.loo_approximate_posterior, tree, part["lp"], part["log_q"])
        assert np.isfinite(corrected.elpd)


def test_improper_priors():
    """Everything but draws of the prior works with a site that cannot be drawn from."""

    def model(sigma, y=None):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("obs", dist.Normal(mu, sigma).to_event(1), obs=y)

    def guide(sigma, y=None):
        numpyro.sample("mu", dist.Normal(0.5, numpyro.param("scale", jnp.ones(()))))

    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    result = SVIRunResult(
        {"scale": jnp.ones(())}, SVIState(None, None, random.key(0)), jnp.zeros(3)
    )
    options = {"num_samples": NUM, "khat": False}
    tree = quiet(to_arviz, svi, result, SIGMA, Y, posterior_predictive=True, **options)
    np.testing.assert_array_equal(dataset(tree, "constant_data")["sigma"], SIGMA)
    assert dataset(tree, "posterior_predictive")["obs"].shape == (1, NUM, 4)
    with pytest.raises(ValueError, match="prior: expected a model whose sites can all be drawn"):
        to_arviz(svi, result, SIGMA, Y, prior=True, **options)


def censored(time, is_seen):
    """Times of failure, of which those of the survivors are known to be later."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 2.0))
    numpyro.factor("bound", -jnp.sum(rate))
    with numpyro.plate("unit", len(time)):
        with handlers.mask(mask=is_seen):
            numpyro.sample("time", dist.Exponential(rate), obs=time)
        with handlers.mask(mask=~is_seen):
            numpyro.factor("survival", -rate * time)


def test_factors_are_no_data(az):
    """Neither masked nor in a plate, which wrap their distribution, and nowhere in the result."""
    time, is_seen = jnp.array([0.3, 1.0, 2.5, 4.0]), jnp.array([True, True, False, True])

    def guide(time, is_seen):
        numpyro.sample("rate", dist.LogNormal(-0.5, numpyro.param("scale", jnp.full((), 0.3))))

    svi = SVI(censored, guide, optax.adam(1e-2), Trace_ELBO())
    params, state = {"scale": jnp.full((), 0.3)}, SVIState(None, None, random.key(0))
    result = SVIRunResult(params, state, jnp.zeros(3))
    options = {"posterior_predictive": True, "prior": True, "log_likelihood": True, "khat": False}
    with pytest.warns(UserWarning, match=r"log_likelihood: expected.*got factors \['survival'\]"):
        tree = to_arviz(svi, result, time, is_seen, num_samples=NUM, **options)
    for group in ("observed_data", "posterior_predictive", "prior_predictive", "log_likelihood"):
        assert set(dataset(tree, group).data_vars) == {"time"}
    assert dataset(tree, "posterior_predictive")["time"].shape == (1, NUM, 4)
    rate = np.asarray(dataset(tree, "posterior")["rate"])[..., None]
    exact = np.where(is_seen, np.log(rate) - rate * np.asarray(time), 0.0)
    np.testing.assert_allclose(dataset(tree, "log_likelihood")["time"], exact, rtol=1e-5, atol=1e-6)
    if not IS_OLD:  # it refuses an observation whose likelihood is the same at all draws
        seen = dataset(tree, "log_likelihood").isel(unit=np.flatnonzero(is_seen))
        tree["log_likelihood"] = type(tree)(seen)
    loo = quiet(az.loo, tree)
    assert np.isfinite(loo.elpd_loo if IS_OLD else loo.elpd)


@pytest.mark.slow
def test_state_space_models():
    """NumPyro's `scan` indexes substituted values by a traced integer."""
    y = jnp.array([0.5, -1.0, 2.0])

    def walk(y):
        def step(x, value):
            x = numpyro.sample("x", dist.Normal(x, 0.5))
            numpyro.sample("y", dist.Normal(x, 1.5), obs=value)
            return x, None

        scan(step, 0.0, y)

    def guide(y):
        noise = numpyro.sample(
            "noise", dist.Normal(jnp.zeros(3), 1.0).to_event(1), infer={"is_auxiliary": True}
        )
        numpyro.sample("x", Implicit(noise))

    svi = SVI(walk, guide, optax.adam(1e-2), ImplicitELBO())
    result = SVIRunResult({}, SVIState(None, None, random.key(0)), jnp.zeros(1))
    tree = quiet(
        to_arviz, svi, result, y, num_samples=NUM, khat=False,
        log_likelihood=True, posterior_predictive=True,
    )  # fmt: skip
    x = np.asarray(dataset(tree, "posterior")["x"])
    assert x.shape == (1, NUM, 3)
    expected = stats.norm.logpdf(np.asarray(y), x, 1.5)
    np.testing.assert_allclose(dataset(tree, "log_likelihood")["y"], expected, rtol=1e-5)
    # Not the data, but draws around x with a standard deviation of 1.5, to four standard errors.
    away = np.asarray(dataset(tree, "posterior_predictive")["y"]) - x
    assert np.mean(away**2) / 1.5**2 == pytest.approx(1.0, abs=4 * (2 / away.size) ** 0.5)


@pytest.mark.parametrize("kind", ["netcdf", "zarr"])
def test_round_trip(az, tree, kind, tmp_path):
    path = str(tmp_path / "fit")
    import xarray

    if IS_OLD and kind == "netcdf":
        quiet(tree.to_netcdf, path)
        back = quiet(az.from_netcdf, path)
    elif IS_OLD:
        # Its own writer knows zarr 2 only, and recommends this for zarr 3.
        quiet(tree.to_datatree().to_zarr, path)
        back = az.InferenceData.from_datatree(quiet(xarray.open_datatree, path, engine="zarr"))
    else:
        options = {"engine": "h5netcdf"} if kind == "netcdf" else {}
        quiet(getattr(tree, f"to_{kind}"), path, **options)
        engine = {"engine": "h5netcdf" if kind == "netcdf" else "zarr"}
        back = quiet(xarray.open_datatree, path, **engine)
    assert groups(back) == groups(tree)
    for group in groups(tree):
        for name, values in dataset(tree, group).data_vars.items():
            np.testing.assert_array_equal(dataset(back, group)[name].values, values.values)
    assert dataset(back, "sample_stats").attrs["log_q_normalized"] == 0


@pytest.mark.parametrize("name", ["forest", "trace"])
def test_plots_work_on_it(az, tree, name):
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    options = {} if IS_OLD else {"backend": "matplotlib"}
    quiet(getattr(az, f"plot_{name}"), tree, var_names=["mu"], **options)
    axes = [panel for number in plt.get_fignums() for panel in plt.figure(number).axes]
    # The draws, or their interval, are in it.
    assert any(panel.lines or panel.collections for panel in axes)
    plt.close("all")


@pytest.mark.thorough
def test_explicit_guide_has_its_own_density():
    from scipy import stats

    svi, result = fitted(explicit_guide, Trace_ELBO())
    tree = quiet(to_arviz, svi, result, SIGMA, y=Y, num_samples=NUM, khat=False)
    part, posterior = dataset(tree, "sample_stats"), dataset(tree, "posterior")
    mu, tau, z = (posterior[name].values[0] for name in ("mu", "tau", "z"))
    expected = stats.norm.logpdf(mu, 0.5) + stats.norm.logpdf(np.log(tau), -0.5, 0.5)
    expected = expected + stats.norm.logpdf(z).sum(axis=1)
    np.testing.assert_allclose(part["log_q"].values[0], expected, rtol=1e-4, atol=1e-4)
    assert part.attrs["log_q_normalized"] == 1
    assert "khat" not in part


def test_energy_of_other_draws_is_refused(found):
    svi, result = fitted(implicit_guide, ImplicitELBO())
    with pytest.raises(ValueError, match="khat: expected that of the draws that are kept.*rng_key"):
        to_arviz(svi, result, SIGMA, y=Y, num_samples=NUM, khat=found, rng_key=random.key(5))


def test_wrong_use_is_named(monkeypatch):
    svi, result = fitted(implicit_guide, ImplicitELBO())
    with pytest.raises(ValueError, match=r"model: expected data at \['obs'\]"):
        to_arviz(svi, result, SIGMA)
    with pytest.raises(TypeError, match="expected the arguments the guide was fitted with"):
        to_arviz(svi, result)
    with pytest.raises(TypeError, match="khat: expected True, False or what khat.*got 0.3"):
        to_arviz(svi, result, SIGMA, y=Y, khat=0.3)
    for name in ("arviz", "arviz.data.io_numpyro", "arviz_base.io_numpyro", "arviz_stats.base"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "numpyro-kscore\[arviz\]"'):
        to_arviz(svi, result, SIGMA, y=Y)


@pytest.mark.thorough
def test_arviz_is_not_imported_with_the_package():
    import subprocess

    code = (
        "import sys, numpyro_kscore; "
        "sys.exit(any(m.split('.')[0] in ('arviz', 'arviz_base', 'xarray') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_jax_arrays_stay_where_they_are(tree):
    assert not any(
        isinstance(values.data, jax.Array) for values in dataset(tree, "posterior").values()
    )
