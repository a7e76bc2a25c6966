"""A model's density at a subset of its data and at all of them: rows, or batches of a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_kscore._model.control_variate import MOST_CURVED, Taylor, taylor
from numpyro_kscore._model.subsampling import FewRows, counted_once, mean_over_rows
from numpyro_kscore._starts.compiled_density import (
    TargetInForms,
    batched_density,
    with_gradient,
)
from numpyro_kscore._starts.search import Density
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.transport import Evaluate
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.compiling import quick_jit

# Rows that a search looks at; fewer where each has latents of its own, which are integrated out.
MOST_ROWS, MOST_BLOCKS = 8192, 2048

# From a point (d,) and its centering to the energy there.
Expand = Callable[[np.ndarray, Centering], Taylor]


class DataSubset(NamedTuple):
    """A subset of the data.

    Attributes:
        once: the density of its rows alone.
        density: the density in which they stand for all.
        expand: Taylor expansions of the latter.
        share: which part of all data it is.
    """

    once: Density
    density: Density
    expand: Expand
    share: float


class AllData(NamedTuple):
    """All data.

    Attributes:
        expand: Taylor expansions of the energy.
        evaluate: energies (m,) and gradients (m, d) at points (m, d), with their centering.
    """

    expand: Expand
    evaluate: Callable[[np.ndarray, Centering], tuple[np.ndarray, np.ndarray]]


def corrected(evaluate: Evaluate, point: np.ndarray, difference: Taylor) -> Evaluate:
    """Energies and gradients with a quadratic function added."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = evaluate(points)
        values, slopes = difference.at(points - point)
        return energies + values, gradients + slopes

    return inside


def of_rows(
    target: TargetInForms,
    whole: Callable[..., Any],
    few: FewRows,
    forward_mode: bool,
    in_blocks: bool,
) -> tuple[DataSubset, AllData]:
    """Some rows of a model's plates, and all.

    Rows in blocks have latents of their own, which are integrated out: then a pass takes some rows
    at a time.
    """
    model, size = target.target.model, few.size

    def over_rows(of_model: Callable[[Any], Any]) -> Any:
        return of_model(whole) if size is None else mean_over_rows(of_model, model, size)

    def of_all(*point: Any) -> Any:
        if not in_blocks:
            return target.of_model(whole).energy(*point)
        # The derivative is taken some rows at a time, too.
        return over_rows(lambda one: jax.checkpoint(target.of_model(one).energy)(*point))

    def expansion(over: Callable[[Callable[[Any], Any]], Any]) -> Expand:
        @quick_jit
        def run(point: Array, centering: Centering) -> Taylor:
            # Without blocks all rows times all directions would take much memory.
            return over(
                lambda one: _expanded(
                    target.of_model(one), point, centering, forward_mode, one_by_one=size is None
                )
            )

        return lambda point, centering: jax.tree.map(np.asarray, run(point, centering))

    def density(one: Callable[..., Any]) -> Density:
        return batched_density(target.of_model(one).energy, forward_mode)

    # Many rows fill the processor with one point.
    every = batched_density(of_all, forward_mode, rows_at_once=1)

    def evaluate(points: np.ndarray, centering: Centering) -> tuple[np.ndarray, np.ndarray]:
        return every(points, centering, centering)[:2]

    standing = density(few.model)
    once = standing if in_blocks else density(counted_once(few.model))
    subset = DataSubset(once, standing, expansion(lambda of_model: of_model(few.model)), few.share)
    return subset, AllData(expansion(over_rows), evaluate)


def of_batches(
    target: TargetInForms, batches: Batches, forward_mode: bool
) -> tuple[DataSubset, AllData]:
    """A sample of the batches of a loader, which count with their mean, and all."""

    @quick_jit
    def expansions(stack: Any, point: Array, centering: Centering) -> Taylor:
        def of_one(batch: Any) -> Taylor:
            of_batch = target.of_data(*batches.arguments(batch))
            return _expanded(of_batch, point, centering, forward_mode)

        return lax.map(of_one, stack)

    def expansion(mean: Callable[..., Any]) -> Expand:
        return lambda point, centering: mean(lambda stack: expansions(stack, point, centering))

    @quick_jit
    def values(stack: Any, points: Array, centering: Centering) -> tuple[Array, Array]:
        def of_one(batch: Any) -> tuple[Array, Array]:
            of_batch = target.of_data(*batches.arguments(batch))
            return lax.map(_value_and_slope(of_batch, centering, forward_mode), points)

        return lax.map(of_one, stack)

    def evaluate(points: np.ndarray, centering: Centering) -> tuple[np.ndarray, np.ndarray]:
        energies, slopes = batches.mean(lambda stack: values(stack, points, centering))
        return energies, slopes

    taken = jax.tree.leaves(batches.sample)[0].shape[0]
    once = target.of_model(counted_once(target.target.model, taken))
    subset = DataSubset(
        sample_density(once, batches, forward_mode),
        sample_density(target, batches, forward_mode),
        expansion(batches.sample_mean),
        taken / (batches.count or taken),
    )
    return subset, AllData(expansion(batches.mean), evaluate)


def sample_density(target: TargetInForms, batches: Batches, forward_mode: bool) -> Density:
    """The mean density of a sample of the batches."""

    def mean(*point: Any) -> tuple[Array, Array]:
        def one(batch: Any) -> tuple[Array, Array]:
            return target.of_data(*batches.arguments(batch)).energy(*point)

        values, seen = jax.vmap(one)(batches.sample)
        return jnp.mean(values), seen[0]

    return batched_density(mean, forward_mode)


def _value_and_slope(
    target: TargetInForms, centering: Centering, forward_mode: bool
) -> Callable[[Array], tuple[Array, Array]]:
    energy = with_gradient(lambda x: target.energy(x, centering, centering), forward_mode)
    return lambda x: energy(x)[:2]


def _expanded(
    target: TargetInForms,
    point: Array,
    centering: Centering,
    forward_mode: bool,
    one_by_one: bool = False,
) -> Taylor:
    """The energy at a point (d,), to second order in up to 128 dimensions."""
    value_and_slope = _value_and_slope(target, centering, forward_mode)
    along = lax.map if one_by_one else lambda fn, xs: jax.vmap(fn)(xs)
    return taylor(value_and_slope, point, len(point) <= MOST_CURVED, along)
