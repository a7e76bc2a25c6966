"""Frozen dataclasses that are JAX pytrees, and the one place where input is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the pytree's structure (hashable, not traced).

    Args:
        **kwargs: of ``dataclasses.field``, such as ``default``.

    Returns:
        The field.
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass registered with JAX: for kernels, profiles and filters.

    Fields are leaves unless declared with :func:`static`. JAX rebuilds the object through its
    constructor at every unflatten, so a ``__post_init__`` sees tracers and placeholders: it
    checks concrete numbers only.

    Not ``jax.tree_util.register_dataclass``: structures of two classes registered by it compare
    equal if their fields do (seen in jaxlib 0.10 and 0.12). Of an estimator with ``CurlFree()`` and
    one with ``Diagonal()`` the second was then, whenever two hashes shared a few bits, served by
    the program compiled for the first.

    Args:
        cls: a class with annotated fields.

    Returns:
        The class, as a frozen dataclass. Its constructor raises ``TypeError`` for an array in a
        static field.

    Example::

        @pytree
        class Power(RadialProfile):
            exponent: float = static(default=1.0)

            def __call__(self, s):
                return (1 + s) ** -self.exponent
    """
    check_fields = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        # A class may turn what it is given into something static.
        if check_fields is not None:
            check_fields(self)
        for name in meta:
            _check_static(f"{cls.__name__}.{name}", getattr(self, name))

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    keys = [jax.tree_util.GetAttrKey(name) for name in data]

    def flatten(tree: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        parts = [tuple(getattr(tree, name) for name in names) for names in (data, meta)]
        return parts[0], parts[1]

    def flatten_with_keys(tree: T) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        leaves, structure = flatten(tree)
        return tuple(zip(keys, leaves, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], leaves: Iterable[Any]) -> T:
        given = zip((*data, *meta), (*leaves, *structure), strict=True)
        return cls(**dict(given))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def _check_static(name: str, x: Any) -> None:
    """Raise for an array: JAX hashes and compares what is static, and may keep a tracer."""
    if isinstance(x, jax.Array | np.ndarray):
        kind = "a traced one" if isinstance(x, jax.core.Tracer) else "one"
        raise TypeError(
            f"{name}: expected no array, since programs are compiled for this value; got {kind} "
            f"of dtype {x.dtype} and shape {x.shape}. Give a Python number; under jit or vmap it "
            "cannot vary"
        )


def is_concrete(x: Any) -> bool:
    """Whether ``x`` is a number or array whose value is known now (not a tracer)."""
    if isinstance(x, bool) or isinstance(x, jax.core.Tracer):
        return False
    return isinstance(x, int | float | np.ndarray | np.generic | jax.Array)


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


def check_choice(name: str, x: Any, choices: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` unless ``x`` is one of ``choices``."""
    if not any(x is c or (isinstance(x, str) and x == c) for c in choices):
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}; got {x!r}")


def as_points(name: str, x: Any, dim: int | None = None, minimum: int = 1) -> jax.Array:
    """``x`` as a floating-point array of shape (n, d), checked.

    Raises:
        TypeError: for a dtype other than float32 and float64.
        ValueError: for a wrong rank or dimension, fewer than ``minimum`` rows, or, outside
            ``jit``, entries that are not finite.
    """
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
    """Draws and the model's score at them, both (n, d), checked and of one precision.

    Raises:
        TypeError: for a dtype that is not real floating point.
        ValueError: see :func:`as_points`; and if the shapes differ.
    """
    x = as_points("samples", samples, minimum=minimum)
    s = as_points("scores", scores)
    if x.shape != s.shape:
        raise ValueError(f"scores: expected shape {x.shape}, that of the samples; got {s.shape}")
    return x, s.astype(x.dtype)


def with_jax_leaves(tree: T) -> T:
    """The tree with its NumPy arrays turned into JAX arrays."""
    return jax.tree.map(_as_jax, tree)


def _as_jax(x: Any) -> Any:
    # JAX 0.10 to 0.12 remembers what it makes of a NumPy array by the array alone, not by the
    # precision too, as long as a program uses it: in the other precision the same array then has
    # the wrong dtype. A copy is an array JAX has not seen.
    return jnp.asarray(x.copy()) if isinstance(x, np.ndarray) else x
