"""Random keys for other uses than the particles of a step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

__all__ = ["check_key", "key_apart"]

LARGEST = 2**31 - 1


def key_apart(key: jax.Array, number: int) -> jax.Array:
    """A key that no split of ``key`` gives, one for each small ``number``.

    JAX's default keys are counters: ``fold_in(key, i)`` is the i-th key of ``split(key, n)``, so
    folding in a small number would repeat the noise of a particle.
    """
    return jax.random.fold_in(key, LARGEST - number)


def check_key(key: Any) -> None:
    """Raise ``TypeError`` unless ``key`` is a random key; an integer seed is none."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"rng_key: expected a random key such as jax.random.key(0); got {key!r}")
