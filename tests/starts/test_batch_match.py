"""Batch and match against its fixed point and the minimum that defines a step."""

import numpy as np
import pytest

from numpyro_kscore._starts.batch_match import elbo, match_scores, matched
from numpyro_kscore._transports.affine import Affine


def gaussian_model(dim=4, seed=3):
    rng = np.random.default_rng(seed)
    factor = np.tril(rng.normal(size=(dim, dim))) + 3 * np.eye(dim)
    target = Affine(rng.normal(size=dim), factor)
    precision = np.linalg.inv(factor @ factor.T)

    def evaluate(points):
        moved = points - target.mean
        return 0.5 * np.sum(moved @ precision * moved, axis=1), moved @ precision

    return evaluate, target


def test_a_gaussian_posterior_is_found():
    evaluate, target = gaussian_model()
    rng = np.random.default_rng(0)
    weights = [32 * 4 / k for k in range(1, 31)]
    found = match_scores(evaluate, Affine(np.full(4, 30.0), 0.01 * np.eye(4)), rng, weights, 32)[-1]
    # The divergence from the target falls geometrically; there is no Monte-Carlo error in the end.
    np.testing.assert_allclose(found.mean, target.mean, atol=1e-3)
    np.testing.assert_allclose(found.factor, target.factor, atol=1e-2)


def test_a_step_minimizes_what_defines_it():
    """Source: equations 4 and 6 of the paper, by finite differences in mean and covariance."""
    rng = np.random.default_rng(1)
    dim, count, weight = 2, 8, 3.0
    before = Affine(rng.normal(size=dim), np.array([[1.3, 0.0], [0.4, 0.7]]))
    noise, scores = rng.normal(size=(count, dim)), rng.normal(size=(count, dim))
    draws = before.push(noise)
    sigma_before = before.factor @ before.factor.T

    def objective(mean, sigma):
        difference = scores + (draws - mean) @ np.linalg.inv(sigma)
        match = np.mean(np.sum(difference @ sigma * difference, axis=1))
        inverse = np.linalg.inv(sigma_before)
        move = mean - before.mean
        # KL(q_t || q), the divergence of the last Gaussian from the new one.
        new_inverse = np.linalg.inv(sigma)
        divergence = 0.5 * (
            np.trace(new_inverse @ sigma_before)
            - dim
            + move @ new_inverse @ move
            + np.log(np.linalg.det(sigma @ inverse))
        )
        return 0.5 * weight * match + divergence

    after = matched(before, noise, scores, weight)
    sigma = after.factor @ after.factor.T
    best = objective(after.mean, sigma)
    for _ in range(20):
        change = 1e-3 * rng.normal(size=(dim, dim))
        moved = objective(after.mean + 1e-3 * rng.normal(size=dim), sigma + change + change.T)
        assert moved > best


def test_a_bound_has_the_error_of_its_draws():
    """The bound of the exact posterior is the log evidence, without any error."""
    evaluate, target = gaussian_model()
    half = np.random.default_rng(2).standard_normal((16, 4))
    noise = np.concatenate([half, -half])
    log_det = np.sum(np.log(np.diag(target.factor)))
    evidence = log_det + 2 * np.log(2 * np.pi)
    exact = elbo(target, noise, evaluate(target.push(noise))[0])
    assert exact.value == pytest.approx(evidence, abs=1e-9)
    assert exact.standard_error < 1e-9
    wide = Affine(target.mean, 2 * target.factor)
    bound = elbo(wide, noise, evaluate(wide.push(noise))[0])
    # The divergence of a Gaussian twice as wide: (4 - 1) / 2 - log 2 for each dimension.
    loss = 4 * (1.5 - np.log(2))
    assert bound.value == pytest.approx(evidence - loss, abs=5 * bound.standard_error)
    assert bound.lower < bound.value
    energies = evaluate(target.push(noise))[0]
    energies[3] = np.nan
    assert elbo(target, noise, energies).value == -np.inf


def test_steps_with_draws_that_are_not_finite_are_left_out():
    start = Affine(np.zeros(2), np.eye(2))

    def evaluate(points):
        return np.full(len(points), np.nan), np.full_like(points, np.nan)

    found = match_scores(evaluate, start, np.random.default_rng(0), [3.0] * 3, 8)
    assert len(found) == 3
    np.testing.assert_array_equal(found[-1].mean, start.mean)
