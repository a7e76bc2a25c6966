"""The fitted score: a function of points, with its potential, divergence and a report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_kscore._util.checks import as_points
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore._util.sharding import by_rows, constrain_rows, place
from numpyro_kscore.estimators._base import Base
from numpyro_kscore.estimators._coordinates import Coordinates
from numpyro_kscore.estimators._info import ScoreInfo
from numpyro_kscore.kernels import _pairwise as pairwise
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._pairwise import Expansion

__all__ = [
    "Score",
]


@pytree
class Score:
    """An estimate of ``∇ log q``, callable at any points.

    Attributes:
        stored: the estimate at the samples, or None after a fit with ``subset``.
        info: how the fit went.
        kernel: the kernel.
        coordinates: the map to the kernel's coordinates.
        expansion: the residual ``ŝ - s0`` in those coordinates.
        base: the base score s0.
        sharding: how points it is evaluated at are divided over devices, or None.
    """

    kernel: Kernel
    coordinates: Coordinates
    expansion: Expansion
    base: Base
    stored: jax.Array | None
    info: ScoreInfo
    sharding: NamedSharding | None = static(default=None, kw_only=True)

    @property
    def at_samples(self) -> jax.Array:
        """The estimate at the samples, (n, d), in 1/units of the samples.

        Stored by the fit; with ``subset`` it is computed on access, at O(n² d).
        """
        if self.stored is not None:
            return self.stored
        field = self._over_pairs(pairwise.field, self.expansion.points)
        residual = self.coordinates.scores_from_kernel(field)
        return residual if self.base.at_samples is None else self.base.at_samples + residual

    def __call__(self, x: Any) -> jax.Array:
        """The estimate at ``x``: (m, d) -> (m, d). Cost: O(m n d).

        Raises:
            ValueError: if the base score is known at the samples only, or for a wrong shape.
        """
        x = self._points(x)
        return self.base.score(x) + self.residual(x)

    def residual(self, x: Any) -> jax.Array:
        """The estimate less its base, ``ŝ - s0``, at ``x``: (m, d) -> (m, d)."""
        z = self.coordinates.to_kernel(self._points(x))
        field = self._over_pairs(pairwise.field, z)
        return self.coordinates.scores_from_kernel(field)

    def log_density(self, x: Any) -> jax.Array:
        """A function whose gradient is the estimate, (m, d) -> (m,): log q up to a constant.

        Raises:
            TypeError: for a kernel that is not curl-free.
            ValueError: if the base has no density.
        """
        x = self._points(x)
        potential = self.residual_potential(x)
        return self.base.log_density(x) + potential

    def residual_potential(self, x: Any) -> jax.Array:
        """A function whose gradient is :meth:`residual`, (m, d) -> (m,). Curl-free only."""
        z = self.coordinates.to_kernel(self._points(x))
        return self._over_pairs(pairwise.potential, z)

    def divergence(self, x: Any) -> jax.Array:
        """``div ŝ`` at ``x``: (m, d) -> (m,)."""
        x = self._points(x)
        return self.base.divergence(x) + self.residual_divergence(x)

    def residual_divergence(self, x: Any) -> jax.Array:
        """``div (ŝ - s0)`` at ``x``: (m, d) -> (m,)."""
        z = self.coordinates.to_kernel(self._points(x))
        return self._over_pairs(pairwise.divergence, z, self.coordinates.factor())

    @full_precision
    def _over_pairs(self, total: Callable[..., jax.Array], z: jax.Array, *more: Any) -> jax.Array:
        arguments = (self.kernel, self.expansion, z, *more)
        if self.sharding is None:
            return total(*arguments)
        return _by_rows(total, self.sharding, *arguments)

    def _points(self, x: Any) -> jax.Array:
        points = as_points("x", x, dim=self.expansion.points.shape[1])
        return place(jnp.asarray(points, self.expansion.points.dtype), self.sharding)


@partial(jax.jit, static_argnums=(0, 1))
def _by_rows(
    total: Callable[..., jax.Array],
    sharding: NamedSharding,
    kernel: Kernel,
    expansion: Expansion,
    z: jax.Array,
    *more: Any,
) -> jax.Array:
    def own(rows: jax.Array, whole: Any) -> jax.Array:
        kernel, expansion, more = whole
        return total(kernel, expansion, rows, *more)

    return constrain_rows(by_rows(own, sharding, z, (kernel, expansion, more)), sharding)
