"""A digest of a program before it is lowered: equal digests stand for equal machine code.

Lowering takes as long as tracing. What was compiled once serves a program of equal digest, which
the operations of a program, their parameters and how they are connected determine.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

# Rules of derivatives and of batching, which a program that is compiled as it is does not use.
RULES = {
    "custom_jvp_call": {"jvp_jaxpr_fun", "jvp_jaxpr_thunk"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
    "custom_vmap_call": {"rule"},
}
# Parts of a text that does not determine its object: a place in memory, or an array cut short.
INCOMPLETE = (" at 0x", "...")


class _UnknownError(Exception):
    """A parameter whose text does not determine it."""


def fingerprint(program: Any) -> str | None:
    """A digest of a closed program without the values of its own constants.

    Constants of programs inside of it are part of their text or of the executable, and of the
    digest. So are all settings of JAX, some of which count when a program is lowered. The digest is
    None if parameters are told apart by nothing but their identity, as functions called back are.
    """
    found = hashlib.sha256()
    try:
        _add(found, program.jaxpr)
    except _UnknownError:
        return None
    config: Any = jax.config
    # Settings that a context makes for a thread are seen by name only.
    settings = {name: getattr(config, name, None) for name in config.values}
    found.update(repr(sorted(settings.items())).encode())
    return found.hexdigest()


def _add(found: Any, jaxpr: Any) -> None:
    """Add a program: variables by number, in the order in which they appear."""
    numbers: dict[Any, int] = {}

    def variable(var: Any) -> str:
        if isinstance(var, jex.Literal):
            return f"literal {_text(found, var.val)} {var.aval!r}"
        if var not in numbers:
            numbers[var] = len(numbers)
            return f"{numbers[var]} {var.aval!r}"
        return str(numbers[var])

    def several(variables: Any) -> None:
        found.update(repr([variable(var) for var in variables]).encode())

    several([*jaxpr.constvars, *jaxpr.invars])
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        found.update(f"\n{name} {_text(found, equation.ctx)}".encode())
        several(equation.invars)
        several(equation.outvars)
        for key in sorted(equation.params.keys() - RULES.get(name, set())):
            found.update(f" {key}=".encode())
            found.update(_text(found, equation.params[key]).encode())
    several(jaxpr.outvars)


def _text(found: Any, value: Any) -> str:
    """The text of a parameter; programs inside of it are added at once."""
    if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
        # New versions of JAX have one class for both; before, only closed ones have constants.
        for constant in getattr(value, "consts", ()):
            found.update(_text(found, constant).encode())
        _add(found, getattr(value, "jaxpr", value))
        return "program"
    if isinstance(value, tuple | list):
        return f"({', '.join(_text(found, one) for one in value)})"
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        numbers = np.asarray(value)
        return f"{numbers.dtype} {numbers.shape} {hashlib.sha256(numbers.tobytes()).hexdigest()}"
    if _is_importable(value):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if any(part in text for part in INCOMPLETE):
        raise _UnknownError(text)
    return text


def _is_importable(value: Any) -> bool:
    """Whether a function or class is what its name in a module stands for."""
    name = getattr(value, "__qualname__", None)
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return isinstance(name, str) and getattr(module, name, None) is value
