"""A model's density in any form of coordinates, compiled once for any number of points."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._model.coordinates import (
    LatentCoordinates,
    moved_coordinates,
    names_of,
    priors_of,
    ravel,
    unravel,
)
from numpyro_kscore._model.target import Target
from numpyro_kscore._starts.search import AtPoints, Density
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.stretch import Marginals
from numpyro_kscore._util.compiling import quick_jit

# Rows of a compiled batch, and how many of them are evaluated at once. Few rows at once keep the
# program and its memory small; a loop over as many as are asked for wastes little.
MOST_ROWS, ROWS_AT_ONCE = 128, 4


class TargetInForms(NamedTuple):
    """A model whose coordinates have any degrees of centering.

    Attributes:
        target: the model.
        hierarchical: names of the latents that have degrees of centering.
        marginals: functions of coordinates that are normal under the prior, if there are some.
        shaped: names of the latents that have them.
    """

    target: Target
    hierarchical: tuple[str, ...]
    marginals: Marginals | None = None
    shaped: tuple[str, ...] = ()

    def of_model(self, model: Callable[..., Any]) -> TargetInForms:
        """The same with another model of these latents."""
        return self._replace(target=self.target._replace(model=model))

    def of_data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TargetInForms:
        """The same with other arguments."""
        return self._replace(target=self.target._replace(args=args, kwargs=kwargs))

    def energy(
        self, point: jax.Array, centering: Centering, other: Centering
    ) -> tuple[jax.Array, jax.Array]:
        """Minus log density at a point (d,), and the rest of :class:`AtPoints` there, (4, d)."""
        shapes = self.target.shapes
        own, others = (self._coordinates(form) for form in (centering, other))
        value, trace = self.target._replace(coordinates=(own,)).evaluate(point)
        moved = values = point
        locs = log_scales = jnp.zeros_like(point)
        if self.hierarchical:
            names = [name for name, _ in shapes]
            # Functions of coordinates are the same in every form.
            same = {n: x for n, x in unravel(point, shapes).items() if n in self.shaped}
            moved, values = (
                ravel({**moved_coordinates(trace, names, c), **same}, shapes)
                for c in (others.centerings(), {})
            )
            priors = priors_of(trace, self.hierarchical)
            locs, log_scales = (
                ravel(
                    {
                        name: jnp.broadcast_to(priors[name][k] if name in priors else 0.0, shape)
                        for name, shape in shapes
                    },
                    shapes,
                )
                for k in (0, 1)
            )
        return -value, jnp.stack([moved, values, locs, log_scales])

    def energy_given(
        self, held: tuple[str, ...], free: jax.Array, point: jax.Array, centering: Centering
    ) -> jax.Array:
        """Minus log density at a point (d,) whose latents but for some have other values, (f,).

        What is computed from the held ones alone has no derivative in the free ones, as JAX sees.
        """
        shapes, own = self.target.shapes, self._coordinates(centering)
        of_point = unravel(point, shapes)
        of_free = unravel(free, tuple((name, shape) for name, shape in shapes if name not in held))
        values = {name: of_free.get(name, of_point[name]) for name, _ in shapes}
        return -self.target._replace(coordinates=(own,)).evaluate(values)[0]

    def _coordinates(self, centering: Centering) -> LatentCoordinates:
        return LatentCoordinates(
            centering,
            shapes=self.target.shapes,
            hierarchical=self.hierarchical,
            marginals=self.marginals,
            shaped=self.shaped,
        )


def in_all_forms(
    target: Target, hierarchical: tuple[str, ...], marginals: Marginals | None = None
) -> TargetInForms:
    """A model whose coordinates may have degrees of centering, and functions of normal numbers."""
    shaped = () if marginals is None else names_of(marginals.vary, target.shapes)
    return TargetInForms(target, hierarchical, marginals, shaped)


def batched_density(
    energy: Callable[..., tuple[jax.Array, jax.Array]],
    forward_mode: bool,
    rows_at_once: int = ROWS_AT_ONCE,
) -> Density:
    """A model's energy and gradient, compiled once for any number of points.

    ``energy`` takes a point (d,), its centering and another one to the energy there, and the rest
    of :class:`AtPoints`, (4, d). ``rows_at_once`` points are evaluated together, a divisor of 128.
    """

    def one(point: jax.Array, centering: Centering, other: Centering) -> tuple[Any, Any, Any]:
        return with_gradient(lambda x: energy(x, centering, other), forward_mode)(point)

    @quick_jit
    def run(points: jax.Array, count: jax.Array, centering: Centering, other: Centering) -> Any:
        # Infinite where nothing was computed: a row that is read by mistake would be noticed.
        empty = (jnp.full(MOST_ROWS, jnp.inf, points.dtype), jnp.zeros_like(points))
        seen = jnp.zeros((MOST_ROWS, 4, points.shape[1]), points.dtype)
        given = partial(one, centering=centering, other=other)
        return by_rows(given, points, count, rows_at_once, (*empty, seen))

    def evaluate(points: np.ndarray, centering: Centering, other: Centering) -> AtPoints:
        parts = []
        for start in range(0, len(points), MOST_ROWS):
            rows = points[start : start + MOST_ROWS]
            found = run(filled_up(rows, MOST_ROWS), -(-len(rows) // rows_at_once), centering, other)
            parts.append([np.asarray(a, float)[: len(rows)] for a in found])
        energies, gradients, seen = (np.concatenate(column) for column in zip(*parts, strict=True))
        return AtPoints(energies, gradients, *np.moveaxis(seen, 1, 0))

    return evaluate


def by_rows(
    one: Callable[[jax.Array], Any],
    points: jax.Array,
    count: jax.Array,
    rows_at_once: int,
    empty: Any,
) -> Any:
    """A function of a row at points (m, d), ``count`` times so many rows; the rest stays empty."""

    def body(k: jax.Array, out: Any) -> Any:
        start = k * rows_at_once
        found = jax.vmap(one)(lax.dynamic_slice_in_dim(points, start, rows_at_once))
        return jax.tree.map(
            lambda a, b: lax.dynamic_update_slice_in_dim(a, b.astype(a.dtype), start, 0), out, found
        )

    return lax.fori_loop(0, count, body, empty)


def filled_up(rows: np.ndarray, size: int) -> np.ndarray:
    """So many rows, with the last one repeated: zeros may be outside of a model's support."""
    return np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)])


def with_gradient(
    energy: Callable[[jax.Array], tuple[jax.Array, Any]], forward_mode: bool
) -> Callable[[jax.Array], tuple[Any, Any, Any]]:
    """An energy, its gradient, and what it returns besides.

    In forward mode, for models that have no reverse mode, d evaluations take the place of two.
    """

    def with_value(x: jax.Array) -> Any:
        value, seen = energy(x)
        return value, (value, seen)

    def run(x: jax.Array) -> tuple[Any, Any, Any]:
        differentiated = jax.jacfwd if forward_mode else jax.grad
        gradient, (value, seen) = differentiated(with_value, has_aux=True)(x)
        return value, gradient, seen

    return run
