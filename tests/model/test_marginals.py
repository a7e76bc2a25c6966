"""Latents that are functions of normal numbers, as coordinates of a model."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_kscore._model.coordinates import (
    LatentCoordinates,
    announced_coordinates,
    independent_sites,
)
from numpyro_kscore._model.target import Target
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.stretch import Marginals
from support.coordinates import densities


def model():
    scales = numpyro.sample("scales", dist.HalfNormal(2.0).expand([2]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    own = numpyro.sample("own", dist.HalfCauchy(scales[0]))
    with numpyro.plate("people", 3):
        share = numpyro.sample("share", dist.Beta(2.0, 3.0))
        numpyro.sample("y", dist.Normal(share * own + mean, scales[1]), obs=jnp.arange(3.0))


SHAPES = (("scales", (2,)), ("mean", ()), ("own", ()), ("share", (3,)))
LATENTS = {name: jnp.zeros(shape) for name, shape in SHAPES}


def coordinates(rng):
    rates = np.zeros((7, 7))
    rates[2, 0] = 0.5
    marginals = Marginals(rng.normal(size=7), np.exp(rng.normal(size=(7, 10))))
    sizes = Sizes(rates, np.zeros(7))
    return LatentCoordinates(None, sizes, SHAPES, (), ("mean",), marginals, ("scales", "share"))


def test_the_density_is_that_of_the_coordinates(x64):
    rng = np.random.default_rng(0)
    given = coordinates(rng)
    target = Target(model, (), {}, SHAPES, (given,))
    flat = rng.normal(size=7)
    found, expected, density = densities(target, flat)
    np.testing.assert_allclose(density, expected, rtol=1e-10)
    is_shaped = np.array([True, True, False, False, True, True, True])
    images = given.marginals.push(flat)
    np.testing.assert_allclose(found[is_shaped], images[is_shaped], rtol=1e-12)
    assert found[3] == flat[3]


def test_functions_are_inverted_far_out_too():
    rng = np.random.default_rng(1)
    marginals = coordinates(rng).marginals
    points = 6 * rng.standard_normal((50, 7))
    np.testing.assert_allclose(marginals.invert(marginals.push(points)), points, atol=1e-10)


def test_they_are_announced_under_a_scope():
    given = coordinates(np.random.default_rng(0))
    inner = handlers.scope(lambda: given.announce("_auto_coordinates"), "inner")
    (found,) = announced_coordinates(handlers.trace(inner).get_trace())
    assert found.shaped == ("inner/scales", "inner/share")
    assert found.marginals is given.marginals


def test_latents_with_a_prior_of_their_own_are_known():
    """They are bounded, and their priors depend on no other latent and on nothing unknown."""
    assert independent_sites(model, (), {}, LATENTS) == ("scales", "share")

    def more():
        numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("factor", dist.LKJCholesky(3))
        numpyro.sample("real", dist.Cauchy(0.0, 1.0))
        with handlers.scale(scale=2.0):
            numpyro.sample("scaled", dist.HalfNormal(1.0))
        end = numpyro.sample("end", dist.HalfNormal(1.0))
        numpyro.sample("below", dist.Uniform(0.0, end))

    sizes = {"shares": 2, "factor": 3, "real": (), "scaled": (), "end": (), "below": ()}
    latents = {name: jnp.zeros(size) for name, size in sizes.items()}
    values = {**latents, "shares": jnp.ones(3) / 3, "factor": jnp.eye(3)}
    assert independent_sites(more, (), {}, values) == ("shares", "factor", "end")
