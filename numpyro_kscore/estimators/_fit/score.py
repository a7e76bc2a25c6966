"""The fitted score: a function of points, with its potential, divergence and a report."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_kscore._util.checks import as_points
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore._util.sharding import by_rows, constrain_rows, place
from numpyro_kscore.estimators._base.base_scores import Base
from numpyro_kscore.estimators._base.standardization import Coordinates
from numpyro_kscore.estimators._fit.info import ScoreInfo
from numpyro_kscore.estimators._operators.features import FeatureExpansion
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._pairwise import Expansion

Method = Callable[[Any, jax.Array], jax.Array]


def at_points(method: Method) -> Callable[[Any, Any], jax.Array]:
    """A method of a score at points (m, d), checked, as one program.

    Operation by operation JAX would compile what is conditional anew at every call.
    """
    program = quick_jit(full_precision(method))

    @wraps(method)
    def call(self: Any, x: Any) -> jax.Array:
        return program(self, self._points(x))

    return call


@pytree
class Score:
    """An estimate of ``∇ log q``, callable at any points.

    Attributes:
        stored: the estimate at the samples, or None after a fit with ``subset`` or of a stream.
        info: how the fit went.
        kernel: the kernel.
        coordinates: the map to the kernel's coordinates.
        expansion: the residual ``ŝ - s0`` in those coordinates.
        base: the base score s0.
        sharding: how points it is evaluated at are divided over devices, or None.

    Example::

        score = ScoreEstimator().fit(samples)
        score(samples[:5])  # (5, 2)
        score.log_density(samples[:5])  # (5,)
        score.info.converged  # True
    """

    kernel: Kernel
    coordinates: Coordinates
    expansion: Expansion | FeatureExpansion
    base: Base
    stored: jax.Array | None
    info: ScoreInfo
    sharding: NamedSharding | None = static(default=None, kw_only=True)

    @property
    def at_samples(self) -> jax.Array:
        """The estimate at the samples, (n, d), in 1/units of the samples.

        Stored by the fit; with ``subset`` it is computed on access, at O(n² d). A stream keeps no
        samples, and has none.

        Raises:
            ValueError: for the score of a stream.
        """
        if self.stored is not None:
            return self.stored
        if isinstance(self.expansion, FeatureExpansion):
            raise ValueError(
                "at_samples: expected a fit that keeps its samples; got that of a stream, which "
                "keeps none. Use score(samples)"
            )
        residual = _residual_at_samples(self, self._frame)
        return residual if self.base.at_samples is None else self.base.at_samples + residual

    @at_points
    def __call__(self, x: Any) -> jax.Array:
        """The estimate at ``x``: (m, d) -> (m, d). Cost: O(m n d), n the size of the expansion.

        Raises:
            ValueError: if the base score is known at the samples only, or for a wrong shape.
        """
        return self.base.score(x) + self.residual(x)

    @at_points
    def residual(self, x: Any) -> jax.Array:
        """The estimate less its base, ``ŝ - s0``, at ``x``: (m, d) -> (m, d)."""
        field = self._evaluate("field", self.coordinates.to_kernel(x))
        return self.coordinates.scores_from_kernel(field)

    @at_points
    def log_density(self, x: Any) -> jax.Array:
        """A function whose gradient is the estimate, (m, d) -> (m,): log q up to a constant.

        Raises:
            TypeError: for a kernel that is not curl-free.
            ValueError: if the base has no density.
        """
        potential = self.residual_potential(x)
        return self.base.log_density(x) + potential

    @at_points
    def residual_potential(self, x: Any) -> jax.Array:
        """A function whose gradient is :meth:`residual`, (m, d) -> (m,). Curl-free only."""
        return self._evaluate("potential", self.coordinates.to_kernel(x))

    @at_points
    def divergence(self, x: Any) -> jax.Array:
        """``div ŝ`` at ``x``: (m, d) -> (m,)."""
        return self.base.divergence(x) + self.residual_divergence(x)

    @at_points
    def residual_divergence(self, x: Any) -> jax.Array:
        """``div (ŝ - s0)`` at ``x``: (m, d) -> (m,)."""
        z = self.coordinates.to_kernel(x)
        return self._evaluate("divergence", z, self.coordinates.factor())

    @property
    def _frame(self) -> Any:
        """The map of scores at the samples."""
        return self.coordinates

    def _evaluate(self, what: str, z: jax.Array, *more: Any) -> jax.Array:
        """The expansion's method of that name, on each device at its own points."""

        def own(rows: jax.Array, whole: Any) -> jax.Array:
            kernel, expansion, more = whole
            return getattr(expansion, what)(kernel, rows, *more)

        whole = (self.kernel, self.expansion, more)
        return constrain_rows(by_rows(own, self.sharding, z, whole), self.sharding)

    def _points(self, x: Any) -> jax.Array:
        mean = self.coordinates.mean
        points = as_points("x", x, dim=mean.shape[0])
        return place(jnp.asarray(points, mean.dtype), self.sharding)


@quick_jit
@full_precision
def _residual_at_samples(score: Score, frame: Any) -> jax.Array:
    """The residual at the points of the expansion, by the map of scores at them."""
    expansion: Any = score.expansion
    return frame.scores_from_kernel(score._evaluate("field", expansion.points))
