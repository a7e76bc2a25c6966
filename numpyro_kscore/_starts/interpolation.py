"""The Gaussian of the others at all values of the scales, from those at some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.fit_shapes import unshaped
from numpyro_kscore._starts.laplace import Given
from numpyro_kscore._starts.scale_distribution import Tails, along_axes, moments_by
from numpyro_kscore._transports.affine import Affine, OfFirst, antithetic, factor
from numpyro_kscore._transports.arrow import Arrow
from numpyro_kscore._transports.conditional import Conditional, StretchedGaussian
from numpyro_kscore._transports.features import features, through_features
from numpyro_kscore._transports.skewed import Skewed
from numpyro_kscore._transports.stretch import Marginals, slopes_at, unstretched
from numpyro_kscore._transports.transport import Chain

# Draws of the scales for their moments in the end.
MOMENT_DRAWS = 4096
# Ridge of the regression on features of scales, and nats that the rest of triangles may lose.
RIDGE, LOSS = 1e-3, 5e-3
# Numbers of a triangle that are taken at a time from all of them.
PIECE = 1_000_000


class Scales(NamedTuple):
    """The distribution of the scales, and where the others are expected at their values.

    Attributes:
        gaussian: the Gaussian of the scales, before each is stretched.
        slopes: see :class:`~numpyro_kscore._transports.conditional.StretchedGaussian`, (k, 10).
        mode: the mode of the others at the mean, (r,).
        moves: how that moves with the scales in units of the Gaussian, (k, r).
        triangle: the factor of the covariance of the others at the mean, if it is known.
        is_shaped: which scales are normal under their prior, (k,), so that no tail is longer than a
            standard normal one; None if none are.
    """

    gaussian: Affine
    slopes: np.ndarray
    mode: np.ndarray
    moves: np.ndarray
    triangle: Arrow | None = None
    is_shaped: np.ndarray | None = None

    @property
    def transport(self) -> StretchedGaussian:
        """The distribution of the scales as a map of standard normal points."""
        return StretchedGaussian(self.gaussian, self.slopes)

    @property
    def steepest(self) -> np.ndarray:
        """The largest slopes that tails may have, in units of the Gaussian, (k,)."""
        widths = np.linalg.norm(self.gaussian.factor, axis=1)
        if self.is_shaped is None:
            return np.full(len(widths), np.inf)
        return np.where(self.is_shaped, 1 / widths, np.inf)


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

    @property
    def gaussian(self) -> Affine | None:
        """The Gaussian of all latents, if nothing changes with scales and all shapes are normal."""
        given = self.conditional
        if len(given.scales.slopes) or self.skewed is not None:
            return None
        triangle = given.base.times(np.eye(len(given.mean)))
        place = np.argsort(given.order)
        return Affine(given.mean[place], factor((triangle.T @ triangle)[np.ix_(place, place)]))

    def moved_before(self, affine: Affine) -> Found:
        """The same with a move of the standard normal scales, which comes first."""
        steps = (affine,) if self.moved is None else (affine, *self.moved.transport.steps)
        return self._replace(moved=OfFirst(Chain(steps), len(affine.mean)))

    def slopes_beyond(self, points: np.ndarray) -> np.ndarray:
        """The gradient of the evidence beyond the bound at points of the scales (n, k)."""
        moved = points if self.moved is None else self.moved.transport.push(points)
        every = np.broadcast_to(self.beyond, (len(points), len(self.beyond)))
        slopes = through_features(moved, every)
        if self.moved is None:
            return slopes
        pull = self.moved.transport.pull
        # The slope of the volume is no part of the evidence.
        return pull(points, slopes) - pull(points, np.zeros_like(slopes))


def evidences_at(now: Scales, points: np.ndarray, nodes: Sequence[Given]) -> np.ndarray:
    """The evidence at points (n, k) in their coordinates, (n,)."""
    evidences = np.array([node.evidence for node in nodes])
    return evidences + np.log(slopes_at(points, now.slopes)[0]).sum(axis=1)


def interpolated(order: np.ndarray, now: Scales, points: np.ndarray, nodes: list[Given]) -> Found:
    """The Gaussian at all values of the scales from that at some of them, the center first.

    Triangles of the nodes are let go, since those of thousands of latents need room.
    """
    values = features(points)
    mean, base = nodes[0].mean, nodes[0].triangle
    means = base.solve(np.stack([node.mean - mean for node in nodes]))
    weights = to_features(values)
    diagonals, rests = np.empty((len(nodes), len(mean))), []
    for number, node in enumerate(nodes):
        triangle = base.divided(node.triangle)
        diagonals[number] = triangle.diagonal
        rests.append(triangle.below_diagonal().in_single())
        nodes[number] = node._replace(triangle=base)
    sums, kept = _main_sums(weights, rests)
    beyond = 0.5 * weights @ np.array([node.variance - nodes[0].variance for node in nodes])
    conditional = Conditional(
        now.transport,
        mean,
        base,
        weights @ means,
        weights @ np.log(diagonals),
        sums,
        kept,
        tuple(order.tolist()),
    )
    return Found(None, _skewed(weights, nodes, len(now.slopes)), conditional, beyond)


def to_features(values: np.ndarray) -> np.ndarray:
    """The map from numbers at n nodes to coefficients of features with these values, (p, n)."""
    gram = values.T @ values + RIDGE * np.eye(values.shape[1])
    return np.linalg.solve(gram, values.T)


def last_move(
    now: Scales, points: np.ndarray, nodes: Sequence[Given], tails: Tails
) -> OfFirst | None:
    """The move of standard normal scales to the density that the evidence at points says.

    Each of them gets its shape on its own axis, where the evidence may be known farther out; and
    all together the moments of the evidence, interpolated.
    """
    values, evidences = features(points), evidences_at(now, points, nodes)
    rest = evidences + 0.5 * np.sum(points**2, axis=1)
    coefficients = to_features(values) @ (rest - rest[0])
    draws = antithetic(np.random.default_rng(0), MOMENT_DRAWS, points.shape[1])
    count = points.shape[1]
    most = now.steepest / np.max(now.slopes[:, [0, -1]], axis=1)
    widths = np.ones(count)
    # Moments widen all of a distribution, but its tails are known as they are.
    for _ in range(2):
        narrower = tails._replace(points=tails.points / widths)
        _, _, slopes = along_axes(points, evidences, unstretched(count), most, narrower)
        shape = Marginals(np.zeros(count), slopes)
        moved = shape.push(draws)
        change = 0.5 * np.sum(draws**2 - moved**2, axis=1) + shape.log_volume(draws)
        affine = moments_by(features(moved) @ coefficients + change, draws)
        if affine is None:
            return None
        widths = np.linalg.norm(affine.factor, axis=1)
    return OfFirst(Chain((affine, shape)), count)


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
    parts = [(rest.leaves, rest.borders, rest.core) for rest in rests]
    for arrays in zip(*parts, strict=True):
        for rows in _pieces(arrays[0]):
            flat = np.stack([a[rows].ravel() for a in arrays]).astype(float)
            gram += flat @ flat.T
    axes = _main_axes(weights, gram)
    mixed, found = axes.T @ weights, []
    for arrays in zip(*parts, strict=True):
        found.append(np.empty((len(mixed), *arrays[0].shape), arrays[0].dtype))
        for rows in _pieces(arrays[0]):
            found[-1][:, rows] = np.tensordot(mixed, np.stack([a[rows] for a in arrays]), axes=1)
    leaves, borders, core = found
    return axes, Arrow(leaves, borders, core, rests[0].places)


def _pieces(array: np.ndarray) -> Iterator[slice]:
    """Rows of an array, as many at a time as have a million numbers."""
    step = max(1, PIECE * len(array) // max(1, array.size))
    return (slice(start, start + step) for start in range(0, len(array), step))


def _main_axes(weights: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """The directions of features that matter, (p, q), from products of what changes at n nodes."""
    sizes, axes = np.linalg.eigh(weights @ gram @ weights.T)
    lost = np.cumsum(np.maximum(sizes, 0)) / 2
    return axes[:, lost > LOSS]
