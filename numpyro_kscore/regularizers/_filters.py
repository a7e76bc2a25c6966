"""Regularizers as scalar filters on the spectrum of ``K/n``.

Every estimator of Zhou, Shi and Zhu (2020) is ``ŝ = s0 - g(L̂) ζ'`` for one scalar function g that
imitates 1/σ where eigenvalues are large and stays bounded where they are small. A regularizer
here is that function, together with ``g(0)`` and ``r(σ) = (g(σ) - g(0))/σ``, which the estimate
away from the samples needs and which would cancel if computed from g.

λ always refers to eigenvalues of ``K/n``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.checks import check_choice, check_positive, is_concrete
from numpyro_kscore._util.pytree import pytree

MOST_KRYLOV_STEPS = 32
# Strengths the automatic selection tries, as degrees of the polynomial that resolves them: λ is the
# largest eigenvalue over the degree squared. Neighbors differ by a factor of two in λ.
DEGREES = tuple(0.25 * 2 ** (k / 2) for k in range(16))
# The same where the scale of the kernel is not known: λ over seven decades.
LITERAL_DEGREES = tuple(10.0 ** (k / 4) for k in range(15))
# Dimension of the Krylov space of an automatic selection. It regularizes too where a strength would
# need a larger space, in the selection and in the fit alike.
AUTO_KRYLOV_STEPS = 20
UNCHOSEN = (
    "{name}: expected a number here; got 'auto'. Only ScoreEstimator chooses: give it this "
    "regularizer"
)


def path_degrees(bound: float | None) -> tuple[tuple[float, ...], float]:
    """Degrees the automatic selection tries, and the largest eigenvalue they refer to."""
    return (LITERAL_DEGREES, 1.0) if bound is None else (DEGREES, bound)


class Filter(NamedTuple):
    """A filter evaluated on a spectrum.

    Attributes:
        g: g(σ), the shape of σ.
        g0: g(0), a scalar.
        r: ``(g(σ) - g(0))/σ``, the shape of σ.

    Example::

        from numpyro_kscore.regularizers import Tikhonov

        values = Tikhonov(0.1).evaluate(jnp.array([0.1, 0.9]))
        values.g[1]  # 1.0
        values.g0  # 10.0
        values.r  # (2,)
    """

    g: jax.Array
    g0: jax.Array
    r: jax.Array


class Regularizer:
    """A scalar filter; subclasses implement :meth:`evaluate`.

    Attributes:
        spectral_bound: largest eigenvalue the filter is made for, or None without a limit.
            Solvers rescale a spectrum that exceeds it and say so in ``info.spectral_scale``.
        is_smooth: whether g is continuous, so that a Krylov space can represent it.

    Example::

        from numpyro_kscore import pytree
        from numpyro_kscore.regularizers import Filter, Regularizer


        @pytree
        class IteratedTikhonov(Regularizer):
            lam: float = 0.1

            def evaluate(self, sigma):
                g = (sigma + 2 * self.lam) / (sigma + self.lam) ** 2
                r = -(2 * sigma + 3 * self.lam) / (self.lam * (sigma + self.lam) ** 2)
                return Filter(g, jnp.asarray(2 / self.lam), r)


        score = ScoreEstimator(regularizer=IteratedTikhonov()).fit(samples)
    """

    is_smooth: bool = True

    @property
    def spectral_bound(self) -> Any:
        """Largest eigenvalue of ``K/n`` the filter is made for; None if there is no limit."""
        return None

    def evaluate(self, sigma: jax.Array) -> Filter:
        """The filter at non-negative eigenvalues ``sigma``, any shape (k,)."""
        raise NotImplementedError

    @property
    def is_auto(self) -> bool:
        """Whether the strength is to be selected from the samples."""
        return False

    def path(self, bound: float | None) -> tuple[Regularizer, ...]:
        """Candidates of the automatic selection, strongest first; itself if the strength is given.

        Args:
            bound: bound on the eigenvalues of K/n; None if none is known.
        """
        return (self,)

    def strength(self) -> Any:
        """The strength, λ or a number of steps; NaN for a filter with neither."""
        return jnp.nan

    def evaluate_path(self, sigma: jax.Array, bound: float | None) -> Filter:
        """The filters of :meth:`path` at ``sigma`` (k,): one row each, (p, k), g0 (p,)."""
        filters = [member.evaluate(sigma) for member in self.path(bound)]
        return jax.tree.map(lambda *rows: jnp.stack(rows), *filters)

    def on_range(self) -> Regularizer:
        """A filter with the same values at positive eigenvalues, continuous if possible.

        For operators without null space, where a truncation does nothing.
        """
        return self

    def krylov_steps(self, bound: float | None) -> int:
        """Dimension of the Krylov space that represents the filter to about 1e-3.

        Args:
            bound: bound on the eigenvalues of K/n; None if none is known.
        """
        return AUTO_KRYLOV_STEPS if self.is_auto else MOST_KRYLOV_STEPS

    def rescaled(self, sigma: jax.Array, rho: jax.Array) -> Filter:
        """The filter ``g(σ/ρ)/ρ``, for a spectrum that ρ brings within the bound."""
        g, g0, r = self.evaluate(sigma / rho)
        return Filter(g / rho, g0 / rho, r / rho**2)


@pytree
class Tikhonov(Regularizer):
    """``g(σ) = 1/(σ + λ)``: the kernel exponential family (KEF, KEF-CG).

    Implements Zhou, Shi and Zhu (2020), Theorem 3.1.

    Args:
        lam: regularization parameter λ > 0, on the eigenvalues of K/n. A leaf: one compilation
            serves many values. ``"auto"`` selects it from the samples by held-out score
            matching (docs/theory).

    Example::

        from numpyro_kscore.regularizers import Tikhonov

        score = ScoreEstimator(regularizer=Tikhonov(1e-2)).fit(samples)
        score(samples[:5])  # (5, 2)
        Tikhonov("auto").is_auto  # True: selected from the samples at the fit
    """

    lam: Any = 1e-3

    def __post_init__(self) -> None:
        if isinstance(self.lam, str):
            check_choice("lam", self.lam, ("auto",), "a positive finite number")
            # A string could not be a leaf.
            object.__setattr__(self, "lam", None)
        check_positive("lam", self.lam)

    @property
    def is_auto(self) -> bool:
        return self.lam is None

    def path(self, bound: float | None) -> tuple[Regularizer, ...]:
        if not self.is_auto:
            return (self,)
        degrees, top = path_degrees(bound)
        return tuple(Tikhonov(top / degree**2) for degree in degrees)

    def strength(self) -> Any:
        return self.lam

    def evaluate(self, sigma: jax.Array) -> Filter:
        if self.is_auto:
            raise ValueError(UNCHOSEN.format(name="lam"))
        lam = jnp.asarray(self.lam, sigma.dtype)
        g = 1.0 / (sigma + lam)
        return Filter(g, 1.0 / lam, -g / lam)


@pytree
class TruncatedTikhonov(Regularizer):
    """``g(σ) = 1{σ > 0}/(σ + λ)``: Tikhonov within the range of K (Stein, NKEF).

    Implements Zhou, Shi and Zhu (2020), Examples 3.6 and 3.7. Eigenvalues below rounding,
    ``k eps max(σ)``, count as zero.

    Args:
        lam: regularization parameter λ > 0, on the eigenvalues of K/n.

    Example::

        from numpyro_kscore.regularizers import TruncatedTikhonov
        from numpyro_kscore.solvers import Dense

        estimator = ScoreEstimator(regularizer=TruncatedTikhonov(1e-2), solver=Dense())
        score = estimator.fit(samples)
        score(samples[:5])  # (5, 2)
    """

    lam: Any = 1e-3
    is_smooth = False

    def __post_init__(self) -> None:
        check_positive("lam", self.lam)

    def evaluate(self, sigma: jax.Array) -> Filter:
        lam = jnp.asarray(self.lam, sigma.dtype)
        return _restricted(sigma, _above_rounding(sigma), 1.0 / (sigma + lam))

    def on_range(self) -> Regularizer:
        return Tikhonov(self.lam)


@pytree
class SpectralCutoff(Regularizer):
    """``g(σ) = 1{σ > λ}/σ``, by threshold or by the fraction of the spectrum kept (SSGE).

    Implements Zhou, Shi and Zhu (2020), Theorem 3.2; the fraction is Shi, Sun and Zhu (2018). Give
    one of the two.

    Args:
        lam: λ ≥ 0, the threshold on the eigenvalues of K/n.
        fraction: keep the fewest leading eigenvalues whose sum reaches this fraction of the trace,
            in (0, 1].

    Example::

        from numpyro_kscore.regularizers import SpectralCutoff
        from numpyro_kscore.solvers import Dense

        estimator = ScoreEstimator(regularizer=SpectralCutoff(fraction=0.95), solver=Dense())
        score = estimator.fit(samples)
        score(samples[:5])  # (5, 2)
    """

    lam: Any = None
    fraction: Any = None
    is_smooth = False

    def __post_init__(self) -> None:
        if (self.lam is None) == (self.fraction is None):
            given = "neither" if self.lam is None else "both"
            raise ValueError(f"SpectralCutoff: expected one of lam and fraction; got {given}")
        if isinstance(self.lam, str):
            raise ValueError(f"lam: expected a non-negative number; got {self.lam!r}")
        if is_concrete(self.lam) and not np.all(np.asarray(self.lam) >= 0):
            raise ValueError(f"lam: expected a non-negative number; got {self.lam}")
        check_positive("fraction", self.fraction)
        if is_concrete(self.fraction) and not np.all(np.asarray(self.fraction) <= 1):
            raise ValueError(f"fraction: expected a number in (0, 1]; got {self.fraction}")

    def evaluate(self, sigma: jax.Array) -> Filter:
        keep = _above_rounding(sigma)
        if self.lam is not None:
            keep = keep & (sigma > self.lam)
        else:
            ordered = jnp.sort(sigma)[::-1]
            # The j-th eigenvalue is kept as long as those before it do not reach the fraction.
            before = jnp.cumsum(ordered) - ordered
            needed = before < self.fraction * jnp.sum(ordered)
            smallest = jnp.min(jnp.where(needed, ordered, jnp.inf))
            keep = keep & (sigma >= smallest)
        return _restricted(sigma, keep, 1.0 / jnp.where(keep, sigma, 1.0))


def _above_rounding(sigma: jax.Array) -> jax.Array:
    """Which eigenvalues are distinguishable from zero."""
    return sigma > sigma.shape[-1] * jnp.finfo(sigma.dtype).eps * jnp.max(sigma)


def _restricted(sigma: jax.Array, keep: jax.Array, g: jax.Array) -> Filter:
    """The filter that is ``g`` on the kept eigenvalues and zero elsewhere, at 0 too."""
    g = jnp.where(keep, g, 0.0)
    return Filter(g, jnp.zeros((), sigma.dtype), g / jnp.where(keep, sigma, 1.0))
