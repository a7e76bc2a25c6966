"""Partially non-centered coordinates, against the definition of a change of variables."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import AffineTransform, ExpTransform
from scipy import stats

from numpyro_kscore._model.coordinates import (
    hierarchical_sites,
    location_and_scale,
    moved_coordinates,
)
from numpyro_kscore._model.target import Target
from numpyro_kscore._transports.centering import Centering, centered
from support.compiling import quick_jit
from support.coordinates import coordinates_of

SCALE = np.array([[1.5, 0.0, 0.0], [0.4, 0.8, 0.0], [-0.3, 0.2, 1.1]])


def transformed(*steps):
    return lambda loc, scale: dist.TransformedDistribution(
        dist.Normal(0.0, 1.0), [AffineTransform(loc, scale), *steps]
    )


def narrow(loc):
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 10.0))
    with numpyro.plate("effects", 40):
        numpyro.sample("effect", dist.Normal(loc, jnp.exp(log_scale)))


@pytest.mark.parametrize(("loc", "is_lost"), [(1.4, True), (0.0, False)])
def test_effects_that_rounding_makes_equal_have_no_density(loc, is_lost):
    """Single precision puts all at their location, where the density is 20 nats too high."""
    shapes = (("log_scale", ()), ("effect", (40,)))
    values = {"log_scale": 0.0, "effect": np.zeros(40)}
    form = coordinates_of(values, {"effect": np.zeros((3, 40))})
    target = Target(narrow, (loc,), {}, shapes, (form,))
    z = np.random.default_rng(0).normal(size=40)
    exact = stats.norm.logpdf(z).sum()
    for log_scale, far in ((-3.0, False), (-20.0, True)):
        found = target.log_density(jnp.asarray(np.r_[log_scale, z], jnp.float32))
        of_scale = stats.norm.logpdf(log_scale, scale=10.0)
        if far and is_lost:
            assert found == -jnp.inf
        else:
            # Rounding of effects moves them by 1e-6 of their scale here.
            np.testing.assert_allclose(found, exact + of_scale, atol=1e-3)


# From a location and a scale to a distribution of three numbers.
FAMILIES = {
    "Normal": lambda loc, scale: dist.Normal(loc, scale).expand([3]),
    "StudentT": lambda loc, scale: dist.StudentT(4.0, loc, scale).expand([3]).to_event(1),
    "Laplace": lambda loc, scale: dist.Laplace(loc, scale).expand([3]),
    "Cauchy": lambda loc, scale: dist.Cauchy(loc, scale).expand([3]),
    "Logistic": lambda loc, scale: dist.Logistic(loc, scale).expand([3]),
    "Gumbel": lambda loc, scale: dist.Gumbel(loc, scale).expand([3]),
    "LogNormal": lambda loc, scale: dist.LogNormal(loc, scale).expand([3]),
    "HalfNormal": lambda loc, scale: dist.HalfNormal(scale).expand([3]),
    "HalfCauchy": lambda loc, scale: dist.HalfCauchy(scale).expand([3]),
    "Weibull": lambda loc, scale: dist.Weibull(scale, 1.5).expand([3]),
    "Exponential": lambda loc, scale: dist.Exponential(1 / scale).expand([3]),
    "Gamma": lambda loc, scale: dist.Gamma(2.0, 1 / scale).expand([3]),
    "InverseGamma": lambda loc, scale: dist.InverseGamma(3.0, scale).expand([3]),
    "affine": lambda loc, scale: transformed()(loc, scale).expand([3]),
    "exponential of affine": lambda loc, scale: transformed(ExpTransform())(loc, scale).expand([3]),
    "MultivariateNormal": lambda loc, scale: dist.MultivariateNormal(
        jnp.full(3, loc), scale_tril=scale * jnp.asarray(SCALE)
    ),
    "MultivariateStudentT": lambda loc, scale: dist.MultivariateStudentT(
        5.0, jnp.full(3, loc), scale * jnp.asarray(SCALE)
    ),
    "GaussianRandomWalk": lambda loc, scale: dist.GaussianRandomWalk(scale, 3),
}


def of_degrees(degrees):
    return Centering(
        jnp.asarray(degrees), jnp.zeros(np.shape(degrees)), jnp.zeros(np.shape(degrees))
    )


def density_of_coordinate(fn, v, centering):
    """Log density of v, and v itself by the way back."""
    prior = location_and_scale(fn)
    given = centered(prior, centering)
    u, log_det = given.push(v), given.log_volumes(v)
    transform = biject_to(fn.support)
    x = transform(u)
    inner = jnp.sum(transform.log_abs_det_jacobian(u, x))
    value = jnp.sum(fn.log_prob(x)) + inner + jnp.sum(log_det)
    return value, given.invert(u), u


@pytest.mark.parametrize("name", FAMILIES)
def test_non_centered_coordinates_do_not_know_location_and_scale(name, x64):
    v, zeros = jnp.array([-0.7, 0.3, 1.9]), of_degrees(np.zeros(3))
    values = []
    evaluate = quick_jit(lambda *at: density_of_coordinate(FAMILIES[name](*at), v, zeros))
    for loc, scale in ((0.0, 1.0), (2.5, 0.01), (-40.0, 7.0)):
        value, back, _ = evaluate(loc, scale)
        np.testing.assert_allclose(back, v, rtol=1e-9)
        values.append(value)
    np.testing.assert_allclose(values, values[0], rtol=1e-9)


@pytest.mark.parametrize("name", ["Normal", "HalfCauchy", "MultivariateNormal"])
def test_the_jacobian_is_that_of_the_map(name, x64):
    fn = FAMILIES[name](1.3, 0.2)
    prior, v = location_and_scale(fn), np.array([0.4, -1.0, 0.1])
    kind = Centering(*jnp.array([[0, 0.3, 1], [0, -1.5, 0], [0, 2.0, 0]]))

    @quick_jit
    def evaluate(v):
        given = centered(prior, kind)
        unchanged = centered(prior, of_degrees(np.ones(3))).push(v)
        back = density_of_coordinate(fn, v, kind)[1]
        return jax.jacfwd(given.push)(v), given.log_volumes(v), back, unchanged

    jacobian, log_det, back, unchanged = map(np.asarray, evaluate(v))
    np.testing.assert_allclose(np.linalg.slogdet(jacobian)[1], np.sum(log_det), rtol=1e-9)
    np.testing.assert_allclose(back, v, rtol=1e-9)
    np.testing.assert_array_equal(unchanged, v)


def test_there_is_no_funnel_where_the_data_are_a_normal_observation(x64):
    """Conjugacy gives the coordinate, given its scale, a normal with one mean and one sd."""
    rng = np.random.default_rng(2)
    y, noise, loc, typical = 3.0, 0.7, -1.0, 0.4
    degree = typical**2 / (typical**2 + noise**2)
    kind = Centering(*jnp.array([degree, np.log(typical), y]))
    for scale in (1e-3, 0.4, 50.0):
        precision = 1 / scale**2 + 1 / noise**2
        mean = (loc / scale**2 + y / noise**2) / precision
        u = jnp.asarray(mean + rng.normal(size=5) / precision**0.5)
        prior = location_and_scale(dist.Normal(loc, scale))
        v = centered(prior, Centering(*(jnp.full(5, a) for a in kind))).invert(u)
        expected = (u - mean) * precision**0.5 * noise * degree**0.5
        np.testing.assert_allclose(v, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    "fn",
    [
        lambda: dist.Uniform(0.0, 2.0),
        lambda: dist.TruncatedNormal(0.0, 1.0, low=0.0),
        lambda: dist.Dirichlet(jnp.ones(3)),
        lambda: dist.LKJCholesky(3, 1.0),
        lambda: dist.Beta(2.0, 2.0),
        lambda: dist.TransformedDistribution(dist.HalfNormal(1.0), AffineTransform(1.0, 2.0)),
    ],
    ids=["Uniform", "TruncatedNormal", "Dirichlet", "LKJCholesky", "Beta", "transformed"],
)
def test_families_without_location_and_scale_have_none(fn):
    found = []
    # Seen, not computed.
    jax.eval_shape(lambda: found.append(location_and_scale(fn())))
    assert found == [None]


def nested():
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = numpyro.sample("spread", dist.HalfNormal(2.0))
    rate = numpyro.sample("rate", dist.HalfNormal(spread))
    with numpyro.plate("groups", 3):
        group = numpyro.sample("group", dist.Normal(mean, spread))
        with numpyro.plate("times", 2):
            effect = numpyro.sample("effect", dist.StudentT(4.0, group, rate))
    numpyro.sample("plain", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(effect, 1.0), obs=jnp.ones((2, 3)))


def values_of(model, key=0):
    trace = handlers.trace(handlers.seed(model, key)).get_trace()
    return {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def test_hierarchical_sites_are_read_off_the_model():
    assert hierarchical_sites(nested, (), {}, values_of(nested)) == ("rate", "group", "effect")


def test_priors_that_depend_on_hidden_draws_are_left_out():
    part = handlers.block(nested, hide=["spread"])
    latents = {n: v for n, v in values_of(nested).items() if n != "spread"}
    assert hierarchical_sites(part, (), {}, latents) == ("effect",)


@pytest.mark.thorough
def test_the_density_of_a_nested_model(x64):
    """Against the centered model, the Jacobian by automatic differentiation."""
    values = jax.eval_shape(lambda: values_of(nested))
    names = list(values)
    centering = {
        "rate": of_degrees(0.5),
        "group": Centering(*jnp.array([[0.0, 0.3, 1.0], [0.0, 0.8, 0.0], [0.0, -1.1, 0.0]])),
        "effect": of_degrees(np.full((2, 3), 0.7)),
    }
    v = {name: np.full(np.shape(values[name]), 0.3 + 0.1 * k) for k, name in enumerate(names)}
    flat = np.concatenate([np.ravel(v[name]) for name in names])
    coordinates = coordinates_of(values, centering)
    plain = Target(nested, (), {}, coordinates.shapes)
    target = plain._replace(coordinates=(coordinates,))

    @quick_jit
    def evaluate(v, flat):
        expected = plain.log_density(target.unconstrained(flat))
        expected = expected + jnp.linalg.slogdet(jax.jacfwd(target.unconstrained)(flat))[1]
        back = moved_coordinates(target.trace(v), names, centering)
        return target.log_density(flat), expected, back

    got, expected, back = evaluate(v, flat)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    for name in names:
        np.testing.assert_allclose(back[name], v[name], rtol=1e-9)


def walk():
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))

    def step(last, _):
        value = numpyro.sample("x", dist.Normal(last, scale))
        return value, value

    scan(step, 0.0, None, length=4)


def test_latents_inside_a_scan(x64):
    """Non-centered coordinates of a random walk are its standardized steps."""
    assert hierarchical_sites(walk, (), {}, values_of(walk)) == ("x",)
    steps, scale = np.array([0.5, -1.0, 2.0, 0.1]), 0.3
    v = {"scale": np.log(scale), "x": steps}
    zeros = coordinates_of(v, {"x": of_degrees(np.zeros(4))})
    target = Target(walk, (), {}, zeros.shapes, (zeros,))

    @quick_jit
    def evaluate(v):
        return target.trace(v)["x"]["value"], target.log_density(v)

    x, density = evaluate(v)
    np.testing.assert_allclose(x, scale * np.cumsum(steps), rtol=1e-9)
    expected = stats.norm.logpdf(steps).sum() + stats.halfnorm.logpdf(scale) + np.log(scale)
    np.testing.assert_allclose(density, expected, rtol=1e-9)


def test_a_prior_that_changes_its_family_is_refused():
    def model():
        numpyro.sample("x", dist.Uniform(0.0, 1.0))

    half = coordinates_of({"x": 0.0}, {"x": of_degrees(0.5)})
    with pytest.raises(ValueError, match="expected a prior with location and scale at site 'x'"):
        Target(model, (), {}, half.shapes, (half,)).log_density(jnp.zeros(1))
