"""Newton's method to the mode of some coordinates, the others held.

The Hessian is made of differences of gradients, which need no further program. At given scales
many models are close to Gaussian, and one or two steps arrive where a quasi-Newton path of as many
gradients, which has to learn every curvature on its way, is hundreds of nats below.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from numpyro_kscore._starts.bfgs import Iterate
from numpyro_kscore._transports.transport import Evaluate

MOST_STEPS = 10
# A mode is found when a step would lower the energy by less than this, in nats.
ARRIVED = 1e-2
# Decrease of the energy, as a part of what its slope promises, and most halvings of a step.
DECREASE, HALVINGS = 1e-4, 8
# Least curvature, as a part of the largest: less is rounding.
LEAST_CURVATURE = 1e-12
# How much longer or shorter a coordinate can become at once, where there is hardly any curvature.
MOST_CHANGE = 1e6
# Differences span less than this part of a standard deviation, or are taken anew.
SPAN = 0.1


def newton(
    evaluate: Evaluate, start: np.ndarray, is_free: np.ndarray, widths: np.ndarray
) -> Iterate | None:
    """The end of a damped Newton iteration; None if its numbers are not finite.

    Widths (d,) say how far coordinates may be expected to move. The inverse Hessian at the last
    point, (d, d), is zero but for the coordinates that move, and positive definite there:
    curvatures are taken by their absolute values.

    Cost: 2 f + 8 gradients for each step, f coordinates being free, and O(f³).
    """
    free = np.flatnonzero(is_free)
    # Rounding and curvature of the gradient weigh alike at the cube root of the precision.
    relative = float(jnp.finfo(jnp.result_type(float)).eps) ** (1 / 3)
    point = np.asarray(start, float)
    (energy,), (gradient,) = evaluate(point[None])
    lengths = widths[free]
    found = None
    for _ in range(MOST_STEPS):
        spans = relative * lengths
        hessian = _hessian(evaluate, point, free, spans)
        if not (np.isfinite(energy) and np.all(np.isfinite(hessian))):
            break
        inverse, lengths = _inverse(hessian, lengths)
        is_local = bool(np.all(spans < SPAN * lengths))
        direction = -inverse @ gradient[free]
        decrement = -float(direction @ gradient[free])
        whole = np.zeros((len(point), len(point)))
        whole[np.ix_(free, free)] = inverse
        found = Iterate(point, float(energy), np.where(is_free, gradient, 0.0), whole)
        if is_local and decrement < ARRIVED:
            break
        parts = 0.5 ** np.arange(HALVINGS)
        trials = np.repeat(point[None], HALVINGS, axis=0)
        trials[:, free] += parts[:, None] * direction
        energies, gradients = evaluate(trials)
        lower = np.isfinite(energies) & (energies <= energy - DECREASE * parts * decrement)
        if not np.any(lower):
            if is_local:
                break
            continue
        first = int(np.argmax(lower))
        point, energy, gradient = trials[first], energies[first], gradients[first]
    return found


def _inverse(hessian: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse (f, f) of a Hessian with curvatures by their absolute values; lengths (f,).

    Lengths are what the diagonal says of standard deviations. In units of them eigenvalues do not
    depend on those of the coordinates.
    """
    with np.errstate(divide="ignore"):
        lengths = 1 / np.sqrt(np.abs(np.diag(hessian)))
    lengths = np.clip(lengths, before / MOST_CHANGE, before * MOST_CHANGE)
    curvatures, axes = np.linalg.eigh(hessian * np.outer(lengths, lengths))
    sizes = np.abs(curvatures)
    inverse = (axes / np.maximum(sizes, LEAST_CURVATURE * np.max(sizes))) @ axes.T
    return inverse * np.outer(lengths, lengths), lengths


def _hessian(
    evaluate: Evaluate, point: np.ndarray, free: np.ndarray, spans: np.ndarray
) -> np.ndarray:
    """Second derivatives of the energy, (f, f), by central differences of its gradient."""
    moves = np.zeros((len(free), len(point)))
    moves[np.arange(len(free)), free] = spans
    _, gradients = evaluate(np.concatenate([point + moves, point - moves]))
    ahead, behind = gradients[: len(free), free], gradients[len(free) :, free]
    hessian = (ahead - behind) / (2 * spans[:, None])
    return 0.5 * (hessian + hessian.T)
