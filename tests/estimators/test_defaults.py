"""Defaults of ``ScoreEstimator()``: its bandwidths, and how accurate it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from benchmarks.accuracy.score_targets import TARGETS
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Landmarks, RandomFeatures, Subset
from numpyro_kscore.estimators._fit.path import PathMember, pick
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from support.compiling import quick_jit

# ----------------------------------------------------------------------- the rule for bandwidths

PATH = PathMember(Tikhonov("auto"), jnp.asarray(0), 0.5)


@quick_jit
def rule(bandwidths, loss, apart):
    def error(members, rows):
        return apart[rows, jnp.arange(len(rows))][:, None] * jnp.ones_like(loss)

    return pick(PATH, loss, error, bandwidths)


def picked(bandwidths, leasts, errors):
    """The index of the bandwidth taken; its least loss is that of the fourth member.

    The standard error of a difference between two bandwidths is given for all pairs, and between
    members of one it is .01.
    """
    loss = np.zeros((len(bandwidths), PATH.strengths(jnp.float32).shape[0]), np.float32)
    loss[:, 3] = leasts
    apart = np.where(np.eye(len(leasts)), 0.01, errors)
    selection, member = rule(np.float32(bandwidths), loss, np.float32(apart))
    # The fit to all samples has one member less of regularization than those to the halves.
    assert int(selection.column) == int(member.index) == 4
    return int(selection.row)


def member_for(leasts, growth=1.0):
    """The member taken of one bandwidth, for the losses of its first members."""
    loss = jnp.ones((1, PATH.strengths(jnp.float32).shape[0])).at[0, : len(leasts)].set(leasts)
    return int(pick(PATH, loss, lambda *_: 0.1 * jnp.ones_like(loss), jnp.ones(1), growth)[1].index)


@pytest.mark.thorough
def test_all_samples_bear_less_regularization_than_the_samples_of_a_choice():
    found = jnp.array([0.0, -1.0, -2.0, -1.95, -1.0])
    # The strongest within a standard error, and one weaker: for all samples, not for half.
    assert member_for(found) == 3
    # λ falls by the root of how many more samples the fit has.
    assert [member_for(found, growth) for growth in (1.9, 2.1, 4.0, 16.0, 64.0)] == [3, 4, 4, 5, 6]
    # Nothing found is nothing added, and a loss that is not finite is never taken.
    assert member_for(jnp.array([0.0, 0.5, 1.0])) == 0
    assert member_for(jnp.array([0.0, -1.0, jnp.inf])) == 1
    # The path ends somewhere.
    last = PATH.strengths(jnp.float32).shape[0] - 1
    assert member_for(-jnp.arange(last + 1.0)) == last


def test_narrower_bandwidths_have_to_be_better_by_two_standard_errors():
    errors = np.full((3, 3), 0.1)
    for gain, taken in ((-0.5, 0), (0.19, 0), (0.21, 2)):
        assert picked([1.0, 2.0, 0.5], [-1.0, -0.9, -1.0 - gain], errors) == taken
    # Wider ones need only be better. A narrow one is then compared with the best of them.
    assert picked([1.0, 2.0, 0.5], [-1.0, -1.01, -1.15], errors) == 1
    assert picked([1.0, 2.0, 0.5], [-1.0, -1.1, -1.25], errors) == 1
    assert picked([1.0, 2.0, 0.5], [-1.0, -1.1, -1.35], errors) == 2
    # With the errors of the differences from that one, not of others.
    errors[1] = [0.1, 0.1, 0.02]
    assert picked([1.0, 2.0, 0.5], [-1.0, -1.1, -1.15], errors) == 2
    # The better one of two that are better.
    errors = np.full((3, 3), 0.1)
    assert picked([1.0, 0.25, 0.5], [-1.0, -1.3, -1.4], errors) == 2


@pytest.mark.parametrize(
    ("options", "candidates"),
    [
        ({}, 4),
        ({"landmarks": Landmarks(8)}, 4),
        ({"subset": Subset(8)}, 4),
        ({"features": RandomFeatures(16)}, 1),
        ({"regularizer": Tikhonov("auto"), "bandwidth": "median"}, 1),
        ({"regularizer": NuMethod(5)}, None),
    ],
)
@pytest.mark.thorough
def test_bandwidths_that_are_tried_without_a_rule(options, candidates):
    """Four for an automatic strength of a kernel, the median alone otherwise."""

    def tried(estimator):
        selection = jax.eval_shape(
            lambda x: estimator.fit(x).info.selection, jax.ShapeDtypeStruct((32, 2), jnp.float32)
        )
        return None if selection is None else selection.bandwidths.shape[0]

    estimator = ScoreEstimator(base=None, standardize="none", **options)
    assert tried(estimator) == candidates
    if not options:
        # Resolved by the fit, and not before.
        assert estimator.bandwidth is None
        assert tried(dataclasses.replace(estimator, regularizer=NuMethod(5))) is None
        fixed = dataclasses.replace(estimator, regularizer=NuMethod(5))
        assert tried(dataclasses.replace(fixed, regularizer=NuMethod("auto"))) == 4


# -------------------------------------------------------------------------------------- accuracy


# The default, and the one with Gaussian coordinates and base: one program for all targets.
SCORES = quick_jit(
    lambda x: [
        ScoreEstimator(**options).at_samples(x).scores
        for options in ({}, {"standardize": "full", "base": "gaussian"})
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("far modes", 0.75), ("student", 0.2)])
def test_far_modes_and_heavy_tails_cost_less_than_with_gaussian_coordinates(name, share):
    """Squared errors at 400 samples in eight dimensions, over those with Gaussian ones.

    For four keys the share was .47 to .64 on far modes and .03 to .05 on draws of t(4).
    """
    target = TARGETS[name](8)
    x = target.draw(random.key(0), 400)
    exact = quick_jit(jax.vmap(jax.grad(target.log_density)))(x)
    found, before = (np.sum((scores - exact) ** 2) for scores in SCORES(x))
    assert found < share * before
