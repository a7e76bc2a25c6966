"""Looks at the other latents of a model at values of its scales.

A look finds the mode of the others and their best density there, from what looks before it found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.best_given import Shared, best_given
from numpyro_kscore._starts.interpolation import Scales, to_features
from numpyro_kscore._starts.laplace import Given, Others, evidence_slopes, mode_at
from numpyro_kscore._transports.features import features
from numpyro_kscore._transports.stretch import slopes_at, stretched

# Noise of a mean score, in nats for each standard deviation of a scale, that is too much.
ROUGH = 0.5


class Looks(NamedTuple):
    """The others at points of the scales, the center first.

    Attributes:
        others: with the structure that they have at all of these points.
        nodes: none where one of their modes is not found.
        shared: see :func:`~numpyro_kscore._starts.best_given.best_given`; None by modes alone.
    """

    others: Others
    nodes: list[Given]
    shared: Shared | None


def look(
    others: Others,
    now: Scales,
    indices: np.ndarray,
    points: np.ndarray,
    by_modes: bool,
    known: Looks | None = None,
) -> Looks:
    """The others at points of the scales (n, k), the center first; those have these indices.

    Those at the first points may be known, and what they share. ``by_modes`` says that modes are
    enough.
    """
    places = stretched(points, now.slopes)
    starts = np.zeros((len(points), len(indices) + len(others.indices)))
    starts[:, indices] = now.gaussian.push(places)
    starts[:, others.indices] = now.mode + places @ now.moves
    before, others = others, others.checked(starts)
    # Factors of another structure are of no use.
    known = known if others is before else None
    nodes, shared = ([], None) if known is None else (list(known.nodes), known.shared)
    expected = _expected(points, nodes)
    for number in range(len(nodes), len(points)):
        start = starts[number]
        means = [start[others.indices], *(n.mean for n in nodes[:1])]
        at = _nearest(others, start, means if expected is None else [*means, expected[number]])
        node = mode_at(others, at, now.triangle, is_exact=by_modes)
        if node is not None and not by_modes:
            found = best_given(others, at, node, shared)
            node, shared = (None, None) if found is None else found
        if node is None:
            return Looks(others, [], shared)
        # All others are divided by the triangle of the center, which stays double.
        nodes.append(node._replace(triangle=node.triangle.in_single()) if nodes else node)
    return Looks(others, nodes, shared)


def _expected(points: np.ndarray, known: Sequence[Given]) -> np.ndarray | None:
    """Means of the others at points (n, k) by those at the first of them, the center first."""
    if not known:
        return None
    values = features(points)
    means = np.stack([node.mean - known[0].mean for node in known])
    return known[0].mean + values @ (to_features(values[: len(known)]) @ means)


def _nearest(others: Others, at: np.ndarray, means: Sequence[np.ndarray]) -> np.ndarray:
    """The point (d,) with the scales of one, and of some means of the others the one most likely.

    Where a mode moves along a curve, its tangent may end anywhere.
    """
    points = np.tile(at, (len(means), 1))
    points[:, others.indices] = means
    energies = others.held(points, False)[0] if len(means) > 1 else np.zeros(1)
    return points[int(np.argmin(np.where(np.isfinite(energies), energies, np.inf)))]


def gradients_at(
    others: Others, now: Scales, indices: np.ndarray, points: np.ndarray, nodes: Sequence[Given]
) -> np.ndarray:
    """Gradients of the evidence at points (n, k) of scales that are not stretched."""
    found = []
    for point, node in zip(points, nodes, strict=True):
        at = np.zeros(len(indices) + len(others.indices))
        at[indices], at[others.indices] = now.gaussian.push(point), node.mean
        found.append(evidence_slopes(others, at, node)[indices] @ now.gaussian.factor)
    return np.stack(found)


def mean_scores_at(
    now: Scales, indices: np.ndarray, points: np.ndarray, nodes: Sequence[Given]
) -> np.ndarray:
    """Gradients (n, k) of the evidence at points of scales, by the mean scores of best densities.

    They are those of the bound, which is highest at the best density (Danskin's theorem).
    """
    scores = np.stack([node.scores[indices] for node in nodes if node.scores is not None])
    slopes, bends = slopes_at(points, now.slopes)
    return slopes * (scores @ now.gaussian.factor) + bends


def are_rough(now: Scales, indices: np.ndarray, nodes: Sequence[Given]) -> bool:
    """Whether the noise of mean scores hides how these change with the scales.

    What all of them share does not matter. Sums of a thousand moves have a score of the size of a
    move that varies by hundreds of nats.
    """
    noise = np.stack([n.noise_of_scores[indices] for n in nodes if n.noise_of_scores is not None])
    return bool(np.max(np.std(noise @ now.gaussian.factor, axis=0)) > ROUGH)
