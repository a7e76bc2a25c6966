"""The fitted score: a function of points, with its potential, divergence and a report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_kscore import pairwise
from numpyro_kscore._pytree import as_points, pytree, static
from numpyro_kscore.base import Base
from numpyro_kscore.coordinates import Coordinates
from numpyro_kscore.kernels import Kernel
from numpyro_kscore.pairwise import Expansion
from numpyro_kscore.precision import full_precision
from numpyro_kscore.selection import Choice
from numpyro_kscore.sharding import by_rows, constrain_rows, place

__all__ = ["FitInfo", "Score"]

# The error of the estimate is up to ten times the residual (measured, ν-method), so this stands
# for about 1 %, well below the statistical error at any affordable n.
RESIDUAL_TOLERANCE = 1e-3


class FitInfo(NamedTuple):
    """What happened in a fit, as data: nothing raises under ``jit``.

    Attributes:
        steps: products with the Gram operator.
        residual: relative residual of the solver; 0 where it is direct.
        bandwidth: in standardised units.
        spectral_scale: ρ ≥ 1; above 1 the spectrum of K/n did not suit the regulariser and was
            divided by ρ (never with ``normalize=True``).
        finite: whether all values at the samples are finite.
        choice: what an automatic choice of regularisation or bandwidth saw and took, or None.
    """

    steps: jax.Array
    residual: jax.Array
    bandwidth: jax.Array
    spectral_scale: jax.Array
    finite: jax.Array
    choice: Choice | None = None

    @property
    def converged(self) -> jax.Array:
        """Whether the values are finite and the residual is below 1e-3."""
        return self.finite & (self.residual < RESIDUAL_TOLERANCE)

    def raise_if_failed(self) -> None:
        """Raise ``FloatingPointError`` if the fit failed. Call it outside ``jit``."""
        if not bool(self.finite):
            raise FloatingPointError(
                "score fit: expected finite values; got NaN or infinity. Look for samples or "
                "base scores that are not finite, or so large that squares overflow"
            )
        if not bool(self.converged):
            raise FloatingPointError(
                f"score fit: expected a residual below {RESIDUAL_TOLERANCE:g}; got "
                f"{float(self.residual):.2g} after {int(self.steps)} steps. Give the solver more "
                "steps, regularise more, or use Dense() for a small problem"
            )


@pytree
class Score:
    """An estimate of ``∇ log q``, callable at any points.

    Attributes:
        stored: the estimate at the samples, or None where the fit did not need it.
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
    info: FitInfo
    sharding: NamedSharding | None = static(default=None, kw_only=True)

    @property
    def at_samples(self) -> jax.Array:
        """The estimate at the samples, (n, d), in 1/units of the samples.

        It is there after a fit; only one to a subset makes it here, at O(n² d).
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
