"""Iterations as regularizers: a number of steps in place of λ.

Stopped early, gradient descent and its accelerated form are polynomials in ``K/n`` that imitate
1/σ as well as their degree lets them. The published recursions are a solver
(:class:`~numpyro_kscore.solvers.Recursion`); here are the filters that they amount to.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.checks import check_choice, check_count, check_positive
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.regularizers._filters import (
    AUTO_KRYLOV_STEPS,
    MOST_KRYLOV_STEPS,
    UNCHOSEN,
    Filter,
    Regularizer,
    path_degrees,
)

MOST_NU_STEPS = 512


class _Iteration(Regularizer):
    """A filter whose strength is a number of steps; subclasses relate that number to λ."""

    num_steps: int | str

    @property
    def is_auto(self) -> bool:
        return self.num_steps == "auto"

    def path(self, bound: float | None) -> tuple[Regularizer, ...]:
        if not self.is_auto:
            return (self,)
        degrees, top = path_degrees(bound)
        steps = sorted({max(1, round(self._steps_of(degree, top))) for degree in degrees})
        return tuple(dataclasses.replace(self, num_steps=t) for t in steps)  # type: ignore[type-var]

    def strength(self) -> int:
        """The step count; ``ValueError`` while it is still to be selected."""
        if isinstance(self.num_steps, str):
            raise ValueError(UNCHOSEN.format(name="num_steps"))
        return int(self.num_steps)

    def _steps_of(self, degree: float, top: float) -> float:
        """The number of steps that acts like ``λ = top / degree²``."""
        raise NotImplementedError

    def _check_steps(self) -> None:
        """Raise unless the step count is a positive integer or ``"auto"``."""
        if isinstance(self.num_steps, str):
            check_choice("num_steps", self.num_steps, ("auto",), "an integer of at least 1")
        else:
            check_count("num_steps", self.num_steps)


@pytree
class LandweberIteration(_Iteration):
    """``g(σ) = (1 - (1 - ησ)^t)/σ``: t steps of gradient descent on the regression.

    Implements Zhou, Shi and Zhu (2020), Theorem 3.4 (whose recursion has a wrong sign, see
    ``docs/errata``).

    Args:
        num_steps: t ≥ 1, or ``"auto"``, which selects it from the samples, among counts that
            suit η = 1.
        step_size: η > 0; the spectrum of K/n must lie within [0, 1/η].

    Example::

        from numpyro_kscore.regularizers import LandweberIteration

        LandweberIteration(100).evaluate(jnp.zeros(1)).g  # (1,): 100 at eigenvalue 0
        score = ScoreEstimator(regularizer=LandweberIteration(1000)).fit(samples)
        score(samples[:5])  # (5, 2)
    """

    num_steps: int | str = static(default=100)
    step_size: Any = 1.0

    def __post_init__(self) -> None:
        self._check_steps()
        check_positive("step_size", self.step_size)

    @property
    def spectral_bound(self) -> Any:
        return 1.0 / self.step_size

    def _steps_of(self, degree: float, top: float) -> float:
        # η t is 1/λ. The counts are those for η = 1: they must be known while tracing, η is not.
        return degree**2 / top

    def evaluate(self, sigma: jax.Array) -> Filter:
        t = float(self.strength())
        eta = jnp.asarray(self.step_size, sigma.dtype)
        x = eta * sigma
        # Where t x is small, 1 - (1-x)^t and then r cancel; the binomial series does not.
        small = t * x < 0.1
        safe = jnp.where(small, 0.5, x)
        # At most one less a rounding error, where log1p and its slope are still finite.
        remainder = jnp.where(safe > 1.0, 1.0, safe) * (1.0 - jnp.finfo(x.dtype).eps)
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
class NuMethod(_Iteration):
    """The ν-method: accelerated Landweber, polynomial in σ; t steps act like λ = t⁻².

    Implements Zhou, Shi and Zhu (2020), Example 3.5 and its recursion C.4 (Engl, Hanke and
    Neubauer 1996, section 6.3). The step count is the regularizer: there is no tolerance.

    Args:
        num_steps: t ≥ 1, or ``"auto"``, which selects it from the samples.
        nu: ν > 0, the qualification; 1 is the paper's choice.

    Example::

        from numpyro_kscore.regularizers import NuMethod

        score = ScoreEstimator(regularizer=NuMethod(45)).fit(samples)
        score(samples[:5])  # (5, 2)
        score.info.steps < 45  # True: a Krylov space takes fewer products
    """

    num_steps: int | str = static(default=100)
    nu: float = static(default=1.0)

    def __post_init__(self) -> None:
        self._check_steps()
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
        t = self.strength()
        degree = t * min(1.0, 1.0 if bound is None else bound) ** 0.5
        return min(MOST_KRYLOV_STEPS, t, 3 + math.ceil(0.385 * degree))

    def _steps_of(self, degree: float, top: float) -> float:
        return min(degree / top**0.5, MOST_NU_STEPS)

    def evaluate_path(self, sigma: jax.Array, bound: float | None) -> Filter:
        path: tuple[Any, ...] = self.path(bound)
        return self._filters(sigma, tuple(member.num_steps for member in path))

    def coefficients(self) -> tuple[np.ndarray, np.ndarray]:
        """Momenta u_t and step sizes ω_t for t = 1 … num_steps, float64, each (num_steps,)."""
        t, nu = np.arange(1.0, self.strength() + 1), float(self.nu)
        ends = (t + 2 * nu - 1) * (2 * t + 4 * nu - 1)
        omega = 4 * (2 * t + 2 * nu - 1) * (t + nu - 1) / ends
        with np.errstate(divide="ignore", invalid="ignore"):
            momentum = (t - 1) * (2 * t - 3) * (2 * t + 2 * nu - 1) / (ends * (2 * t + 2 * nu - 3))
        momentum[0] = 0.0
        return momentum, omega

    def evaluate(self, sigma: jax.Array) -> Filter:
        return jax.tree.map(lambda rows: rows[0], self._filters(sigma, (self.strength(),)))

    def _filters(self, sigma: jax.Array, steps: tuple[int, ...]) -> Filter:
        """The filters after these numbers of steps: (p, k), g0 (p,)."""
        series, at_zero = _polynomials(steps, self.nu)
        residual, g, r = jnp.moveaxis(_evaluate_series(series, sigma), -2, 0)
        g0 = jnp.asarray(at_zero, sigma.dtype)
        # Relative to their values at zero the series are exact to rounding, and g falls from t²
        # there to 1/σ. The residual 1 - σ g, at most one everywhere, gives g where σ t² > 1.
        is_large = sigma * (np.array(steps)[:, None] ** 2.0) > 1.0
        safe = jnp.where(is_large, sigma, 1.0)
        g = jnp.where(is_large, (1.0 - residual) / safe, g)
        r = jnp.where(is_large, (g - g0[:, None]) / safe, r)
        return Filter(g, g0, r)


@functools.lru_cache(maxsize=64)
def _polynomials(steps: tuple[int, ...], nu: float) -> tuple[np.ndarray, np.ndarray]:
    """The ν-method after p numbers of steps, from its recursion in float64 at Chebyshev nodes.

    First coefficients of Chebyshev series in ``1 - 2σ`` for 1 - σ g, g and r, (p, 3, terms), then
    g(0), (p,). A series has no loop, and in float32 is more accurate than the recursion, whose
    errors add up.
    """
    most = max(steps)
    angles = np.pi * (np.arange(most + 1) + 0.5) / (most + 1)
    sigma = np.append(np.sin(0.5 * angles) ** 2, 0.0)
    # g_t = g_(t-1) + u_t (g_(t-1) - g_(t-2)) + ω_t (1 - σ g_(t-1)), and the same divided by σ for
    # r = (g - g(0))/σ, where the constant drops out: nothing cancels.
    g = g_old = r = r_old = np.zeros_like(sigma)
    at_step = {}
    for t, (u, w) in enumerate(zip(*NuMethod(most, nu).coefficients(), strict=True), start=1):
        r, r_old = r + u * (r - r_old) - w * g, r
        g, g_old = g + u * (g - g_old) + w * (1.0 - sigma * g), g
        if t in steps:
            at_step[t] = np.stack([1.0 - sigma * g, g, r])
    values = np.stack([at_step[t] for t in steps])
    cosines = np.cos(np.outer(angles, np.arange(most + 1)))
    series = values[..., :-1] @ cosines * (2.0 / (most + 1))
    series[..., 0] *= 0.5
    return series, values[:, 1, -1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _evaluate_series(coefficients: np.ndarray, sigma: jax.Array) -> jax.Array:
    """``Σ_m coefficients_m T_m(1 - 2σ)`` on [0, 1]: (…, terms) and (k,) -> (…, k)."""
    # T_m(cos θ) = cos m θ; an arc cosine would lose the small eigenvalues.
    theta = 2.0 * jnp.arcsin(jnp.sqrt(jnp.clip(sigma, 0.0, 1.0)))
    cosines = jnp.cos(theta * jnp.arange(coefficients.shape[-1], dtype=sigma.dtype)[:, None])
    return jnp.matmul(jnp.asarray(coefficients, sigma.dtype), cosines, precision="highest")


@_evaluate_series.defjvp
def _evaluate_series_jvp(
    coefficients: np.ndarray, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # Slopes of the arc sine and the root are infinite at the ends, that of a polynomial is not.
    slopes = -2.0 * np.polynomial.chebyshev.chebder(coefficients, axis=-1)
    slope = _evaluate_series(slopes, primals[0])
    return _evaluate_series(coefficients, primals[0]), slope * tangents[0]
