"""Noise of a guide that may be drawn once, for all passes over its particles."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_kscore import Implicit
from numpyro_kscore._model.program import Program, inspect_program

AUXILIARY = {"is_auxiliary": True}


def model():
    numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("b", dist.Normal(0.0, 1.0))


def noise(name="noise", sd=1.0):
    return numpyro.sample(name, dist.Normal(0.0, sd), infer=AUXILIARY)


def rest(value):
    numpyro.sample("b", Implicit(value))


def plain():
    z = noise()
    numpyro.sample("a", Implicit(z))
    rest(numpyro.param("shift", 0.3) + z * noise("more"))


def scaled_by_a_parameter():
    numpyro.sample("a", Implicit(noise(sd=numpyro.param("sd", 1.0))))
    rest(noise("more"))


def scaled_by_noise():
    numpyro.sample("a", Implicit(noise("more", sd=jnp.exp(noise()))))
    rest(noise("third"))


def beside_a_density():
    numpyro.sample("a", dist.Normal(0.0, 1.0))
    rest(noise())


def beside_a_key():
    numpyro.sample("a", Implicit(random.normal(numpyro.prng_key())))
    rest(noise())


def on_drawn_rows():
    with numpyro.plate("rows", 6, subsample_size=3):
        z = noise()
    numpyro.sample("a", Implicit(z[0]))
    rest(z[1])


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (plain, ("noise", "more")),
        (scaled_by_a_parameter, ()),
        (scaled_by_noise, ()),
        (beside_a_density, ()),
        (beside_a_key, ()),
        (on_drawn_rows, ()),
    ],
)
def test_noise_is_drawn_once_if_nothing_else_is_random(guide, expected):
    params = {"shift": jnp.float32(0.3), "sd": jnp.float32(2.0)}
    layout = inspect_program(random.key(0), Program(params, model, guide, (), {}, {}))
    assert layout.noise_sites == expected
