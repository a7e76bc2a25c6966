"""Programs that compile in half the time, and only once for what differs in numbers alone.

A fit, a diagnosis and a search close over the data and the parameters they are about. ``jax.jit``
would take these for constants and compile again for others; here they are arguments, and what was
compiled once in a process serves all programs of equal text.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.checks import with_jax_leaves

__all__ = ["quick_jit"]

# XLA's newer code generator for fused loops and LLVM's second level of optimization take more than
# half of the time in which a program of hundreds of small loops compiles. It is no faster for them
# (docs/performance).
OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}
# Executables that are kept: those of ten models or more.
MOST_KEPT = 64

_kept: OrderedDict[Any, Callable[..., Any]] = OrderedDict()


def quick_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit`` for a large program over arrays, traced once for each set of shapes.

    Inside a program that is being traced, and where there are several devices, it is ``jax.jit``.

    Args:
        fn: the function, of positional arguments.
    """
    plain = jax.jit(fn)
    programs: dict[Any, Callable[..., Any]] = {}

    @wraps(fn)
    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if _is_traced(leaves) or jax.device_count() > 1:
            return plain(*args)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        # Numbers inside a program have the precision that is set when it is traced.
        key = (structure, jnp.result_type(float), *map(_type_of, arrays))
        if key not in programs:
            programs[key] = _compile(fn, structure, arrays)
        return programs[key](arrays)

    return call


def _is_traced(leaves: list[Any]) -> bool:
    """Whether arguments are traced, or what is around the call."""
    # Inside of jit a new array is a tracer.
    return any(isinstance(leaf, jax.core.Tracer) for leaf in [jnp.zeros(()), *leaves])


@cache
def _options() -> dict[str, Any] | None:
    """The options, where there is a CPU and its compiler knows them; otherwise None."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=OPTIONS).lower().compile()
    except Exception:
        # Which error it is that an unknown option raises has changed, and so have options.
        return None
    return OPTIONS


def _type_of(array: jax.Array) -> Any:
    return array.shape, array.dtype, getattr(array, "weak_type", False)


def _compile(
    fn: Callable[..., Any], structure: Any, arrays: list[jax.Array]
) -> Callable[[list[jax.Array]], Any]:
    """``fn`` of arguments given as leaves, compiled, or served by what is kept."""

    def flat(*leaves: jax.Array) -> Any:
        return fn(*jax.tree.unflatten(structure, leaves))

    closed, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    constants = [jnp.asarray(c) for c in with_jax_leaves(closed.consts)]

    def run(constants: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        return jax.core.eval_jaxpr(closed.jaxpr, constants, *arrays)

    run.__name__ = getattr(fn, "__name__", "run")
    # Arguments that are not used stay in the text: which are left out differs from data to data.
    lowered = jax.jit(run, keep_unused=True).lower(constants, arrays)
    # Constants of inner programs are part of the text, or of the executable: of the key in any
    # case.
    key = (lowered.as_text(), _digest(closed.jaxpr), jax.default_backend())
    program = _kept.pop(key, None) or lowered.compile(_options())
    _kept[key] = program
    if len(_kept) > MOST_KEPT:
        _kept.popitem(last=False)
    result = jax.tree.structure(out)
    return lambda leaves: jax.tree.unflatten(result, program(constants, leaves))


def _digest(jaxpr: Any) -> str:
    """A digest of the constants of the programs inside a program."""
    found = hashlib.sha256()

    def visit(value: Any) -> None:
        if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
            # New versions of JAX have one class for both; before, only closed ones have constants.
            for constant in map(jnp.asarray, getattr(value, "consts", ())):
                is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
                numbers = jax.random.key_data(constant) if is_key else constant
                found.update(np.asarray(numbers).tobytes())
            for equation in value.eqns:
                visit(list(equation.params.values()))
        elif isinstance(value, tuple | list):
            for one in value:
                visit(one)

    # The program's own constants are arguments by now.
    for equation in jaxpr.eqns:
        visit(list(equation.params.values()))
    return found.hexdigest()
