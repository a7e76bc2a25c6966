"""Solvers: apply a filter of the Gram operator ``K/n`` to one vector.

Given ``h' = ζ'(X)`` a solver returns the values ``-g(K/n) h'`` at the samples, and the expansion
``c = -(1/n) r(K/n) h'``, ``a = -g(0)`` that carries the estimate to other points. :class:`Krylov`
and :class:`Dense` go through a :class:`Spectrum`, which serves every filter, every λ and every
step count at once; :class:`ConjugateGradient` and :class:`Recursion` are the published
algorithms, to compare the fast ones with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.checks import check_count, check_positive
from numpyro_kscore._util.linalg import eigh
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.regularizers._filters import Regularizer, Tikhonov
from numpyro_kscore.regularizers._iterations import LandweberIteration, NuMethod
from numpyro_kscore.solvers._operator import Operator, Solution
from numpyro_kscore.solvers._spectrum import (
    Solver,
    Spectrum,
    apply_filter,
    largest_eigenvalue,
    spectral_scale,
)


@pytree
class Krylov(Solver):
    """Lanczos with re-orthogonalization: every continuous filter from one Krylov space.

    The error falls geometrically once the space is as large as the degree of polynomial the
    filter needs: 100 iterations of the ν-method are reproduced to 1e-5 by 24 steps at d = 2 and
    by 16 at d = 20.

    Args:
        num_steps: dimension of the Krylov space; more than n d changes nothing. None takes what
            the filter needs on this spectrum (docs/performance), at most 32.

    Raises:
        TypeError: at a fit, for a filter that jumps.

    Cost: a product with the Gram operator a step, and O(num_steps² n d) time and O(num_steps n d)
    memory for the basis.

    Example::

        from numpyro_kscore.regularizers import Tikhonov
        from numpyro_kscore.solvers import Krylov

        score = ScoreEstimator(regularizer=Tikhonov(1e-2), solver=Krylov(16)).fit(samples)
        score.info.steps  # 16
        score.info.converged  # True
    """

    num_steps: int | None = static(default=None)

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_count("num_steps", self.num_steps)

    def check(self, regularizer: Regularizer) -> None:
        if not regularizer.is_smooth:
            self._reject("a filter that is continuous in σ (or solver=Dense())", regularizer)

    def decompose(self, gram: Operator, h: jax.Array, num_steps: int) -> Spectrum:
        """Ritz pairs of ``K/n`` in the Krylov space of ``h``. Cost: num_steps products."""
        num_steps = min(num_steps, h.size)
        tiny = jnp.finfo(h.dtype).tiny
        unit, largest = _over_largest(h)
        unit = gram.laid_out(unit)
        length = jnp.sqrt(_inner(unit, unit))
        start = unit / jnp.maximum(length, tiny)

        def step(carry: Any, k: jax.Array) -> tuple[Any, Any]:
            basis, v, v_old, link, scale = carry
            w = gram.laid_out(gram @ v)
            diagonal = _inner(v, w)
            # Three terms suffice in exact arithmetic; the pass over the whole basis removes what
            # rounding leaves of the other directions.
            w = w - diagonal * v - link * v_old
            w = w - jnp.tensordot(_inner(basis, w), basis, 1)
            off_diagonal = jnp.sqrt(_inner(w, w))
            scale = jnp.maximum(scale, jnp.abs(diagonal))
            # A remainder below rounding is noise: the space is invariant, and zeros end it.
            alive = off_diagonal > 10 * jnp.finfo(h.dtype).eps * scale
            off_diagonal = jnp.where(alive, off_diagonal, 0.0)
            v_new = jnp.where(alive, w / jnp.maximum(off_diagonal, tiny), 0.0)
            # Written last: a write before the products that read it is done twice, with copies.
            basis = basis.at[k + 1].set(v_new, mode="drop")
            return (basis, v_new, v, off_diagonal, scale), (diagonal, off_diagonal)

        # Never flattened: n, the last axis, may be divided over devices.
        basis = jnp.zeros((num_steps, *h.shape), h.dtype).at[0].set(start)
        basis = gram.laid_out(basis)
        zero = jnp.zeros((), h.dtype)
        carry: Any = (basis, start, jnp.zeros_like(start), zero, zero)
        (basis, *_), (diagonal, links) = lax.scan(step, carry, jnp.arange(num_steps))
        tridiagonal = jnp.diag(diagonal) + jnp.diag(links[:-1], 1) + jnp.diag(links[:-1], -1)
        sigma, vectors = eigh(tridiagonal)
        return Spectrum(
            sigma,
            jnp.tensordot(vectors.T, basis, 1),
            (largest * length * vectors[0])[None, :],
            links[-1] * vectors[-1] * vectors[0],
        )

    def solve(self, gram: Operator, h: jax.Array, regularizer: Regularizer) -> Solution:
        self.check(regularizer)
        num_steps = self.num_steps or regularizer.krylov_steps(gram.spectral_bound)
        return apply_filter(num_steps, self, gram, h, regularizer)


def _over_largest(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A vector over its largest entry, and that entry: float32 holds no square of 1e-30 or 1e30."""
    largest = jnp.max(jnp.abs(h))
    return h / jnp.where(largest > 0, largest, 1.0), largest


def _inner(v: jax.Array, w: jax.Array) -> jax.Array:
    """Inner products of (..., d, n) with (d, n)."""
    return jnp.tensordot(v, w, 2)


@pytree
class Dense(Solver):
    """Every filter by a full eigendecomposition: exact, for small problems.

    Cost: O((n d)³) time and O((n d)²) memory, or O(n³) and O(n²) for a diagonal kernel.

    Example::

        from numpyro_kscore.regularizers import TruncatedTikhonov
        from numpyro_kscore.solvers import Dense

        score = ScoreEstimator(regularizer=TruncatedTikhonov(1e-2), solver=Dense()).fit(samples)
        score.info.residual  # 0.0
    """

    def check(self, regularizer: Regularizer) -> None:
        """Accept every regularizer."""

    def decompose(self, gram: Operator, h: jax.Array, num_steps: int = 0) -> Spectrum:
        """All eigenpairs of ``K/n``; ``num_steps`` is ignored."""
        sigma, vectors = eigh(gram.dense())
        coordinates = h.reshape(-1, vectors.shape[0]) @ vectors
        basis = vectors.T.reshape(len(sigma), -1, h.shape[1])
        return Spectrum(sigma, basis, coordinates, jnp.zeros_like(sigma))

    def solve(self, gram: Operator, h: jax.Array, regularizer: Regularizer) -> Solution:
        return apply_filter(0, self, gram, h, regularizer)


@pytree
class ConjugateGradient(Solver):
    """Conjugate gradients on ``(K/n + λ) u = h'``: KEF-CG, Tikhonov only.

    Args:
        max_steps: largest number of products with the Gram operator.
        tol: stop at this relative residual.

    Raises:
        TypeError: at a fit, for another regularizer.

    Cost: one product with the Gram operator a step.

    Example::

        from numpyro_kscore.regularizers import Tikhonov
        from numpyro_kscore.solvers import ConjugateGradient

        solver = ConjugateGradient(max_steps=100, tol=1e-4)
        score = ScoreEstimator(regularizer=Tikhonov(1e-2), solver=solver).fit(samples)
        score.info.converged  # True
    """

    max_steps: int = static(default=40)
    tol: Any = 1e-4

    def __post_init__(self) -> None:
        check_count("max_steps", self.max_steps)
        check_positive("tol", self.tol)

    def check(self, regularizer: Regularizer) -> None:
        if not isinstance(regularizer, Tikhonov):
            self._reject("Tikhonov(lam)", regularizer)

    def solve(self, gram: Operator, h: jax.Array, regularizer: Regularizer) -> Solution:
        self.check(regularizer)
        lam = jnp.asarray(regularizer.lam, h.dtype)  # type: ignore[attr-defined]
        tiny = jnp.finfo(h.dtype).tiny
        unit, largest = _over_largest(h)
        h_norm_squared = jnp.sum(unit * unit)

        def going(state: Any) -> jax.Array:
            _, _, _, norm_squared, k = state
            return (k < self.max_steps) & (norm_squared > self.tol**2 * h_norm_squared)

        def step(state: Any) -> Any:
            u, residual, direction, norm_squared, k = state
            image = gram @ direction + lam * direction
            # The quadratic form is at least λ|p|²; below that it is rounding noise.
            least = jnp.maximum(lam * jnp.sum(direction * direction), tiny)
            length = norm_squared / jnp.maximum(jnp.sum(direction * image), least)
            u = u + length * direction
            residual = residual - length * image
            new_norm_squared = jnp.sum(residual * residual)
            momentum = new_norm_squared / jnp.maximum(norm_squared, tiny)
            return u, residual, residual + momentum * direction, new_norm_squared, k + 1

        zero = jnp.zeros_like(h)
        state = (zero, unit, unit, h_norm_squared, jnp.zeros((), jnp.int32))
        # Not differentiable: callers put the fit behind stop_gradient.
        u, _, _, norm_squared, steps = lax.while_loop(going, step, state)
        # A norm that is NaN ends the loop as a small one does, and must not pass for one.
        u = jnp.where(jnp.isfinite(norm_squared), largest * u, jnp.nan)
        return Solution(
            -u,
            u / (lam * h.shape[1]),
            -1.0 / lam,
            steps,
            jnp.sqrt(norm_squared / jnp.maximum(h_norm_squared, tiny)),
            jnp.ones((), h.dtype),
        )


@pytree
class Recursion(Solver):
    """The published iterations of the ν-method and Landweber, as they are.

    A reference: :class:`Krylov` gives the same estimate in a fraction of the products. Values at
    the samples and coefficients are iterated side by side, since ``a ζ + K c`` cancels (1.7e-4
    against 2e-6 in float32 after 100 steps).

    Raises:
        TypeError: at a fit, for another regularizer than the two.

    Cost: num_steps + 32 products with the Gram operator: 33 that find its largest eigenvalue,
    fewer where n d is below 32, and one for each step but the first. ``info.steps`` is num_steps.

    Example::

        from numpyro_kscore.regularizers import NuMethod
        from numpyro_kscore.solvers import Recursion

        score = ScoreEstimator(regularizer=NuMethod(45), solver=Recursion()).fit(samples)
        score.info.steps  # 45
    """

    def check(self, regularizer: Regularizer) -> None:
        if not isinstance(regularizer, NuMethod | LandweberIteration):
            self._reject("NuMethod(…) or LandweberIteration(…)", regularizer)

    def solve(self, gram: Operator, h: jax.Array, regularizer: Regularizer) -> Solution:
        self.check(regularizer)
        spectrum = lax.stop_gradient(Krylov().decompose(gram, h, 32))
        rho = spectral_scale(gram, largest_eigenvalue(gram, spectrum), regularizer)
        n = h.shape[1]
        if isinstance(regularizer, NuMethod):
            momentum, omega = (jnp.asarray(x, h.dtype) for x in regularizer.coefficients())
        else:
            eta = jnp.asarray(regularizer.step_size, h.dtype)  # type: ignore[attr-defined]
            omega = jnp.full(regularizer.num_steps, eta)  # type: ignore[attr-defined]
            momentum = jnp.zeros_like(omega)

        # With K/(n ρ) in place of K/n and h/ρ in place of h:
        #   s_t = s_(t-1) + u_t (s_(t-1) - s_(t-2)) - ω_t (h + K s_(t-1)/n)/ρ,
        # and the same for the a and c of s = a ζ + Σ_j K(·, x_j) c_j. The first step is written
        # out: it has no product, and a product with a zero array is miscompiled on CPU.
        def step(carry: Any, ut_wt: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            s, s_old, c, c_old, a, a_old = carry
            u, w = ut_wt
            s_new = s + u * (s - s_old) - w / rho * (h + gram @ s)
            c_new = c + u * (c - c_old) - w / (rho * n) * s
            a_new = a + u * (a - a_old) - w / rho
            return (s_new, s, c_new, c, a_new, a), None

        a = -omega[0] / rho
        zero = jnp.zeros_like(h)
        carry = (a * h, zero, zero, zero, a, jnp.zeros_like(a))
        (s, _, c, _, a, _), _ = lax.scan(step, carry, (momentum[1:], omega[1:]))
        steps = jnp.asarray(regularizer.num_steps)  # type: ignore[attr-defined]
        return Solution(s, c, a, steps, jnp.zeros((), h.dtype), rho)
