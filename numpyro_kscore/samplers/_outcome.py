"""What chains came to, and the limits within which they have settled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore.samplers._convergence import Moments

__all__ = ["LARGEST_INFLUENCE", "MOST_DIVERGENT", "TREND", "Chains"]

# Largest change from earlier to later draws, in standard errors.
TREND = 4.0
# A standard deviation that changes by more without one superchain rests on it. Where all visit the
# same regions, the change is about the Monte Carlo error, of up to 3.5 %, over the root of their
# number, twice as much for the one with the largest.
LARGEST_INFLUENCE = 0.05
# Share of divergent transitions from which on there are regions that chains cannot enter.
MOST_DIVERGENT = 0.01


class Chains(NamedTuple):
    """What the chains came to.

    Attributes:
        draws: of the windows that count, in the guide's coordinates, (chains, draws, d).
        moments: of their unconstrained values.
        has_settled: whether they did before the limit.
        acceptance: mean probability of each chain, (chains,).
        num_divergent: divergent transitions in the windows that count.
        num_gradients: of all windows.
        num_windows: number of all windows.
    """

    draws: np.ndarray
    moments: Moments
    has_settled: bool
    acceptance: np.ndarray
    num_divergent: int
    num_gradients: int
    num_windows: int
