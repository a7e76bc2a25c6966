"""Whether a function can be traced in double precision after it was in single precision.

JAX 0.10 to 0.12 keeps what it made of a NumPy array in one precision as long as a program that has
it as a constant lives, such as a compiled one of NUTS. In the other precision it takes that for the
array, and products of it with others then have two types. And what a trace that ends with an error
has seen, it keeps for good.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import jax
import numpy as np

from numpyro_kscore._util.compiling import constants_of

__all__ = ["runs_in_double"]


def runs_in_double(fn: Callable[..., Any], *args: Any) -> bool:
    """Whether a function traces in double precision, for which JAX may have to forget programs.

    It does not where a program that uses its arrays cannot be forgotten, or where it insists on
    single precision, as by the carry of a scan.

    Args:
        fn: the function; it is traced in the precision that is set, and then in double precision.
        *args: its arguments.
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
    arrays = [ref(constant) for constant in constants_of(program) if _has_precision(constant)]
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
        except (TypeError, ValueError) as error:
            errors.append(str(error))
            return None

    with jax.enable_x64(True):
        jax.make_jaxpr(guarded)(*args)
    return not errors
