"""Programs that compile in half the time, and once for all calls that differ in numbers only.

A fit, a diagnosis and a search close over the data and the parameters they are about. ``jax.jit``
would take these for constants and compile again for others; here they are arguments, and what was
compiled once in a process serves all programs of the same operations.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.checks import with_jax_leaves
from numpyro_kscore._util.fingerprint import fingerprint

# XLA's newer code generator for fused loops and LLVM's second level of optimization take more than
# half of the time in which a program of hundreds of small loops compiles. It is no faster for them
# (docs/performance). With the older one, fusions that are left to YNNPACK give wrong numbers where
# a sum of sums is one of them, such as the log likelihood of a regression (jaxlib 0.10.2).
OPTIONS = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_experimental_ynn_fusion_type": "",
    "xla_backend_optimization_level": 1,
}
# Sums of more than 32 numbers are made into trees of windows, a fifth of all machine code. One
# after another, up to a thousand numbers add with a rounding error of some 2e-6 of their size.
SHORT_SUMS = {"xla_disable_hlo_passes": "tree_reduction_rewriter"}
LONGEST_SUM = 1024
# A program that runs a single time takes milliseconds without any optimization if no array of it
# is larger than this, and a second to compile with it.
AS_IT_IS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
LARGEST_AS_IT_IS = 65536
# Number of executables that are kept: those of ten models or more.
MOST_KEPT = 64

_kept: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
_programs_of: WeakKeyDictionary[Any, tuple[dict[Any, Any], ...]] = WeakKeyDictionary()


def quick_jit(
    fn: Callable[..., Any], runs_once: bool = False, runs_long: bool = False
) -> Callable[..., Any]:
    """``jax.jit`` for a large program over arrays, traced once for each set of shapes.

    Inside a program that is being traced, where there are several devices and where compiling is
    disabled, it is ``jax.jit``. Keyword arguments are static. Optimization is left out for a
    function that ``runs_once``, since it does not pay. One over large arrays that ``runs_long`` is
    compiled as by ``jax.jit``: it takes twice as long to compile, and half as long to run.
    """
    plain: dict[Any, Callable[..., Any]] = {}
    programs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()

    @wraps(fn)
    def call(*args: Any, **static: Any) -> Any:
        options = tuple(sorted(static.items()))
        leaves, structure = jax.tree.flatten(args)
        config: Any = jax.config
        if config.jax_disable_jit or _is_traced(leaves) or jax.device_count() > 1:
            if options not in plain:
                plain[options] = jax.jit(_with_static(fn, static))
            return plain[options](*args)
        # NumPy arrays go into the program unconverted: it converts them ten times as fast.
        known = jax.Array, np.ndarray
        arrays: list[Any] = [x if isinstance(x, known) else jnp.asarray(x) for x in leaves]
        # Numbers inside a program have the precision that is set when it is traced.
        key = (*OPTIONS.items(), options, structure, jnp.result_type(float), *map(_type_of, arrays))
        program = programs.pop(key, None)
        if program is None:
            program = _compile(_with_static(fn, static), structure, arrays, runs_once, runs_long)
        _keep(programs, key, program)
        return program(arrays)

    _programs_of[call] = plain, programs
    return call


def forget_programs() -> None:
    """Forget all that was traced and compiled, by JAX too (``jax.clear_caches``)."""
    _kept.clear()
    for programs in list(_programs_of.values()):
        for some in programs:
            some.clear()
    jax.clear_caches()


def _with_static(fn: Callable[..., Any], static: dict[str, Any]) -> Callable[..., Any]:
    return wraps(fn)(partial(fn, **static)) if static else fn


def _keep(programs: OrderedDict[Any, Callable[..., Any]], key: Any, program: Any) -> None:
    """Put a program last, and leave out the one that was used longest ago if there are many."""
    programs[key] = program
    if len(programs) > MOST_KEPT:
        programs.popitem(last=False)


def _is_traced(leaves: list[Any]) -> bool:
    """Whether an argument or the code around the call is being traced."""
    # A new array is a tracer inside of jit. Transfer guards allow this explicit transfer.
    return any(
        isinstance(leaf, jax.core.Tracer) for leaf in [jax.device_put(np.zeros(())), *leaves]
    )


@cache
def _known_options(as_it_is: bool) -> dict[str, Any]:
    """The options that the compiler knows; none without a CPU."""
    options = OPTIONS | SHORT_SUMS | (AS_IT_IS if as_it_is else {})
    return {k: v for k, v in options.items() if _is_known({k: v})}


def _is_known(option: dict[str, Any]) -> bool:
    if jax.default_backend() != "cpu":
        return False
    # Options change between versions, and so does the error that an unknown one raises.
    with suppress(Exception):
        jax.jit(lambda: 0, compiler_options=option).lower().compile()
        return True
    return False


def _options(jaxpr: Any, runs_once: bool) -> dict[str, Any] | None:
    """The options for a program."""
    known = _known_options(runs_once and _largest(jaxpr) <= LARGEST_AS_IT_IS)
    if max(_sum_lengths(jaxpr), default=0) > LONGEST_SUM:
        known = {k: v for k, v in known.items() if k not in SHORT_SUMS}
    return known or None


def _largest(jaxpr: Any) -> int:
    """The size of the largest array that a program computes."""
    results = [var.aval for equation in equations(jaxpr) for var in equation.outvars]
    return max((math.prod(getattr(aval, "shape", ())) for aval in results), default=0)


def _sum_lengths(jaxpr: Any) -> Iterator[int]:
    """The number of terms of each sum in a program and in those inside of it."""
    for equation in equations(jaxpr):
        if equation.primitive.name not in ("reduce_sum", "cumsum"):
            continue
        terms, params = equation.invars[0].aval, equation.params
        if jnp.issubdtype(terms.dtype, jnp.inexact):
            axes = params["axes"] if "axes" in params else [params["axis"]]
            yield math.prod(terms.shape[axis] for axis in axes)


def _type_of(array: jax.Array | np.ndarray) -> Any:
    is_converted = isinstance(array, np.ndarray)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype) if is_converted else array.dtype
    return array.shape, dtype, getattr(array, "weak_type", False)


def _compile(
    fn: Callable[..., Any], structure: Any, arrays: list[Any], runs_once: bool, runs_long: bool
) -> Callable[[list[Any]], Any]:
    """Return ``fn`` of arguments given as leaves, compiled, or served by what is kept."""

    def flat(*leaves: jax.Array) -> Any:
        return fn(*jax.tree.unflatten(structure, leaves))

    closed, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    constants = [jnp.asarray(c) for c in with_jax_leaves(closed.consts)]

    def run(constants: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        return jax.core.eval_jaxpr(closed.jaxpr, constants, *arrays)

    run.__name__ = getattr(fn, "__name__", "run")
    # Unused arguments stay: which ones are unused differs from data to data.
    whole = jax.jit(run, keep_unused=True)
    digest = fingerprint(closed)
    key = (*OPTIONS.items(), digest, jax.default_backend(), runs_once, runs_long)
    program = _kept.pop(key, None)
    if program is None:
        options = None if runs_long else _options(closed.jaxpr, runs_once)
        program = whole.lower(constants, arrays).compile(options)
    if digest is not None:
        _keep(_kept, key, program)
    result = jax.tree.structure(out)
    return lambda leaves: jax.tree.unflatten(result, program(constants, leaves))


def runs_in_double(fn: Callable[..., Any], *args: Any) -> bool:
    """Whether a function also traces in double precision; JAX may have to forget programs for it.

    JAX 0.10 to 0.12 keeps what it made of a NumPy array in one precision as long as a program that
    has it as a constant lives, such as a compiled one of NUTS. In the other precision it takes that
    for the array, and products of it with others then have two types. And what a trace that ends
    with an error has seen, it keeps for good.

    The function does not trace in double precision where a program that uses its arrays cannot be
    forgotten, or where it insists on single precision, as by the carry of a scan or a check of its
    own.
    """
    for forget in (None, gc.collect, jax.clear_caches):
        if forget is not None:
            forget()
        if not _are_kept(fn, args):
            return _traces_in_double(fn, args)
    return False


def _are_kept(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether NumPy arrays that a function closes over are constants of other programs too."""
    program = jax.make_jaxpr(lambda *args: fn(*args))(*args)
    arrays = [ref(constant) for constant in _constants(program) if _has_precision(constant)]
    del program
    return any(array() is not None for array in arrays)


def _has_precision(constant: Any) -> bool:
    return isinstance(constant, np.ndarray) and constant.dtype.kind in "iufc"


def _traces_in_double(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    errors = []

    def guarded(*args: Any) -> Any:
        # An error that leaves the trace would leave its arrays in double precision behind.
        try:
            return fn(*args)
        except Exception as error:
            errors.append(str(error))
            return None

    with jax.enable_x64(True):
        jax.make_jaxpr(guarded)(*args)
    return not errors


def _constants(program: Any) -> Iterator[Any]:
    """The constants of a closed program and of those inside of it."""
    yield from program.consts
    for inner in _inner_programs(program.jaxpr):
        # New versions of JAX have one class for both; before, only closed ones have constants.
        yield from getattr(inner, "consts", ())


def equations(jaxpr: Any) -> Iterator[Any]:
    """The operations of a program and of those inside of it."""
    yield from jaxpr.eqns
    for program in _inner_programs(jaxpr):
        yield from program.eqns


def _inner_programs(value: Any) -> Iterator[Any]:
    """The programs inside a program, or in the parameters of an operation, in a fixed order."""
    if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
        for equation in value.eqns:
            for one in _programs_among(list(equation.params.values())):
                yield one
                yield from _inner_programs(one)


def _programs_among(value: Any) -> Iterator[Any]:
    if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _programs_among(one)
