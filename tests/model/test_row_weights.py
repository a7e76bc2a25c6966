"""Weights of rows that are fitted to the scores of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._model.coreset import choose_rows
from numpyro_kscore._model.tall_density import NUM_ROWS, fit_weights, score_remainders

ROWS, DIM = 3_000, 3


def logistic(rng):
    x = rng.normal(size=(ROWS, DIM)) * rng.lognormal(0.0, 0.7, (ROWS, 1))
    y = rng.random(ROWS) < 0.3
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


@pytest.mark.parametrize("is_curved", [True, False])
def test_remainders_of_scores_are_those_of_the_expansion(is_curved):
    """The rows are monomials up to the fourth order in one coordinate, expanded by hand."""
    point, x = jnp.array([0.5, 1.0]), jnp.array([[2.0, 1.0], [0.5, 3.0]])
    root = jnp.array([[2.0, 0.0], [1.0, 3.0]])

    def rows_at(at):
        return jnp.stack([at[0] ** k for k in range(5)])

    found = score_remainders(rows_at, point, x, root, is_curved)
    slope = np.array([[k * a ** max(k - 1, 0) for k in range(5)] for a in (2.0, 0.5)])
    left = slope - slope[1]
    if is_curved:
        bend = np.array([k * (k - 1) * 0.5 ** max(k - 2, 0) for k in range(5)])
        left = left - bend * np.array([[1.5], [0.0]])
    # The score is along the first coordinate, whose row of the root is (2, 0).
    np.testing.assert_allclose(found[..., 0], 2 * left, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[..., 1], 0.0, atol=1e-5)


def test_few_rows_have_the_score_of_all():
    rng = np.random.default_rng(0)
    features, y = logistic(rng)
    point, root = jnp.array([0.3, -0.2, 0.1]), 0.15 * jnp.eye(DIM)
    draws = point + 0.15 * jnp.asarray(rng.normal(size=(192, DIM)), jnp.float32)

    def rows_at(x):
        logits = features @ x
        return y * logits - jnp.logaddexp(logits, 0.0)

    of_rows = np.asarray(jax.jit(
        lambda: score_remainders(rows_at, point, draws, root, True)
    )())  # fmt: skip
    sizes = np.sqrt(np.mean(of_rows**2, axis=(0, 2)))
    chosen = choose_rows(sizes, NUM_ROWS[0])

    def missed(weights):
        error = np.einsum("jnd,n->jd", of_rows[:, chosen.rows], weights) - of_rows.sum(1)
        return error[:128], np.sqrt(np.mean(error[128:] ** 2))

    before, noise = missed(chosen.weights)
    fitted = fit_weights(chosen, of_rows[:128, chosen.rows], before)
    assert np.min(fitted.weights) >= 0
    # At draws to which they were not fitted.
    left = missed(fitted.weights)[1] / noise
    assert left < 0.1, left


def test_weights_that_nothing_is_gained_by_stay():
    rng = np.random.default_rng(1)
    chosen = choose_rows(rng.exponential(size=500), 50)
    of_rows, missed = rng.normal(size=(64, 50, 2)), rng.normal(size=(64, 2))
    # What is missed has nothing to do with the rows, so that draws that are held out get worse.
    fitted = fit_weights(chosen, 1e-3 * of_rows, missed)
    np.testing.assert_allclose(fitted.weights, chosen.weights, rtol=0.1)


def test_draws_that_are_not_finite_do_no_harm():
    rng = np.random.default_rng(2)
    chosen = choose_rows(rng.exponential(size=500), 50)
    of_rows, change = rng.normal(size=(64, 50, 2)), 0.1 * rng.normal(size=50)
    missed = -np.einsum("jnd,n->jd", of_rows, chosen.weights * change)
    of_rows[3, 4, 0], missed[7, 1] = np.inf, np.nan
    fitted = fit_weights(chosen, of_rows, missed)
    np.testing.assert_allclose(fitted.weights, chosen.weights * (1 + change), rtol=0.01)
    nothing = fit_weights(chosen, np.full((64, 50, 2), np.nan), missed)
    np.testing.assert_array_equal(nothing.weights, chosen.weights)


def test_a_likelihood_that_is_quadratic_has_nothing_to_fit():
    chosen = choose_rows(np.ones(500), 50)
    fitted = fit_weights(chosen, np.zeros((64, 50, 2)), np.zeros((64, 2)))
    np.testing.assert_array_equal(fitted.weights, chosen.weights)
