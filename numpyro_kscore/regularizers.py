"""Regularisers as scalar filters on the spectrum of ``K/n``.

Every estimator of Zhou, Shi and Zhu (2020) is ``ŝ = s0 - g(L̂) ζ'`` for one scalar function g that
imitates 1/σ where eigenvalues are large and stays bounded where they are small. A regulariser
here is that function, together with ``g(0)`` and ``r(σ) = (g(σ) - g(0))/σ``, which the estimate
away from the samples needs and which would cancel if computed from g.

λ always refers to eigenvalues of ``K/n``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._pytree import (
    check_choice,
    check_count,
    check_positive,
    is_concrete,
    pytree,
    static,
)

__all__ = [
    "Filter",
    "Landweber",
    "NuMethod",
    "Regularizer",
    "SpectralCutoff",
    "Tikhonov",
    "TruncatedTikhonov",
]

MOST_KRYLOV_STEPS = 32
# Strengths an automatic choice tries, as degrees of the polynomial that resolves them: λ is the
# largest eigenvalue over the degree squared. Neighbours differ by a factor of two in λ.
DEGREES = tuple(0.25 * 2 ** (k / 2) for k in range(16))
# With λ over seven decades where the scale of the kernel is not known.
LITERAL_DEGREES = tuple(10.0 ** (k / 4) for k in range(15))
# A Krylov space this large serves an automatic choice: beyond it the dimension of the space
# regularises too, in the choice as in the fit.
AUTO_KRYLOV_STEPS = 20
MOST_NU_STEPS = 512
UNCHOSEN = (
    "{name}: expected a number here; got 'auto'. Only ScoreEstimator chooses: give it this "
    "regulariser"
)


class Filter(NamedTuple):
    """A filter evaluated on a spectrum.

    Attributes:
        g: g(σ), the shape of σ.
        g0: g(0), a scalar.
        r: ``(g(σ) - g(0))/σ``, the shape of σ.
    """

    g: jax.Array
    g0: jax.Array
    r: jax.Array


class Regularizer:
    """A scalar filter; subclasses implement :meth:`evaluate`.

    Attributes:
        spectral_bound: largest eigenvalue the filter is made for, or None if any will do.
            Solvers rescale a spectrum that exceeds it and say so in ``info.spectral_scale``.
        is_smooth: whether g is continuous, so that a Krylov space can represent it.
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
        """Whether the strength is to be chosen from the samples."""
        return False

    def path(self, bound: float | None) -> tuple[Regularizer, ...]:
        """What an automatic choice tries, strongest first; itself where nothing is open.

        Args:
            bound: what eigenvalues of K/n are known not to exceed; None if nothing is known.
        """
        return (self,)

    def strength(self) -> Any:
        """What sets the strength: λ or a number of steps; NaN if it is neither."""
        return jnp.nan

    def evaluate_path(self, sigma: jax.Array, bound: float | None) -> Filter:
        """The filters of :meth:`path` at ``sigma`` (k,): one row each, (p, k), g0 (p,)."""
        filters = [member.evaluate(sigma) for member in self.path(bound)]
        return jax.tree.map(lambda *rows: jnp.stack(rows), *filters)

    def on_range(self) -> Regularizer:
        """A filter with the same values at positive eigenvalues, continuous if there is one.

        For operators without null space, where a truncation does nothing.
        """
        return self

    def krylov_steps(self, bound: float | None) -> int:
        """Dimension of the Krylov space that represents the filter to about 1e-3.

        Args:
            bound: what eigenvalues of K/n are known not to exceed; None if nothing is known.
        """
        return MOST_KRYLOV_STEPS

    def rescaled(self, sigma: jax.Array, rho: jax.Array) -> Filter:
        """The filter ``g(σ/ρ)/ρ``, for a spectrum that ρ brings within the bound."""
        g, g0, r = self.evaluate(sigma / rho)
        return Filter(g / rho, g0 / rho, r / rho**2)


@pytree
class Tikhonov(Regularizer):
    """``g(σ) = 1/(σ + λ)``: the kernel exponential family (KEF, KEF-CG).

    Implements Zhou, Shi and Zhu (2020), Theorem 3.1.

    Args:
        lam: λ > 0, on the eigenvalues of K/n. A leaf: one compilation serves many values.
            ``"auto"`` chooses it from the samples, see :mod:`numpyro_kscore.selection`.
    """

    lam: Any = 1e-3

    def __post_init__(self) -> None:
        if isinstance(self.lam, str):
            check_choice("lam", self.lam, ("auto",))
            # None: a string could not be a leaf.
            object.__setattr__(self, "lam", None)
        check_positive("lam", self.lam)

    @property
    def is_auto(self) -> bool:
        return self.lam is None

    def path(self, bound: float | None) -> tuple[Regularizer, ...]:
        if not self.is_auto:
            return (self,)
        degrees, top = _degrees(bound)
        return tuple(Tikhonov(top / degree**2) for degree in degrees)

    def strength(self) -> Any:
        return self.lam

    def krylov_steps(self, bound: float | None) -> int:
        return AUTO_KRYLOV_STEPS if self.is_auto else MOST_KRYLOV_STEPS

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
        lam: λ > 0, on the eigenvalues of K/n.
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
    """``g(σ) = 1{σ > λ}/σ``, by threshold or by the share of the spectrum kept (SSGE).

    Implements Zhou, Shi and Zhu (2020), Theorem 3.2; the share is Shi, Sun and Zhu (2018). Give
    one of the two.

    Args:
        lam: λ ≥ 0, the threshold on the eigenvalues of K/n.
        share: keep the fewest leading eigenvalues whose sum reaches this share of the trace,
            in (0, 1].
    """

    lam: Any = None
    share: Any = None
    is_smooth = False

    def __post_init__(self) -> None:
        if self.lam is None and self.share is None:
            raise ValueError("SpectralCutoff: expected lam=… or share=…; got neither")
        if self.lam is not None and self.share is not None:
            raise ValueError("SpectralCutoff: expected lam=… or share=…; got both")
        if isinstance(self.lam, str):
            raise ValueError(f"lam: expected a non-negative number; got {self.lam!r}")
        if is_concrete(self.lam) and not np.all(np.asarray(self.lam) >= 0):
            raise ValueError(f"lam: expected a non-negative number; got {self.lam}")
        check_positive("share", self.share)
        if is_concrete(self.share) and not np.all(np.asarray(self.share) <= 1):
            raise ValueError(f"share: expected a number in (0, 1]; got {self.share}")

    def evaluate(self, sigma: jax.Array) -> Filter:
        keep = _above_rounding(sigma)
        if self.lam is not None:
            keep = keep & (sigma > self.lam)
        else:
            ordered = jnp.sort(sigma)[::-1]
            # The j-th eigenvalue is kept as long as those before it do not reach the share.
            before = jnp.cumsum(ordered) - ordered
            needed = before < self.share * jnp.sum(ordered)
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


@pytree
class Landweber(Regularizer):
    """``g(σ) = (1 - (1 - ησ)^t)/σ``: t steps of gradient descent on the regression.

    Implements Zhou, Shi and Zhu (2020), Theorem 3.4 (whose recursion has a wrong sign, see
    ``docs/errata``).

    Args:
        num_steps: t ≥ 1, or ``"auto"``, which chooses it from the samples, among counts that
            suit η = 1.
        step_size: η > 0; the spectrum of K/n must lie within [0, 1/η].
    """

    num_steps: int | str = static(default=100)
    step_size: Any = 1.0

    def __post_init__(self) -> None:
        check_steps(self.num_steps)
        check_positive("step_size", self.step_size)

    @property
    def spectral_bound(self) -> Any:
        return 1.0 / self.step_size

    @property
    def is_auto(self) -> bool:
        return self.num_steps == "auto"

    def path(self, bound: float | None) -> tuple[Regularizer, ...]:
        if not self.is_auto:
            return (self,)
        degrees, top = _degrees(bound)
        # η t is 1/λ. The counts are those for η = 1: they must be known while tracing, η is not.
        steps = sorted({max(1, round(degree**2 / top)) for degree in degrees})
        return tuple(dataclasses.replace(self, num_steps=t) for t in steps)

    def strength(self) -> Any:
        return _number(self.num_steps)

    def krylov_steps(self, bound: float | None) -> int:
        return AUTO_KRYLOV_STEPS if self.is_auto else MOST_KRYLOV_STEPS

    def evaluate(self, sigma: jax.Array) -> Filter:
        t = float(_number(self.num_steps))
        eta = jnp.asarray(self.step_size, sigma.dtype)
        x = jnp.clip(eta * sigma, 0.0, 1.0)
        # Where t x is small, 1 - (1-x)^t and then r cancel; the binomial series does not.
        small = t * x < 0.1
        safe = jnp.where(small, 0.5, x)
        # The floor keeps log1p and its derivative finite at x = 1, where (1-x)^t is 0 anyway.
        remainder = jnp.minimum(safe, 1.0 - jnp.finfo(x.dtype).eps)
        descended = -jnp.expm1(t * jnp.log1p(-remainder))
        # Σ_{k≥2} (-1)^(k-1) binom(t, k) x^(k-2) = t² Σ_k (-1)^(k-1) [binom(t, k)/t^k] (t x)^(k-2)
        series = jnp.zeros_like(x)
        for k in range(7, 1, -1):
            binomial = float(np.prod([(1.0 - j / t) / (j + 1.0) for j in range(k)]))
            series = series * (t * x) + (-1.0) ** (k - 1) * binomial
        r = jnp.where(small, t**2 * series, (descended - t * safe) / safe**2)
        g = jnp.where(small, t + t**2 * series * x, descended / safe)
        return Filter(eta * g, eta * t, eta**2 * r)


@pytree
class NuMethod(Regularizer):
    """The ν-method: accelerated Landweber, polynomial in σ; t steps act like λ = t⁻².

    Implements Zhou, Shi and Zhu (2020), Example 3.5 and its recursion C.4 (Engl, Hanke and
    Neubauer 1996, section 6.3). The step count is the regulariser: there is no tolerance.

    Args:
        num_steps: t ≥ 1, or ``"auto"``, which chooses it from the samples.
        nu: ν > 0, the qualification; 1 is the paper's choice.
    """

    num_steps: int | str = static(default=100)
    nu: float = static(default=1.0)

    def __post_init__(self) -> None:
        check_steps(self.num_steps)
        check_positive("nu", self.nu)

    @property
    def spectral_bound(self) -> Any:
        return 1.0

    def krylov_steps(self, bound: float | None) -> int:
        # A polynomial of degree t on [0, bound] instead of [0, 1] behaves like one of degree
        # t sqrt(bound); constants fitted to relative errors between 1e-4 and 5e-3 over d = 2...30
        # and five targets (docs/performance).
        if self.is_auto:
            return AUTO_KRYLOV_STEPS
        t = _number(self.num_steps)
        degree = t * min(1.0, 1.0 if bound is None else bound) ** 0.5
        return min(MOST_KRYLOV_STEPS, t, 3 + math.ceil(0.385 * degree))

    @property
    def is_auto(self) -> bool:
        return self.num_steps == "auto"

    def path(self, bound: float | None) -> tuple[Regularizer, ...]:
        if not self.is_auto:
            return (self,)
        degrees, top = _degrees(bound)
        steps = {max(1, round(degree / top**0.5)) for degree in degrees}
        capped = sorted({min(t, MOST_NU_STEPS) for t in steps})
        return tuple(NuMethod(t, self.nu) for t in capped)

    def strength(self) -> Any:
        return _number(self.num_steps)

    def evaluate_path(self, sigma: jax.Array, bound: float | None) -> Filter:
        # One recursion passes through all step counts.
        path: tuple[Any, ...] = self.path(bound)
        rows = np.array([member.num_steps for member in path]) - 1
        g, r, g0 = NuMethod(int(rows[-1]) + 1, self.nu)._iterates(sigma)
        return Filter(g[rows], g0[rows], r[rows])

    def coefficients(self) -> tuple[np.ndarray, np.ndarray]:
        """Momenta u_t and step sizes ω_t for t = 1 … num_steps, float64, each (num_steps,)."""
        t, nu = np.arange(1.0, _number(self.num_steps) + 1), float(self.nu)
        ends = (t + 2 * nu - 1) * (2 * t + 4 * nu - 1)
        omega = 4 * (2 * t + 2 * nu - 1) * (t + nu - 1) / ends
        with np.errstate(divide="ignore", invalid="ignore"):
            momentum = (t - 1) * (2 * t - 3) * (2 * t + 2 * nu - 1) / (ends * (2 * t + 2 * nu - 3))
        momentum[0] = 0.0
        return momentum, omega

    def evaluate(self, sigma: jax.Array) -> Filter:
        momentum, omega = self.coefficients()
        step, start = self._recursion(sigma)
        steps = (jnp.asarray(momentum, sigma.dtype), jnp.asarray(omega, sigma.dtype))
        (g, _, r, _), _ = lax.scan(step, start, steps, unroll=10)
        return Filter(g, jnp.asarray(self._at_zero()[-1], sigma.dtype), r)

    def _iterates(self, sigma: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """g and r after every step, (t, k), and g(0), (t,)."""
        step, start = self._recursion(sigma)
        momentum, omega = self.coefficients()

        def recorded(carry: Any, ut_wt: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            carry, _ = step(carry, ut_wt)
            return carry, (carry[0], carry[2])

        steps = (jnp.asarray(momentum, sigma.dtype), jnp.asarray(omega, sigma.dtype))
        _, (g, r) = lax.scan(recorded, start, steps, unroll=10)
        return g, r, jnp.asarray(self._at_zero(), sigma.dtype)

    @staticmethod
    def _recursion(sigma: jax.Array) -> tuple[Callable[..., tuple[Any, None]], Any]:
        # g_t = g_(t-1) + u_t (g_(t-1) - g_(t-2)) + ω_t (1 - σ g_(t-1)), and the same divided by σ
        # for r = (g - g(0))/σ, where the constant drops out: nothing cancels.
        def step(carry: Any, ut_wt: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            g, g_old, r, r_old = carry
            u, w = ut_wt
            g_new = g + u * (g - g_old) + w * (1.0 - sigma * g)
            r_new = r + u * (r - r_old) - w * g
            return (g_new, g, r_new, r), None

        zero = jnp.zeros_like(sigma)
        return step, (zero, zero, zero, zero)

    def _at_zero(self) -> np.ndarray:
        """g(0) after every step, numbers: the recursion at σ = 0."""
        values = [0.0, 0.0]
        for u, w in zip(*self.coefficients(), strict=True):
            values.append(values[-1] + u * (values[-1] - values[-2]) + w)
        return np.array(values[2:])


def _degrees(bound: float | None) -> tuple[tuple[float, ...], float]:
    """Degrees of a path and the largest eigenvalue they refer to."""
    return (LITERAL_DEGREES, 1.0) if bound is None else (DEGREES, bound)


def check_steps(num_steps: Any) -> None:
    """Raise unless a step count is a positive integer or ``"auto"``."""
    if isinstance(num_steps, str):
        check_choice("num_steps", num_steps, ("auto",))
    else:
        check_count("num_steps", num_steps)


def _number(num_steps: Any) -> int:
    """A step count that is a number.

    Raises:
        ValueError: if it is still to be chosen.
    """
    if isinstance(num_steps, str):
        raise ValueError(UNCHOSEN.format(name="num_steps"))
    return int(num_steps)
