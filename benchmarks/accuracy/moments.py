"""Moments of reference draws, which stay in the project: the draws take hours of NUTS.

The folder ``benchmarks/results/suite_references`` has a file for each posterior. It keeps seven
digits of the location and spread of each coordinate, beside what says whether they can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from jax import Array

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.references import (
    CACHE_VERSION,
    Reference,
    Sizes,
    are_trusted,
    kept_numbers,
    load_reference,
    location_and_spread,
    path_of,
    seven_digits,
)
from examples.common.tables import Row

__all__ = ["KEPT", "Moments", "load_moments"]

KEPT = Path(__file__).parents[1] / "results" / "suite_references"


@dataclass(frozen=True)
class Moments:
    """Moments of each summarized coordinate of a posterior.

    Attributes:
        location, spread: mean and standard deviation, or median and scaled interquartile range
            where tails are heavy; (k,) each.
        rhat, ess: largest split R̂, and smallest effective sample size.
        num_draws: reference draws that the moments are of.
    """

    location: list[float]
    spread: list[float]
    rhat: float
    ess: float
    num_draws: int

    @staticmethod
    def of(reference: Reference, heavy_tails: bool) -> Moments:
        """Moments of the draws that guides are compared with."""
        location, spread = location_and_spread(reference.truth, heavy_tails)
        return Moments(
            *(seven_digits(x) for x in (location, spread, reference.rhat, reference.ess)),
            len(reference.truth),
        )  # fmt: skip

    @property
    def trusted(self) -> bool:
        """True if the chains agree and there are enough independent draws."""
        return are_trusted(self.rhat, self.ess)

    def compare(self, draws: Array, heavy_tails: bool) -> Row:
        """Largest error of a location, in spreads, and the ratios of spreads.

        Args:
            draws: summarized draws, shape (n, k).
            heavy_tails: whether locations are medians.
        """
        location, spread = location_and_spread(draws, heavy_tails)
        errors = jnp.abs(location - jnp.array(self.location)) / jnp.array(self.spread)
        ratios = spread / jnp.array(self.spread)
        return {
            "mean_error": float(errors.max()),
            "sd_low": float(ratios.min()),
            "sd_high": float(ratios.max()),
        }


def load_moments(
    posterior: Posterior, sizes: Sizes, folder: Path | None, known: bool = False
) -> Moments | None:
    """Moments of a reference, from the folder or drawn and kept there.

    Returns:
        The moments; check ``trusted`` before use. None if only ``known`` ones are asked for.
    """

    def compute() -> Moments:
        return Moments.of(load_reference(posterior, sizes, None), posterior.heavy_tails)

    path = path_of(posterior, folder, CACHE_VERSION, *sizes)
    return kept_numbers(path, Moments, compute, known)
