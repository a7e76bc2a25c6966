"""The contract of a transport, and transports one after another.

A transport is an invertible map T from points x to coordinates ``y = T(x)``, in d dimensions. Its
formulas are written once: with arrays of NumPy they run on the host, in the search for a start, and
with those of JAX they are part of a guide's program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.linalg import solve_transposed
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
        """The gradient in x of an energy E(T(x)) less the log volume, (..., d).

        Args:
            x: points, (..., d).
            gradients: of E, at the coordinates of the points, (..., d).
        """
        ...

    def push_score(self, x: Any, score: Any) -> Any:
        """The score of the image of a density, at the coordinates of points, (..., d).

        It is the inverse of :meth:`pull`, but for the sign: the score of a density is minus the
        gradient of its energy.

        Args:
            x: points, (..., d).
            score: of the density of the points, (..., d).
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
        total = namespace(x).zeros(x.shape[:-1], x.dtype)
        for step in self.steps:
            total = total + step.log_volume(x)
            x = step.push(x)
        return total

    def pull(self, x: Any, gradients: Any) -> Any:
        points = []
        for step in self.steps:
            points.append(x)
            x = step.push(x)
        for step, point in zip(reversed(self.steps), reversed(points), strict=True):
            gradients = step.pull(point, gradients)
        return gradients

    def push_score(self, x: Any, score: Any) -> Any:
        for step in self.steps:
            score = step.push_score(x, score)
            x = step.push(x)
        return score


class LocalDensity(NamedTuple):
    """The log density of a draw if no other noise were pushed there, and its gradient, (d,).

    The gradient is NaN where the map is known to be folded.
    """

    log_density: jax.Array
    score: jax.Array


def push_density(transport: Transport, x: jax.Array, local: LocalDensity) -> LocalDensity:
    """The density of the image of points (d,) that have a density.

    Args:
        transport: the map.
        x: the points.
        local: their density.
    """
    log_density = local.log_density - transport.log_volume(x)
    return LocalDensity(log_density, transport.push_score(x, local.score))


def pulled_back(evaluate: Evaluate, transport: Transport) -> Evaluate:
    """Energies and gradients of coordinates as those of the points that are pushed there."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = evaluate(transport.push(points))
        return energies - transport.log_volume(points), transport.pull(points, gradients)

    return inside


def solve_lower_transposed(triangle: Any, vectors: Any) -> Any:
    """``x`` with ``triangleᵀ x = vector``, for triangles (..., d, d) and vectors (..., d)."""
    if namespace(triangle, vectors) is np:
        return np.linalg.solve(np.swapaxes(triangle, -1, -2), vectors[..., None])[..., 0]
    return jnp.vectorize(solve_transposed, signature="(d,d),(d)->(d)")(triangle, vectors)
