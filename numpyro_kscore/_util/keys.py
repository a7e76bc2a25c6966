"""Random keys for other uses than the particles of a step."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = 2**31 - 1


class FitKey(IntEnum):
    """The numbers of the keys that a fit takes from that of its state, each for one use."""

    LOOK = 0
    EXPANSION = 1
    # Recoveries from numbers that are not finite have this number and up to five after it.
    RECOVERY = 2
    WEIGHTS = 16


def key_apart(key: jax.Array, number: int) -> jax.Array:
    """A key that no split of ``key`` gives, one for each small ``number``.

    JAX's default keys are counters: ``fold_in(key, i)`` is the i-th key of ``split(key, n)``, so
    folding in a small number would repeat the noise of a particle.
    """
    return jax.random.fold_in(key, LARGEST - number)


def is_typed_key(x: Any) -> bool:
    """Whether ``x`` is an array of random keys of JAX's own type."""
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def as_numbers(x: Any) -> np.ndarray:
    """A number, an array or random keys as numbers, in the precision that JAX has them in."""
    return np.asarray(jax.random.key_data(x) if is_typed_key(x) else jnp.asarray(x))


def host_generator(key: jax.Array) -> np.random.Generator:
    """NumPy's generator with the numbers of a key as its seed.

    Orders and choices on the host take no time by it; JAX compiles a sort for each of them, which
    takes a second.
    """
    return np.random.default_rng(as_numbers(key).ravel().tolist())


def check_key(name: str, key: Any, before: str = "") -> None:
    """Raise ``TypeError`` unless ``key`` is a random key; seeds and data are refused.

    ``before`` is what follows the key where it is the first argument, such as ``"the data"``.
    """
    dtype: Any = getattr(key, "dtype", None)
    if is_typed_key(key):
        is_key = key.ndim == 0
    else:
        is_array = isinstance(key, jax.Array | np.ndarray)
        is_key = is_array and dtype == jnp.uint32 and key.ndim == 1
    if not is_key:
        given = repr(key) if dtype is None else f"an array of {dtype}, shape {key.shape}"
        order = f". The key comes before {before}" if before else ""
        raise TypeError(
            f"{name}: expected one random key such as jax.random.key(0); got {given}{order}"
        )
