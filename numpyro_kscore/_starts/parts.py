"""A model's density at a part of its data and at all of them: rows, or batches of a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_kscore._starts.data import Expand, Part, Quadratic, Whole
from numpyro_kscore._starts.density import batched_density
from numpyro_kscore._tracing.anchor import MOST_CURVED
from numpyro_kscore._tracing.coupling import Centering
from numpyro_kscore._tracing.subsampling import FewRows, counted_once, mean_over_rows
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.compiling import quick_jit

__all__ = ["MOST_BLOCKS", "MOST_ROWS", "of_batches", "of_rows", "sample_density"]

# Rows that a search looks at; fewer where each has latents of its own, which are integrated out.
MOST_ROWS, MOST_BLOCKS = 8192, 2048

Model = Callable[..., Any]
# From a point, its centering and another one, and arguments and keyword arguments of the model, to
# the energy and what else is seen there.
Energy = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Array, Array]]


def of_rows(
    energy: Callable[[Model], Energy],
    models: tuple[Model, Model],
    few: FewRows,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    forward_mode: bool,
    in_blocks: bool,
) -> tuple[Part, Whole]:
    """Some rows of a model's plates, and all.

    Args:
        energy: from a model to its energy.
        models: as it was given, and with all rows.
        few: with some rows.
        given: arguments and keyword arguments.
        forward_mode: differentiate in forward mode.
        in_blocks: whether rows have latents of their own, which are integrated out: then a pass
            takes some rows at a time.
    """
    model, whole = models
    size = few.size

    def at(one: Model) -> Callable[..., Any]:
        return lambda at: energy(one)(at, *given)

    def over_rows(of_model: Callable[[Model], Any]) -> Any:
        return of_model(whole) if size is None else mean_over_rows(of_model, model, size)

    def of_all(*point: Any) -> Any:
        if not in_blocks:
            return at(whole)(point)
        # As is its derivative.
        return over_rows(lambda one: jax.checkpoint(at(one))(point))

    def expansion(over: Callable[[Callable[[Model], Any]], Any]) -> Expand:
        @quick_jit
        def run(point: Array, centering: Centering) -> Any:
            def of_model(one: Model) -> Any:
                def value(x: Array) -> Array:
                    return at(one)((x, centering, centering))[0]

                # Without blocks all rows times all directions would take much memory.
                return _expanded(value, point, forward_mode, one_by_one=size is None)

            return over(of_model)

        def expand(point: np.ndarray, centering: Centering) -> Quadratic:
            value, slope, bend = jax.tree.map(np.asarray, run(point, centering))
            return Quadratic(value, slope, bend)

        return expand

    def density(one: Model) -> Any:
        return batched_density(lambda *point: at(one)(point), forward_mode)

    # Many rows fill the processor with one point.
    every = batched_density(of_all, forward_mode, rows_at_once=1)

    def evaluate(points: np.ndarray, centering: Centering) -> tuple[np.ndarray, np.ndarray]:
        return every(points, centering, centering)[:2]

    standing = density(few.model)
    once = standing if in_blocks else density(counted_once(few.model))
    part = Part(once, standing, expansion(lambda of_model: of_model(few.model)), few.share)
    return part, Whole(expansion(over_rows), evaluate)


def of_batches(
    energy: Callable[[Model], Energy],
    model: Model,
    batches: Batches,
    forward_mode: bool,
) -> tuple[Part, Whole]:
    """A sample of the batches of a loader, and all.

    Args:
        energy: from a model to its energy at a batch.
        model: the model, which scales a batch to all data.
        batches: the batches; those of the sample count with their mean.
        forward_mode: differentiate in forward mode.
    """
    at_batch = energy(model)
    differentiate = jax.jacfwd if forward_mode else jax.grad

    @quick_jit
    def expansions(stack: Any, point: Array, centering: Centering) -> Any:
        def of_one(batch: Any) -> Any:
            def value(x: Array) -> Array:
                return at_batch((x, centering, centering), *batches.arguments(batch))[0]

            return _expanded(value, point, forward_mode)

        return lax.map(of_one, stack)

    def expansion(mean: Callable[..., Any]) -> Expand:
        def expand(point: np.ndarray, centering: Centering) -> Quadratic:
            return Quadratic(*mean(lambda stack: expansions(stack, point, centering)))

        return expand

    @quick_jit
    def values(stack: Any, points: Array, centering: Centering) -> tuple[Array, Array]:
        def of_one(batch: Any) -> tuple[Array, Array]:
            def value(x: Array) -> tuple[Array, Array]:
                found = at_batch((x, centering, centering), *batches.arguments(batch))[0]
                return found, found

            slopes, energies = lax.map(differentiate(value, has_aux=True), points)
            return energies, slopes

        return lax.map(of_one, stack)

    def evaluate(points: np.ndarray, centering: Centering) -> tuple[np.ndarray, np.ndarray]:
        energies, slopes = batches.mean(lambda stack: values(stack, points, centering))
        return energies, slopes

    taken = jax.tree.leaves(batches.sample)[0].shape[0]
    part = Part(
        sample_density(energy(counted_once(model, taken)), batches, forward_mode),
        sample_density(at_batch, batches, forward_mode),
        expansion(batches.sample_mean),
        taken / (batches.count or taken),
    )
    return part, Whole(expansion(batches.mean), evaluate)


def sample_density(energy: Energy, batches: Batches, forward_mode: bool) -> Any:
    """The mean density of a sample of the batches.

    Args:
        energy: at a batch.
        batches: the batches.
        forward_mode: differentiate in forward mode.
    """

    def mean(*at: Any) -> tuple[Array, Array]:
        def one(batch: Any) -> tuple[Array, Array]:
            return energy(at, *batches.arguments(batch))

        values, seen = jax.vmap(one)(batches.sample)
        return jnp.mean(values), seen[0]

    return batched_density(mean, forward_mode)


def _expanded(
    value: Callable[[Array], Array], point: Array, forward_mode: bool, one_by_one: bool = False
) -> Any:
    """Value, slope and Hessian at a point (d,); no Hessian in many dimensions."""
    slope = (jax.jacfwd if forward_mode else jax.grad)(value)
    if len(point) > MOST_CURVED:
        return value(point), slope(point), None

    def along(direction: Array) -> Array:
        return jax.jvp(slope, (point,), (direction,))[1]

    directions = jnp.eye(len(point), dtype=point.dtype)
    bend = lax.map(along, directions) if one_by_one else jax.vmap(along)(directions)
    return value(point), slope(point), bend
