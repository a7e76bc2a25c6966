"""A Gaussian that changes with the scales of a model, from modes at some of their values.

Newton's method goes to the mode of all others at values of the scales; latents between two bounds,
such as correlations, count as scales too. The evidence of the scales by Laplace's approximation
says where to look, in rounds that widen and move until the scales have, in their own coordinates,
about a standard normal distribution. What is found at the last values is interpolated, see
``_transports.conditional``, and rounds of batch and match follow. The bound decides whether this is
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.candidates import (
    EQUAL_BOUNDS,
    Candidate,
    bounded,
    highest,
    lower_bound,
)
from numpyro_kscore._starts.climb import climb_near
from numpyro_kscore._starts.newton import ARRIVED, newton
from numpyro_kscore._starts.scale_distribution import Change, change_at_first, change_nearby
from numpyro_kscore._starts.search import Search
from numpyro_kscore._transports.affine import Affine, factor, standard
from numpyro_kscore._transports.conditional import Conditional, exponents, features
from numpyro_kscore._transports.stretch import slopes_at, stretched, unstretched
from numpyro_kscore._transports.transport import Evaluate, pulled_back

# Latents that may be scales: so many numbers in all, of sites that have so many.
MOST_SCALES, MOST_OF_LATENT = 6, 4
# Most powers of scales times squares of the number of others: numbers that every draw takes.
MOST_NUMBERS = 1e6
# Where scales are looked at while their own distribution is still far, and when it is near: on
# axes, and in pairs. One alone and two have more in the end, since there is time for it.
AT_FIRST, ON_AXES, IN_PAIRS = (1.5,), (1.0, 2.0, 3.0), (1.2,)
LAST = {1: ((0.8, 1.6, 2.4, 3.2), ()), 2: ((0.8, 1.6, 2.4, 3.2), (0.8, 1.6, 2.4))}
# Changes of the distribution of scales after which it is near, and there; and most rounds.
NEAR, THERE, ROUNDS = 0.5, 0.15, 10
# Steps to a mode by the curvature at another one, before curvatures are looked at.
CHORDS = 3
# Ridge of the regression on powers of scales.
RIDGE = 1e-3
# Most rounds of batch and match.
MATCHES = 6


def fit_conditional(search: Search, known: Candidate) -> Candidate:
    """A Gaussian that changes with the model's scales; the known one if its bound is no higher.

    Cost: for k scales and r others about 2 r gradients of the model at 2 k² + 2 k + 1 nodes, and a
    few times 2 r at 2 k + 1; rounds of batch and match as long as they pay; O(k² r³).
    """
    latents = search.latents
    small = np.repeat(latents.sizes, latents.sizes) <= MOST_OF_LATENT
    scales = np.flatnonzero((latents.is_scale | latents.is_between) & small)
    dim = len(small)
    count = len(scales)
    if not (0 < count <= MOST_SCALES and count < dim):
        return known
    if len(exponents(count)) * (dim - count) ** 2 > MOST_NUMBERS:
        return known
    evaluate = search.model.in_form(known.centering)
    try:
        given = _find(evaluate, known.gaussian, scales, latents.prior_widths)
    except FloatingPointError:
        return known
    if given is None:
        return known
    inside, start = pulled_back(evaluate, given), standard(dim)
    first = highest([known, bounded(inside, start, search.noise, known.centering)])
    best = climb_near(inside, start, first, search, MATCHES, patience=1)
    if lower_bound(best) < lower_bound(first) + EQUAL_BOUNDS:
        # Matching narrows tails, which the bound hardly sees.
        best = first
    return known if best is known else best._replace(conditional=given)


class _Node(NamedTuple):
    """The others at one value of the scales.

    Attributes:
        mode: the mode of the others, (r,).
        covariance: the inverse Hessian there, (r, r).
        evidence: the evidence of the scales, by Laplace's approximation.
    """

    mode: np.ndarray
    covariance: np.ndarray
    evidence: float


class _Scales(NamedTuple):
    """The distribution of the scales, and where the others are expected at their values.

    Attributes:
        gaussian: the Gaussian of the scales, before each is stretched.
        slopes: see :class:`~numpyro_kscore._transports.conditional.Conditional`, (k, 10).
        mode: the mode of the others at the mean, (r,).
        moves: how that moves with the scales in units of the Gaussian, (k, r).
        covariance: the covariance of the others at the mean, (r, r).
    """

    gaussian: Affine
    slopes: np.ndarray
    mode: np.ndarray
    moves: np.ndarray
    covariance: np.ndarray


def _find(
    evaluate: Evaluate, known: Affine, scales: np.ndarray, prior: np.ndarray
) -> Conditional | None:
    """A Gaussian that changes with scales; None where their distribution is not found.

    Raises:
        FloatingPointError: if numbers are not finite at one of their values.
    """
    count, dim = len(scales), len(known.mean)
    others = np.setdiff1d(np.arange(dim), scales)
    covariance = known.factor @ known.factor.T
    widths = np.sqrt(np.diag(covariance))
    # What the prior decides comes before what the data decide: given the former, the mean of the
    # latter is nearly linear, and factors are smooth.
    others = others[np.argsort(-(widths / prior)[others], kind="stable")]
    inside, across = (covariance[np.ix_(scales, columns)] for columns in (scales, others))
    gaussian = Affine(known.mean[scales], factor(inside))
    moves = np.linalg.solve(gaussian.factor, across)
    rest = covariance[np.ix_(others, others)] - moves.T @ moves
    now = _Scales(gaussian, unstretched(count), known.mean[others], moves, rest)

    def look(points: np.ndarray) -> list[_Node]:
        nodes = []
        for point in points:
            at = np.empty(dim)
            place = stretched(point, now.slopes)
            at[scales] = now.gaussian.push(place)
            at[others] = now.mode + place @ now.moves
            node = _look(evaluate, at, others, widths, now.covariance)
            if node is None:
                raise FloatingPointError("expected a finite density at a mode; got none")
            nodes.append(node)
        return nodes

    is_near = is_there = False
    for _ in range(ROUNDS):
        points = _design(count, ON_AXES, IN_PAIRS) if is_near else _design(count, AT_FIRST)
        nodes = look(points)
        evidences = np.array([node.evidence for node in nodes])
        evidences += np.log(slopes_at(points, now.slopes)[0]).sum(axis=1)
        change = (
            change_nearby(points, evidences, now.slopes)
            if is_near
            else change_at_first(points, evidences)
        )
        is_there = is_near and change.size < THERE
        if is_there:
            break
        now = _moved(now, change, points, nodes)
        is_near = is_near or change.size < NEAR
    if not is_near:
        return None
    if count in LAST or not is_there:
        now = _moved(now, change, points, nodes) if is_there else now
        points = _design(count, *LAST.get(count, (ON_AXES, IN_PAIRS)))
        nodes = look(points)
    return _interpolated(np.concatenate([scales, others]), now, points, nodes)


def _look(
    evaluate: Evaluate,
    at: np.ndarray,
    others: np.ndarray,
    widths: np.ndarray,
    covariance: np.ndarray,
) -> _Node | None:
    """The mode near a point with the scales held; None if numbers are not finite there."""
    start, lowest = at, np.inf
    for _ in range(CHORDS + 1):
        (energy,), (gradient,) = evaluate(at[None])
        if not energy < lowest:
            break
        start, lowest = at, energy
        step = covariance @ gradient[others]
        if gradient[others] @ step < ARRIVED:
            break
        at = at.copy()
        at[others] -= step
    end = newton(evaluate, start, np.isin(np.arange(len(at)), others), widths)
    if end is None:
        return None
    inverse = end.inverse_hessian[np.ix_(others, others)]
    step = inverse @ end.gradient[others]
    volume = np.linalg.slogdet(inverse)[1]
    evidence = 0.5 * float(end.gradient[others] @ step + volume) - end.energy
    return _Node(end.point[others] - step, inverse, evidence) if np.isfinite(evidence) else None


def _design(count: int, on_axes: Sequence[float], in_pairs: Sequence[float] = ()) -> np.ndarray:
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


def _moved(now: _Scales, change: Change, points: np.ndarray, nodes: Sequence[_Node]) -> _Scales:
    """The distribution of the scales after a change of it."""
    # A product of lower triangles is one.
    gaussian = Affine(now.gaussian.push(change.mean[None])[0], now.gaussian.factor @ change.factor)
    modes = np.stack([node.mode for node in nodes]) - nodes[0].mode
    moves = np.linalg.lstsq(stretched(points, now.slopes), modes, rcond=None)[0]
    mode = nodes[0].mode + change.mean @ moves
    return _Scales(gaussian, change.slopes, mode, change.factor.T @ moves, nodes[0].covariance)


def _interpolated(
    order: np.ndarray, now: _Scales, points: np.ndarray, nodes: Sequence[_Node]
) -> Conditional:
    """The Gaussian at all values of the scales from that at some of them, the center first."""
    values, _ = features(points)
    mode, root = nodes[0].mode, factor(nodes[0].covariance)

    def whiten(columns: np.ndarray) -> np.ndarray:
        return np.linalg.solve(root, columns)

    means = np.stack([whiten(node.mode - mode) for node in nodes])
    triangles = np.stack([factor(whiten(whiten(node.covariance).T)) for node in nodes])
    gram = values.T @ values + RIDGE * np.eye(values.shape[1])
    weights = np.linalg.solve(gram, values.T)
    return Conditional(
        now.gaussian,
        now.slopes,
        Affine(mode, root),
        weights @ means,
        weights @ np.log(np.einsum("nii->ni", triangles)),
        np.einsum("pn,nij->pij", weights, np.tril(triangles, -1)),
        tuple(order.tolist()),
    )
