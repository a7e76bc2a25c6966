"""Draws of a start that is close to the model, by which a fit can tell that it needs no step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Evaluate, Gaussian
from numpyro_kscore._starts.couplings import Couplings, coupled
from numpyro_kscore._starts.warp import Warp, warped

__all__ = ["NUM_DRAWS", "Nearby", "divergence_of", "draw_nearby"]

# Draws that are kept, and those that tell whether they are worth it.
NUM_DRAWS, FEW_DRAWS = 1024, 64
# Farther from the model, in nats, a start is surely not all that a fit asks for.
FARTHEST = 0.1


class Nearby(NamedTuple):
    """Draws of a start, in coordinates in which it is a standard normal.

    Attributes:
        points: the draws, (n, d).
        scores: the model's score there, (n, d).
        log_density: of the model, in the coordinates of the guide, (n,).
        gaps: log density of the model less the start's, (n,).
    """

    points: np.ndarray
    scores: np.ndarray
    log_density: np.ndarray
    gaps: np.ndarray


def draw_nearby(
    evaluate: Evaluate,
    gaussian: Gaussian,
    couplings: Couplings | None,
    warp: Warp | None,
    rng: np.random.Generator,
) -> Nearby | None:
    """Draws of a start; None if they show that it is not close to the model.

    Args:
        evaluate: energies and gradients in the coordinates of its centering.
        gaussian: the Gaussian.
        couplings: how sizes vary with others in these coordinates.
        warp: what draws of the Gaussian are pushed through.
        rng: for draws.

    Cost: 64 gradients of the model, and 1024 if it is close.
    """
    if couplings is not None:
        evaluate = coupled(evaluate, couplings)
    inside = evaluate if warp is None else warped(evaluate, warp)
    for count in (FEW_DRAWS, NUM_DRAWS):
        points = rng.standard_normal((count, len(gaussian.mean)))
        at = gaussian.push(points)
        energies, gradients = inside(at)
        normal = -0.5 * np.sum(points**2 + np.log(2 * np.pi), axis=1)
        gaps = gaussian.log_volume - energies - normal
        if not divergence_of(gaps) <= FARTHEST:
            return None
    volumes = 0.0 if warp is None else warp.log_volumes(at)
    return Nearby(points, -gradients @ gaussian.factor, -energies - volumes, gaps)


def divergence_of(gaps: np.ndarray) -> float:
    """The divergence from a start to the model, in nats, by importance sampling; NaN if unknown."""
    return float(np.log(np.mean(np.exp(gaps - np.max(gaps)))) + np.max(gaps) - np.mean(gaps))
