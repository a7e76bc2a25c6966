"""Sliced score matching against closed forms, and against known scores."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.primitives import mutable

from numpyro_kscore.sliced import SlicedScoreMatching, SlicedState, sliced_loss
from support import oracle
from support.compiling import quick_jit

KEY = random.key(0)
SMALL = SlicedScoreMatching(hidden_dims=(8,), num_steps=20, learning_rate=1e-2)


TRACES = []


# One program for all small fits, and one for all updates, of 30 draws in two dimensions.
@quick_jit
def fit_small(key, samples, rate):
    TRACES.append(rate)
    return dataclasses.replace(SMALL, learning_rate=rate).fit(key, samples)


update_small = quick_jit(functools.partial(SMALL.update, num_steps=3))


def gaussian_draws(n, seed):
    """Correlated draws off the origin, and their score."""
    mixing = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [-0.5, 0.3, 0.4]])
    mean = np.array([2.0, -1.0, 0.5])
    draws = np.random.default_rng(seed).normal(size=(n, 3)) @ mixing.T + mean
    return draws, -np.linalg.solve(mixing @ mixing.T, (draws - mean).T).T


def banana_draws(n, seed):
    """x ~ N(0, 1), y | x ~ N(x², ¼), and their score."""
    z = np.random.default_rng(seed).normal(size=(n, 2))
    draws = np.stack([z[:, 0], z[:, 0] ** 2 + 0.5 * z[:, 1]], axis=1)
    pull = 2 * z[:, 1]
    return draws, np.stack([2 * z[:, 0] * pull - z[:, 0], -pull], axis=1)


def squared_error(estimate, score):
    return oracle.relative_error(estimate, score) ** 2


# --------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("with_base", [False, True])
def test_loss_and_its_gradient_are_the_formula_for_a_linear_field(with_base, x64):
    """f(x) = A x + b: E[½|f|² + f·s0] + mean of vᵀ A v, and its derivatives by hand."""
    rng = np.random.default_rng(0)
    n, p, d = 6, 4, 3
    matrix, offset = rng.normal(size=(d, d)), rng.normal(size=d)
    x, directions, base = rng.normal(size=(n, d)), rng.normal(size=(p, n, d)), None
    if with_base:
        base = rng.normal(size=(n, d))
    field = x @ matrix.T + offset
    s0 = base if with_base else np.zeros((n, d))
    curvature = np.einsum("pna,ab,pnb->pn", directions, matrix, directions)
    expected = np.mean(0.5 * np.sum(field**2, 1) + np.sum(field * s0, 1)) + np.mean(curvature)
    by_matrix = (field + s0).T @ x / n + np.einsum("pna,pnb->ab", directions, directions) / (n * p)
    by_offset = np.mean(field + s0, axis=0)

    def loss(matrix, offset):
        return sliced_loss(
            lambda y: y @ matrix.T + offset,
            jnp.asarray(x),
            jnp.asarray(directions),
            None if base is None else jnp.asarray(base),
        )

    value, gradient = jax.value_and_grad(loss, (0, 1))(jnp.asarray(matrix), jnp.asarray(offset))
    assert float(value) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient[0], by_matrix, rtol=1e-11)
    np.testing.assert_allclose(gradient[1], by_offset, rtol=1e-11)


def test_loss_of_a_curved_field_by_finite_differences(x64):
    """The curvature term of a field whose Jacobian is neither constant nor symmetric."""
    rng = np.random.default_rng(1)
    x, directions = rng.normal(size=(5, 2)), rng.normal(size=(1, 5, 2))

    def field(x, xp=np):
        return xp.stack([xp.sin(x[:, 0] * x[:, 1]), x[:, 0] ** 2 + xp.cos(x[:, 1])], axis=1)

    step = 1e-6 * directions[0]
    along = (field(x + step) - field(x - step)) / 2e-6
    expected = np.mean(0.5 * np.sum(field(x) ** 2, 1) + np.sum(directions[0] * along, 1))
    value = sliced_loss(lambda y: field(y, jnp), jnp.asarray(x), jnp.asarray(directions))
    assert float(value) == pytest.approx(expected, rel=1e-8)


# --------------------------------------------------------------------------------------- the fit


@pytest.mark.slow
def test_recovers_the_score_of_a_gaussian():
    """The network has to find the whitening, which is left out: its base is off by 0.82.

    Squared relative errors at fresh points were 0.012 with these settings.
    """
    draws, _ = gaussian_draws(1000, 0)
    estimator = SlicedScoreMatching((32,), 300, 1e-2, standardize="none")
    fitted = estimator.fit(KEY, jnp.asarray(draws, jnp.float32))
    points, score = gaussian_draws(1000, 1)
    points = jnp.asarray(points, jnp.float32)
    # Over five keys and sets of draws it was .009 to .021.
    assert squared_error(fitted(points), score) < 0.04
    assert squared_error(fitted(points) - fitted.residual(points), score) > 0.7
    precision = np.linalg.inv(np.cov(draws.T))
    # The exact divergence is minus the trace of the precision, here 18.1; 18.2 was measured.
    divergence = np.asarray(fitted.divergence(points))
    assert divergence.mean() == pytest.approx(-np.trace(precision), rel=0.1)


@pytest.mark.thorough
def test_recovers_the_score_of_a_banana_and_the_loss_falls():
    """Squared relative errors at fresh points: 0.12 and 0.16 with two keys, 0.92 at the start."""
    draws, _ = banana_draws(4000, 0)
    estimator = SlicedScoreMatching((32, 32), 600, 1e-2, batch_size=256)
    fitted = estimator.fit(KEY, jnp.asarray(draws, jnp.float32))
    points, score = banana_draws(1000, 1)
    points = jnp.asarray(points, jnp.float32)
    # .16 with this key; .03 to .16 over five keys and sets of draws.
    assert squared_error(fitted(points), score) < 0.3
    assert squared_error(fitted(points) - fitted.residual(points), score) > 0.8
    losses = np.asarray(fitted.info.losses)
    assert losses.shape == (600,)
    assert np.all(np.isfinite(losses))
    # Zero is the loss of the Gaussian it starts from; it ended at -12.
    assert losses[-100:].mean() < -5.0
    assert losses[-300:-200].mean() < losses[100:200].mean()


@pytest.mark.thorough
def test_score_is_base_plus_residual_in_the_units_of_the_samples(x64):
    """The network's coordinates, undone by hand; the divergence by automatic differentiation."""
    draws, points = gaussian_draws(50, 0)[0], gaussian_draws(7, 1)[0]

    @quick_jit
    def evaluate(key, draws, points):
        results = []
        for base in ("gaussian", None):
            fitted = SlicedScoreMatching((8,), 20, 1e-1, base=base).fit(key, draws)
            jacobian = jax.vmap(jax.jacfwd(lambda x, f=fitted: f(x[None])[0]))(points)
            values = fitted(points), fitted.residual(points), fitted.divergence(points)
            results.append((fitted, fitted(draws), values, jacobian))
        return results

    mean, root = draws.mean(axis=0), np.linalg.cholesky(np.cov(draws.T, ddof=0))
    z = np.linalg.solve(root, (points - mean).T).T
    gaussian = np.linalg.solve(root.T, -z.T).T
    results = jax.device_get(evaluate(KEY, draws, points))
    for base, (fitted, at_draws, values, jacobian) in zip((gaussian, 0.0), results, strict=True):
        hidden = z
        for weight, bias in fitted.layers[:-1]:
            hidden = hidden @ weight + bias
            hidden = hidden / (1 + np.exp(-hidden))
        out = hidden @ fitted.layers[-1][0] + fitted.layers[-1][1]
        residual = np.linalg.solve(root.T, out.T).T
        score, found, divergence = values
        assert oracle.relative_error(found, residual) < 1e-10
        assert oracle.relative_error(score, residual + base) < 1e-10
        assert oracle.relative_error(divergence, np.trace(jacobian, axis1=1, axis2=2)) < 1e-10
        np.testing.assert_allclose(fitted.at_samples, at_draws, rtol=1e-10)


@pytest.mark.thorough
def test_follows_a_change_of_units(x64):
    """Whitened, the fits to ``x B^T + c`` and to x agree: scores transform as gradients."""
    draws, _ = banana_draws(60, 0)
    # Lower triangular: whitening by Cholesky factors then gives the same coordinates.
    change, shift = np.array([[2.0, 0.0], [-0.5, 0.1]]), np.array([100.0, -5.0])
    fit = quick_jit(SMALL.fit)
    plain = fit(KEY, jnp.asarray(draws))
    moved = fit(KEY, jnp.asarray(draws @ change.T + shift))
    expected = np.linalg.solve(change.T, np.asarray(plain.at_samples).T).T
    assert oracle.relative_error(moved.at_samples, expected) < 1e-7


@pytest.mark.thorough
def test_values_of_a_base_score():
    """The network learns the difference from the base, which is zero for the exact score."""
    draws, score = gaussian_draws(1000, 0)
    draws, score = jnp.asarray(draws, jnp.float32), jnp.asarray(score, jnp.float32)
    estimator = SlicedScoreMatching((32,), 300, 1e-2, standardize="none", base=None)
    fitted = estimator.fit(KEY, draws, 0.5 * score)
    # Squared relative error of the sum: 0.25 at the start, 0.011 measured after training.
    # Over five keys and sets of draws it was .010 to .021.
    assert squared_error(fitted.at_samples, score) < 0.04
    np.testing.assert_allclose(
        fitted.at_samples, 0.5 * score + fitted.residual(draws), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match=r"(?s)expected a base score.*residual\(x\)"):
        fitted(draws)
    with pytest.raises(ValueError, match=r"(?s)expected a base score.*residual_divergence\(x\)"):
        fitted.divergence(draws)


@pytest.mark.thorough
def test_jit_vmap_pytree_and_one_trace():
    draws = np.float32(banana_draws(30, 0)[0])
    batch, rates = np.stack([draws, 3 * draws]), np.float32([1e-2, 1e-3])
    keys = random.split(KEY, 2)
    before = len(TRACES)
    single = [fit_small(keys[i], batch[i], rates[i]) for i in range(2)]
    # None if another test has traced it.
    assert len(TRACES) - before <= 1
    mapped = jax.vmap(fit_small)(keys, batch, rates)
    for i in range(2):
        np.testing.assert_allclose(mapped.at_samples[i], single[i].at_samples, rtol=2e-3, atol=2e-3)
    again = jax.tree.unflatten(*jax.tree.flatten(single[0])[::-1])
    np.testing.assert_array_equal(again(draws), single[0](draws))
    assert hash(SMALL) == hash(SlicedScoreMatching((8,), 20, 1e-2))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_dtypes_follow_the_samples(dtype, x64):
    samples = jax.ShapeDtypeStruct((10, 3), dtype)
    estimator = SlicedScoreMatching((4,), 3, num_projections=2, batch_size=5)

    def outputs(key, samples):
        fitted = estimator.fit(key, samples)
        state = estimator.init(key, 3, dtype)
        state = estimator.update(state, key, samples)
        return fitted(samples), fitted.divergence(samples), fitted.info.losses, state.loss

    shapes = jax.eval_shape(outputs, KEY, samples)
    assert [out.dtype for out in shapes] == [dtype] * 4
    assert [out.shape for out in shapes] == [(10, 3), (10,), (3,), ()]


@pytest.mark.thorough
def test_samples_that_do_not_vary_give_finite_values():
    """One coordinate constant, half of the draws duplicates."""
    half = np.float32(np.random.default_rng(0).normal(size=(15, 2)) * [1.0, 0.0])
    fitted = fit_small(KEY, np.concatenate([half, half]), np.float32(1e-2))
    assert np.all(np.isfinite(fitted.at_samples))
    fitted.info.raise_if_failed()


# ---------------------------------------------------------------------------------- following


@pytest.mark.slow
def test_follows_a_drifting_target():
    """A banana that moves by ten and triples in size while two steps are taken for each new set."""
    estimator = SlicedScoreMatching((32, 32), learning_rate=5e-3)
    num_sets, num_keys = 800, 8

    @jax.jit
    @jax.vmap
    def follow(run_key):
        def one(state, t):
            key = random.fold_in(run_key, t)
            z = random.normal(key, (128, 2))
            draws = jnp.stack([z[:, 0], z[:, 0] ** 2 + 0.5 * z[:, 1]], axis=1)
            progress = t / num_sets
            samples = (1 + 2 * progress) * draws + 10 * progress
            return estimator.update(state, random.fold_in(key, 1), samples, num_steps=2), None

        start = estimator.init(random.fold_in(run_key, num_sets), 2)
        state, _ = lax.scan(one, start, jnp.arange(num_sets))
        assert jax.tree.structure(state) == jax.tree.structure(start)
        return estimator.score(state, points), estimator.residual(state, points)

    points, score = banana_draws(1000, 1)
    points = jnp.asarray(3 * points + 10, jnp.float32)
    estimates, residuals = follow(random.split(KEY, num_keys))
    errors = [squared_error(estimate, score / 3) for estimate in estimates]
    # Single ones of 32 keys gave .3 to .7, means over eight .40 to .44; the Gaussian .92 to .95.
    assert np.mean(errors) < 0.5
    for estimate, residual in zip(estimates, residuals, strict=True):
        assert squared_error(estimate - residual, score / 3) > 0.85


@pytest.mark.thorough
def test_update_is_pure_and_takes_the_steps_asked_for():
    samples = jnp.asarray(banana_draws(30, 0)[0], jnp.float32)
    start = SMALL.init(KEY, 2)
    before = jax.tree.map(np.array, start)
    first = update_small(start, KEY, samples)
    again = update_small(start, KEY, samples)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, start))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert isinstance(first, SlicedState)
    assert int(jax.tree.leaves(first.optimizer)[0]) == 3
    # It follows draws that move: the Gaussian is that of the last ones, the network goes on.
    moved = np.float32(3 * samples + 10)
    after = update_small(first, KEY, moved)
    assert int(jax.tree.leaves(after.optimizer)[0]) == 6
    gaussian = SMALL.score(after, moved) - SMALL.residual(after, moved)
    expected = -np.linalg.solve(np.cov(moved.T, ddof=0), (moved - moved.mean(axis=0)).T).T
    assert oracle.relative_error(gaussian, expected) < 1e-4


def test_bad_draws_leave_the_state_usable():
    samples = jnp.asarray(banana_draws(30, 0)[0], jnp.float32)
    # Outside jit such samples are refused.
    state = update_small(SMALL.init(KEY, 2), KEY, samples)
    old = jax.tree.leaves((state.layers, state.optimizer, state.coordinates))
    for bad in (jnp.nan, jnp.inf):
        after = update_small(state, KEY, samples.at[3, 1].set(bad))
        assert jnp.isnan(after.loss)
        kept = jax.tree.leaves((after.layers, after.optimizer, after.coordinates))
        for a, b in zip(kept, old, strict=True):
            np.testing.assert_array_equal(a, b)
        assert jnp.isfinite(update_small(after, KEY, samples).loss)


@pytest.mark.parametrize("base", ["gaussian", "values", pytest.param(None, marks=pytest.mark.slow)])
def test_a_step_of_an_objective_is_an_update_and_the_estimate_after_it(base):
    estimator = dataclasses.replace(SMALL, base=None if base == "values" else base)
    samples = jnp.asarray(banana_draws(30, 0)[0], jnp.float32)
    base_scores = -samples if base == "values" else None
    state = estimator.init(KEY, 2)
    estimate, after = estimator.follow(state, KEY, samples, base_scores)
    expected = estimator.update(state, KEY, samples, base_scores)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    residual = estimator.residual(after, samples)
    scores = -samples + residual if base == "values" else estimator.score(after, samples)
    np.testing.assert_array_equal(estimate.residual, residual)
    np.testing.assert_array_equal(estimate.scores, scores)
    z = np.asarray(after.coordinates.to_kernel(samples), float)
    squares = np.sum((z[:, None] - z) ** 2, axis=2) + np.diag(np.full(30, np.inf))
    np.testing.assert_allclose(estimate.nearest, squares.min(axis=1), rtol=1e-3, atol=1e-6)


def test_a_step_of_an_objective_takes_no_jackknife_and_no_context():
    samples, state = jnp.ones((4, 2)), SMALL.init(KEY, 2)
    with pytest.raises(ValueError, match=r"debias: expected None with SlicedScoreMatching\(\)"):
        SMALL.follow(state, KEY, samples, debias="jackknife")
    with pytest.raises(ValueError, match=r"context: expected None with Sliced.*got shape \(4, 1\)"):
        SMALL.follow(state, KEY, samples, context=samples[:, :1])


def test_non_finite_samples_are_reported_by_a_jitted_fit():
    samples = jnp.asarray(banana_draws(30, 0)[0], jnp.float32).at[3, 1].set(jnp.nan)
    fitted = fit_small(KEY, samples, np.float32(1e-2))
    assert not bool(fitted.info.finite)
    with pytest.raises(FloatingPointError, match="expected finite values"):
        fitted.info.raise_if_failed()


@pytest.mark.thorough
def test_state_lives_in_a_mutable_site():
    """A guide whose draws train the network, under NumPyro's own SVI."""

    def model():
        numpyro.sample("x", dist.Normal().expand([2]).to_event(1))

    def guide():
        loc = numpyro.param("loc", jnp.ones(2))
        box = mutable("network", {"state": SMALL.init(KEY, 2)})
        draws = loc + random.normal(numpyro.prng_key(), (16, 2))
        box["state"] = SMALL.update(box["state"], KEY, lax.stop_gradient(draws))
        numpyro.sample("x", dist.Normal(loc, 1.0).to_event(1))

    svi = SVI(model, guide, optax.sgd(0.1), Trace_ELBO())

    @quick_jit
    def run(key):
        start = svi.init(key)
        return start, svi.update(start)[0]

    states = [after.mutable_state["network"]["state"] for after in run(KEY)]
    state = states[-1]
    steps = [int(jax.tree.leaves(s.optimizer)[0]) for s in states]
    assert steps[1] == steps[0] + 1
    assert SMALL.score(state, jnp.zeros((3, 2))).shape == (3, 2)


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("error", "settings", "message"),
    [
        (TypeError, {"hidden_dims": 32}, "hidden_dims: expected a tuple.*got 32"),
        (TypeError, {"hidden_dims": ()}, "hidden_dims: expected a tuple of one or more"),
        (ValueError, {"hidden_dims": (0,)}, "hidden_dims: expected an integer of at least 1"),
        (ValueError, {"num_steps": 0}, "num_steps: expected.*got 0"),
        (TypeError, {"num_projections": 1.5}, "num_projections: expected an integer.*got 1.5"),
        (ValueError, {"batch_size": 0}, "batch_size: expected.*got 0"),
        (ValueError, {"learning_rate": -1.0}, "learning_rate: expected a positive.*got -1"),
        (ValueError, {"standardize": "whiten"}, "standardize: expected one of.*got 'whiten'"),
        (ValueError, {"base": "model"}, "base: expected one of 'gaussian', None; got 'model'"),
    ],
)
def test_bad_settings_are_refused(error, settings, message):
    with pytest.raises(error, match=rf"(?s){message}"):
        SlicedScoreMatching(**settings)


@pytest.mark.parametrize(
    ("error", "samples", "base_scores", "message"),
    [
        (ValueError, np.zeros(3), None, r"samples: expected shape \(n, d\).*got shape \(3,\)"),
        (ValueError, np.zeros((1, 3)), None, "samples: expected at least 2 rows"),
        (
            TypeError,
            np.zeros((4, 3), int),
            None,
            "samples: expected an array of float32 or float64",
        ),
        (ValueError, np.full((4, 3), np.nan), None, "samples: expected finite values; got 4 row"),
        (ValueError, np.zeros((4, 3)), np.zeros((4, 3)), "expected base=None.*got base='gaussian'"),
    ],
)
def test_bad_samples_are_refused(error, samples, base_scores, message):
    with pytest.raises(error, match=rf"(?s){message}"):
        SMALL.fit(KEY, samples, base_scores)


def test_shapes_that_do_not_fit_are_refused():
    estimator = SlicedScoreMatching(base=None)
    with pytest.raises(ValueError, match=r"base_scores: expected shape \(4, 3\).*got \(5, 3\)"):
        estimator.fit(KEY, np.zeros((4, 3)), np.zeros((5, 3)))
    state = SMALL.init(KEY, 2)
    with pytest.raises(ValueError, match=r"samples: expected 2 column.*\(4, 3\)"):
        SMALL.update(state, KEY, np.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"x: expected 2 column.*\(4, 3\)"):
        SMALL.score(state, np.zeros((4, 3)))
    with pytest.raises(ValueError, match="dim: expected an integer of at least 1; got 0"):
        SMALL.init(KEY, 0)


def test_missing_optax_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"expected optax.*numpyro-kscore\[examples\]"):
        SMALL.init(KEY, 2)


@pytest.mark.parametrize("standardize", ["local", "full", "diagonal", "none"])
def test_a_state_keeps_its_structure(standardize):
    estimator = SlicedScoreMatching((8,), standardize=standardize)

    def states(key, samples):
        state = estimator.init(key, 2)
        return state, estimator.update(state, key, samples)

    samples = jax.ShapeDtypeStruct((16, 2), jnp.float32)
    before, after = jax.eval_shape(states, random.key(0), samples)
    assert before == after
