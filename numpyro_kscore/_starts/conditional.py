"""Gaussians whose mean and covariance change with some latents, the drivers.

Given its scales, many a model is close to Gaussian in all else: time series, smooth curves, fields
(Rue, Martino and Chopin 2009). But every value of the scales has another Gaussian. Where effects
are written as standardized ones times a scale no prior says how it changes, and where there are
several scales no basis makes all of these Gaussians independent. So they are looked at: Newton's
method goes to the mode of the others at some values of the drivers, and what is found there, modes
and Cholesky factors, is interpolated. The logarithm of the volume is then known everywhere.

The evidence of the drivers by Laplace's approximation says where to look, and the bound decides
whether this is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from numpyro_kscore._starts.batch_match import Evaluate, Gaussian, elbo
from numpyro_kscore._starts.candidates import (
    CountedModel,
    Judged,
    Latents,
    factor,
    surely,
    widths_of,
)
from numpyro_kscore._starts.newton import newton
from numpyro_kscore._starts.refinement import LEAST_GAIN, match_near

__all__ = ["Conditional", "conditioned", "given_drivers"]

# Latents that may be drivers: so many numbers in all, of sites that have so many.
MOST_DRIVERS, MOST_OF_LATENT = 6, 4
# Most of the others: Newton's method takes two gradients of the model for each, at every node.
MOST_OTHERS = 256
# Powers of one driver and of two together that entries of the Gaussian are polynomials of, and where
# one, two or more drivers are looked at for that, in standard deviations: on axes, and in pairs.
DEGREES = {1: 5, 2: 4, 3: 3}
ON_AXES = {1: (0.8, 1.6, 2.4), 2: (1.1, 2.2), 3: (1.0, 2.0)}
IN_PAIRS = {2: (1.1, 2.2), 3: (1.2,)}
# Where they are looked at while their own Gaussian is still far.
AT_FIRST = 1.5
# How much that may widen, narrow or, in standard deviations, move at once; changes of this kind
# after which it is near, and there; and most rounds.
MOST_CHANGE, NEAR, THERE, ROUNDS = 3.0, 0.5, 0.25, 10
# Beyond so many standard deviations the Gaussian changes no more: there polynomials are wild.
REACH = 3.0
# Ridge of the regression on powers of drivers.
RIDGE = 1e-3
# Most rounds of batch and match.
MATCHES = 6


class Conditional(NamedTuple):
    """A Gaussian whose mean and covariance change with k of its latents, the drivers.

    Given the drivers at points ``u`` of theirs, the r others are ``mean + factor (m(u) + T(u) v)``
    at points ``v``, with a vector m(u) and a lower triangle T(u). Every entry of m and T, and the
    logarithms of the diagonal of T, are linear in p :func:`features` of u.

    Attributes:
        order: places of the latents in the order of the other attributes, drivers first, (d,).
        drivers: the Gaussian of the drivers.
        others: that of the others where the drivers have their mean.
        means: coefficients of m, (p, r).
        logs: coefficients of the logarithms of the diagonal of T, (p, r).
        rests: coefficients of the rest of T, (p, r, r).
    """

    order: np.ndarray
    drivers: Gaussian
    others: Gaussian
    means: np.ndarray
    logs: np.ndarray
    rests: np.ndarray

    @property
    def place(self) -> np.ndarray:
        """Where every latent is in the order, (d,)."""
        return np.argsort(self.order)

    def push(self, points: np.ndarray) -> np.ndarray:
        """Coordinates (m, d) at standard normal points (m, d)."""
        of_drivers, points = self._split(points)
        values, _ = features(of_drivers)
        inner = values @ self.means + np.exp(values @ self.logs) * points
        for value, rest in zip(values.T, self.rests, strict=True):
            inner += value[:, None] * (points @ rest.T)
        found = [self.drivers.push(of_drivers), self.others.push(inner)]
        return np.concatenate(found, axis=1)[:, self.place]

    def log_volumes(self, points: np.ndarray) -> np.ndarray:
        """Logarithms of the determinants of the derivative of :meth:`push`, (m,)."""
        values, _ = features(self._split(points)[0])
        return self.drivers.log_volume + self.others.log_volume + (values @ self.logs).sum(1)

    def pull(self, points: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients (m, d) of an energy by the coordinates as those by the points, less volume."""
        of_drivers, points = self._split(points)
        by_drivers, inner = self._split(gradients[:, self.order])
        values, slopes = features(of_drivers)
        inner = inner @ self.others.factor
        scaled = inner * np.exp(values @ self.logs)
        by_values = inner @ self.means.T + (scaled * points - 1) @ self.logs.T
        by_points = scaled
        for number, rest in enumerate(self.rests):
            back = inner @ rest
            by_points = by_points + values[:, number, None] * back
            by_values[:, number] += np.sum(back * points, axis=1)
        by_drivers = by_drivers @ self.drivers.factor + np.einsum("mp,mpk->mk", by_values, slopes)
        return np.concatenate([by_drivers, by_points], axis=1)

    def _split(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.drivers.mean)
        return points[:, :count], points[:, count:]


def features(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Powers of drivers, which end beyond a few standard deviations.

    Args:
        points: of the drivers, (m, k).

    Returns:
        The features, 0 where all drivers are, (m, p), and their derivatives, (m, p, k).
    """
    t = np.tanh(points / REACH)
    slopes, t = 1 - t**2, REACH * t
    powers = exponents(points.shape[1])
    each = t[:, None] ** powers
    derivatives = powers * t[:, None] ** np.maximum(powers - 1, 0) * slopes[:, None]
    others = [np.prod(np.delete(each, j, axis=2), axis=2) for j in range(points.shape[1])]
    return np.prod(each, axis=2), derivatives * np.stack(others, axis=2)


def exponents(count: int) -> np.ndarray:
    """Of some drivers, in all powers of one or two of them, (p, count)."""
    degree = DEGREES[min(count, 3)]
    found = [
        [i if k == a else j if k == b else 0 for k in range(count)]
        for a in range(count)
        for b in range(a, count)
        for i in range(1, degree + 1)
        for j in range(0 if a == b else 1, 1 if a == b else degree + 1 - i)
    ]
    return np.array(found)


def conditioned(evaluate: Evaluate, given: Conditional) -> Evaluate:
    """Energies and gradients as functions of the points of a Gaussian that changes with drivers."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = evaluate(given.push(points))
        return energies - given.log_volumes(points), given.pull(points, gradients)

    return inside


def given_drivers(
    model: CountedModel,
    latents: Latents,
    known: Judged,
    rng: np.random.Generator,
    noise: np.ndarray,
) -> tuple[Judged, Conditional] | None:
    """A Gaussian that changes with the model's scales; None if its bound is no higher.

    Args:
        model: the model.
        latents: what is known of the latents.
        known: the best Gaussian that does not change.
        rng: for draws.
        noise: for bounds, (m, d), antithetic.

    Returns:
        The Gaussian of the points, and what pushes them to the coordinates of the known one.

    Cost: for k drivers and r others about 2 r gradients of the model at 2 k² + 2 k + 1 nodes, and a
    few times 2 r at 2 k + 1; rounds of batch and match as long as they pay; O(k² r³).
    """
    small = np.repeat(latents.sizes, latents.sizes) <= MOST_OF_LATENT
    drivers = np.flatnonzero(latents.is_scale & small)
    dim = len(small)
    if not (0 < len(drivers) <= MOST_DRIVERS and len(drivers) < dim <= MOST_OTHERS):
        return None
    evaluate = model.in_form(known.centering)
    found = _find(evaluate, known.gaussian, drivers, widths_of(latents.from_prior, dim))
    if found is None:
        return None
    given, of_drivers = found
    inside = conditioned(evaluate, given)
    gaussian = Gaussian(np.zeros(dim), np.eye(dim))
    count = len(drivers)
    gaussian.mean[:count], gaussian.factor[:count, :count] = of_drivers
    best = known
    for count in range(MATCHES + 1):
        before = best
        if count:
            gaussian = match_near(inside, gaussian, rng, count - 1)
        bound = elbo(gaussian, noise, inside(gaussian.push(noise))[0])
        if bound.surely > best.bound.surely:
            best = Judged(bound, gaussian, known.centering)
        if count > 1 and surely(best) < surely(before) + LEAST_GAIN:
            break
    return None if best is known else (best, given)


class _Node(NamedTuple):
    """The others at values of the drivers: mode, covariance and Laplace's evidence."""

    mode: np.ndarray
    covariance: np.ndarray
    evidence: float


def _find(
    evaluate: Evaluate, known: Gaussian, drivers: np.ndarray, prior: np.ndarray
) -> tuple[Conditional, Gaussian] | None:
    """A Gaussian that changes with drivers, and the one of its points; None where Newton fails."""
    dim, count = len(known.mean), len(drivers)
    others = np.setdiff1d(np.arange(dim), drivers)
    covariance = known.factor @ known.factor.T
    widths = np.sqrt(np.diag(covariance))
    # What the prior decides comes before what the data decide: given the former, the mean of the
    # latter is nearly linear, and factors are smooth.
    others = others[np.argsort(-(widths / prior)[others], kind="stable")]
    order = np.concatenate([drivers, others])
    inside = covariance[np.ix_(drivers, drivers)]
    moving = np.linalg.solve(inside, covariance[np.ix_(drivers, others)])
    gaussian = Gaussian(known.mean[drivers], factor(inside))
    before, middle, slopes = gaussian, known.mean[others], gaussian.factor.T @ moving

    def look(values: np.ndarray) -> _Node | None:
        at = known.mean.copy()
        at[drivers] = values
        at[others] = middle + np.linalg.solve(before.factor, values - before.mean) @ slopes
        end = newton(evaluate, at, ~np.isin(np.arange(dim), drivers), widths)
        if end is None:
            return None
        inverse = end.inverse_hessian[np.ix_(others, others)]
        step = inverse @ end.gradient[others]
        volume = np.linalg.slogdet(inverse)[1]
        evidence = 0.5 * float(end.gradient[others] @ step + volume) - end.energy
        return _Node(end.point[others] - step, inverse, evidence)

    is_near = False
    for left in reversed(range(ROUNDS)):
        points = _design(count, is_near or not left)
        nodes = [look(values) for values in gaussian.push(points)]
        if any(node is None or not np.isfinite(node.evidence) for node in nodes):
            return None
        change, size = _change(points, np.array([node.evidence for node in nodes]))

        if size < THERE and is_near or not left:
            return _interpolated(order, gaussian, points, nodes), change
        modes = np.stack([node.mode for node in nodes])
        before, middle = gaussian, modes[0]
        slopes = np.linalg.lstsq(points, modes - middle, rcond=None)[0]
        # A product of lower triangles is one.
        gaussian = Gaussian(gaussian.push(change.mean[None])[0], gaussian.factor @ change.factor)
        is_near = is_near or size < NEAR
    return None


def _design(count: int, whole: bool) -> np.ndarray:
    """Points of drivers at which the others are looked at, the center first, (n, count)."""
    kind, unit = min(count, 3), np.eye(count)
    far = ON_AXES[kind] if whole else (AT_FIRST,)
    points = [np.zeros((1, count)), *(sign * size * unit for size in far for sign in (1, -1))]
    if whole and count > 1:
        sides = [sign * size for size in IN_PAIRS[kind] for sign in (1, -1)]
        points += [
            (x * unit[a] + y * unit[b])[None]
            for a in range(count)
            for b in range(a)
            for x in sides
            for y in sides
        ]
    return np.concatenate(points)


def _change(points: np.ndarray, evidences: np.ndarray) -> tuple[Gaussian, float]:
    """The Gaussian that the evidence at points makes of a standard normal, and how far that is."""
    count = points.shape[1]
    one, other = np.triu_indices(count)
    squares = points[:, one] * points[:, other]
    columns = np.concatenate([np.ones((len(points), 1)), points, squares], axis=1)
    found = np.linalg.lstsq(columns, evidences, rcond=None)[0]
    slopes, seconds = found[1 : 1 + count], np.zeros((count, count))
    seconds[one, other] = found[1 + count :]
    curvatures, axes = np.linalg.eigh(-seconds - seconds.T)
    curvatures = np.clip(curvatures, MOST_CHANGE**-2, MOST_CHANGE**2)
    move = (axes / curvatures) @ axes.T @ slopes
    length = np.linalg.norm(move)
    move *= min(1.0, MOST_CHANGE / max(length, np.finfo(float).tiny))
    size = max(length, float(np.max(np.abs(np.log(curvatures)))) / 2)
    return Gaussian(move, factor((axes / curvatures) @ axes.T)), size


def _interpolated(
    order: np.ndarray, drivers: Gaussian, points: np.ndarray, nodes: list[_Node]
) -> Conditional:
    """The Gaussian at all values of the drivers from that at some of them."""
    values, _ = features(points)
    mode, root = nodes[0].mode, factor(nodes[0].covariance)

    def whiten(columns: np.ndarray) -> np.ndarray:
        return solve_triangular(root, columns, lower=True)

    means = np.stack([whiten(node.mode - mode) for node in nodes])
    triangles = np.stack([factor(whiten(whiten(node.covariance).T)) for node in nodes])
    gram = values.T @ values + RIDGE * np.eye(values.shape[1])
    weights = np.linalg.solve(gram, values.T)
    return Conditional(
        order,
        drivers,
        Gaussian(mode, root),
        weights @ means,
        weights @ np.log(np.einsum("nii->ni", triangles)),
        np.einsum("pn,nij->pij", weights, np.tril(triangles, -1)),
    )
