"""A model's density at points that share their scales, compiled once for any number of them.

What is computed from scales alone is then computed once: the factor of a covariance that they
parametrize costs as much as hundreds of values of the other latents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._starts.compiled_density import ROWS_AT_ONCE, by_rows, filled_up, with_gradient
from numpyro_kscore._starts.search import HeldInForms, ProductsInForms
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._util.compiling import equations, quick_jit

# Points in a call whose scales are shared.
POINTS_AT_ONCE = 64
# Most points of a mean Hessian, and vectors that it is multiplied with in a call.
MOST_POINTS, VECTORS_AT_ONCE = 16, 64
# How many of these a program takes at once where it multiplies matrices, which are then read once
# for all, and what a term of a sum over the rows of groups takes more for many at once, in numbers
# of a matrix that are read.
PRODUCTS_AT_ONCE, COST_OF_TERM = 16, 5

# Minus log density at values of the free latents (f,) and a point (d,) that has all others, in the
# coordinates of a centering.
EnergyGiven = Callable[[jax.Array, jax.Array, Centering], jax.Array]


def batched_held(energy: EnergyGiven, forward_mode: bool, free: np.ndarray) -> HeldInForms:
    """A model's energy and gradient at points with the same scales, compiled once.

    ``free`` are the places of the free latents, (f,). All other latents are those of the first
    point.
    """
    derivative = jax.jacfwd if forward_mode else jax.grad

    @quick_jit
    def run(
        points: jax.Array, count: jax.Array, with_scales: jax.Array, centering: Centering
    ) -> Any:
        at, rows = points[0], points[:, free]

        def one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            given = with_gradient(lambda x: (energy(x, at, centering), None), forward_mode)
            return given(x)[:2]

        def mean_energy(at: jax.Array) -> jax.Array:
            values = jax.vmap(lambda x: energy(x, at, centering))(rows)
            return jnp.where(jnp.arange(POINTS_AT_ONCE) < count, values, 0.0).sum() / count

        empty = jnp.full(POINTS_AT_ONCE, jnp.inf, points.dtype), jnp.zeros_like(rows)
        found = by_rows(one, rows, -(-count // ROWS_AT_ONCE), ROWS_AT_ONCE, empty)
        of_scales = lax.cond(with_scales, derivative(mean_energy), jnp.zeros_like, at)
        return *found, of_scales

    def evaluate(
        points: np.ndarray, with_scales: bool, centering: Centering
    ) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = np.empty(len(points)), np.zeros(points.shape)
        for start in range(0, len(points), POINTS_AT_ONCE):
            rows = points[start : start + POINTS_AT_ONCE]
            found = run(
                filled_up(rows, POINTS_AT_ONCE), np.int32(len(rows)), with_scales, centering
            )
            value, gradient, of_scales = (np.asarray(a, float) for a in found)
            part = slice(start, start + len(rows))
            energies[part] = value[: len(rows)]
            # The derivative in what is free is that at each point.
            gradients[part] = of_scales
            gradients[part, free] = gradient[: len(rows)]
        return energies, gradients

    return evaluate


def batched_products(
    energy: EnergyGiven,
    forward_mode: bool,
    free: np.ndarray,
) -> ProductsInForms:
    """Products of a model's mean Hessian with vectors, compiled once for any number of them.

    ``energy`` takes values of the free latents (f,), a point (d,) that has all others, and a
    centering, to the energy there; ``free`` are the places of the former. Rows and columns of all
    others count as 0: a covariance that changes with scales alone is not factorized anew with
    every vector.
    """

    def run(
        points: jax.Array,
        sizes: jax.Array,
        vectors: jax.Array,
        centering: Centering,
        by_differences: bool = False,
    ) -> jax.Array:
        differentiated = jax.jacfwd if forward_mode else jax.grad
        derivative = _differences if by_differences else _linearized

        def at_point(k: jax.Array, total: jax.Array) -> jax.Array:
            gradient = differentiated(lambda x: energy(x, points[k], centering))
            at = points[k, free]
            product = derivative(gradient, at)
            at_once = PRODUCTS_AT_ONCE if _multiplies_matrices(product, at) else 1
            several = jax.vmap(product) if at_once > 1 else lambda rows: product(rows[0])[None]

            def add(j: jax.Array, total: jax.Array) -> jax.Array:
                rows = j * at_once + jnp.arange(at_once)
                found = several(vectors[rows[:, None], free])
                return total.at[rows[:, None], free].add(found)

            return lax.fori_loop(0, -(-sizes[1] // at_once), add, total)

        return lax.fori_loop(0, sizes[0], at_point, jnp.zeros_like(vectors)) / sizes[0]

    programs = [quick_jit(run), quick_jit(partial(run, by_differences=True))]

    def products(points: np.ndarray, vectors: np.ndarray, centering: Centering) -> np.ndarray:
        few = np.repeat(points[-1:], MOST_POINTS, axis=0)
        few[: len(points)] = points
        found = []
        for start in range(0, len(vectors), VECTORS_AT_ONCE):
            rows = vectors[start : start + VECTORS_AT_ONCE]
            padded = np.zeros((VECTORS_AT_ONCE, vectors.shape[1]))
            padded[: len(rows)] = rows
            sizes = np.array([len(points), len(rows)], np.int32)
            try:
                part = programs[0](few, sizes, padded, centering)
            except TypeError:
                # Functions with a reverse mode of their own, such as solvers of differential
                # equations, have no forward one.
                if len(programs) == 1:
                    raise
                part = programs[1](few, sizes, padded, centering)
                del programs[0]
            found.append(np.asarray(part, float)[: len(rows)])
        return np.concatenate(found)

    return products


def _multiplies_matrices(product: Callable[[jax.Array], jax.Array], vector: jax.Array) -> bool:
    """Whether more of a product's time goes into reading matrices than into sums over groups."""
    numbers, terms = 0, 0
    for equation in equations(jax.make_jaxpr(product)(vector).jaxpr):
        sizes = [math.prod(getattr(x.aval, "shape", ())) for x in equation.invars]
        if equation.primitive.name == "dot_general":
            numbers += max(sizes)
        elif equation.primitive.name.startswith("scatter"):
            terms += sizes[-1]
    return numbers > COST_OF_TERM * terms


def _linearized(
    gradient: Callable[[jax.Array], jax.Array], point: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """The derivative of a gradient at a point, as a function of vectors."""
    return jax.linearize(gradient, point)[1]


def _differences(
    gradient: Callable[[jax.Array], jax.Array], point: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """The same by central differences; rounding and curvature weigh alike."""
    span = float(jnp.finfo(point.dtype).eps) ** (1 / 3)

    def difference(vector: jax.Array) -> jax.Array:
        ahead, behind = gradient(point + span * vector), gradient(point - span * vector)
        return (ahead - behind) / (2 * span)

    return difference
