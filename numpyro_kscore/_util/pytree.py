"""Frozen dataclasses that are JAX pytrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the pytree's structure (hashable, not traced).

    Args:
        **kwargs: of ``dataclasses.field``, such as ``default``.

    Returns:
        The field.

    Example::

        import jax

        from numpyro_kscore import pytree, static
        from numpyro_kscore.kernels import RadialProfile


        @pytree
        class Quadratic(RadialProfile):
            exponent: float = static(default=1.0)  # a program for each value
            width: float = 1.0  # may be traced

            def __call__(self, s):
                return (1 + s / self.width**2) ** -self.exponent


        jax.tree.leaves(Quadratic(exponent=2.0))  # [1.0]
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass registered with JAX: for kernels, profiles and filters.

    Fields are leaves unless declared with :func:`static`. JAX rebuilds the object through its
    constructor at every unflatten, so a ``__post_init__`` sees tracers and placeholders: it
    checks concrete numbers only.

    ``jax.tree_util.register_dataclass`` is not used: structures of two classes registered by it
    compare equal if their fields do (seen in jaxlib 0.10 and 0.12). Whenever two hashes shared a
    few bits, an estimator with ``Diagonal()`` was served by the program compiled for one with
    ``CurlFree()``.

    Args:
        cls: a class with annotated fields.

    Returns:
        The class, as a frozen dataclass. Its constructor raises ``TypeError`` for an array in a
        static field.

    Example::

        from numpyro_kscore import pytree, static
        from numpyro_kscore.kernels import CurlFree, RadialProfile


        @pytree
        class Power(RadialProfile):
            exponent: float = static(default=1.0)

            def __call__(self, s):
                return (1 + s) ** -self.exponent


        CurlFree(Power(2.0))(samples[0], samples[1])  # (2, 2)
    """
    check_fields = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        # The check of a class may turn its arguments into something hashable.
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


def with_leading(shape: tuple[int, ...], values: Any) -> Any:
    """Arrays of a tree with other dimensions in place of their first one."""
    return jax.tree.map(lambda value: value.reshape(*shape, *value.shape[1:]), values)


def named_leaves(values: dict[str, Any]) -> dict[str, Any]:
    """Arrays by name: those of a value that is a tree have their place after it, as ``"a[0]"``."""
    return {
        name + jax.tree_util.keystr(place): leaf
        for name, value in values.items()
        for place, leaf in jax.tree_util.tree_leaves_with_path(value)
    }


def _check_static(name: str, x: Any) -> None:
    """Raise for an array: JAX hashes and compares static fields, and may keep a tracer."""
    if isinstance(x, jax.Array | np.ndarray):
        kind = "a traced one" if isinstance(x, jax.core.Tracer) else "one"
        raise TypeError(
            f"{name}: expected no array, since programs are compiled for this value; got {kind} "
            f"of dtype {x.dtype} and shape {x.shape}. Give a Python number; under jit or vmap it "
            "cannot vary"
        )
