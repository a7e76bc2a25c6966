"""The base of separate groups: how groups are found, and the estimate with one density for each."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from benchmarks.accuracy import modes
from benchmarks.accuracy.groups import of_target
from benchmarks.accuracy.score_targets import TARGETS
from numpyro_kscore import KernelExponentialFamily, ScoreEstimator
from numpyro_kscore.estimators import RandomFeatures, Subset
from numpyro_kscore.estimators._base.base_scores import Base, EllipticalBase
from numpyro_kscore.estimators._base.fitted_base import fit_mixture, make_base
from numpyro_kscore.estimators._base.gaussian import fit_gaussian
from numpyro_kscore.estimators._base.groups import find_groups
from numpyro_kscore.estimators._base.mixture import MixtureBase
from numpyro_kscore.estimators._base.student import fit_student
from numpyro_kscore.estimators._fit.grouped_score import DRAWS
from numpyro_kscore.kernels import CurlFree, Gaussian
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from support import oracle
from support.compiling import quick_jit

SIZES = (26, 14)
N = sum(SIZES)
# Draws of the two groups take turns as long as there are some of both.
ORDER = np.argsort(np.concatenate([np.arange(k) for k in SIZES]), kind="stable")
OWN = np.repeat([0, 1], SIZES)[ORDER]


def two_groups(distance, dim=2, seed=0):
    """Skewed draws of two groups of different shapes, off the origin: (n, d)."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(N, dim))
    z = z + 0.3 * z**2
    z[SIZES[0] :] = 0.5 * z[SIZES[0] :] @ (np.eye(dim) + 0.6 * np.tri(dim, k=-1))
    z[: SIZES[0]] += distance
    return z[ORDER] + 3.0


# ------------------------------------------------------------------------------ some of the samples


@pytest.mark.parametrize("fit", [fit_gaussian, fit_student])
@pytest.mark.thorough
def test_samples_that_do_not_count_do_not_matter(fit, x64):
    """Few enough for shrinkage, and with heavy tails."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, 4)) / np.sqrt(rng.gamma(1.0, size=(40, 1)))
    counts = np.arange(40) % 3 > 0
    members = counts.astype(float)
    whole, alone = quick_jit(fit)(jnp.asarray(x), jnp.asarray(members)), fit(jnp.asarray(x[counts]))
    np.testing.assert_allclose(whole.held_out[counts], alone.held_out, rtol=1e-9)
    for a, b in zip(*map(jax.tree.leaves, (whole.coordinates, alone.coordinates)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    if fit is fit_student:
        assert whole.inverse_degrees == alone.inverse_degrees > 0


# ------------------------------------------------------------------------------------------- groups


groups_of_each = quick_jit(jax.vmap(find_groups))


def found(name, dim, n, seeds=4):
    """Numbers of groups found in draws of a target."""
    draw = of_target(name, dim)[1]
    sets = np.stack([draw(random.key(seed), n) for seed in range(seeds)])
    return np.asarray(groups_of_each(sets).number)


@pytest.mark.parametrize("dim", [2, 8])
@pytest.mark.thorough
def test_modes_are_found_and_nothing_else(dim):
    """Two normals, and no groups in one normal, a curved ridge, heavy and long tails."""
    assert np.all(found("far modes", dim, 200) == 2)
    for name in ("normal", "banana", "student", "log gamma", "funnel"):
        assert np.all(found(name, dim, 200) == 1), name


@pytest.mark.slow
def test_a_ring_that_is_cut_is_one_group():
    """Two halves of a ring or an arc are as dense where they meet as anywhere; modes are not.

    Of 64 sets of draws the ring and the arc are taken for several groups in none (57 and 60 if it
    does not count how dense samples are at the cuts), modes in the plane for one in none, and those
    of the mixture in eight dimensions in 4.
    """
    assert np.all(found("ring", 2, 1000) == 1)
    for dim in (2, 8):
        assert np.all(found("arc", dim, 1000) == 1)
    assert np.all(found("mixture", 2, 1000) == 2)
    assert np.all(found("bananas", 2, 1000) == 2)
    assert np.sum(found("mixture", 8, 1000) == 2) >= 3


@pytest.mark.thorough
def test_groups_are_those_of_the_samples():
    """Whatever the units and axes, in either precision, under jit and vmap."""
    x = two_groups(8.0)
    rng = np.random.default_rng(0)
    moved = x @ (1e3 * rng.normal(size=(2, 2))) + 1e4
    for sets in (np.float32([x, moved]), np.float64([x, moved])):
        with jax.enable_x64(sets.dtype == np.float64):
            groups = jax.device_get(groups_of_each(sets))
        assert np.all(groups.number == 2)
        # Which of them is first depends on the sign of an eigenvector.
        for own in groups.own:
            assert np.mean(own == OWN) in (0.0, 1.0)


def test_too_few_samples_are_one_group():
    groups = find_groups(jnp.asarray(two_groups(50.0)[:15]))
    assert groups.number == 1
    np.testing.assert_array_equal(groups.own, 0)


# --------------------------------------------------------------------------------- the distribution


@functools.cache
def mixture():
    """A mixture fitted in double precision to groups that touch."""
    with jax.enable_x64(True):
        return quick_jit(lambda x: make_base("auto", x, None))(jnp.asarray(two_groups(7.0)))


@pytest.mark.thorough
def test_score_and_divergence_are_derivatives_of_the_mixture(x64):
    base = mixture()
    assert isinstance(base, MixtureBase)
    assert base.number == 2
    x = two_groups(7.0)
    far = np.array([[1e3, -1e3]])
    points = jnp.asarray(np.concatenate([x[:6], 0.5 * (x[:1] + x[1:2]), x[:1] + far]))

    @quick_jit
    def evaluate(base, x):
        gradient = jax.grad(lambda x: jnp.sum(base.log_density(x)))(x)
        divergences = base.divergence(x), Base.divergence(base, x)
        return base.score(x), gradient, *divergences, base.shares(x)

    score, gradient, divergence, by_jacobian, shares = evaluate(base, points)
    np.testing.assert_allclose(score, gradient, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(divergence, by_jacobian, rtol=1e-8, atol=1e-12)
    # Between the modes the second term of the divergence counts.
    np.testing.assert_allclose(np.sum(shares, axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.exp(base.log_weights[:2]), [0.5] * 2, atol=0.2)
    assert np.all(np.isneginf(base.log_weights[2:]))


@pytest.mark.thorough
def test_squares_that_overflow():
    samples, points = np.float32(two_groups(7.0)), np.float32([[1e25, -1e25], [1e19, 0.0]])
    scores = quick_jit(lambda x, points: make_base("auto", x, None).score(points))(samples, points)
    assert np.all(np.isfinite(scores))


@pytest.mark.thorough
def test_draws_have_the_weights_and_the_moments_of_the_components(x64):
    base, count = mixture(), 4000
    x = quick_jit(lambda base: base.draw(random.key(0), count))(base)
    first = np.asarray(base.components.coordinates.mean[0])
    near = np.linalg.norm(np.asarray(x) - first, axis=1) < 3.5
    weight = float(np.exp(base.log_weights[0]))
    # Four standard errors, and the tails beyond the line between the modes.
    assert abs(np.mean(near) - weight) < 4 * (weight * (1 - weight) / count) ** 0.5 + 0.01


# ------------------------------------------------------------------------------------- the estimate

KERNEL = CurlFree(Gaussian())


@pytest.mark.slow
def test_far_apart_it_is_the_estimate_of_each_group(x64):
    """The reference is the definition in each group's samples alone, in double precision.

    The operator is averaged over all n samples, so that Tikhonov's λ is n/n_k times as large in
    group k. Groups are so far apart that shares are zero or one, and the kernel falls off so fast
    that none is left between them.
    """
    x, lam, bandwidth = two_groups(1e4, seed=1), 0.05, 1.3
    estimator = ScoreEstimator(KERNEL, Tikhonov(lam), bandwidth=bandwidth, standardize="full")

    @quick_jit
    def fit(x):
        score = dataclasses.replace(estimator, base="auto").fit(x)
        return score, score(x), score.divergence(x), score.log_density(x)

    score, values, divergence, log_density = fit(jnp.asarray(x))
    assert score.base.number == 2
    np.testing.assert_allclose(score.at_samples, values, rtol=1e-9)
    for k in (0, 1):
        mine = OWN == k
        part = dataclasses.replace(estimator, regularizer=Tikhonov(lam * N / mine.sum()))

        @quick_jit
        def alone(x, part=part):
            score = part.fit(x)
            return score(x), score.divergence(x), score.log_density(x)

        expected = alone(jnp.asarray(x[mine]))
        assert oracle.relative_error(values[mine], np.asarray(expected[0])) < 1e-7
        assert oracle.relative_error(divergence[mine], np.asarray(expected[1])) < 1e-7
        # Up to a constant for each group.
        apart = log_density[mine] - expected[2]
        np.testing.assert_allclose(apart, apart[0], atol=1e-7)


IN_GROUPS = ScoreEstimator(regularizer=NuMethod(30), base="auto", bandwidth=2.0)
fit_in_groups = quick_jit(IN_GROUPS.fit)


@functools.cache
def touching():
    """A fit in double precision to groups that touch, and points in and between them."""
    x = two_groups(7.0)
    points = np.concatenate([x[:6], 0.5 * (x[:3] + x[1:4])])
    with jax.enable_x64(True):
        return fit_in_groups(x), points


@pytest.mark.slow
def test_score_and_divergence_are_derivatives_of_the_log_density(x64):
    score, points = touching()
    assert score.base.number == 2

    @quick_jit
    def evaluate(score, x):
        parts = score.base.score(x) + score.residual(x)
        divergences = score.base.divergence(x) + score.residual_divergence(x)
        density = score.base.log_density(x) + score.residual_potential(x)
        return score(x), score.log_density(x), score.divergence(x), parts, divergences, density

    # Differences of fourth order, whose error is 1e-12 times fifth derivatives, over 30.
    step = 1e-3
    moves = step * np.array([1, -1, 2, -2])[:, None, None] * np.eye(2)
    around = (points[:, None, None] + moves).reshape(-1, 2)
    found = evaluate(score, np.concatenate([points, around]))
    values, log_density, divergence, parts, divergences, density = (
        np.asarray(a)[: len(points)] for a in found
    )

    def derivatives(values):
        """By coordinate, of values at the points: (n, d, ...)."""
        of_steps = np.asarray(values)[len(points) :].reshape(len(points), 4, 2, *values.shape[1:])
        right, left, right_twice, left_twice = np.moveaxis(of_steps, 1, 0)
        return (8 * (right - left) - (right_twice - left_twice)) / (12 * step)

    gradient, jacobian = derivatives(found[1]), derivatives(found[0])
    np.testing.assert_allclose(values, gradient, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(jacobian, jacobian.transpose(0, 2, 1), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(divergence, np.trace(jacobian, axis1=1, axis2=2), rtol=1e-7)
    np.testing.assert_allclose(parts, values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(divergences, divergence, rtol=1e-9)
    np.testing.assert_allclose(density, log_density, rtol=1e-9)


@pytest.mark.slow
def test_the_estimate_under_jit_and_vmap_in_either_precision_and_other_units():
    x = two_groups(7.0)
    # The shrinkage of a group's covariance depends on the axes, and on the ratio of their units.
    unit, shift = 1e3, np.array([1e4, -4e3])
    one = np.asarray(touching()[0].at_samples)
    single = np.asarray(fit_in_groups(np.float32(x)).at_samples)
    with jax.enable_x64(True):
        each = quick_jit(jax.vmap(lambda x: IN_GROUPS.fit(x).at_samples))
        double = np.asarray(each(np.stack([x, unit * x + shift])))
    assert double.dtype == one.dtype == np.float64
    assert oracle.relative_error(double[0], one) < 1e-9
    assert oracle.relative_error(unit * double[1], one) < 1e-6
    # Places of groups that are sixty radii apart cost two digits of seven.
    assert single.dtype == np.float32
    assert oracle.relative_error(single, one) < 1e-2


@pytest.mark.slow
def test_one_group_is_the_default():
    """Both agree to rounding, at samples and elsewhere."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(48, 3)) + 0.3 * rng.normal(size=(48, 3)) ** 2, jnp.float32)
    points = 1.5 * x[:9] + 0.1

    def evaluate(base):
        score = ScoreEstimator(regularizer=NuMethod(30), base=base).fit(x)
        return score.at_samples, score(points), score.divergence(points), score.log_density(points)

    evaluate = quick_jit(evaluate, static_argnums=0)
    for a, b in zip(evaluate("auto"), evaluate("student"), strict=True):
        assert oracle.relative_error(np.asarray(a), np.asarray(b)) < 1e-4


# --------------------------------------------------------------------------------- weights of modes


def trapezoid(log_density, x):
    """Integrals over the left and the right half of the axis, of values there."""
    values = np.exp(np.asarray(log_density, float))
    total = np.cumsum(0.5 * (values[1:] + values[:-1]) * np.diff(x))
    left = np.interp(0.0, x[1:], total)
    return left, total[-1] - left


@pytest.mark.thorough
def test_the_density_has_the_shares_of_the_samples(x64):
    """Quadrature in one dimension gives the shares, to four standard errors of the constants."""
    rng = np.random.default_rng(5)
    z = rng.normal(size=(60, 1)) ** 3 / 3 + rng.normal(size=(60, 1))
    x = np.where(np.arange(60)[:, None] % 3 == 0, 0.6 * z - 14.0, z + 14.0)
    grid = np.linspace(-60, 60, 24001)
    estimator = ScoreEstimator(regularizer=NuMethod(30), base="auto")

    @quick_jit
    def evaluate(x, grid):
        score = estimator.fit(x)
        values = score.log_density(grid), score._residuals("potential", grid)
        return score.base, *values, score.base.each("log_density", grid)

    base, log_density, potentials, components = evaluate(x, grid[:, None])
    assert base.number == 2
    assert np.ptp(potentials[:2]) > 0.1
    masses = trapezoid(log_density, grid)
    for k in (0, 1):
        side = int(base.components.coordinates.mean[k, 0] > 0)
        # Relative variance of exp(f) for draws of the component.
        once, twice = (sum(trapezoid(components[k] + p * potentials[k], grid)) for p in (1, 2))
        error = ((twice / once**2 - 1) / DRAWS) ** 0.5
        weight = np.exp(base.log_weights[k])
        assert weight == pytest.approx([1 / 3, 2 / 3][side], abs=0.01)
        assert abs(masses[side] / weight - 1) < 4 * error + 1e-3


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", modes.TARGETS)
def test_weights_of_distant_modes(name):
    """Eight standard deviations apart: within a tenth of the share that the samples have."""
    for seed in (0, 1):
        row = modes.compute(name, 2, 200, "auto", seed)
        # With so many effective draws the benchmark's own error is below 2 %.
        assert row["effective"] > 1000
        assert abs(row["weight"] / row["share"] - 1) < 0.1


# ------------------------------------------------------------------------------------ with the rest


@pytest.mark.slow
def test_a_density_of_two_groups_is_normalized(x64):
    @quick_jit
    def evaluate(x, score):
        family = KernelExponentialFamily(x, score)
        gradient = jax.grad(lambda x: jnp.sum(family.log_prob(x)))(x)
        return gradient, family.normalize(random.key(1)).normalization

    score = touching()[0]
    gradient, constant = evaluate(two_groups(7.0), score)
    np.testing.assert_allclose(gradient, score.at_samples, rtol=1e-3, atol=1e-3)
    # The constants of the groups have an error of the same size.
    assert abs(constant.log_constant) < 4 * 2**0.5 * max(constant.standard_error, 0.02)


@pytest.mark.thorough
def test_a_subset_has_values_at_all_samples():
    """The values are those of each sample's own group, since the groups are far apart."""
    x = jnp.asarray(two_groups(1e3), jnp.float32)
    estimator = ScoreEstimator(regularizer=NuMethod(20), base="auto", subset=Subset(20))
    score, values = quick_jit(lambda x: (lambda s: (s, s(x)))(estimator.fit(x)))(x)
    assert score.stored is None
    assert oracle.relative_error(np.asarray(score.at_samples), np.asarray(values)) < 1e-3


@pytest.mark.thorough
def test_a_stream_has_one_base():
    """Later samples are not dealt into groups."""
    batch = jnp.asarray(two_groups(7.0), jnp.float32)
    estimator = ScoreEstimator(features=RandomFeatures(8))
    assert isinstance(estimator.init_stream(batch).base, EllipticalBase)


@pytest.mark.thorough
def test_the_fit_is_differentiable():
    """Groups and the number of them are not differentiated; what is fitted to them is."""
    x = jnp.asarray(two_groups(7.0), jnp.float32)

    def total(x):
        return jnp.sum(fit_mixture(x, find_groups(x)).score(x[:3]) ** 2)

    gradient = quick_jit(jax.grad(total))(x)
    assert np.all(np.isfinite(gradient))
    assert np.any(gradient != 0)


@pytest.mark.thorough
def test_outside_of_jit_the_program_is_that_of_what_is_found():
    one = jnp.asarray(two_groups(0.0), jnp.float32)
    two = jnp.asarray(two_groups(9.0), jnp.float32)
    assert isinstance(make_base("auto", one, None), EllipticalBase)
    assert isinstance(make_base("auto", two, None), MixtureBase)
    # Too few for two groups: known inside of jit too.
    assert isinstance(
        jax.eval_shape(lambda x: make_base("auto", x, None), two[:15]), EllipticalBase
    )
    assert isinstance(jax.eval_shape(lambda x: make_base("auto", x, None), two[:16]), MixtureBase)


@pytest.mark.slow
def test_groups_that_touch_are_no_truncated_ones():
    """Score matching sees no boundary: fields toward one looked good, with an error of .50 here."""
    target = TARGETS["mixture"](2)
    x, points = (target.draw(random.key(seed), 1_000) for seed in (1, 2))
    score = ScoreEstimator().fit(x)
    assert score.base.number == 2
    error = score(points) - quick_jit(jax.vmap(jax.grad(target.log_density)))(points)
    # Of a Gaussian of 500 samples the score has an error of about d/n times 1 + 2 for mean and
    # covariance; between the modes the weights count too.
    assert np.mean(np.square(error)) < 0.03
