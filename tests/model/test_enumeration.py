"""Discrete latents are summed out: densities, gradients and losses are those of marginal models."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan

from numpyro_kscore import Implicit, ImplicitELBO
from numpyro_kscore._model.target import Target
from numpyro_kscore._transports.centering import Centering
from support.compiling import quick_jit
from support.coordinates import coordinates_of
from support.doubles import GaussianScore
from support.enumerated import (
    chained_sizes,
    chained_switch,
    hmm,
    in_rows,
    local_latents,
    masked_hmm,
    mixture,
    topics,
)

KEY = random.key(0)
RNG = np.random.default_rng(1)
MIXTURE = {"weights": RNG.normal(size=2), "spread": np.array(0.3), "means": RNG.normal(size=3)}
HALF = Centering(np.zeros(3), np.full(3, 0.5), np.ones(3))
CASES = {
    "plate": (mixture, MIXTURE, {}),
    "non-centered": (
        mixture,
        MIXTURE,
        {"means": HALF},
    ),
    "subsampled": (in_rows(partial(mixture, rows=3), rows=[1, 4, 6]), MIXTURE, {}),
    "local latents": (
        in_rows(local_latents, rows=[0, 3, 5]),
        {"share": np.array(0.2), "x": RNG.normal(size=3)},
        {},
    ),
    "hidden Markov": (hmm, {"means": RNG.normal(size=3), "sd": np.array(0.1)}, {}),
    "masked steps": (masked_hmm, {"means": RNG.normal(size=3)}, {}),
    "chain with others": (chained_switch, {"means": RNG.normal(size=3)}, {}),
    "chain with sizes and factors": (
        chained_sizes,
        {"rate": np.array(0.3), "sizes": RNG.normal(size=(7, 2))},
        {},
    ),
    "plates in plates": (
        in_rows(partial(topics, rows=2), documents=[1, 3]),
        {"topic": RNG.normal(size=(3, 4)), "share": RNG.normal(size=(2, 2))},
        {},
    ),
}
# They have parts of the others, one by one.
THOROUGH = {
    "plate", "hidden Markov", "chain with others", "local latents", "masked steps",
    "plates in plates", "non-centered",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in THOROUGH else name
        for name in CASES
    ],
)
def test_density_and_gradient_are_those_of_the_marginal_model(x64, name):
    model, coordinates, centerings = CASES[name]
    forms = (coordinates_of(coordinates, centerings),) if centerings else ()

    def density(at, by_hand):
        target = Target(model, (), {"by_hand": by_hand}, coordinates=forms, key=KEY)
        return target.log_density(at)

    coordinates = jax.tree.map(jnp.asarray, coordinates)
    both = quick_jit(lambda at: [jax.value_and_grad(density)(at, b) for b in (False, True)])(
        coordinates
    )
    found, expected = map(jax.tree.leaves, both)
    assert len(found) == 1 + len(coordinates)
    for of_model, by_hand in zip(found, expected, strict=True):
        np.testing.assert_allclose(of_model, by_hand, rtol=1e-9, atol=1e-9)


def test_loop_over_time_has_the_marginal_density():
    def density(at, **options):
        return Target(hmm, (), options).log_density(at)

    at = {"means": jnp.array([-1.0, 0.4, 1.5]), "sd": jnp.array(0.1)}
    found = quick_jit(lambda at: [density(at, as_loop=True), density(at, by_hand=True)])(at)
    # Sums of seven terms of order ten in single precision.
    np.testing.assert_allclose(*found, rtol=2e-6)


def guide(*args, **kwargs):
    loc = numpyro.param("loc", jnp.linspace(-0.5, 0.5, 6))
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(6), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    x = loc + 0.3 * noise
    numpyro.sample("weights", Implicit(dist.biject_to(dist.constraints.simplex)(x[:2]), 1))
    numpyro.sample("spread", Implicit(jnp.exp(x[2])))
    centering = jnp.array([0.2, 0.5, 1.0])
    means = x[3:] / jnp.sqrt(centering + (1 - centering) * jnp.exp(-2 * x[2]))
    numpyro.sample("means", Implicit(means, 1, unconstrained=x[3:]))
    degrees = {"means": Centering(centering, jnp.zeros(3), jnp.zeros(3))}
    coordinates = coordinates_of({"weights": x[:2], "spread": x[2], "means": x[3:]}, degrees)
    coordinates.announce("_coordinates")


@pytest.mark.thorough
def test_loss_of_minibatches_is_that_of_the_marginal_model(x64):
    elbo = ImplicitELBO(16, estimator=GaussianScore())
    params = {"loc": jnp.linspace(-0.4, 0.6, 6)}

    def loss(params, by_hand):
        model = partial(mixture, rows=3, by_hand=by_hand)
        return elbo.loss(KEY, params, model, guide)

    both = [quick_jit(jax.value_and_grad(partial(loss, by_hand=b)))(params) for b in (False, True)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), *both)
    # Against a scale that is forgotten: the density of all rows is more than twice that of three.
    assert abs(both[0][0]) > 1.0


@pytest.mark.parametrize("scale", [0.5, np.array([0.5, 1.0, 2.0])])
def test_scaled_factors_are_scaled_before_values_are_summed_over(scale):
    """``handlers.scale`` scales each factor, as in NumPyro's density of enumerated models."""
    y, x = np.array([-1.0, 0.5, 2.0]), 0.3

    def model():
        x = numpyro.sample("x", dist.Normal())
        with numpyro.plate("rows", 3):
            kind = numpyro.sample("kind", dist.Bernoulli(0.3))
            with handlers.scale(scale=scale):
                numpyro.sample("y", dist.Normal(x + 2.0 * kind, 1.0), obs=y)

    found = quick_jit(lambda x: Target(model, (), {}).log_density({"x": x}))(x)
    of_each = [
        np.log(share) + scale * (-0.5 * (y - x - 2 * kind) ** 2 - 0.5 * np.log(2 * np.pi))
        for kind, share in ((0, 0.7), (1, 0.3))
    ]
    expected = np.sum(np.logaddexp(*of_each)) - 0.5 * x**2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_deterministic_sites_of_discrete_latents_have_no_value():
    def model():
        x = numpyro.sample("x", dist.Normal())
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        numpyro.deterministic("of_x", 2 * x)
        numpyro.deterministic("of_both", x + kind)

    found = Target(model, (), {}).sites({"x": jnp.array(1.5)})
    assert {name: float(value) for name, value in found.items()} == {"x": 1.5, "of_x": 3.0}


def first_loss(model, guide):
    elbo = ImplicitELBO(16, estimator=GaussianScore())
    return jax.eval_shape(lambda key: elbo.loss(key, {}, model, guide), KEY)


def one_guide():
    noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
    numpyro.sample("x", Implicit(noise))


def poisson():
    numpyro.sample("count", dist.Poisson(jnp.exp(numpyro.sample("x", dist.Normal()))))


def one_by_one():
    x = numpyro.sample("x", dist.Normal())
    numpyro.sample("kind", dist.Bernoulli(logits=x), infer={"enumerate": "sequential"})


def without_plate():
    x = numpyro.sample("x", dist.Normal())
    numpyro.sample("kind", dist.Bernoulli(logits=x).expand([3]))


def discrete_vector():
    x = numpyro.sample("x", dist.Normal())
    numpyro.sample("kind", dist.Bernoulli(logits=x).expand([3]).to_event(1))


def discrete_outside_of_minibatches():
    x = numpyro.sample("x", dist.Normal())
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    with numpyro.plate("rows", 7, subsample_size=3) as index:
        numpyro.sample("y", dist.Normal(x + kind, 1.0), obs=jnp.arange(7.0)[index])


def one_row_of_many():
    x = numpyro.sample("x", dist.Normal())
    with numpyro.plate("rows", 7, subsample_size=1) as index:
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(x + kind, 1.0), obs=jnp.arange(7.0)[index])


def support_of_values():
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    numpyro.sample("x", dist.Uniform(0.0, 1.0 + kind))


def switching():
    def step(kind, y):
        kind = numpyro.sample("kind", dist.Categorical(jnp.eye(2)[kind] * 0.8 + 0.1))
        x = numpyro.sample("x", dist.Normal(1.0 * kind, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
        return kind, None

    scan(step, 0, jnp.arange(4.0))


def guide_in_time():
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(4), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    numpyro.sample("x", Implicit(noise))


def crossed():
    """Every pair of a row's and a column's value has a factor: no order of sums is cheap."""
    x = numpyro.sample("x", dist.Normal())
    rows, columns = numpyro.plate("rows", 3, dim=-2), numpyro.plate("columns", 2, dim=-1)
    with rows:
        first = numpyro.sample("first", dist.Bernoulli(0.5))
    with columns:
        second = numpyro.sample("second", dist.Bernoulli(0.5))
    with rows, columns:
        numpyro.sample("y", dist.Normal(x + first * second, 1.0), obs=jnp.ones((3, 2)))


def drawing_guide():
    one_guide()
    numpyro.sample("kind", dist.Bernoulli(0.5))


@pytest.mark.parametrize(
    ("model", "guide", "message"),
    [
        (poisson, one_guide, "finitely many values.*'count' from Poisson.*Sum it out"),
        (one_by_one, one_guide, "'parallel'.*at 'kind'; got 'sequential'"),
        (without_plate, one_guide, r"dimension -1 of 'kind', of size 3.*numpyro.plate(?!, or)"),
        (discrete_vector, one_guide, r"single numbers.*'kind', whose event has the shape \(3,\)"),
        (discrete_outside_of_minibatches, one_guide, r"'kind' outside of \['rows'\], where 'y'"),
        (one_row_of_many, one_guide, r"at least two rows.*one of \['rows'\] at 'kind'"),
        (support_of_values, one_guide, "support of 'x' that depends on no discrete"),
        (switching, guide_in_time, "inside a scan.*got 'x'"),
        (crossed, one_guide, r"can sum out; got \['first', 'second'\] \(intractable"),
    ],
)
def test_what_cannot_be_summed_out_is_named(model, guide, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        first_loss(model, guide)


def test_guides_draw_no_discrete_latents():
    def model():
        numpyro.sample("kind", dist.Bernoulli(logits=numpyro.sample("x", dist.Normal())))

    with pytest.raises(ValueError, match=r"(?s)no draws of discrete.*got \['kind'\]. Leave"):
        first_loss(model, drawing_guide)


def test_funsor_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "funsor", None)
    with pytest.raises(ImportError, match=r"(?s)expected funsor.*\['kind'\].*kscore\[enum\]"):
        first_loss(mixture_in_one_row, one_guide)


def mixture_in_one_row():
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(kind + numpyro.sample("x", dist.Normal()), 1.0), obs=1.0)


@pytest.mark.thorough
def test_models_without_discrete_latents_do_not_import_funsor():
    program = """
import sys
import jax, numpyro
import numpyro.distributions as dist
from numpyro import handlers
import numpyro_kscore
from numpyro_kscore._model.target import Target
model = lambda: numpyro.sample("x", dist.Normal())
Target(model, (), {}).log_density({"x": jax.numpy.ones(())})
assert "funsor" not in sys.modules
"""
    found = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=120, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
