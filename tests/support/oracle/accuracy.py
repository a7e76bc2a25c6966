"""Distances of values from the reference."""

from __future__ import annotations

import math

import numpy as np

from .profiles import Array


def relative_error(value: Array, reference: Array) -> float:
    """Norm-wise relative error; NaN counts as infinite."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    if value.shape != reference.shape:
        raise ValueError(f"expected shape {reference.shape}; got {value.shape}")
    error = np.linalg.norm(value - reference) / np.linalg.norm(reference)
    return float(error) if np.isfinite(error) else math.inf
