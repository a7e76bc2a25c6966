"""A posterior as guides are compared on it: a target, its coordinates, and how NUTS samples it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

from benchmarks.accuracy.targets import Draws, Target

__all__ = ["Posterior"]


@dataclass(frozen=True)
class Posterior:
    """A target with the way guides are compared on it.

    Attributes:
        target: model, data and source of reference draws.
        summary: maps constrained draws of all sites, leading axis n, to the compared coordinates,
            (n, k); None compares the unconstrained coordinates.
        heavy_tails: compare medians and interquartile ranges, because variances are infinite or
            poorly determined by thousands of draws.
        thinning: NUTS keeps one of this many draws.
        accept: the acceptance probability NUTS adapts its step size to.
        dense_mass: NUTS adapts a full mass matrix, for posteriors with strong correlations, or one
            of these sites.
        float64: NUTS runs in double precision, because models in raw units lose digits in single.
        batch_size: rows of the minibatches that guides are fitted to, the last argument of the
            model; None fits them to all.
    """

    target: Target
    summary: Callable[[Draws], Array] | None = None
    heavy_tails: bool = False
    thinning: int = 2
    accept: float = 0.95
    dense_mass: bool | list[tuple[str, ...]] = False
    float64: bool = False
    batch_size: int | None = None

    @property
    def fit_args(self) -> tuple[Any, ...]:
        """Arguments of the model in a fit."""
        return (*self.target.args, *(() if self.batch_size is None else (self.batch_size,)))

    @property
    def batch_share(self) -> float:
        """Share of all rows that a gradient in a fit reads."""
        return 1.0 if self.batch_size is None else self.batch_size / len(self.target.args[0])

    def summarize(self, draws: Draws) -> Array:
        """The compared coordinates, (n, k), of draws of the model's sites."""
        return self.target.unconstrained(draws) if self.summary is None else self.summary(draws)
