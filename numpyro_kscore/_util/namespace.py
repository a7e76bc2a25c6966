"""Formulas that are written once for arrays of NumPy and of JAX."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np


def namespace(*arrays: Any) -> ModuleType:
    """``numpy`` if all arrays are NumPy's, otherwise ``jax.numpy``."""
    return np if all(isinstance(a, np.ndarray | np.generic) for a in arrays) else jnp
