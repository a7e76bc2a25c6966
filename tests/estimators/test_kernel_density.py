"""``KernelDensity``: scores and densities by smoothing, against sums of normal densities."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore.estimators import (
    AutoBandwidth,
    KernelDensity,
    KernelDensityScore,
    NormalReference,
)
from numpyro_kscore.kernels import _smoothing as smoothing
from support import oracle
from support.compiling import quick_jit
from support.estimating import POINTS, SAMPLES, D, N
from support.samples import base_function, make_data

# Among the samples, around them, and so far that no density in floating point is positive.
WHERE = np.concatenate([POINTS, SAMPLES[:2], 40 + SAMPLES[:2]])
H, FLOOR = 0.8, 0.3  # this floor is above the density at about half of the points
ESTIMATORS = {
    "plain": KernelDensity(H, floor=FLOOR),
    "debiased": KernelDensity(H, "debiased", floor=FLOOR),
    "debiased by a pilot": KernelDensity(H, "debiased", floor=FLOOR, pilot=base_function),
    "laplace": KernelDensity(H, "laplace", floor=FLOOR),
    "adaptive": KernelDensity(H, "adaptive", floor=FLOOR),
}


def close(value, expected):
    return oracle.relative_error(value, expected) < 1e-9


@quick_jit
def everything(estimator, samples, where):
    score = estimator.fit(samples)
    jacobian = jax.vmap(jax.jacfwd(lambda x: score(x[None])[0]))(where)
    return {
        "score": score(where),
        "density": score.density(where),
        "log_density": score.log_density(where),
        "divergence": score.divergence(where),
        "trace": jnp.trace(jacobian, axis1=1, axis2=2),
        "at_samples": score.at_samples,
        "log_density_at_samples": score.log_density_at_samples,
        "bandwidth": score.info.bandwidth,
    }


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.thorough
def test_every_value_is_that_of_the_definition(name, x64):
    estimator = ESTIMATORS[name]
    found = everything(estimator, SAMPLES, WHERE)
    pilot = None if estimator.pilot is None else base_function
    reference = oracle.kernel_density(SAMPLES, estimator.correction, H, FLOOR, pilot)
    density, scores = reference.values(WHERE)
    assert close(found["score"], scores)
    assert close(found["density"], density)
    near = density > 0
    assert close(found["log_density"][near], np.log(density[near]))
    # The density of the far points has no logarithm in NumPy: their squared distance says it.
    far = np.asarray(found["log_density"][~near])
    assert np.all(far < -500)
    assert close(found["divergence"], found["trace"])
    density, scores = reference.left_out(SAMPLES)
    assert close(found["at_samples"], scores)
    log_density = np.log(np.where(density > 0, density, np.nan))
    expected = np.where(np.isnan(log_density), -np.inf, log_density)
    np.testing.assert_allclose(found["log_density_at_samples"], expected, rtol=1e-9)
    # Both branches of the maximum are taken.
    below = density < reference.epsilon
    assert 0 < np.sum(below) < N


def test_the_laplace_correction_is_minus_half_the_laplacian(x64):
    """A negative density has the logarithm -inf, and a tenth of the plain density as divisor."""
    x = np.array([[0.0], [0.1], [0.3]])
    estimator = KernelDensity(0.5, "laplace", floor=0.0, standardize="none")
    plain = KernelDensity(0.5, standardize="none", floor=0.0)
    where = jnp.array([[0.2], [1.0], [1.5]])

    @quick_jit
    def evaluate(x, where):
        density = plain.fit(x).density
        laplacian = jax.vmap(jax.hessian(lambda y: density(y[None])[0]))(where)[:, 0, 0]
        score = estimator.fit(x)
        corrected = jax.vmap(jax.grad(lambda y: score.density(y[None])[0]))(where)[:, 0]
        expected = density(where) - 0.5 * 0.5**2 * laplacian
        return score.density(where), expected, score.log_density(where), score(where), (
            corrected / jnp.maximum(expected, 0.1 * density(where))
        )  # fmt: skip

    found, expected, log_density, score, expected_score = evaluate(x, where)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_array_equal(np.sign(found), [1.0, 1.0, -1.0])
    np.testing.assert_array_equal(np.isneginf(log_density), [False, False, True])
    np.testing.assert_allclose(score[:, 0], expected_score, rtol=1e-9)


@pytest.mark.parametrize("loss", ["score", "likelihood"])
def test_the_selected_bandwidth_has_the_least_held_out_loss(loss, x64):
    samples = make_data(20, 2, 0, seed=3)[0]
    factors = (0.5, 0.9, 1.6)
    estimator = KernelDensity(AutoBandwidth(factors), loss=loss)
    info = quick_jit(lambda x: estimator.fit(x).info)(samples)
    z = (samples - samples.mean(axis=0)) @ oracle.whitener(samples, "full").T
    reference = (4 / (4 * 10)) ** (1 / 6)
    expected = []
    for factor in factors:
        values = []
        for own, other in ((z[0::2], z[1::2]), (z[1::2], z[0::2])):
            density = oracle.kernel_density(own, None, factor * reference, w=np.eye(2))
            values += [held_out_loss(density, x, loss) for x in other]
        expected.append(np.mean(values))
    np.testing.assert_allclose(info.bandwidths, np.array(factors) * reference, rtol=1e-9)
    # Of the score's loss the divergence is by differences.
    np.testing.assert_allclose(info.losses, expected, rtol=1e-6 if loss == "score" else 1e-9)
    best = factors[int(np.argmin(expected))]
    assert info.bandwidth == pytest.approx(best * (4 / (4 * 20)) ** (1 / 6), rel=1e-9)


def held_out_loss(density, x, loss):
    """Loss at one held-out sample."""
    value, score = density.at(x)
    if loss == "likelihood":
        return -np.log(max(value, density.epsilon))
    step = 1e-5
    ends = [density.at(x + sign * step * e)[1] for e in np.eye(2) for sign in (1, -1)]
    forward, backward = np.diag(ends[0::2]), np.diag(ends[1::2])
    return 0.5 * score @ score + np.sum(forward - backward) / (2 * step)


@pytest.mark.parametrize("fourth_order", [False, True])
def test_tiles_add_up_to_the_whole(fourth_order, monkeypatch, x64):
    widths = np.linspace(0.5, 2.0, N)
    centers = smoothing.Centers(SAMPLES, widths)

    def sums():
        def evaluate(centers, y):
            kwargs = {"fourth_order": fourth_order, "factor": jnp.asarray(np.triu(np.ones((D, D))))}
            inside = smoothing.smooth(centers, y, **kwargs)
            return inside, smoothing.smooth(centers, centers.points, leave_out=True, **kwargs)

        return quick_jit(evaluate)(centers, WHERE)

    whole = sums()
    for name, value in {"CACHED_PAIRS": 0, "TILE_ROWS": 3, "TILE_COLUMNS": 3}.items():
        monkeypatch.setattr(smoothing, name, value)
    for tiled, dense in zip(sums(), whole, strict=True):
        for a, b in zip(tiled, dense, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-300)


def test_densities_integrate_to_one(x64):
    grid = jnp.linspace(-30.0, 40.0, 5001)[:, None]
    corrections = (None, "debiased", "laplace", "adaptive")
    values = quick_jit(
        lambda x: [KernelDensity(correction=c).fit(x).density(grid) for c in corrections]
    )
    # The trapezoidal rule on analytic functions that vanish at both ends has no error to speak of.
    for density in values(SAMPLES[:, :1]):
        assert np.sum(density) * 70 / 5000 == pytest.approx(1.0, abs=1e-9)


@functools.cache
def fitted():
    """The fit in float32, as most users have it."""
    return jax.jit(lambda x: KernelDensity(correction="debiased", floor=0.0).fit(x))(
        jnp.asarray(SAMPLES, jnp.float32)
    )


def test_without_a_floor_the_score_is_the_gradient_of_the_log_density():
    where, score = jnp.asarray(WHERE, jnp.float32), fitted()
    gradient = quick_jit(jax.vmap(jax.grad(lambda x: score.log_density(x[None])[0])))(where)
    np.testing.assert_allclose(score(where), gradient, rtol=1e-4, atol=1e-4)


def test_values_are_finite_however_far_the_points():
    sizes = np.array([1e3, 1e10, 1e19, 1e30], np.float32)
    far = np.outer(sizes, np.ones(D, np.float32))
    for score in (fitted(), dataclasses.replace(fitted(), log_floor=jnp.asarray(-10.0))):
        assert np.all(np.isfinite(score(far)))
        assert np.all(score.log_density(far) < -1e5)
        assert not np.any(np.isnan(score.log_density(far)))


@pytest.mark.thorough
def test_an_affine_map_of_the_samples_maps_the_estimate(x64):
    matrix, shift = np.triu(np.full((D, D), 0.7)) + np.eye(D), np.array([3.0, -1.0, 100.0])
    estimator = KernelDensity("auto", "debiased")
    evaluate = quick_jit(
        lambda x, where: (lambda s: (s(where), s.log_density(where)))(estimator.fit(x))
    )
    scores, log_density = evaluate(SAMPLES, POINTS)
    mapped, log_mapped = evaluate(SAMPLES @ matrix.T + shift, POINTS @ matrix.T + shift)
    assert close(np.asarray(mapped) @ matrix, scores)
    log_det = np.linalg.slogdet(matrix)[1]
    np.testing.assert_allclose(log_mapped, np.asarray(log_density) - log_det, rtol=1e-9)


def test_one_program_serves_many_bandwidths_and_floors():
    samples = jnp.asarray(SAMPLES, jnp.float32)

    @quick_jit
    def both(bandwidths, floors):
        fit = jax.vmap(lambda h, floor: KernelDensity(h, floor=floor).fit(samples))
        score = fit(bandwidths, floors)
        return jax.vmap(lambda s: s(samples))(score), score.info.bandwidth, score.info.floor

    values, bandwidths, floors = both(jnp.array([0.5, 1.0]), jnp.array([1.0, 3.0]))
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(bandwidths, [0.5, 1.0])
    np.testing.assert_allclose(floors, np.array([1.0, 3.0]) / N**2, rtol=1e-6)
    assert np.max(np.abs(values[0] - values[1])) > 0.1


def test_a_fitted_score_is_a_pilot():
    samples = np.asarray(SAMPLES, np.float32)
    score = fitted()
    estimator = KernelDensity(0.7, "debiased", pilot=score)
    by_score = quick_jit(lambda e: e.fit(samples))(estimator)
    by_function = KernelDensity(0.7, "debiased", pilot=lambda x: score(x)).fit(samples)
    assert isinstance(by_score, KernelDensityScore)
    # Two programs, which round in different orders.
    np.testing.assert_allclose(by_score.centers.points, by_function.centers.points, atol=1e-5)


@pytest.mark.slow
def test_copies_and_two_samples_give_finite_values():
    def values(x):
        bandwidths = [("auto", None)] + [
            ("reference", c) for c in ("debiased", "laplace", "adaptive")
        ]
        scores = [KernelDensity(h, correction).fit(x) for h, correction in bandwidths]
        return [(s(x), s.at_samples, s.density(x), s.info.finite) for s in scores]

    for x in (np.ones((6, 2), np.float32), np.float32([[0.0, 1.0], [2.0, 3.0]])):
        for *arrays, finite in quick_jit(values)(x):
            assert bool(finite)
            assert all(np.all(np.isfinite(a)) for a in arrays)


def test_numbers_that_are_not_finite_are_reported():
    nothing = KernelDensity(0.5, "debiased", pilot=lambda x: x / 0.0)
    info = quick_jit(lambda x: nothing.fit(x).info)(jnp.asarray(SAMPLES, jnp.float32))
    assert not bool(info.finite)
    with pytest.raises(FloatingPointError, match="expected finite"):
        info.raise_if_failed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"bandwidth": "median"},
            "bandwidth: expected 'reference', 'auto' or a positive finite number.*; got 'median'",
        ),
        ({"bandwidth": -1.0}, "bandwidth: expected a positive finite number; got -1.0"),
        ({"bandwidth": NormalReference}, "bandwidth: expected .* or a number; got <class"),
        ({"correction": "jackknife"}, "correction: expected one of None, 'debiased'"),
        ({"loss": "mise"}, "loss: expected one of 'score', 'likelihood'"),
        ({"floor": -1.0}, "floor: expected a number of at least 0; got -1.0"),
        ({"pilot": base_function}, "pilot: expected None with correction=None; got one"),
        ({"pilot": 3.0, "correction": "debiased"}, "pilot: expected a score function or None"),
        ({"pilot": lambda x: x[:2], "correction": "debiased"}, r"pilot\(samples\): expected shape"),
        ({"bandwidth": jnp.ones(2)}, r"bandwidth: expected one number; got shape \(2,\)"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        KernelDensity(**arguments).fit(SAMPLES.astype(np.float32))


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="samples: expected at least 2 rows"):
        KernelDensity().fit(np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="x: expected 3 column"):
        fitted()(np.zeros((1, 2), np.float32))
