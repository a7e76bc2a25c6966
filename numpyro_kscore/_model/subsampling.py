"""Models with subsampled plates: at all of their rows, at some, and with rows counted once."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro import handlers
from numpyro.infer.initialization import init_to_feasible
from numpyro.primitives import Messenger

from numpyro_kscore._model.handlers import Hidden

# Most rows evaluated at once in a pass over all of them, where each takes much memory.
ROWS_AT_ONCE = 4096


def is_subsampled(plate: dict[str, Any]) -> bool:
    """Whether a plate of a trace draws only some of its elements."""
    size, subsample_size = plate["args"]
    return subsample_size is not None and subsample_size != size


def subsampled_plates(trace: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The plates of a trace that draw only some of their elements, by name."""
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "plate" and is_subsampled(site)
    }


class _Rows(Messenger):
    """A handler that gives subsampled plates the rows of ``choose(name, size, number drawn)``."""

    def __init__(
        self, fn: Callable[..., Any], choose: Callable[[str, int, int], jax.Array]
    ) -> None:
        self.choose = choose
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size, drawn = msg["args"]
            rows = self.choose(msg["name"], size, drawn)
            msg["args"], msg["value"] = (size, None if len(rows) == size else len(rows)), rows


def spread_rows(key: jax.Array, size: int, count: int) -> jax.Array:
    """Indices (count,) of rows spread over all, each drawn with probability ``count / size``.

    One is drawn of each of ``count`` strata of a random rotation: no two are the same, and the cost
    does not depend on ``size``. NumPyro draws rows one after another.
    """
    bounds = np.arange(count + 1, dtype=np.int64) * size // count
    inside_key, shift_key = jax.random.split(key)
    inside = jax.random.randint(inside_key, (count,), 0, np.diff(bounds).astype(np.int32))
    shift = jax.random.randint(shift_key, (), 0, size)
    return (jnp.asarray(bounds[:-1].astype(np.int32)) + inside + shift) % size


def with_all_rows(program: Callable[..., Any]) -> Callable[..., Any]:
    """A model or guide with all rows of its subsampled plates."""
    return _Rows(program, lambda name, size, drawn: jnp.arange(size))


def with_rows(model: Callable[..., Any], rows: dict[str, jax.Array]) -> Callable[..., Any]:
    """The model with given rows of its subsampled plates, by name of the plate."""
    return _Rows(model, lambda name, size, drawn: rows[name])


def with_spread_rows(model: Callable[..., Any], key: jax.Array) -> Callable[..., Any]:
    """The model with as many rows as its plates draw, by :func:`spread_rows`."""

    def choose(name: str, size: int, drawn: int) -> jax.Array:
        of_plate = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return spread_rows(of_plate, size, drawn)

    return _Rows(model, choose)


def mean_over_rows(
    of_model: Callable[[Callable[..., Any]], Any], model: Callable[..., Any], size: int
) -> Any:
    """A quantity linear in a log density, at all rows of the one plate that a model subsamples.

    Blocks of rows are evaluated one after another, each scaled to all rows: their mean is that of
    all rows at once. ``of_model`` goes from a model to a pytree of arrays; ``size`` counts all
    rows.
    """
    fewest = -(-size // ROWS_AT_ONCE)
    # Blocks of one size make one program; otherwise the rows that are left make a second one.
    even = (count for count in range(fewest, 2 * fewest + 1) if size % count == 0)
    count = next(even, fewest)
    block = size // count

    def of_rows(start: Any, number: int) -> Any:
        rows = start + jnp.arange(number)
        found = of_model(_Rows(model, lambda name, size, drawn: rows))
        return jax.tree.map(lambda a: a * (number / size), found)

    parts = lax.map(lambda start: of_rows(start, block), block * jnp.arange(count))
    total = jax.tree.map(lambda a: jnp.sum(a, axis=0), parts)
    if rest := size - count * block:
        total = jax.tree.map(jnp.add, total, of_rows(size - rest, rest))
    return total


class _CountedOnce(Messenger):
    """A handler that undoes how subsampled plates scale the rows that they draw."""

    def __init__(self, fn: Callable[..., Any], times: int) -> None:
        self.times = times
        self._sizes: dict[str, int] = {}
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            self._sizes[msg["name"]] = msg["args"][0]
        elif msg["type"] == "sample":
            sizes = ((f.size, self._sizes.get(f.name, f.size)) for f in msg["cond_indep_stack"])
            drawn = [few / size for few, size in sizes if few < size]
            if drawn:
                msg["scale"] = msg["scale"] * (self.times * math.prod(drawn))


def counted_once(model: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    """The model whose subsampled plates count each row drawn ``times`` times, and no more."""
    return _CountedOnce(model, times)


class FewRows(NamedTuple):
    """A model of a share of its rows; ``size`` counts all, None if it subsamples several plates."""

    model: Callable[..., Any]
    share: float
    size: int | None


def few_rows(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], most: int
) -> FewRows | None:
    """The model of at most ``most`` rows of each plate, always the same; None if over half."""
    sizes: dict[str, int] = {}

    def choose(name: str, size: int, drawn: int) -> jax.Array:
        sizes[name] = size
        return spread_rows(jax.random.key(0), size, min(size, most))

    few = _Rows(model, choose)
    _odd_sites(few, args, kwargs)
    largest = max(sizes.values(), default=0)
    if largest <= 2 * most:
        return None
    return FewRows(few, most / largest, largest if len(sizes) == 1 else None)


def whole_plates(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """The model of all data; the model itself where it is given a batch of them from outside."""
    whole = with_all_rows(model)
    try:
        fits = _odd_sites(whole, args, kwargs) <= _odd_sites(model, args, kwargs)
    except (TypeError, ValueError):
        return model
    return whole if fits else model


def _odd_sites(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[str]:
    """Observed sites whose values do not have the shape of their distribution."""
    found = set()

    def run(key: jax.Array) -> None:
        with Hidden():
            feasible = handlers.substitute(
                handlers.seed(model, key), substitute_fn=init_to_feasible
            )
            trace = handlers.trace(feasible).get_trace(*args, **kwargs)
        for name, site in trace.items():
            is_observed = site["type"] == "sample" and site["is_observed"]
            if is_observed and jnp.shape(site["value"]) != site["fn"].shape():
                found.add(name)

    jax.eval_shape(run, jax.random.key(0))
    return found
