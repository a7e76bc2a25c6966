"""Data of toys whose prior is a simulator, with their exact posteriors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from examples.functions.programs import PROGRAMS, importance_posterior, lotka_volterra, sampler
from examples.functions.samplers import exact_piecewise, piecewise_function

TOYS = ("piecewise", *PROGRAMS)


@dataclass(frozen=True)
class Task:
    """Data of one function, and where its posterior is looked at.

    Attributes:
        name: of the toy.
        x: inputs, (N, d).
        y: targets, (N,).
        noise: their standard deviation.
        grid: inputs at which posteriors are compared, (m, d).
        inside: whether they count as near the data, (m,).
        points: further inputs in a measurement set, (M, d).
        held_out: inputs and targets of a forecast, or None.
    """

    name: str
    x: Array
    y: Array
    noise: float
    grid: Array
    inside: np.ndarray
    points: Array
    held_out: tuple[Array, Array] | None = None

    @property
    def sampler(self) -> Callable[[Array, Array], Array]:
        """The prior as a simulator."""
        if self.name == "piecewise":
            return piecewise_function
        return sampler(PROGRAMS[self.name])

    def exact(self) -> np.ndarray:
        """Draws of the exact posterior on the grid, (S, m)."""
        given = self.x, self.y, self.noise, self.grid
        if self.name == "piecewise":
            return exact_piecewise(*given)
        return importance_posterior(PROGRAMS[self.name], *given).draws


def make_task(name: str, seed: int = 0) -> Task:
    """One of ``TOYS``; the seed is that of the data."""
    rng = np.random.default_rng(seed)
    held_out = None
    if name == "piecewise":
        x = np.array([[-1.8, -1.5, -1.1, -0.8, -0.1, 0.2, 0.5, 1.3, 1.5, 1.8]]).T
        y, noise = np.where(x < -0.4, -0.8, np.where(x < 0.9, 1.0, 0.1))[:, 0], 0.1
        grid, points = (np.linspace(-2, 2, size)[:, None] for size in (121, 21))
        inside = np.abs(grid[:, 0]) <= 2
    elif name == "periodic":
        x, noise = rng.uniform(-2, 0.5, (12, 1)), 0.1
        y = np.sin(2 * np.pi * x[:, 0] / 1.5)
        grid, points = (np.linspace(-2, 4, size)[:, None] for size in (121, 41))
        inside = grid[:, 0] < 0.5
    elif name == "monotone":
        x, noise = rng.uniform(-1.5, 0.5, (10, 1)), 0.1
        y = np.tanh(2 * x[:, 0])
        grid, points = (np.linspace(-2, 2, size)[:, None] for size in (121, 21))
        inside = np.abs(grid[:, 0] + 0.5) < 1
    elif name == "lotka-volterra":
        noise = 0.2
        x, later, grid, points = (
            _both_species(np.arange(start, stop, step))
            for start, stop, step in (
                (0.5, 8.1, 0.5),
                (8.5, 16.1, 0.5),
                (0, 16.1, 0.25),
                (9, 17, 1),
            )
        )
        all_times = _single(np.concatenate([x, later]))
        y = np.asarray(sampler(lotka_volterra)(random.key(seed), all_times))
        inside = grid[:, 0] <= 8
    else:
        raise ValueError(f"toy: expected one of {', '.join(TOYS)}; got {name!r}")
    y = y + noise * rng.normal(size=len(y))
    if name == "lotka-volterra":
        held_out, y = (_single(later), _single(y[len(x) :])), y[: len(x)]
    x, y, grid, points = (_single(array) for array in (x, y, grid, points))
    return Task(name, x, y, noise, grid, inside, points, held_out)


def _both_species(times: np.ndarray) -> np.ndarray:
    return np.stack([np.tile(times, 2), np.repeat([0, 1], len(times))], axis=1)


def _single(array: Any) -> Array:
    return jnp.asarray(array, jnp.float32)
