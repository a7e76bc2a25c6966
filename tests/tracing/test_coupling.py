"""Latents whose size varies with others, against automatic differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers

from numpyro_kscore import Implicit
from numpyro_kscore._tracing.coordinates import log_density_at, moved_coordinates, trace_at
from numpyro_kscore._tracing.coupling import Coupling, Form, log_size
from support.compiling import quick_jit


def model():
    scales = numpyro.sample("scales", dist.HalfNormal(2.0).expand([2]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    with numpyro.plate("people", 3):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        share = numpyro.sample("share", dist.Normal(mean, scales[0]))
        numpyro.sample("y", dist.Normal(share + z @ scales, 0.1), obs=jnp.arange(3.0))


SHAPES = {"scales": (2,), "mean": (), "z": (3, 2), "share": (3,)}


def unravel(flat):
    out, start = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        out[name], start = flat[start : start + size].reshape(shape), start + size
    return out


def test_the_density_is_that_of_the_coordinates(x64):
    rng = np.random.default_rng(0)
    z_rates = Coupling(jnp.array(rng.uniform(-0.9, 0.9, (3, 2, 2))), jnp.array([0.3, -0.2]))
    share_rates = Coupling(jnp.array(rng.uniform(-0.9, 0.9, 3)), jnp.array(0.5))
    basis = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    forms = {
        "z": Form(couplings={"scales": z_rates}, basis=jnp.array(basis.reshape(3, 2, 3, 2))),
        # Coordinates are multiplied before the prior's location is added.
        "share": Form(jnp.array([0.0, 0.4, 1.0]), {"mean": share_rates}),
    }
    seeded = handlers.seed(model, random.key(0))
    flat = rng.normal(size=12)

    def plain(flat):
        trace = trace_at(seeded, (), {}, unravel(flat), forms)
        moved = moved_coordinates(trace, list(SHAPES), {})
        return jnp.concatenate([jnp.ravel(moved[name]) for name in SHAPES])

    @quick_jit
    def evaluate(flat):
        found = unravel(plain(flat))
        expected = log_density_at(seeded, (), {}, found, {})
        expected += jnp.linalg.slogdet(jax.jacfwd(plain)(flat))[1]
        return found["z"], expected, log_density_at(seeded, (), {}, unravel(flat), forms)

    z, expected, density = evaluate(flat)
    v, rates = unravel(flat), np.asarray(z_rates.rates)
    change = np.einsum("pij,j->pi", rates, v["scales"] - np.asarray(z_rates.center))
    share = np.max(np.abs(rates), axis=-1)
    size = (1 - share + share * np.exp(2 * change / share)) ** -0.5
    np.testing.assert_allclose(np.ravel(z), basis @ np.ravel(v["z"] * size), rtol=1e-12)
    np.testing.assert_allclose(density, expected, rtol=1e-10)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_sizes_are_posterior_widths(x64, scale):
    """Of a normal effect with unit errors, in units of its scale: 1 / √(1 + scale²)."""
    center = 1.5  # of the scale
    rate = center**2 / (1 + center**2)
    couplings = {"w": Coupling(jnp.array([rate]), jnp.log(center))}
    found = jnp.exp(log_size(couplings, {"w": jnp.log(scale)})) / (1 + center**2) ** 0.5
    np.testing.assert_allclose(found, [(1 + scale**2) ** -0.5], rtol=1e-10)


def test_couplings_of_another_shape_are_named():
    with pytest.raises(ValueError, match=r"rates of the shapes of unconstrained.*\(3, 2\); got"):
        Implicit(
            jnp.zeros(3), unconstrained=jnp.zeros(3), couplings={"w": (jnp.zeros(3), jnp.zeros(2))}
        )
    with pytest.raises(ValueError, match="couplings: expected unconstrained"):
        Implicit(jnp.zeros(3), couplings={"w": (jnp.zeros((3, 2)), jnp.zeros(2))})
    with pytest.raises(ValueError, match=r"basis: expected .* twice, \(3, 3\); got \(3, 2\)"):
        Implicit(jnp.zeros(3), unconstrained=jnp.zeros(3), basis=jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match="basis: expected .* twice, None"):
        Implicit(jnp.zeros(3), basis=jnp.eye(3))
