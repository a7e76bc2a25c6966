"""Batch and match: the Gaussian whose scores at its own draws are the model's.

Each step draws from the Gaussian, and moves it to where the weighted sum of the squared difference
of scores (in the Gaussian's own metric) and the divergence from the last Gaussian is smallest. That
step is in closed form (Cai, Modi, Pillaud-Vivien, Margossian, Gower, Blei and Saul 2024, *Batch and
match: black-box variational inference with a score-based divergence*, algorithm 1). It does not
know coordinates: stiff and correlated posteriors take as many steps as round ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._transports.affine import Affine, antithetic
from numpyro_kscore._transports.transport import Evaluate

# Draws of a step are twice the dimension, or these pairs.
FEWEST_PAIRS = 16
# Steps of a round near the best Gaussian, and the weight of the first of them.
NEAR_STEPS, NEAR_WEIGHT = 20, 10.0


class Bound(NamedTuple):
    """An evidence lower bound by Monte Carlo.

    Attributes:
        value: in nats; minus infinity if an energy was not finite.
        standard_error: its standard error.
    """

    value: float
    standard_error: float

    @property
    def lower(self) -> float:
        """The bound less two errors: of many noisy bounds the highest is too high."""
        return self.value - 2 * self.standard_error


def elbo(gaussian: Affine, noise: np.ndarray, energies: np.ndarray) -> Bound:
    """The evidence lower bound of a Gaussian, by energies (m,) at the draws of the noise."""
    if not np.all(np.isfinite(energies)):
        return Bound(-np.inf, 0.0)
    # With the density of the Gaussian at the draws, a perfect match has no error at all.
    log_q = (
        -0.5 * np.sum(noise**2, axis=1) - gaussian.log_det - 0.5 * len(noise[0]) * np.log(2 * np.pi)
    )
    pairs = np.mean((-energies - log_q).reshape(2, -1), axis=0)
    return Bound(float(np.mean(pairs)), float(np.std(pairs) / np.sqrt(max(len(pairs) - 1, 1))))


def matched(
    gaussian: Affine, noise: np.ndarray, scores: np.ndarray, weight: float
) -> Affine | None:
    """One step of batch and match; None if its numbers are not finite.

    The model's scores (m, d) are at the Gaussian's draws of this noise. The weight is the λ of the
    paper: how far the step trusts these draws.
    """
    # In coordinates in which the last Gaussian is the standard one.
    scores = scores @ gaussian.factor
    count, dim = noise.shape
    mean_noise, mean_score = noise.mean(0), scores.mean(0)
    shrunk = weight / (1 + weight)
    z, s = noise - mean_noise, scores - mean_score
    u = weight * (s.T @ s) / count + shrunk * np.outer(mean_score, mean_score)
    v = np.eye(dim) + weight * (z.T @ z) / count + shrunk * np.outer(mean_noise, mean_noise)
    try:
        # Σ = 2 V (I + (I + 4 U V)^½)⁻¹, symmetrically.
        lower = np.linalg.cholesky(v)
        values, vectors = np.linalg.eigh(lower.T @ u @ lower)
        root = np.sqrt(2 / (1 + np.sqrt(1 + 4 * np.maximum(values, 0.0))))
        half = lower @ (vectors * root)
        covariance = half @ half.T
        factor = gaussian.factor @ np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return None
    move = shrunk * (covariance @ mean_score + mean_noise)
    found = Affine(gaussian.mean + gaussian.factor @ move, factor)
    is_finite = np.all(np.isfinite(found.mean)) and np.all(np.isfinite(factor))
    return found if is_finite and np.all(np.diag(factor) > 0) else None


def match_scores(
    evaluate: Evaluate,
    start: Affine,
    rng: np.random.Generator,
    weights: Sequence[float],
    num_draws: int,
) -> list[Affine]:
    """Batch and match from a first Gaussian; returns the Gaussian after every step.

    A step whose numbers are not finite is left out; the next one draws anew.

    Cost: num_draws gradients of the model and O(d² (d + num_draws)) for each step.
    """
    gaussian, found = start, []
    for weight in weights:
        noise = antithetic(rng, num_draws, len(start.mean))
        energies, gradients = evaluate(gaussian.push(noise))
        finite = np.isfinite(energies) & np.all(np.isfinite(gradients), axis=1)
        if np.sum(finite) >= max(2, num_draws // 2):
            after = matched(gaussian, noise[finite], -gradients[finite], weight)
            gaussian = gaussian if after is None else after
        found.append(gaussian)
    return found


def match_far(
    evaluate: Evaluate, start: Affine, rng: np.random.Generator, num_steps: int
) -> list[Affine]:
    """Steps with the published weights, draws times dimensions over steps, for a Gaussian far off.

    They forget all earlier draws at every step, and stop at the noise of one batch.
    """
    num_draws = _num_draws(start)
    weights = num_draws * len(start.mean) / np.arange(1, num_steps + 1)
    return match_scores(evaluate, start, rng, weights.tolist(), num_draws)


def match_near(
    evaluate: Evaluate, start: Affine, rng: np.random.Generator, count: int
) -> list[Affine]:
    """A round of steps near the best Gaussian: weights go on falling with the rounds before it."""
    weights = NEAR_WEIGHT / np.sqrt(count * NEAR_STEPS + np.arange(1, NEAR_STEPS + 1))
    return match_scores(evaluate, start, rng, weights.tolist(), _num_draws(start))


def _num_draws(gaussian: Affine) -> int:
    return 2 * max(FEWEST_PAIRS, len(gaussian.mean))
