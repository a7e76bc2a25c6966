"""The fall of a noisy number from one window of a trace to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Gain", "window_gain"]


class Gain(NamedTuple):
    """The fall of a number from one window to the next.

    Attributes:
        value: difference of the means, positive for an improvement.
        standard_error: of the difference.
    """

    value: float
    standard_error: float

    def is_real(self, least: float, errors: float = 1) -> bool:
        """Whether the gain exceeds both so many of its errors and the least that matters."""
        return self.value > max(errors * self.standard_error, least)


def window_gain(values: Sequence[float], errors: Sequence[float], window: int) -> Gain:
    """Compare the means of the last two windows.

    Entries are weighted by their inverse variances, so one with a huge error counts for nothing.
    Where they scatter more than their errors explain, as losses do while an optimizer wanders, the
    error of the mean grows by the ratio.

    Args:
        values: one finite number for each chunk, at least ``2 * window``.
        errors: their standard errors, positive.
        window: entries in each of the two windows, at least 2 for a scatter.
    """
    value, error = np.asarray(values, float), np.asarray(errors, float)
    before = _mean(value[-2 * window : -window], error[-2 * window : -window])
    after = _mean(value[-window:], error[-window:])
    return Gain(before[0] - after[0], float(np.hypot(before[1], after[1])))


def _mean(value: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    weight = (np.min(error) / error) ** 2
    mean = float(np.sum(weight * value) / np.sum(weight))
    scatter = np.sum(((value - mean) / error) ** 2) / max(len(value) - 1, 1)
    return mean, float(np.min(error) / np.sqrt(np.sum(weight)) * np.sqrt(max(scatter, 1.0)))
