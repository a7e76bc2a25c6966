"""The contract of a transport, and transports one after another.

A transport is an invertible map T from points x to coordinates ``y = T(x)``, in d dimensions. Its
formulas are written once: with arrays of NumPy they run on the host, in the search for a start, and
with those of JAX they are part of a guide's program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree

# Points (m, d) to energies (m,), minus log densities, and their gradients (m, d).
Evaluate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Transport(Protocol):
    """An invertible map of points (..., d); one point (d,) at a time where arrays are JAX's."""

    def push(self, x: Any) -> Any:
        """The coordinates at points, (..., d)."""
        ...

    def log_volume(self, x: Any) -> Any:
        """``log |det dT/dx|`` at points, (...,)."""
        ...

    def pull(self, x: Any, gradients: Any) -> Any:
        """The gradient in x of E(T(x)) less the log volume, from that of an energy E, (..., d)."""
        ...

    def push_score(self, x: Any, score: Any) -> Any:
        """The score of the image of a density, at the coordinates of points, (..., d).

        It is the inverse of :meth:`pull`, but for the sign: the score of a density is minus the
        gradient of its energy.
        """
        ...


@pytree
class Chain:
    """Transports one after another; with none the identity.

    Attributes:
        steps: the first one comes first.
    """

    steps: tuple[Any, ...] = ()

    def push(self, x: Any) -> Any:
        for step in self.steps:
            x = step.push(x)
        return x

    def log_volume(self, x: Any) -> Any:
        zeros = namespace(x).zeros(x.shape[:-1], x.dtype)
        return sum((step.log_volume(point) for step, point in self._placed(x)), zeros)

    def pull(self, x: Any, gradients: Any) -> Any:
        for step, point in reversed(self._placed(x)):
            gradients = step.pull(point, gradients)
        return gradients

    def push_score(self, x: Any, score: Any) -> Any:
        for step, point in self._placed(x):
            score = step.push_score(point, score)
        return score

    def _placed(self, x: Any) -> list[tuple[Any, Any]]:
        """Every step with the points that it is given."""
        placed = []
        for step in self.steps:
            placed.append((step, x))
            # What comes out of the last one is not asked for.
            x = step.push(x) if step is not self.steps[-1] else x
        return placed


class LocalDensity(NamedTuple):
    """The log density of a draw if no other noise were pushed there, and its gradient, (d,).

    The gradient is NaN where the map is known to be folded.
    """

    log_density: jax.Array
    score: jax.Array


def push_density(transport: Transport, x: jax.Array, local: LocalDensity) -> LocalDensity:
    """The density of the image of points (d,) that have a density."""
    log_density = local.log_density - transport.log_volume(x)
    return LocalDensity(log_density, transport.push_score(x, local.score))


def pulled_back(evaluate: Evaluate, transport: Transport) -> Evaluate:
    """Energies and gradients of coordinates as those of the points that are pushed there."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = evaluate(transport.push(points))
        return energies - transport.log_volume(points), transport.pull(points, gradients)

    return inside
