"""Rounds that find where the scales of a model are, and the Gaussian of the others at each value.

Modes of all others are looked at around the distribution of the scales so far. The evidence there
says how it has to move, widen and bend (``scale_distribution``), until the scales have, in their
own coordinates, about a standard normal distribution. What is found at the last values is
interpolated (``_transports.conditional``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.best_given import Shared, best_given
from numpyro_kscore._starts.fit_shapes import unshaped
from numpyro_kscore._starts.laplace import Given, Others, evidence_slopes, mode_at
from numpyro_kscore._starts.scale_distribution import (
    MOST_CHANGE,
    Change,
    change_at_first,
    change_nearby,
    limited,
    moments_by,
)
from numpyro_kscore._transports.affine import Affine, OfFirst, antithetic
from numpyro_kscore._transports.arrow import Arrow
from numpyro_kscore._transports.conditional import Conditional
from numpyro_kscore._transports.features import MANY, features, through_features
from numpyro_kscore._transports.skewed import Skewed
from numpyro_kscore._transports.stretch import slopes_at, stretched
from numpyro_kscore._transports.transport import Chain

# Most numbers of scales.
MOST_SCALES = MANY
# Where scales are looked at while their own distribution is still far, and when it is near: on
# axes, and in pairs. One alone and two have more in the end, since there is time for it.
AT_FIRST, ON_AXES, IN_PAIRS = (1.5,), (1.0, 2.0, 3.0), (1.2,)
LAST = {1: ((0.8, 1.6, 2.4, 3.2), ()), 2: ((0.8, 1.6, 2.4, 3.2), (0.8, 1.6, 2.4))}
# Scales from the fifth on whose signs at the corners of a cube are products of those before.
CORNERS = {5: ((0, 1, 2, 3),), 6: ((0, 1, 2, 3, 4),), 7: ((0, 1, 2, 3, 4, 5),)}
CORNERS[8] = ((0, 1, 2, 3), (0, 1, 4, 5))
# Changes of the distribution of scales after which it is near, and there; and most rounds.
NEAR, THERE, ROUNDS = 0.5, 0.15, 10
# Draws of the scales for their moments in the end.
MOMENT_DRAWS = 4096
# Nats by which a round may lower the evidence before it is taken back.
WORSE = 1.0
# Ridge of the regression on features of scales, and nats that the rest of triangles may lose.
RIDGE, LOSS = 1e-3, 5e-3


class Scales(NamedTuple):
    """The distribution of the scales, and where the others are expected at their values.

    Attributes:
        gaussian: the Gaussian of the scales, before each is stretched.
        slopes: see :class:`~numpyro_kscore._transports.conditional.Conditional`, (k, 10).
        mode: the mode of the others at the mean, (r,).
        moves: how that moves with the scales in units of the Gaussian, (k, r).
        triangle: the factor of the covariance of the others at the mean, if it is known.
    """

    gaussian: Affine
    slopes: np.ndarray
    mode: np.ndarray
    moves: np.ndarray
    triangle: Arrow | None = None


class Found(NamedTuple):
    """A Gaussian that changes with scales, and what it leaves of their evidence.

    Attributes:
        moved: a last move of the scales; None if it is not known.
        skewed: the shapes of its coordinates; None if they are normal.
        conditional: the Gaussian.
        beyond: coefficients of the evidence beyond the bound by it, in the features of the scales,
            (p,).
    """

    moved: OfFirst | None
    skewed: Skewed | None
    conditional: Conditional
    beyond: np.ndarray

    @property
    def transport(self) -> Chain:
        """All of it, one after the other."""
        steps = (self.moved, self.skewed, self.conditional)
        return Chain(tuple(step for step in steps if step is not None))

    def slopes_beyond(self, points: np.ndarray) -> np.ndarray:
        """The gradient of the evidence beyond the bound at points of the scales (n, k)."""
        moved = points if self.moved is None else self.moved.affine.push(points)
        every = np.broadcast_to(self.beyond, (len(points), len(self.beyond)))
        slopes = through_features(moved, every)
        return slopes if self.moved is None else self.moved.affine.pull(points, slopes)


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
        nodes.append(node)
    return Looks(others, nodes, shared)


def _expected(points: np.ndarray, known: Sequence[Given]) -> np.ndarray | None:
    """Means of the others at points (n, k) by those at the first of them, the center first."""
    if not known:
        return None
    values = features(points)
    means = np.stack([node.mean - known[0].mean for node in known])
    return known[0].mean + values @ (_weights(values[: len(known)]) @ means)


def _nearest(others: Others, at: np.ndarray, means: Sequence[np.ndarray]) -> np.ndarray:
    """The point (d,) with the scales of one, and of some means of the others the one most likely.

    Where a mode moves along a curve, its tangent may end anywhere.
    """
    points = np.tile(at, (len(means), 1))
    points[:, others.indices] = means
    energies = others.evaluate(points)[0] if len(means) > 1 else np.zeros(1)
    return points[int(np.argmin(np.where(np.isfinite(energies), energies, np.inf)))]


def find_scales(others: Others, now: Scales, indices: np.ndarray, is_small: bool) -> Found | None:
    """A Gaussian that changes with scales; None where their distribution is not found.

    Of a small model modes say enough, since batch and match follows: better Gaussians take many
    times as many gradients. One or two scales are looked at densely in the end there. A
    distribution of the scales that rounds have not settled is given all the same, but not that of a
    small model which they have not come near.
    """
    count = len(indices)
    if count:
        near = _approached(others, now, indices, is_small)
        if near is None:
            return None
        others, now = near
    if count > MOST_SCALES:
        return _find_many(others, now, indices)
    first = design(count, ON_AXES, IN_PAIRS if is_small else ())
    is_denser = is_small and count in LAST
    last = design(count, *LAST[count]) if is_denser else first
    if not is_small:
        last = np.concatenate([first, between(count)])
    seen: Looks | None = None
    for _ in range(ROUNDS if count else 0):
        seen = look(others, now, indices, first, is_small, seen and seen._replace(nodes=[]))
        if not seen.nodes:
            return None
        others, nodes = seen.others, seen.nodes
        gradients = None if is_small else _mean_scores(now, indices, first, nodes)
        evidences = _evidences(now, first, nodes)
        change = change_nearby(first, evidences, now.slopes, gradients)
        is_there = change.size < THERE
        if is_denser or not is_there:
            now, seen = _moved(now, change, first, nodes), seen._replace(nodes=[])
        if is_there:
            break
    others, nodes, _ = look(others, now, indices, last, is_small, seen)
    if not nodes:
        return None
    found = _interpolated(np.concatenate([indices, others.indices]), now, last, nodes)
    return found if is_small or not count else found._replace(moved=_last_move(now, last, nodes))


def _find_many(others: Others, now: Scales, indices: np.ndarray) -> Found | None:
    """The same for more scales than have shapes of their own: these are taken for normal.

    Gradients at the ends of all axes tell means and correlations.
    """
    points = design(len(indices), IN_PAIRS)
    seen = look(others, now, indices, points[:1], by_modes=False)
    now = _centered(others, now, indices, seen.nodes)
    for number in range(ROUNDS):
        # All have steps to their shapes from the same: a center that differs would bend all axes.
        seen = look(others, now, indices, points, False, seen._replace(nodes=[]))
        others, nodes = seen.others, seen.nodes
        if not nodes:
            return None
        scores = _mean_scores(now, indices, points, nodes)
        change = change_at_first(points, _evidences(now, points, nodes), scores)
        if change.size < NEAR or number == ROUNDS - 1:
            break
        now = _moved(now, change, points, nodes)
    found = _interpolated(np.concatenate([indices, others.indices]), now, points, nodes)
    means = found.conditional.means.copy()
    means[len(indices) :] += _products_of_two(others, now, indices, points, nodes)
    conditional = replace(found.conditional, means=means)
    return found._replace(
        moved=OfFirst(Affine(change.mean, change.factor)), conditional=conditional
    )


def _products_of_two(
    others: Others, now: Scales, indices: np.ndarray, points: np.ndarray, nodes: Sequence[Given]
) -> np.ndarray:
    """Coefficients of means in the products of two different scales, and 0 for squares.

    By derivatives of modes at the ends of axes: the Hessian between scales and others, through the
    inverse of that of the others.
    """
    count, base = len(indices), nodes[0].triangle
    vectors = np.zeros((count, count + len(others.indices)))
    vectors[:, indices] = now.gaussian.factor.T
    slopes = []
    for point, node in zip(points[1:], nodes[1:], strict=True):
        at = np.zeros(vectors.shape[1])
        at[indices], at[others.indices] = now.gaussian.push(point), node.mean
        across = others.products(at[None], vectors)[:, others.indices]
        slopes.append(-base.solve(node.triangle.times(node.triangle.transposed(across))))
    ahead, behind = np.split(np.stack(slopes), 2)
    reach = features(points[1])[count] ** 0.5
    both = (ahead - behind) / (2 * reach)
    one, other = np.triu_indices(count)
    found = 0.5 * (both + both.swapaxes(0, 1))[one, other]
    found[one == other] = 0
    return found


def _evidences(now: Scales, points: np.ndarray, nodes: Sequence[Given]) -> np.ndarray:
    """The evidence at points (n, k) in their coordinates, (n,)."""
    evidences = np.array([node.evidence for node in nodes])
    return evidences + np.log(slopes_at(points, now.slopes)[0]).sum(axis=1)


class _Round(NamedTuple):
    """A distribution of scales, the others at points of it, and how the evidence changes there."""

    now: Scales
    points: np.ndarray
    nodes: list[Given]
    gradients: np.ndarray | None

    def changed(self, most: float) -> tuple[Scales, float]:
        """The distribution after a change of it, by so many standard deviations, and its size."""
        evidences = _evidences(self.now, self.points, self.nodes)
        change = change_at_first(self.points, evidences, self.gradients, most)
        return _moved(self.now, change, self.points, self.nodes), change.size


def _approached(
    others: Others, now: Scales, indices: np.ndarray, is_small: bool
) -> tuple[Others, Scales] | None:
    """The distribution of scales after rounds by modes that came near to it.

    A round that went too far, to a lower evidence, is taken back. Of a small model gradients of the
    evidence would take longer than all else, and None is returned unless rounds come near.
    """
    points, last = design(len(indices), AT_FIRST), None
    most = MOST_CHANGE * np.sqrt(max(1, len(indices) / MOST_SCALES))
    for _ in range(ROUNDS):
        others, nodes, _ = look(others, now, indices, points, by_modes=True)
        if not nodes or (last and nodes[0].evidence < last.nodes[0].evidence - WORSE):
            most /= 2
            if last is None:
                if is_small:
                    return None
                now = now._replace(gaussian=Affine(now.gaussian.mean, now.gaussian.factor / 2))
            else:
                now, _ = last.changed(most)
            continue
        gradients = None if is_small else _gradients(others, now, indices, points, nodes)
        last = _Round(now, points, nodes, gradients)
        now, size = last.changed(most)
        if size < NEAR:
            return others, now
    return None if is_small or last is None else (others, now)


def _centered(others: Others, now: Scales, indices: np.ndarray, best: Sequence[Given]) -> Scales:
    """The distribution of many scales, moved by what best densities change in the slope at once."""
    center = np.zeros((1, len(indices)))
    modes = look(others, now, indices, center, by_modes=True).nodes
    if not (modes and best):
        return now
    by_modes = _gradients(others, now, indices, center, modes)[0]
    move = limited(_mean_scores(now, indices, center, best)[0] - by_modes)
    gaussian = Affine(now.gaussian.push(move[None])[0], now.gaussian.factor)
    return now._replace(gaussian=gaussian, mode=best[0].mean + move @ now.moves)


def _gradients(
    others: Others, now: Scales, indices: np.ndarray, points: np.ndarray, nodes: Sequence[Given]
) -> np.ndarray:
    """Gradients of the evidence at points (n, k) of scales that are not stretched."""
    found = []
    for point, node in zip(points, nodes, strict=True):
        at = np.zeros(len(indices) + len(others.indices))
        at[indices], at[others.indices] = now.gaussian.push(point), node.mean
        found.append(evidence_slopes(others, at, node)[indices] @ now.gaussian.factor)
    return np.stack(found)


def _mean_scores(
    now: Scales, indices: np.ndarray, points: np.ndarray, nodes: Sequence[Given]
) -> np.ndarray:
    """Gradients (n, k) of the evidence at points of scales, by the mean scores of best densities.

    They are those of the bound, which is highest at the best density (Danskin's theorem).
    """
    scores = np.stack([node.scores[indices] for node in nodes if node.scores is not None])
    slopes, bends = slopes_at(points, now.slopes)
    return slopes * (scores @ now.gaussian.factor) + bends


def design(count: int, on_axes: Sequence[float], in_pairs: Sequence[float] = ()) -> np.ndarray:
    """Points of scales at which the others are looked at, the center first, (n, count)."""
    unit = np.eye(count)
    points = [np.zeros((1, count)), *(sign * size * unit for size in on_axes for sign in (1, -1))]
    sides = [sign * size for size in in_pairs for sign in (1, -1)]
    points += [
        (x * unit[a] + y * unit[b])[None]
        for a in range(count)
        for b in range(a)
        for x in sides
        for y in sides
    ]
    return np.concatenate(points)


def between(count: int) -> np.ndarray:
    """Points of scales that lie between the axes, (n, count).

    Four scales are looked at in pairs, and more at corners of a cube, a part of them that tells all
    pairs apart (a fraction of resolution V; Box and Hunter 1961).
    """
    if count < min(CORNERS):
        return design(count, (), IN_PAIRS)[1:]
    words = CORNERS[count]
    whole = np.array(list(product((1.0, -1.0), repeat=count - len(words))))
    return np.column_stack([whole, *(whole[:, list(word)].prod(axis=1) for word in words)])


def _moved(now: Scales, change: Change, points: np.ndarray, nodes: Sequence[Given]) -> Scales:
    """The distribution of the scales after a change of it."""
    # A product of lower triangles is one.
    gaussian = Affine(now.gaussian.push(change.mean[None])[0], now.gaussian.factor @ change.factor)
    modes = np.stack([node.mean for node in nodes]) - nodes[0].mean
    moves = np.linalg.lstsq(stretched(points, now.slopes), modes, rcond=None)[0]
    mode = nodes[0].mean + change.mean @ moves
    return Scales(gaussian, change.slopes, mode, change.factor.T @ moves, nodes[0].triangle)


def _interpolated(
    order: np.ndarray, now: Scales, points: np.ndarray, nodes: Sequence[Given]
) -> Found:
    """The Gaussian at all values of the scales from that at some of them, the center first."""
    values = features(points)
    mean, base = nodes[0].mean, nodes[0].triangle
    means = base.solve(np.stack([node.mean - mean for node in nodes]))
    triangles = [base.divided(node.triangle) for node in nodes]
    weights = _weights(values)
    diagonals = np.stack([triangle.diagonal for triangle in triangles])
    rests = [triangle.below_diagonal() for triangle in triangles]
    sums, kept = _main_sums(weights, rests)
    beyond = 0.5 * weights @ np.array([node.variance - nodes[0].variance for node in nodes])
    conditional = Conditional(
        now.gaussian,
        now.slopes,
        mean,
        base,
        weights @ means,
        weights @ np.log(diagonals),
        sums,
        kept,
        tuple(order.tolist()),
    )
    return Found(None, _skewed(weights, nodes, len(now.slopes)), conditional, beyond)


def _weights(values: np.ndarray) -> np.ndarray:
    """The map from numbers at n nodes to coefficients of features with these values, (p, n)."""
    gram = values.T @ values + RIDGE * np.eye(values.shape[1])
    return np.linalg.solve(gram, values.T)


def _last_move(now: Scales, points: np.ndarray, nodes: Sequence[Given]) -> OfFirst | None:
    """The move of standard normal scales to the moments of the evidence at points, interpolated."""
    values = features(points)
    rest = _evidences(now, points, nodes) + 0.5 * np.sum(points**2, axis=1)
    coefficients = _weights(values) @ (rest - rest[0])
    draws = antithetic(np.random.default_rng(0), MOMENT_DRAWS, points.shape[1])
    affine = moments_by(features(draws) @ coefficients, draws)
    return None if affine is None else OfFirst(affine)


def _skewed(weights: np.ndarray, nodes: Sequence[Given], count: int) -> Skewed | None:
    """The shapes at all values of the scales, from those at nodes; None if all are normal."""
    if all(node.shapes is None for node in nodes):
        return None
    normal = unshaped(len(nodes[0].mean))
    shapes = [normal if node.shapes is None else node.shapes for node in nodes]
    changes = np.stack([here - shapes[0] for here in shapes])
    flat = changes.reshape(len(nodes), -1)
    axes = _main_axes(weights, flat @ flat.T)
    mixed = np.tensordot(axes.T @ weights, changes, axes=1)
    return Skewed(shapes[0], axes, mixed, count)


def _main_sums(weights: np.ndarray, rests: Sequence[Arrow]) -> tuple[np.ndarray, Arrow]:
    """The few sums of features by which triangles change, (p, q), and the q triangles.

    ``weights`` (p, n) make coefficients from the triangles at n nodes. The half squared length of
    what is left out, with features of size 1, is the loss in nats.
    """
    gram = np.zeros((len(rests), len(rests)))
    for part in zip(*((rest.leaves, rest.borders, rest.core) for rest in rests), strict=True):
        flat = np.stack([a.ravel() for a in part])
        gram += flat @ flat.T
    axes = _main_axes(weights, gram)
    mixed = axes.T @ weights
    leaves, borders, core = (
        np.tensordot(mixed, np.stack([getattr(rest, name) for rest in rests]), axes=1)
        for name in ("leaves", "borders", "core")
    )
    return axes, Arrow(leaves, borders, core, rests[0].places)


def _main_axes(weights: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """The directions of features that matter, (p, q), from products of what changes at n nodes."""
    sizes, axes = np.linalg.eigh(weights @ gram @ weights.T)
    lost = np.cumsum(np.maximum(sizes, 0)) / 2
    return axes[:, lost > LOSS]
