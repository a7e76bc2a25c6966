"""Verdicts on draws whose faults are known, and on models that are hard to differentiate."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_kscore import Implicit, ImplicitELBO, diagnose, evaluate_guide
from numpyro_kscore._model.layout import Site
from numpyro_kscore._model.tall_density import ModelDensity
from numpyro_kscore.diagnostics._chains import ChainProgram, fit_metric
from numpyro_kscore.diagnostics._examine import examine
from numpyro_kscore.diagnostics._missed_modes import UNSEARCHED, far_points
from numpyro_kscore.diagnostics._movement import Walk

KEY = random.key(0)
SITES = (Site("z", (2,), 0, ()),)
# Standard deviations 1 and 1000, correlated: a stiff valley.
ROOT = np.array([[1.0, 0.0], [900.0, 400.0]])


@jax.value_and_grad
def valley(x):
    return -0.5 * jnp.sum((jnp.asarray(np.linalg.inv(ROOT), x.dtype) @ x) ** 2)


@jax.value_and_grad
def pair(x):
    return jnp.logaddexp(-0.5 * jnp.sum((x - 4.0) ** 2), -0.5 * jnp.sum((x + 4.0) ** 2))


def funnel(x):
    """The unconstrained values of a pair whose second is standardized by the first."""
    return jnp.stack([x[:, 0], jnp.exp(0.5 * x[:, 0]) * x[:, 1]], axis=1)


@pytest.mark.thorough
def test_moments_are_those_of_unconstrained_values():
    """A shift of .3 of z moves the mean of u = exp(v/2) z by .3 exp(1/8), of an sd of exp(1/4)."""
    density = jax.value_and_grad(lambda x: -0.5 * jnp.sum(x**2))
    points = jnp.asarray(noise() + np.array([0.0, 0.3]), jnp.float32)
    walk = Walk(ChainProgram(density, fit_metric(points)), points, KEY, 128, funnel)
    walk.prolong(12)
    found = walk.movement()
    exact = np.array([0.0, 0.3 * np.exp(-0.125)])
    assert np.all(np.abs(found.shift - exact) < 4 * found.shift_error)
    assert np.all(found.shift_error < 0.03)
    # Variances are 1 and exp(1/2), those of the draws 1 and (1 + .09) exp(1/2) - .09 exp(1/4).
    ratio = np.sqrt([1.0, 1.09 - 0.09 * np.exp(-0.25)])
    assert np.all(np.abs(found.ratio / ratio - 1) < 4 * found.ratio_error)


def noise(n=4_000):
    return np.random.default_rng(0).normal(size=(n, 2))


@pytest.mark.parametrize(
    ("scale", "shift", "verdict", "codes"),
    [
        ((1.0, 1.0), 0.0, "good", ("nothing found",)),
        ((0.95, 1.05), 0.05, "good", ("nothing found",)),
        ((0.8, 0.8), 0.0, "bad", ("too narrow",)),
        ((0.35, 0.35), 0.0, "bad", ("collapsed",)),
        # Only moments of coordinates are judged: that of the valley's width is in none.
        ((1.3, 0.3), 0.0, "bad", ("too wide",)),
        ((1.0, 1.0), 0.3, "bad", ("mean off",)),
    ],
)
@pytest.mark.thorough
def test_a_gaussian_guide_of_a_stiff_valley(scale, shift, verdict, codes):
    """The report is within four standard errors of the error that was given to the guide."""
    z = noise() * np.asarray(scale)
    z[:, 0] += shift
    found = examine((z @ ROOT.T).astype(np.float32), ModelDensity(valley), SITES, KEY)
    assert found.verdict == verdict
    assert found.codes == codes
    assert found.modes.num_missed == 0
    assert found.modes.num_arrived == found.modes.num_paths
    sd = np.linalg.norm(ROOT, axis=1)
    move = found.movement
    exact = ROOT @ np.array([shift, 0.0]) / sd
    np.testing.assert_array_less(np.abs(move.shift - exact), 4 * move.shift_error)
    ratio = np.linalg.norm(ROOT * np.asarray(scale), axis=1) / sd
    np.testing.assert_array_less(np.abs(np.log(move.ratio / ratio)), 4 * move.ratio_error)


@pytest.mark.thorough
def test_what_a_search_for_modes_could_not_see_is_said():
    found = examine((noise() @ ROOT.T).astype(np.float32), ModelDensity(valley), SITES, KEY)
    paths = found.modes.num_paths
    assert str(found).endswith(f"{paths} of {paths} ascents arrived at a maximum; 0 mode(s) missed")
    lost = found._replace(modes=found.modes._replace(num_arrived=0))
    assert f"none of {paths} ascents arrived at a maximum" in str(lost)
    assert str(found._replace(modes=UNSEARCHED)).endswith("modes were not searched for")


@pytest.mark.thorough
def test_one_of_two_equal_modes():
    x = noise().astype(np.float32)
    found = examine(x + 4.0, ModelDensity(pair), SITES, KEY)
    assert found.verdict == "bad"
    assert found.codes == ("mode missed",)
    assert found.modes.num_missed == 1
    # The mean of 512 log densities, of variance 1, enters as 1/4 of its error.
    np.testing.assert_allclose(found.modes.share, 0.5, atol=4 * 512**-0.5 / 4)
    # With both modes nothing is missed; chains seldom get from one to the other, and say so.
    sides = np.where(np.arange(len(x)) % 2, 4.0, -4.0)[:, None].astype(np.float32)
    both = examine(x + sides, ModelDensity(pair), SITES, KEY)
    assert both.modes.num_missed == 0
    assert both.verdict == "cannot tell"


@pytest.mark.thorough
def test_a_mode_counts_by_the_density_itself():
    """Rows that stand for all do so near the draws, and what they say elsewhere may be wrong."""

    def exact(height):
        def values(points):
            left, right = (-0.5 * (points[:, 0] - a) ** 2 for a in (-4.0, 4.0))
            return jnp.logaddexp(height + left, right)

        return values

    x = (noise() + 4.0).astype(np.float32)
    shares = {}
    for height in (-20.0, 0.0, 1.0):
        found = examine(x, ModelDensity(pair, exact=exact(height)), SITES, KEY)
        assert found.modes.num_missed == (height >= 0)
        shares[height] = found.modes.share
    assert shares[-20.0] == 0.0
    # As above.
    for height in (0.0, 1.0):
        expected = 1 / (1 + np.exp(-height))
        np.testing.assert_allclose(shares[height], expected, atol=4 * 512**-0.5 / 4)


def test_far_points_exchange_labels():
    sites = (Site("means", (2,), 0, ()), Site("scales", (3, 2), 2, ()), Site("noise", (), 8, ()))
    row = np.arange(9.0)
    found = far_points(sites, np.tile(row, (20, 1)), 9, np.random.default_rng(0))
    assert found.shape == (9, 9)
    assert np.abs(found[0::3]).max() <= 2
    # Axes of length 2 and of length 3 in turn.
    np.testing.assert_array_equal(found[2], [1, 0, 3, 2, 5, 4, 7, 6, 8])
    assert sorted(found[5]) == list(row)
    np.testing.assert_array_equal(found[5, [0, 1, 8]], [0, 1, 8])


@jax.custom_vjp
def square(x):
    return x**2


# A rule for reverse mode alone, as that of ``odeint``.
square.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))


def by_a_loop(x):
    """Half of x², by a loop of unknown length."""
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + x**2 / 4), (0, 0.0))[1]


def unseen(energy):
    """A standard normal prior of two latents, by a factor: nothing is observed."""

    def model():
        flat = dist.ImproperUniform(dist.constraints.real_vector, (), (2,))
        z = numpyro.sample("z", flat)
        numpyro.factor("energy", -(energy(z[0]) + energy(z[1])))

    return model


def guide():
    unit = dist.Normal(jnp.zeros(2), 1.0).to_event(1)
    z = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
    numpyro.sample("z", Implicit(numpyro.param("scale", jnp.ones(2)) * z, 1))


def fitted(energy, **settings):
    svi = SVI(unseen(energy), guide, optax.adam(1e-2), ImplicitELBO(**settings))
    return svi, SVIRunResult({"scale": jnp.ones(2)}, SVIState(None, None, KEY), jnp.zeros(1))


@pytest.mark.parametrize(
    ("energy", "settings"),
    [
        (lambda x: square(x) / 2, {}),
        (by_a_loop, {"forward_mode_differentiation": True}),
    ],
    ids=["custom rule", "loop"],
)
@pytest.mark.thorough
def test_models_with_one_mode_of_differentiation(energy, settings):
    svi, result = fitted(energy, **settings)
    found = diagnose(svi, result, num_samples=4_000)
    assert found.verdict == "good"
    assert found.names == ("z[0]", "z[1]")
    assert "verdict: good" in str(found)
    draws = evaluate_guide(svi, result, num_samples=100)
    np.testing.assert_allclose(draws.scores, -draws.samples, atol=1e-5)
    # The Hessian is -I.
    covariance = np.cov(np.asarray(draws.samples).T, bias=True)
    np.testing.assert_allclose(draws.laplacian, -np.trace(covariance), rtol=1e-4)


@pytest.mark.thorough
def test_bounded_latents_themselves_are_weighed():
    """Draws are log-normal, and their logarithms have an sd of .55 in place of .5.

    A variable without a variance, and numbers that do not vary, are left out.
    """

    def model():
        numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("wide", dist.HalfCauchy(1))
        numpyro.sample("matrix", dist.LKJ(2, 2.0))
        with numpyro.plate("sizes", 2):
            numpyro.sample("size", dist.LogNormal(0, 0.5))

    def guide():
        numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("wide", dist.HalfCauchy(1))
        numpyro.sample("matrix", dist.LKJ(2, 2.0))
        with numpyro.plate("sizes", 2):
            numpyro.sample("size", dist.LogNormal(0, 0.55))

    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    result = SVIRunResult({}, SVIState(None, None, KEY), jnp.zeros(1))
    found = diagnose(svi, result, num_samples=4_000, progress_bar=False)
    values = found.values
    sizes = [values.names.index(name) for name in ("size[0]", "size[1]")]
    assert set(values.names) == {"size[0]", "size[1]", "matrix[0,1]", "matrix[1,0]"}
    guide_sd, model_sd = (np.sqrt(np.expm1(s**2) * np.exp(s**2)) for s in (0.55, 0.5))
    errors = values.weights.ratio[sizes] / (guide_sd / model_sd) - 1
    assert np.all(np.abs(errors) < 4 * values.weights.ratio_error[sizes])
    assert np.all(values.weights.ratio_error < 0.05)
    assert "bounded latents themselves, such as scales: 1." in str(found)
