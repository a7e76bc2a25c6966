"""Draws of a start that is close to the model, by which a fit can tell that it needs no step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._transports.transport import Chain, Evaluate, pulled_back

# Draws that are kept, and those that tell whether they are worth it.
NUM_DRAWS, FEW_DRAWS = 1024, 64
# Farther from the model, in nats, a start cannot be all that a fit asks for.
FARTHEST = 0.1


class ExactDraws(NamedTuple):
    """Draws of a start whose density is known, at the points that it pushes.

    Attributes:
        points: standard normal points, (n, d).
        scores: the model's score in the coordinates of the points, (n, d).
        log_density: log density of the model, in the coordinates of the guide, (n,).
        gaps: log density of the model less the start's, (n,).
        divergence: that of the start from the model by these gaps, in nats.
    """

    points: np.ndarray
    scores: np.ndarray
    log_density: np.ndarray
    gaps: np.ndarray
    divergence: float


def draw_exactly(
    evaluate: Evaluate, transport: Chain, rng: np.random.Generator
) -> ExactDraws | None:
    """Draws of a start; None if they show that it is not close to the model.

    Args:
        evaluate: energies and gradients in the coordinates of the guide.
        transport: pushes standard normal points to these coordinates, first by an affine map.
        rng: for draws.

    Cost: 64 gradients of the model, and 1024 if it is close.
    """
    inside = pulled_back(evaluate, transport)
    dim = len(transport.steps[0].mean)
    for count in (FEW_DRAWS, NUM_DRAWS):
        points = rng.standard_normal((count, dim))
        energies, gradients = inside(points)
        gaps = -energies + 0.5 * np.sum(points**2 + np.log(2 * np.pi), axis=1)
        divergence = divergence_of(gaps)
        if not divergence <= FARTHEST:
            return None
    log_density = -energies - transport.log_volume(points)
    return ExactDraws(points, -gradients, log_density, gaps, divergence)


def divergence_of(gaps: np.ndarray) -> float:
    """The divergence from a start to the model, in nats, by importance sampling; NaN if unknown."""
    return float(np.log(np.mean(np.exp(gaps - np.max(gaps)))) + np.max(gaps) - np.mean(gaps))
