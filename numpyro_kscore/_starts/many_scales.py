"""A Gaussian that changes with dozens of latents: scales, and a core that others depend on.

Discriminations of items, or loadings of factors, times the latents of persons are no Gaussian, but
those of persons are one at given items. Pairs of so many are not looked at: gradients of the
evidence at the ends of all axes tell their means and correlations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from numpyro_kscore._starts.evidence_slopes import slopes_along
from numpyro_kscore._starts.interpolation import Found, Scales, evidences_at, interpolated
from numpyro_kscore._starts.laplace import Given, Others
from numpyro_kscore._starts.scale_distribution import (
    Change,
    along_axes,
    change_at_first,
    limited,
)
from numpyro_kscore._starts.scale_rounds import (
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

    Cost: for k latents the best densities at 2 k + 1 values of them, in two rounds or three, and
    2 k gradients at each.
    """
    near = approached(others, now, indices)
    if near is None:
        return None
    others, now = near
    points = design(len(indices), IN_PAIRS)
    seen = look(others, now, indices, points[:1], by_modes=False)
    now = _centered(others, now, indices, seen.nodes)
    is_shaped, order = not num_shaped, np.concatenate([indices, others.indices])
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
        is_last = number == ROUNDS - 1 or seconds_left() <= 0
        if is_last or (is_shaped and change.size < NEAR):
            break
        # Stretches stay.
        now = moved(now, change._replace(slopes=now.slopes), points, nodes)
        if change.size < NEAR:
            now, is_shaped = _shaped(others, now, indices, num_shaped), True
    found = interpolated(order, now, points, nodes)
    means = found.conditional.means.copy()
    means[len(indices) :] += _products_of_two(others, now, indices, points, nodes)
    conditional = replace(found.conditional, means=means)
    return found._replace(
        moved=OfFirst(Affine(change.mean, change.factor), len(indices)), conditional=conditional
    )


def _shaped(others: Others, now: Scales, indices: np.ndarray, num_shaped: int) -> Scales:
    """The distribution with the first scales stretched, by the evidence of modes on their axes."""
    count = len(indices)
    points = np.zeros((1 + 2 * len(ON_AXES) * num_shaped, count))
    points[:, :num_shaped] = design(num_shaped, ON_AXES)
    nodes = look(others, now, indices, points, by_modes=True).nodes
    if len(nodes) < len(points):
        return now
    evidences = evidences_at(now, points, nodes)
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


def _centered(others: Others, now: Scales, indices: np.ndarray, best: Sequence[Given]) -> Scales:
    """The distribution of many scales, moved by what best densities change in the slope at once."""
    center = np.zeros((1, len(indices)))
    modes = look(others, now, indices, center, by_modes=True).nodes
    if not (modes and best):
        return now
    by_modes, _ = gradients_at(others, now, indices, center, modes)
    move = limited((mean_scores_at(now, indices, center, best) - by_modes)[0])
    gaussian = Affine(now.gaussian.push(move[None])[0], now.gaussian.factor)
    return now._replace(gaussian=gaussian, mode=best[0].mean + move @ now.moves)
