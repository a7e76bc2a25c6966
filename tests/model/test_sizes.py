"""Latents whose size varies with others, as coordinates of a model."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers

from numpyro_kscore._model.coordinates import LatentCoordinates, announced_coordinates
from numpyro_kscore._model.target import Target
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.sizes import Sizes
from support.coordinates import coordinates_of, densities


def model():
    scales = numpyro.sample("scales", dist.HalfNormal(2.0).expand([2]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    with numpyro.plate("people", 3):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        share = numpyro.sample("share", dist.Normal(mean, scales[0]))
        numpyro.sample("y", dist.Normal(share + z @ scales, 0.1), obs=jnp.arange(3.0))


# Two scales, a mean, six effects and three shares.
VALUES = {"scales": np.zeros(2), "mean": 0.0, "z": np.zeros((3, 2)), "share": np.zeros(3)}


def test_the_density_is_that_of_the_coordinates(x64):
    rng = np.random.default_rng(0)
    rates = np.zeros((12, 12))
    rates[3:9, :2] = rng.uniform(-0.9, 0.9, (6, 2))
    rates[9:, 2] = rng.uniform(-0.9, 0.9, 3)
    center = np.zeros(12)
    center[:3] = 0.3, -0.2, 0.5
    sizes = Sizes(rates, center)
    # LatentCoordinates are multiplied before the prior's location is added.
    degrees = Centering(*jnp.array([[0.0, 0.4, 1.0], [0.0] * 3, [0.0] * 3]))
    coordinates = coordinates_of(VALUES, {"share": degrees}, sizes, ("z", "share"))
    target = Target(model, (), {}, coordinates.shapes, (coordinates,))
    flat = rng.normal(size=12)
    found, expected, density = densities(target, flat)
    change = rates[3:9, :2] @ (flat[:2] - center[:2])
    share = np.max(np.abs(rates[3:9]), axis=1)
    size = (1 - share + share * np.exp(2 * change / share)) ** -0.5
    np.testing.assert_allclose(found[3:9], flat[3:9] * size, rtol=1e-12)
    np.testing.assert_allclose(density, expected, rtol=1e-10)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_sizes_are_posterior_widths(scale):
    """A normal effect with unit errors has the width 1 / √(1 + scale²) in units of its scale."""
    center = 1.5  # of the scale
    rates = np.array([[0.0, 0.0], [center**2 / (1 + center**2), 0.0]])
    sizes = Sizes(rates, np.array([np.log(center), 0.0]))
    found = np.exp(sizes.log_sizes(np.array([np.log(scale), 0.0]))) / (1 + center**2) ** 0.5
    np.testing.assert_allclose(found[1], (1 + scale**2) ** -0.5, rtol=1e-10)


def test_coordinates_are_announced_under_a_scope():
    """Latents have other names inside of a scope, and so have those of their coordinates."""
    coordinates = LatentCoordinates(None, None, (("z", (2,)),), ("z",))

    def guide():
        coordinates.announce("_auto_coordinates")

    trace = handlers.trace(handlers.seed(guide, random.key(0))).get_trace()
    assert announced_coordinates(trace) == (coordinates,)
    trace = handlers.trace(handlers.scope(guide, "inner")).get_trace()
    (found,) = announced_coordinates(trace)
    assert found.shapes == (("inner/z", (2,)),)
    assert found.hierarchical == ("inner/z",)
