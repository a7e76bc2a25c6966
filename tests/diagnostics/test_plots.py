"""Plots show the numbers they were given; ``diagnose`` and ``vsbc`` from end to end."""

from types import SimpleNamespace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import numpy as jnp
from jax import random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO, ScoreEstimator, diagnose, khat
from numpyro_kscore.diagnostics import GuideDraws, vsbc
from numpyro_kscore.diagnostics import _plots as plots
from numpyro_kscore.regularizers import NuMethod

mpl.use("Agg")
KEY = random.key(0)
DATA = jnp.array([1.0, -1.0])
# Mean and sd of the posterior: the prior has sd 1, the data sd 1/2.
MEAN, SD = 0.8 * DATA, 0.2**0.5


@pytest.fixture(autouse=True)
def closed_figures(monkeypatch):
    """A fixed number of steps compiles faster than a choice of one; few stay near a Gaussian."""
    monkeypatch.setattr(plots, "ScoreEstimator", lambda: ScoreEstimator(regularizer=NuMethod(5)))
    yield
    plt.close("all")


def model(data=None):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=data)


def implicit_guide(data=None):
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(2), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    loc, scale = numpyro.param("loc", jnp.zeros(2)), numpyro.param("scale", jnp.ones(2))
    numpyro.sample("z", Implicit(loc + scale * noise, 1))


def explicit_guide(data=None):
    loc = numpyro.param("loc", jnp.zeros(2))
    scale = numpyro.param("scale", jnp.ones(2), constraint=dist.constraints.softplus_positive)
    numpyro.sample("z", dist.Normal(loc, scale).to_event(1))


DRAWS = np.random.default_rng(0).normal(size=(400, 2)) * [1.0, 3.0]
DRAWS = DRAWS.astype(np.float32)


@pytest.mark.slow
def test_pairs():
    figure = plots.plot_pairs(DRAWS, ["first", "second"], reference=DRAWS + 1)
    upper_right, lower_left = figure.axes[1], figure.axes[2]
    assert not upper_right.axison
    assert (lower_left.get_xlabel(), lower_left.get_ylabel()) == ("first", "second")
    shown = {tuple(line.get_data()[0][:2]) for line in lower_left.lines}
    assert shown == {tuple(DRAWS[:2, 0]), tuple(DRAWS[:2, 0] + 1)}
    # The outermost contour is at three standard deviations in either direction.
    outline = np.concatenate([p.vertices for p in lower_left.collections[0].get_paths()])
    np.testing.assert_allclose(np.abs(outline).max(0) / [1, 3], 3.0, rtol=0.25)


@pytest.mark.thorough
def test_score_field():
    figure = plots.plot_score_field(DRAWS, -DRAWS / [1.0, 9.0])
    guide, model_arrows = (
        c for c in figure.axes[0].collections if isinstance(c, mpl.quiver.Quiver)
    )
    assert guide.scale == model_arrows.scale
    np.testing.assert_allclose(model_arrows.U, -DRAWS[: plots.ARROWS, 0], rtol=1e-5)
    assert np.corrcoef(guide.U, model_arrows.U)[0, 1] > 0.95


def test_weights():
    weights = 0.5 * np.random.default_rng(0).normal(size=400)
    z = jnp.asarray(DRAWS)
    draws = GuideDraws(z, jnp.asarray(weights, jnp.float32), -z, jnp.zeros(400), jnp.zeros(400))
    found = khat(draws)
    left, right = plots.plot_weights(found).axes
    raw = left.lines[0].get_ydata()
    np.testing.assert_allclose(np.exp(raw).sum(), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.diff(raw), np.diff(np.sort(weights)[::-1]), atol=1e-4)
    assert right.get_title() == found.verdict


@pytest.mark.parametrize("has_info", [True, False])
def test_convergence(has_info):
    info = SimpleNamespace(
        discrepancy=np.array([1.0, 0.1]),
        discrepancy_error=np.array([0.1, 0.01]),
        trace_steps=np.array([100, 400]),
        best_step=400,
    )
    result = SimpleNamespace(losses=np.arange(400.0), **({"info": info} if has_info else {}))
    figure = plots.plot_convergence(result)
    steps, losses = figure.axes[0].lines[0].get_data()
    np.testing.assert_allclose([steps[-1], losses[0]], [400, 0.5])
    assert len(figure.axes) == 1 + has_info
    if has_info:
        np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), info.discrepancy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((DRAWS[:, :1],), "samples: expected 2 to 8 columns; got 1"),
        ((DRAWS, ["one"]), "names: expected 2, one for each column of the samples; got 1"),
    ],
)
def test_misuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_pairs(*arguments)


@pytest.mark.thorough
def test_diagnose(capsys):
    """The posterior itself is good, in print too; other guides are in ``test_diagnose``."""
    params = {"loc": MEAN, "scale": SD * jnp.ones(2)}
    svi = SVI(model, implicit_guide, optax.adam(1e-2), ImplicitELBO())
    result = SVIRunResult(params, SVIState(None, None, KEY), jnp.array([2.0, 1.0]))
    found = diagnose(svi, result, DATA, num_samples=4_000)
    # The answer is printed by who asks, once.
    assert not capsys.readouterr().out
    assert found.verdict == "good", found


@pytest.mark.thorough
def test_vsbc_of_a_conjugate_model():
    svi = SVI(model, explicit_guide, optax.adam(3e-2), Trace_ELBO(8))
    found = vsbc(
        svi, KEY, num_simulations=20, num_svi_steps=300, num_samples=100, observed_sites=["y"]
    )
    figure = plots.plot_vsbc(found)
    assert [panel.get_title()[:4] for panel in figure.axes] == ["z[0]", "z[1]"]
    counts = [sum(patch.get_height() for patch in panel.patches) for panel in figure.axes]
    assert counts == [20, 20]
    with pytest.raises(TypeError, match="rng_key: expected one random key such as .*; got 0"):
        vsbc(svi, 0, observed_sites=["y"])


@pytest.mark.slow
def test_vsbc_looks_for_a_start_in_every_data_set():
    """Posteriors are a hundredth of the prior wide: no fit gets from the start of another to them.

    Nothing may come from the data the guide has seen, either.
    """

    def sharp(y=None):
        loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(loc, 0.1), obs=y)

    few = {"num_simulations": 5, "num_svi_steps": 30, "num_samples": 200, "observed_sites": ["y"]}
    found = []
    for seen in (True, False):
        guide = AutoImplicit(sharp, hidden_dims=(4,))
        if seen:
            guide.set_up(KEY, jnp.asarray(50.0))
        start = guide.start
        svi = SVI(sharp, guide, optax.adam(1e-3), ImplicitELBO(16))
        found.append(vsbc(svi, KEY, **few).probabilities["loc"])
        assert guide.start is start
    np.testing.assert_array_equal(*found)
    # Uniform on 201 values where calibrated, and all at one end where fits do not arrive.
    assert np.all((found[0] > 0) & (found[0] < 1))
    with pytest.raises(ValueError, match="chain_method: expected none .*; got 'vectorized'"):
        vsbc(svi, KEY, chain_method="vectorized", **few)
