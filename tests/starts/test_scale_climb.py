"""Ends of the way up of scales, of which another one may count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._starts.scale_climb import find_top
from numpyro_kscore._starts.search import Latents
from support.dense_others import dense_others

SIZE = 3


def latents(places):
    """One scale, whose prior has these quartiles, and three others."""
    draws = np.zeros((5, 1 + SIZE))
    draws[:, 0] = np.interp(np.linspace(0, 1, 5), [0.25, 0.5, 0.75], places)
    draws[:, 1:] = np.random.default_rng(0).normal(size=(5, SIZE))
    flags = np.zeros(1 + SIZE, bool)
    is_scale = np.array([True, *flags[1:]])
    return Latents(draws[0], draws, flags, is_scale, flags, (1, SIZE))


def energy(of_scale, of_others):
    def run(point):
        return of_scale(point[0]) + of_others(point[1:])

    return run


def normal(x):
    return 0.5 * jnp.sum(x**2)


def two(scale):
    """Two modes, at -2 and 2."""
    return -jax.nn.logsumexp(jnp.array([-2.0 * (scale + 2) ** 2, -2.0 * (scale - 2) ** 2]))


def flat(scale):
    """One mode that is flat for some units."""
    return 0.01 * scale**4


def folded(x):
    """Modes at ± 2 of the first."""
    return 0.5 * ((jnp.abs(x[0]) - 2) / 0.3) ** 2 + normal(x[1:])


@pytest.mark.parametrize(
    ("of_scale", "of_others", "count"),
    [(normal, normal, 1), (flat, normal, 1), (two, normal, 2), (normal, folded, 2)],
    ids=["one", "flat", "two of the scale", "two of the others"],
)
def test_an_end_beyond_a_valley_is_another(of_scale, of_others, count):
    with jax.enable_x64(True):
        others, _, _ = dense_others(energy(of_scale, of_others), [0.5], SIZE)
        known = latents([-2.5, 0.3, 2.5])
        top = find_top(others, known, np.array([0]))
        assert np.isfinite(top.evidence)
        only = find_top(others, known, np.array([0]), only_one=True)
    assert (only is None) == (count == 2)


def test_a_mode_is_found_where_curvatures_say_nothing():
    """Logits of hundreds, whose likelihood is a line: a step is a thousand times too long."""
    size = jnp.array([300.0, -200.0, 100.0])
    y = jnp.array([0.0, 1.0, 1.0])

    def likelihood(x):
        logits = jnp.outer(size, jnp.ones(5)).ravel() * x[0]
        return jnp.sum(jnp.logaddexp(0.0, logits)) - jnp.sum(jnp.repeat(y, 5) * logits)

    def others(x):
        return likelihood(x) + 0.5 * jnp.sum((x - 40.0) ** 2) / 25

    with jax.enable_x64(True):
        found, at, _ = dense_others(energy(normal, others), [0.0], SIZE)
        at[1:] = 40.0
        start = latents([0.0, 0.0, 0.0])
        draws = np.tile(at, (5, 1))
        top = find_top(found, start._replace(first=at, from_prior=draws), np.array([0]))
        gradient = jax.grad(others)(jnp.asarray(top.at[1:]))
    assert np.max(np.abs(gradient)) < 0.1
