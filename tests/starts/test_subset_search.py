"""Starts from a subset of the data, against a hierarchy of normals whose evidence is known.

The part places every effect three standard errors from where all data do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import special, stats

from numpyro_kscore import AutoImplicit
from numpyro_kscore._model.control_variate import Taylor
from numpyro_kscore._starts.batch_match import elbo
from numpyro_kscore._starts.gaussian_search import find_gaussian
from numpyro_kscore._starts.search import AtPoints, Latents
from numpyro_kscore._starts.subset_density import AllData, DataSubset
from numpyro_kscore._starts.subset_search import moved_to_all_data
from numpyro_kscore._transports.centering import Centering, LocationScale, centered
from numpyro_kscore._util.batches import Batches
from support.compiling import quick_jit

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
    """Energy of mean, log spread and effects in some coordinates, and what is seen there."""

    def at(point, centering, other):
        mean, log_spread = point[:2]
        prior = LocationScale(mean, jnp.exp(log_spread))
        own, others = (Centering(*(a[2:] for a in one)) for one in (centering, other))
        given = centered(prior, own)
        u, log_det = given.push(point[2:]), given.log_volumes(point[2:])
        effects = normal(u, mean, jnp.exp(log_spread)) + normal(y, u, NOISE) + log_det
        head = normal(mean, 0.0, PRIOR) + normal(log_spread, 0.0, PRIOR)
        zero = jnp.zeros(2)
        wide = jnp.ones(len(y))
        seen = (
            jnp.concatenate([point[:2], centered(prior, others).invert(u)]),
            jnp.concatenate([point[:2], u]),
            jnp.concatenate([zero, mean * wide]),
            jnp.concatenate([zero, log_spread * wide]),
        )
        return -head - jnp.sum(effects), seen

    return at


# Programs of all data.
@quick_jit
def rows(y, points, centering, other):
    of_one = jax.value_and_grad(energy(y), has_aux=True)
    return jax.vmap(of_one, in_axes=(0, None, None))(points, centering, other)


@quick_jit
def derivatives(y, point, centering):
    def value(point):
        return energy(y)(point, centering, centering)[0]

    return value(point), jax.grad(value)(point), jax.hessian(value)(point)


def density(y):
    def at(points, centering, other):
        (energies, seen), gradients = rows(y, points, centering, other)
        return AtPoints(*(np.asarray(a) for a in (energies, gradients, *seen)))

    return at


def expansion(y):
    def of(point, centering):
        return Taylor(*map(np.asarray, derivatives(y, point, centering)))

    return of


def whole(expand):
    def evaluate(points, centering):
        return density(DATA)(points, centering, centering)[:2]

    return AllData(expand, evaluate)


def log_evidence(y):
    """Log evidence by quadrature over the mean and the log spread."""
    mean, log_spread = np.meshgrid(np.linspace(-5, 5, 401), np.linspace(-6, 4, 401), indexing="ij")
    head = stats.norm.logpdf(mean, 0.0, PRIOR) + stats.norm.logpdf(log_spread, 0.0, PRIOR)
    total = np.sqrt(np.exp(2 * log_spread[..., None]) + NOISE**2)
    whole = head + np.sum(stats.norm.logpdf(y, mean[..., None], total), axis=-1)
    return special.logsumexp(whole) + np.log(10 / 400) * 2


@pytest.mark.parametrize("is_sound", [True, False])
@pytest.mark.thorough
def test_a_start_knows_where_all_data_place_the_effects(is_sound):
    """Surrogates tell the start, or scores where the surrogates are no good."""
    with jax.enable_x64(True):
        some, every = density(PART), density(DATA)
        is_effect = np.arange(DIM) >= 2
        rng = np.random.default_rng(0)
        draws = rng.normal(size=(32, DIM))
        latents = Latents(
            np.zeros(DIM), draws, is_effect, ~is_effect, np.zeros(DIM, bool), (1, 1, len(DATA))
        )
        some_data = DataSubset(some, some, expansion(PART), 0.1)
        all_data = whole(expansion(DATA if is_sound else DATA + 5))
        found = find_gaussian(some, latents, rng, with_forms=False)
        start = moved_to_all_data(found, some_data, all_data, latents, rng, with_sizes=False)
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


# Rows of each group, and the group of each row.
SIZES = (49_990, 8, 1, 1)
GROUPS = np.random.default_rng(2).permutation(np.repeat(np.arange(4), SIZES)).astype(np.int32)


@functools.cache
def noise_by_group():
    rng = np.random.default_rng(5)
    loc, scale = 100 + 8 * rng.normal(size=4), np.exp(2 + 0.5 * rng.normal(size=4))
    return (loc[GROUPS] + scale[GROUPS] * rng.standard_t(5, len(GROUPS))).astype(np.float32)


def in_groups(group, y, batch=None):
    with numpyro.plate("groups", 4):
        loc = numpyro.sample("loc", dist.Normal(100, 30))
        scale = numpyro.sample("scale", dist.LogNormal(2, 2))
    with numpyro.plate("rows", len(GROUPS), subsample_size=batch or len(y)) as rows:
        if batch:
            group, y = group[rows], y[rows]
        numpyro.sample("y", dist.StudentT(5, loc[group], scale[group]), obs=y)


@functools.cache
def evidence_by_group():
    """Log evidence of each group, by quadrature over its location and log scale."""
    y, total = noise_by_group(), 0.0
    for k, size in enumerate(SIZES):
        own = y[GROUPS == k].astype(float)
        locs, log_scales = np.linspace(-200, 400, 601), np.linspace(-12, 16, 281)
        if size > 100:
            # Of many rows the likelihood is Gaussian, with the information of Student's t.
            _, *found = stats.t.fit(own, fdf=5)
            errors = [found[1] * np.sqrt(8 / 6 / size), np.sqrt(8 / 10 / size)]
            locs, log_scales = (
                center + 6 * error * np.linspace(-1, 1, 17)
                for center, error in zip([found[0], np.log(found[1])], errors, strict=True)
            )
        loc, log_scale = np.meshgrid(locs, log_scales, indexing="ij")
        found = stats.norm.logpdf(loc, 100, 30) + stats.norm.logpdf(log_scale, 2, 2)
        for part in np.array_split(own, max(1, size // 100)):
            found += stats.t.logpdf(part[:, None, None], 5, loc, np.exp(log_scale)).sum(0)
        cell = (locs[1] - locs[0]) * (log_scales[1] - log_scales[0])
        total += special.logsumexp(found) + np.log(cell)
    return total


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["plate", pytest.param("loader", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_groups_of_a_row_or_two_have_a_start(kind):
    """Rows that stand for six of their kind have no bound for the scale of a group of one."""
    y = noise_by_group()
    guide = AutoImplicit(in_groups)
    if kind == "plate":
        guide.set_up(random.key(0), jnp.asarray(GROUPS), jnp.asarray(y), 500)
    else:
        parts = np.array_split(np.arange(len(y)), 10)
        batches = Batches(lambda: ((GROUPS[rows], y[rows]) for rows in parts), (), {})
        args, kwargs = batches.arguments(batches.first)
        guide.prepare(random.key(0), args, kwargs, batches)
    gap = evidence_by_group() - guide.start.elbo
    # A Gaussian loses about a nat for each small group; errors of bounds are a tenth.
    assert -0.5 < gap < 1.5 * 3


def two_modes(point):
    """Minus the log of half a normal at -3 and half a normal at 3 in the first coordinate."""
    both = jnp.logaddexp(normal(point[0], -3.0, 0.5), normal(point[0], 3.0, 0.5)) - jnp.log(2.0)
    return -both - normal(point[1], 0.0, 0.5)


def one_mode(point):
    return -normal(point[0], 3.0, 0.2) - normal(point[1], 1.0, 0.2)


@pytest.mark.thorough
def test_modes_of_a_part_that_are_one_for_all_data():
    """Both Gaussians of the part move to the same place, and count once."""

    def rows(energy):
        of_rows = jax.jit(jax.vmap(jax.value_and_grad(energy)))

        def at(points, centering, other):
            nothing = np.zeros_like(points)
            return AtPoints(*map(np.asarray, of_rows(points)), points, points, nothing, nothing)

        return at

    def expand(energy):
        of = jax.jit(lambda x: (energy(x), jax.grad(energy)(x), jax.hessian(energy)(x)))
        return lambda point, centering: Taylor(*map(np.asarray, of(point)))

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        draws = 3 * rng.normal(size=(32, 2))
        latents = Latents(np.ones(2), draws, *np.zeros((3, 2), bool), (1, 1))
        some_data = DataSubset(rows(two_modes), rows(two_modes), expand(two_modes), 0.1)
        all_data = AllData(expand(one_mode), lambda points, _: rows(one_mode)(points, 0, 0)[:2])
        found = find_gaussian(some_data.once, latents, rng, with_forms=False)
        found = moved_to_all_data(found, some_data, all_data, latents, rng, with_sizes=True)
    np.testing.assert_allclose(found.gaussian.mean, [3.0, 1.0], atol=1e-3)
    np.testing.assert_allclose(found.gaussian.factor, 0.2 * np.eye(2), atol=1e-3)
    assert len(found.weights) == 1
    assert found.parts == ()
    np.testing.assert_allclose(found.elbo, 0.0, atol=1e-3)
