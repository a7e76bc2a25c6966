"""Starts from a part of the data, against a hierarchy of normals whose evidence is known.

The part places every effect three standard errors from where all data do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._starts.batch_match import elbo
from numpyro_kscore._starts.candidates import AtPoints, Latents
from numpyro_kscore._starts.streamed import Quadratic, find_streamed
from numpyro_kscore._starts.tall import find_tall
from numpyro_kscore._tracing.centering import LocationScale, from_centered, to_centered
from numpyro_kscore._tracing.coupling import Centering

# Means of the data of twelve effects, and their standard errors; where a part of the data has them.
RNG = np.random.default_rng(3)
NOISE = RNG.uniform(0.1, 1.2, 12)
DATA = RNG.normal(0.3, np.sqrt(0.6**2 + NOISE**2))
PART = DATA + 3 * NOISE * RNG.choice([-1, 1], 12)
# Standard deviations of the priors of the mean and of the log spread.
PRIOR = 1.0
DIM = 2 + len(DATA)


def normal(x, loc, scale):
    return -0.5 * ((x - loc) / scale) ** 2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi)


def energy(y):
    """Of the mean, the log spread and the effects in some coordinates, and what is seen there."""

    def at(point, centering, other):
        mean, log_spread = point[:2]
        prior = LocationScale(mean, jnp.exp(log_spread))
        own, others = (Centering(*(a[2:] for a in one)) for one in (centering, other))
        u, log_det = to_centered(point[2:], prior, own)
        effects = normal(u, mean, jnp.exp(log_spread)) + normal(y, u, NOISE) + log_det
        head = normal(mean, 0.0, PRIOR) + normal(log_spread, 0.0, PRIOR)
        zero = jnp.zeros(2)
        wide = jnp.ones(len(y))
        seen = (
            jnp.concatenate([point[:2], from_centered(u, prior, others)]),
            jnp.concatenate([point[:2], u]),
            jnp.concatenate([zero, mean * wide]),
            jnp.concatenate([zero, log_spread * wide]),
        )
        return -head - jnp.sum(effects), seen

    return at


def density(y):
    rows = jax.jit(jax.vmap(jax.value_and_grad(energy(y), has_aux=True), in_axes=(0, None, None)))

    def at(points, centering, other):
        (energies, seen), gradients = rows(points, centering, other)
        return AtPoints(*(np.asarray(a) for a in (energies, gradients, *seen)))

    return at


def expansion(y):
    def value(point, centering):
        return energy(y)(point, centering, centering)[0]

    @jax.jit
    def of(point, centering):
        args = point, centering
        return value(*args), jax.grad(value)(*args), jax.hessian(value)(*args)

    return lambda point, centering: Quadratic(*(np.asarray(a) for a in of(point, centering)))


def log_evidence(y):
    """By quadrature over the mean and the log spread."""
    mean, log_spread = np.meshgrid(np.linspace(-5, 5, 401), np.linspace(-6, 4, 401), indexing="ij")
    head = normal(mean, 0.0, PRIOR) + normal(log_spread, 0.0, PRIOR)
    total = np.sqrt(np.exp(2 * log_spread[..., None]) + NOISE**2)
    whole = head + jnp.sum(normal(y, mean[..., None], total), axis=-1)
    return jax.nn.logsumexp(whole) + np.log(10 / 400) * 2


@pytest.mark.parametrize("kind", ["tall", "streamed"])
def test_a_start_knows_where_all_data_place_the_effects(kind):
    with jax.enable_x64(True):
        some, every = density(PART), density(DATA)
        is_effect = np.arange(DIM) >= 2
        rng = np.random.default_rng(0)
        first = np.zeros(DIM)
        latents = Latents(
            first, rng.normal(size=(32, DIM)), is_effect, ~is_effect, (1, 1, len(DATA))
        )
        if kind == "tall":
            start = find_tall(some, every, 0.1, latents, rng, with_couplings=False)
        else:
            expansions = expansion(PART), expansion(DATA)
            start = find_streamed(some, 0.1, expansions, latents, rng, with_couplings=False)
        noise = np.random.default_rng(1).normal(size=(4_000, DIM))
        at = every(start.gaussian.push(noise), start.centering, start.centering)
        bound = elbo(start.gaussian, noise, at.energies)
        evidence = float(log_evidence(DATA))
    # In the part's coordinates a stream's Gaussian was 50 nats below the evidence.
    assert evidence - 0.3 < bound.value < evidence + 5 * bound.standard_error
    degrees, _, locs = (a[2:] for a in start.centering)
    is_known = (degrees > 0.3) & (degrees < 1)
    assert np.sum(is_known) > 3
    # The part has them at 3; a regression of the draws tells them to about half an error.
    assert np.median(np.abs(locs - DATA)[is_known] / NOISE[is_known]) < 1
