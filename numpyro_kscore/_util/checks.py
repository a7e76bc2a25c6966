"""Checks of input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


def is_concrete(x: Any) -> bool:
    """Whether ``x`` is a number or array whose value is known now (not a tracer)."""
    if isinstance(x, bool) or isinstance(x, jax.core.Tracer):
        return False
    return isinstance(x, int | float | np.ndarray | np.generic | jax.Array)


def is_traced(given: Any) -> bool:
    """Whether a pytree has a leaf without a value; words, flags and functions have theirs."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given))


def check_positive(name: str, x: Any) -> None:
    """Raise ``ValueError`` if ``x`` is concrete and not a positive finite number."""
    if isinstance(x, str):
        raise ValueError(f"{name}: expected a positive finite number; got {x!r}")
    if is_concrete(x):
        value = np.asarray(x)
        if not np.all(np.isfinite(value) & (value > 0)):
            raise ValueError(f"{name}: expected a positive finite number; got {x}")


def check_count(name: str, x: Any, minimum: int = 1) -> None:
    """Raise unless ``x`` is a Python integer of at least ``minimum``."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name}: expected an integer; got {x!r} of type {type(x).__name__}")
    if x < minimum:
        raise ValueError(f"{name}: expected an integer of at least {minimum}; got {x}")


def check_choice(name: str, x: Any, choices: tuple[Any, ...], or_else: str = "") -> None:
    """Raise ``ValueError`` unless ``x`` is one of ``choices``, words and None.

    ``or_else`` names what else may be given, which the caller lets pass, such as ``"a number"``.
    """
    if not any(x is c or (isinstance(x, str) and x == c) for c in choices):
        words = ", ".join(map(repr, choices))
        expected = f"{words} or {or_else}" if or_else else f"one of {words}"
        raise ValueError(f"{name}: expected {expected}; got {x!r}")


def as_points(name: str, x: Any, dim: int | None = None, minimum: int = 1) -> jax.Array:
    """``x`` as a float32 or float64 array (n, d), checked; its entries are, outside ``jit``."""
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    if x.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"{name}: expected an array of float32 or float64, of shape (n, d); got dtype "
            f"{x.dtype}. Convert it with .astype('float32')"
        )
    if x.ndim != 2:
        raise ValueError(
            f"{name}: expected shape (n, d), one draw a row; got shape {x.shape}. "
            "Reshape scalar draws to (n, 1)"
        )
    if x.shape[1] < 1 or (dim is not None and x.shape[1] != dim):
        want = "at least 1" if dim is None else str(dim)
        raise ValueError(f"{name}: expected {want} column(s); got shape {x.shape}")
    if x.shape[0] < minimum:
        raise ValueError(f"{name}: expected at least {minimum} rows; got shape {x.shape}")
    if is_concrete(x) and (bad := _count_rows_not_finite(x)):
        raise ValueError(
            f"{name}: expected finite values; got {bad} row(s) with NaN or infinity out of "
            f"{x.shape[0]}. Remove them, or find what produced them"
        )
    return _as_jax(x)


def _count_rows_not_finite(x: Any) -> int:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        # Rows in other processes cannot be fetched; all processes count them together.
        return int(jnp.sum(~jnp.all(jnp.isfinite(x), axis=1)))
    return int(np.sum(~np.isfinite(np.asarray(x)).all(axis=1)))


def as_scored(samples: Any, scores: Any, minimum: int = 1) -> tuple[jax.Array, jax.Array]:
    """Draws and the model's score at them, both (n, d), checked and of one precision."""
    x = as_points("samples", samples, minimum=minimum)
    return x, as_scores("scores", scores, x)


def as_scores(name: str, scores: Any, samples: jax.Array) -> jax.Array:
    """Scores at checked samples, (n, d), checked too, and in the samples' precision."""
    s = as_points(name, scores)
    if s.shape != samples.shape:
        raise ValueError(
            f"{name}: expected shape {samples.shape}, that of the samples; got {s.shape}"
        )
    return s.astype(samples.dtype)


def with_jax_leaves(tree: T) -> T:
    """The tree with its NumPy arrays turned into JAX arrays."""
    return jax.tree.map(_as_jax, tree)


def _as_jax(x: Any) -> Any:
    # JAX 0.10 to 0.12 caches what it makes of a NumPy array by the array alone, not by the
    # precision too: the same array then has the wrong dtype in the other precision. A copy is not
    # in the cache.
    return jnp.asarray(x.copy()) if isinstance(x, np.ndarray) else x


def first_that_traces(attempts: Sequence[Callable[..., Any]], *shapes: Any) -> Any:
    """The first of some functions that can be traced at arguments of these shapes, or None.

    A custom rule for reverse mode has no forward mode, and a loop of unknown length no reverse
    mode: what works is found out by tracing.
    """
    for attempt in attempts:
        try:
            jax.eval_shape(attempt, *shapes)
        except (TypeError, ValueError):
            continue
        return attempt
    return None
