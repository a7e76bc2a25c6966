"""Filters: g of an operator, and what is left of it away from the samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy import special

from .profiles import Array


@dataclass(frozen=True)
class Filter:
    """g, its value at 0, and ``r(t) = (g(t) - g(0)) / t`` free of cancellation."""

    g: Callable[[Array], Array]
    g0: float
    r: Callable[[Array], Array]

    def rescaled(self, rho: float) -> Filter:
        """g(t / rho) / rho."""
        return Filter(
            lambda t: self.g(t / rho) / rho, self.g0 / rho, lambda t: self.r(t / rho) / rho**2
        )


def tikhonov(lam: float) -> Filter:
    """1 / (t + lam)."""
    return Filter(lambda t: 1 / (t + lam), 1 / lam, lambda t: -1 / (lam * (t + lam)))


def _above(threshold: float, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def masked(t: Array) -> Array:
        t = np.asarray(t, np.float64)
        keep = t > threshold
        return np.where(keep, function(np.where(keep, t, 1.0)), 0.0)

    return masked


def truncated_tikhonov(lam: float, zero: float = 0.0) -> Filter:
    """1{t > 0} / (t + lam); ``zero`` is the rounding level below which t counts as 0."""
    return Filter(
        _above(zero, lambda t: 1 / (t + lam)), 0.0, _above(zero, lambda t: 1 / (t * (t + lam)))
    )


def spectral_cutoff(lam: float) -> Filter:
    """1{t > lam} / t."""
    return Filter(_above(lam, lambda t: 1 / t), 0.0, _above(lam, lambda t: 1 / t**2))


def cutoff_for_share(spectrum: Array, fraction: float) -> float:
    """A threshold that keeps the smallest leading set with ``fraction`` of the trace.

    Equal eigenvalues stay together: a diagonal kernel repeats each one d times, and no estimator
    may depend on which copy an eigensolver happens to list first.
    """
    descending = np.sort(spectrum)[::-1]
    held = np.cumsum(descending) / np.sum(descending)
    last = descending[np.searchsorted(held, fraction - 1e-12)]
    lower = descending[descending < last * (1 - 1e-9)]
    return math.sqrt(last * max(lower[0], 1e-300)) if lower.size else 0.0


def landweber(num_steps: int, step_size: float = 1.0) -> Filter:
    """step_size * sum_{i < num_steps} (1 - step_size t)^i."""

    def g(t: Array) -> Array:
        t = np.asarray(t, np.float64)
        return step_size * sum((1 - step_size * t) ** i for i in range(num_steps))

    def r(t: Array) -> Array:
        # ((1 - e)^i - 1) / t with e = step_size t is -step_size times the partial geometric sum.
        factor = 1 - step_size * np.asarray(t, np.float64)
        partial, total, power = np.zeros_like(factor), np.zeros_like(factor), np.ones_like(factor)
        for _ in range(num_steps):
            total = total + partial
            partial = partial + power
            power = power * factor
        return -(step_size**2) * total

    return Filter(g, step_size * num_steps, r)


def nu_coefficients(step: int, nu: float) -> tuple[float, float]:
    """(mu_t, omega_t) of Engl, Hanke and Neubauer's nu-method, t = 1, 2, ..."""
    t = step
    if t == 1:
        return 0.0, (4 * nu + 2) / (4 * nu + 1)  # the general mu_1 is 0/0 at nu = 1/2
    mu = (t - 1) * (2 * t - 3) * (2 * t + 2 * nu - 1)
    mu = mu / ((t + 2 * nu - 1) * (2 * t + 4 * nu - 1) * (2 * t + 2 * nu - 3))
    omega = 4 * (2 * t + 2 * nu - 1) * (t + nu - 1) / ((t + 2 * nu - 1) * (2 * t + 4 * nu - 1))
    return mu, omega


def nu_method(num_steps: int, nu: float = 1.0) -> Filter:
    """g_t = g_{t-1} + mu_t (g_{t-1} - g_{t-2}) + omega_t (1 - t g_{t-1}), in extended precision."""

    def run(t: Array) -> tuple[Array, Array]:
        t = np.asarray(t, np.longdouble)
        g, g_before = np.zeros_like(t), np.zeros_like(t)
        r, r_before = np.zeros_like(t), np.zeros_like(t)
        for step in range(1, num_steps + 1):
            mu, omega = nu_coefficients(step, np.longdouble(nu))
            r, r_before = r + mu * (r - r_before) - omega * g, r
            g, g_before = g + mu * (g - g_before) + omega * (1 - t * g), g
        return np.asarray(g, np.float64), np.asarray(r, np.float64)

    g0 = num_steps * (num_steps + 2 * nu) / (2 * nu + 0.5)
    return Filter(lambda t: run(t)[0], g0, lambda t: run(t)[1])


def nu_residual_jacobi(t: Array, num_steps: int, nu: float) -> Array:
    """1 - t g(t) as the Jacobi polynomial P^(2 nu - 1/2, -1/2)(1 - 2t), scaled to 1 at 0."""
    alpha, beta = 2 * nu - 0.5, -0.5
    at_zero = special.eval_jacobi(num_steps, alpha, beta, 1.0)
    return special.eval_jacobi(num_steps, alpha, beta, 1 - 2 * np.asarray(t)) / at_zero


def nu_exact(t: Fraction, num_steps: int, nu: Fraction) -> tuple[Fraction, Fraction]:
    """(g, r) in rational arithmetic from ``1 - t g(t) = 2F1(-T, T + 2 nu; 2 nu + 1/2; t)``."""
    coefficient, g, r = Fraction(1), Fraction(0), Fraction(0)
    for k in range(1, num_steps + 1):
        coefficient *= (k - 1 - num_steps) * (num_steps + 2 * nu + k - 1)
        coefficient /= (2 * nu + Fraction(1, 2) + k - 1) * k
        g -= coefficient * t ** (k - 1)
        if k >= 2:
            r -= coefficient * t ** (k - 2)
    return g, r
