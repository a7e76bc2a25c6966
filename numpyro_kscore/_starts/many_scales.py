"""A Gaussian that changes with dozens of latents: scales, and a core that others depend on.

Discriminations of items, or loadings of factors, times the latents of persons are no Gaussian, but
those of persons are one at given items. Pairs of so many are not looked at: gradients of the
evidence at the ends of all axes tell their means and correlations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from numpyro_kscore._starts.evidence_slopes import evidence_slopes, slopes_along
from numpyro_kscore._starts.interpolation import Found, Scales, evidences_at, interpolated
from numpyro_kscore._starts.laplace import Given, Others
from numpyro_kscore._starts.scale_distribution import (
    Change,
    along_axes,
    change_at_first,
    limited,
)
from numpyro_kscore._starts.scale_rounds import (
    AT_FIRST,
    IN_PAIRS,
    NEAR,
    ON_AXES,
    ROUNDS,
    approached,
    design,
    gradients_at,
    look,
    mean_scores_at,
    moved,
)
from numpyro_kscore._transports.affine import Affine, OfFirst
from numpyro_kscore._transports.features import features
from numpyro_kscore._util.deadline import seconds_left


def find_many(others: Others, now: Scales, indices: np.ndarray, num_shaped: int) -> Found | None:
    """A Gaussian that changes with many latents; None where their distribution is not found.

    The first ``num_shaped`` get shapes of their own in the end, by modes on their axes; all others
    are taken for normal. Where time is up it is the Gaussian at their mean.

    Cost: for k latents the best densities at 2 k + 1 values of them, in a round or two, and
    2 k gradients at each.
    """
    near = approached(others, now, indices)
    if near is None:
        return None
    others, now = near
    points, order = design(len(indices), IN_PAIRS), np.concatenate([indices, others.indices])
    seen = look(others, now, indices, points[:1], by_modes=False)
    if not seen.nodes:
        return None
    others, beyond = seen.others, _beyond(seen.others, now, indices, seen.nodes)
    now = _round_by_modes(others, now, indices, beyond)
    if num_shaped:
        now = _shaped(others, now, indices, num_shaped, beyond)
    for number in range(ROUNDS):
        # All have steps to their shapes from the same: a center that differs would bend all axes.
        seen = look(others, now, indices, points, False, seen._replace(nodes=[]))
        others, nodes = seen.others, seen.nodes
        if not nodes:
            return None
        if len(nodes) < len(points):
            return interpolated(order, now, points[:1], nodes[:1])
        scores = mean_scores_at(now, indices, points, nodes)
        change = change_at_first(points, evidences_at(now, points, nodes), scores)
        if number == ROUNDS - 1 or seconds_left() <= 0 or change.size < NEAR:
            break
        # Stretches stay.
        now = moved(now, change._replace(slopes=now.slopes), points, nodes)
    found = interpolated(order, now, points, nodes)
    means = found.conditional.means.copy()
    means[len(indices) :] += _products_of_two(others, now, indices, points, nodes)
    conditional = replace(found.conditional, means=means)
    return found._replace(
        moved=OfFirst(Affine(change.mean, change.factor), len(indices)), conditional=conditional
    )


def _beyond(others: Others, now: Scales, indices: np.ndarray, best: Sequence[Given]) -> np.ndarray:
    """What best densities add to the slope of the evidence by modes at the mean of scales, (k,)."""
    center = np.zeros((1, len(indices)))
    modes = look(others, now, indices, center, by_modes=True).nodes
    if not modes or best[0].scores is None:
        return np.zeros(len(indices))
    at = np.zeros(len(indices) + len(others.indices))
    at[indices], at[others.indices] = now.transport.push(center)[0], modes[0].mean
    return best[0].scores[indices] - evidence_slopes(others, at, modes[0])[0][indices]


def _evidences_beyond(
    now: Scales, points: np.ndarray, nodes: Sequence[Given], beyond: np.ndarray
) -> np.ndarray:
    """The evidence by modes at points (n, k), with what best densities add to its slope, (n,)."""
    return evidences_at(now, points, nodes) + now.transport.push(points) @ beyond


def _round_by_modes(others: Others, now: Scales, indices: np.ndarray, beyond: np.ndarray) -> Scales:
    """The distribution after a round by modes, with what best densities add to slopes, (k,)."""
    points = design(len(indices), AT_FIRST)
    nodes = look(others, now, indices, points, by_modes=True).nodes
    if len(nodes) < len(points):
        return now
    gradients, _ = gradients_at(others, now, indices, points, nodes)
    gradients = gradients + beyond @ now.transport.gaussian.factor
    evidences = _evidences_beyond(now, points, nodes, beyond)
    return moved(now, change_at_first(points, evidences, gradients), points, nodes)


def _shaped(
    others: Others, now: Scales, indices: np.ndarray, num_shaped: int, beyond: np.ndarray
) -> Scales:
    """The distribution with the first scales stretched, by the evidence of modes on their axes.

    What best densities add to slopes, (k,), is added.
    """
    count = len(indices)
    points = np.zeros((1 + 2 * len(ON_AXES) * num_shaped, count))
    points[:, :num_shaped] = design(num_shaped, ON_AXES)
    nodes = look(others, now, indices, points, by_modes=True).nodes
    if len(nodes) < len(points):
        return now
    evidences = _evidences_beyond(now, points, nodes, beyond)
    first = slice(num_shaped)
    middle, widths, slopes = np.zeros(count), np.ones(count), now.slopes.copy()
    found = along_axes(points[:, first], evidences, slopes[first])
    middle[first], widths[first], slopes[first] = found
    # Widths by modes are those on an axis as well: shapes alone are news.
    change = Change(limited(middle), np.diag(widths), slopes, 0.0)
    return moved(now, change, points, nodes)


def _products_of_two(
    others: Others, now: Scales, indices: np.ndarray, points: np.ndarray, nodes: Sequence[Given]
) -> np.ndarray:
    """Coefficients of means in the products of two different scales, and 0 for squares.

    By derivatives of modes at the ends of axes: the Hessian between scales and others, through the
    inverse of that of the others.
    """
    count, base = len(indices), nodes[0].triangle
    vectors = np.zeros((count, count + len(others.indices)))
    slopes = []
    for point, node in zip(points[1:], nodes[1:], strict=True):
        at = np.zeros(vectors.shape[1])
        at[indices] = now.transport.push(point)
        at[others.indices] = node.mean
        vectors[:, indices] = now.transport.derivative(point).T
        across = slopes_along(others.evaluate, at, vectors)[:, others.indices]
        slopes.append(-base.solve(node.triangle.times(node.triangle.transposed(across))))
    ahead, behind = np.split(np.stack(slopes), 2)
    reach = features(points[1])[count] ** 0.5
    both = (ahead - behind) / (2 * reach)
    one, other = np.triu_indices(count)
    found = 0.5 * (both + both.swapaxes(0, 1))[one, other]
    found[one == other] = 0
    return found
