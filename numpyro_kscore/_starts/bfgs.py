"""Quasi-Newton paths from several starts, in lockstep.

The inverse Hessian that BFGS builds up on its way to a mode is, at every point of the path, the
covariance of a Gaussian that fits the posterior around there (Zhang et al. 2022, *Pathfinder*).
Everything is double precision on the host: only the model is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._transports.transport import Evaluate

# Constants of the weak Wolfe conditions, as usual for quasi-Newton methods.
DECREASE, CURVATURE = 1e-4, 0.9
# A path has arrived when a Newton step would lower the energy by less than this, in nats, after
# several steps in a row, and not by more each time: while the metric is that of stiff directions
# alone, others look flat, and the steps along them grow.
ARRIVED, ROUNDING, CALM_STEPS = 1e-6, 1e-12, 3
# Where rounding ends a line search, a mode is as near as that.
NEARLY_ARRIVED = 1e-2
MOST_TRIALS, MOST_EXPANSIONS = 40, 12
EXPANSION = 4.0
# Iterates that a path keeps, and numbers in their matrices.
MOST_KEPT, MOST_NUMBERS = 256, 10_000_000


class Iterate(NamedTuple):
    """A point of a path.

    Attributes:
        point: shape (d,).
        energy: minus log density there.
        gradient: of the energy, (d,).
        inverse_hessian: the estimate of BFGS, (d, d), positive definite.
    """

    point: np.ndarray
    energy: float
    gradient: np.ndarray
    inverse_hessian: np.ndarray


class Path:
    """One quasi-Newton path, advanced by one evaluation of the energy at a time.

    Attributes:
        iterates: the points it accepted, in order; of a long path in many dimensions only some.
        count: how many it accepted.
        trial: where energy and gradient are wanted next.
        is_done: whether it has arrived or cannot go on.
        has_arrived: whether it is at a local minimum of the energy.
    """

    def __init__(self, start: np.ndarray, widths: np.ndarray) -> None:
        self.iterates: list[Iterate] = []
        self.count = 0
        self._most_kept = max(8, min(MOST_KEPT, MOST_NUMBERS // len(start) ** 2))
        self.is_done = self.has_arrived = False
        self._calm, self._decrement = 0, np.inf
        self.trial, self._widths = start, widths
        self._direction = np.zeros_like(start)
        self._length, self._shortest, self._longest = 1.0, 0.0, np.inf
        self._trials = self._expansions = 0

    def receive(self, energy: float, gradient: np.ndarray) -> None:
        """Take energy and gradient at the trial point, and choose the next one."""
        finite = np.isfinite(energy) and bool(np.all(np.isfinite(gradient)))
        if not self.iterates:
            if not finite:
                self.is_done = True
                return
            self._accept(Iterate(self.trial, energy, gradient, np.diag(self._widths**2)))
            return
        last = self.iterates[-1]
        slope = last.gradient @ self._direction
        if not finite or energy > last.energy + DECREASE * self._length * slope:
            self._longest = self._length
        elif gradient @ self._direction < CURVATURE * slope and (
            np.isfinite(self._longest) or self._expansions < MOST_EXPANSIONS
        ):
            self._shortest = self._length
        else:
            self._accept(self._updated(last, energy, gradient))
            return
        self._trials += 1
        if self._trials > MOST_TRIALS:
            self.is_done, self.has_arrived = True, bool(-slope < NEARLY_ARRIVED)
            return
        if np.isinf(self._longest):
            self._length *= EXPANSION
            self._expansions += 1
        else:
            self._length = 0.5 * (self._shortest + self._longest)
        self.trial = last.point + self._length * self._direction

    def _updated(self, last: Iterate, energy: float, gradient: np.ndarray) -> Iterate:
        """The BFGS update of the inverse Hessian, from the move and the change of the gradient."""
        move, change = self.trial - last.point, gradient - last.gradient
        curvature = move @ change
        inverse = last.inverse_hessian
        if not curvature > 0:
            return Iterate(self.trial, energy, gradient, inverse)
        if self.count == 1:
            # The first step sets the scale.
            inverse = inverse * (curvature / (change @ inverse @ change))
        image = inverse @ change
        outer = np.outer(move, image)
        inverse = (
            inverse
            + np.outer(move, move) * (1 + change @ image / curvature) / curvature
            - (outer + outer.T) / curvature
        )
        return Iterate(self.trial, energy, gradient, inverse)

    def _accept(self, iterate: Iterate) -> None:
        self.count += 1
        if len(self.iterates) >= self._most_kept:
            # Memory: of the older ones every second one stays.
            self.iterates = [*self.iterates[:-1:2], self.iterates[-1]]
        self.iterates.append(iterate)
        direction = -iterate.inverse_hessian @ iterate.gradient
        decrement = -direction @ iterate.gradient
        if self.count == 1:
            # Little is known of the scale yet: a step of one width at most.
            direction = direction / max(1.0, float(np.linalg.norm(direction / self._widths)))
        is_calm = decrement < ARRIVED and (decrement <= self._decrement or decrement < ROUNDING)
        self._calm = self._calm + 1 if is_calm else 0
        self._decrement = decrement
        arrived = self._calm >= CALM_STEPS or decrement == 0
        if arrived or not np.isfinite(decrement):
            self.is_done, self.has_arrived = True, bool(arrived)
            return
        self._direction, self.trial = direction, iterate.point + direction
        self._length, self._shortest, self._longest = 1.0, 0.0, np.inf
        self._trials = self._expansions = 0


def quasi_newton_paths(
    evaluate: Evaluate, starts: np.ndarray, num_evaluations: int, widths: np.ndarray | None = None
) -> list[Path]:
    """BFGS from several starts, with a line search by bisection that needs no second derivative.

    From k starts, (k, d), with so many evaluations for each path at most. A path first takes its
    widths, by default 1, for standard deviations. One without iterates started where the energy is
    not finite.

    Cost: O(k num_evaluations d²) besides the evaluations. Source: the line search is that of
    Lewis and Overton (2013), which also gets along with kinks.
    """
    widths = np.ones_like(starts, float) if widths is None else widths
    paths = [Path(np.asarray(s, float), w) for s, w in zip(starts, widths, strict=True)]
    for _ in range(num_evaluations):
        going = [path for path in paths if not path.is_done]
        if not going:
            break
        energies, gradients = evaluate(np.stack([path.trial for path in going]))
        for path, energy, gradient in zip(going, energies, gradients, strict=True):
            path.receive(float(energy), gradient)
    return paths
