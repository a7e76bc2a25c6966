"""Filters of the Gram operator through its eigenpairs, or the Ritz pairs of a Krylov space."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from numpyro_kscore._util.divided_differences import (
    Pairs,
    divided_differences,
    sum_of_functions,
    with_slopes,
)
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._operator import Operator, Solution


@pytree
class Spectrum:
    """Eigenpairs of ``K/n`` in which a vector h is expanded: all of them, or Ritz pairs.

    With p_k the entries of ``basis``, ``f(K/n) h`` is ``Σ_k f(σ_k) coordinates_k p_k``. All
    eigenvectors of a scalar kernel are those of one coordinate, shared by all.

    Attributes:
        sigma: eigenvalues, (k,).
        basis: orthonormal, (k, d, n), or (k, 1, n) where coordinates share it.
        coordinates: of h in that basis, (1, k) or (d, k).
        last_link: (k,), the contribution of each pair to the residual of the Krylov space; zeros
            for all eigenpairs.
    """

    sigma: jax.Array
    basis: jax.Array
    coordinates: jax.Array
    last_link: jax.Array

    def apply(self, factors: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """``Σ_k factors_k coordinates_k p_k`` as an array of ``shape`` (d, n)."""
        return jnp.tensordot(factors * self.coordinates, self.basis, 1).reshape(shape)

    def solution(self, gram: Operator, regularizer: Regularizer, steps: int) -> Solution:
        """Evaluate one filter on this spectrum."""
        n, dim = gram.points.shape
        sigma = jnp.maximum(self.sigma, 0.0)
        rho = spectral_scale(gram, jnp.max(sigma), regularizer)
        g, g0, r = regularizer.rescaled(sigma, rho)
        # For Tikhonov this is the relative residual of the linear system, exactly; for the other
        # filters the same expression estimates how much a larger space would still change.
        residual = jnp.abs(jnp.sum(self.last_link * g))
        return Solution(
            self.apply(-g, (dim, n)),
            self.apply(-r / n, (dim, n)),
            -g0,
            jnp.asarray(steps),
            residual,
            rho,
        )


def spectral_scale(gram: Operator, sigma_max: jax.Array, regularizer: Regularizer) -> jax.Array:
    """ρ ≥ 1 such that the spectrum of ``K/(n ρ)`` lies within the filter's bound.

    The largest Ritz value may fall a little short of the largest eigenvalue, hence the 1 %
    margin; the norm of K(x, x) is a bound that needs none.
    """
    bound = regularizer.spectral_bound
    if bound is None:
        return jnp.ones((), sigma_max.dtype)
    largest = jnp.minimum(1.01 * sigma_max, gram.norm_bound)
    return jnp.maximum(1.0, largest / bound).astype(sigma_max.dtype)


class Decomposer(Protocol):
    """A solver that finds eigenpairs in which a vector is expanded."""

    @property
    def num_steps(self) -> int | None: ...

    def decompose(self, gram: Operator, h: jax.Array, num_steps: int) -> Spectrum: ...


def largest_eigenvalue(gram: Operator, spectrum: Spectrum) -> jax.Array:
    """The largest eigenvalue, computed again so that it has the derivative of an eigenvalue."""
    vector = lax.stop_gradient(spectrum.basis[jnp.argmax(spectrum.sigma)])
    return jnp.sum(vector * (gram @ vector))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def apply_filter(
    num_steps: int, solver: Decomposer, gram: Operator, h: jax.Array, regularizer: Regularizer
) -> Solution:
    """The filter applied to h, (d, n), through the spectrum that the solver finds.

    ``num_steps`` is the dimension of the Krylov space; 0 stands for all eigenpairs.

    Its derivative is that of the filtered vector (:mod:`numpyro_kscore._util.divided_differences`),
    to the accuracy of the Krylov spaces; the residual is not differentiated.
    """
    spectrum = solver.decompose(gram, h, num_steps)
    return spectrum.solution(gram, regularizer, min(num_steps, h.size))


def _pushforward(f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """The derivative of ``f(*primals)`` along tangents that are not zero; None if all are.

    Zero tangents are left out: XLA on CPU may turn products with zeros into garbage.
    """
    leaves, structure = jax.tree.flatten(primals)
    directions = jax.tree.leaves(tangents)
    moving = [k for k, t in enumerate(directions) if not isinstance(t, SymbolicZero)]
    if not moving:
        return None

    def of_moving(*moved: jax.Array) -> Any:
        changed = list(leaves)
        for k, leaf in zip(moving, moved, strict=True):
            changed[k] = leaf
        return f(*jax.tree.unflatten(structure, changed))

    return jax.jvp(of_moving, [leaves[k] for k in moving], [directions[k] for k in moving])[1]


@partial(apply_filter.defjvp, symbolic_zeros=True)
def _apply_filter_jvp(num_steps: int, primals: Any, tangents: Any) -> tuple[Solution, Solution]:
    solver, gram, h, regularizer = primals
    _, gram_dot, h_dot, regularizer_dot = tangents
    n = gram.points.shape[0]
    spectrum = solver.decompose(gram, h, num_steps)
    solution = spectrum.solution(gram, regularizer, min(num_steps, h.size))
    rho = solution.spectral_scale
    sigma = _positive(spectrum.sigma)

    # The change of the filter at a fixed spectrum.
    def filtered(gram: Operator, regularizer: Regularizer) -> tuple[jax.Array, ...]:
        rho = spectral_scale(gram, largest_eigenvalue(gram, spectrum), regularizer)
        g, g0, r = regularizer.rescaled(sigma, rho)
        images = jnp.stack([spectrum.apply(-g, h.shape), spectrum.apply(-r / n, h.shape)])
        return images, -g0, rho

    own = _pushforward(filtered, (gram, regularizer), (gram_dot, regularizer_dot))

    # The change of the operator and the vector at a fixed filter.
    def functions(sigma: jax.Array) -> jax.Array:
        g, _, r = regularizer.rescaled(sigma, rho)
        return jnp.stack([-g, -r / n])

    moved = partial(_moved, num_steps, solver) if num_steps else _moved_by_all_pairs
    images = moved(gram, h, spectrum, sigma, functions, gram_dot, h_dot)
    zero = jnp.zeros_like(rho)
    of_filter, *scalars = (None, zero, zero) if own is None else own
    parts = [part for part in (of_filter, images) if part is not None]
    total = sum(parts[1:], parts[0]) if parts else jnp.zeros((2, *h.shape), h.dtype)
    steps = np.zeros(solution.steps.shape, jax.dtypes.float0)
    derivative = Solution(total[0], total[1], scalars[0], steps, zero, scalars[1])  # type: ignore[arg-type]
    return solution, derivative


def _positive(sigma: jax.Array) -> jax.Array:
    """Eigenvalues lifted off zero by rounding: filters that clip at zero have a slope there."""
    return jnp.maximum(sigma, jnp.finfo(sigma.dtype).eps * jnp.max(sigma))


def _moved(
    num_steps: int,
    solver: Decomposer,
    gram: Operator,
    h: jax.Array,
    spectrum: Spectrum,
    theta: jax.Array,
    functions: Callable[[jax.Array], jax.Array],
    gram_dot: Any,
    h_dot: Any,
) -> jax.Array | None:
    """``Σ_j β_j f[A, θ_j] dA y_j + f(A) dh``, each term in a Krylov space of its own: (2, d, n)."""

    # Checkpointed: reverse mode would keep a matrix of pairs for each vector.
    @jax.checkpoint
    def image(vector: jax.Array) -> Any:
        return _pushforward(lambda gram: gram @ vector, (gram,), (gram_dot,))

    at_theta = with_slopes(functions, theta)
    vectors = []
    if any(not isinstance(t, SymbolicZero) for t in jax.tree.leaves(gram_dot)):
        vectors.append(spectrum.coordinates[0][:, None, None] * lax.map(image, spectrum.basis))
    if not isinstance(h_dot, SymbolicZero):
        vectors.append(h_dot[None])
    if not vectors:
        return None

    def decompose(v: jax.Array) -> Pairs:
        own = solver.decompose(gram, v, num_steps)
        return Pairs(_positive(own.sigma), own.coordinates[0], own.basis)

    def all_functions(sigma: jax.Array) -> jax.Array:
        at_sigma = with_slopes(functions, sigma)
        columns = []
        if len(vectors) == 2 or isinstance(h_dot, SymbolicZero):
            columns.append(divided_differences(sigma, at_sigma, theta, at_theta))
        if not isinstance(h_dot, SymbolicZero):
            columns.append(at_sigma.values[:, :, None])
        return jnp.concatenate(columns, axis=2)

    return sum_of_functions(decompose, all_functions, jnp.concatenate(vectors), 0.0 * h)


def _moved_by_all_pairs(
    gram: Operator,
    h: jax.Array,
    spectrum: Spectrum,
    sigma: jax.Array,
    functions: Callable[[jax.Array], jax.Array],
    gram_dot: Any,
    h_dot: Any,
) -> jax.Array | None:
    """The same from all eigenpairs, in which every vector can be expanded."""
    at_sigma = with_slopes(functions, sigma)
    basis = spectrum.basis.reshape(len(sigma), -1)
    terms = []
    matrix_dot = _pushforward(lambda gram: gram.dense(), (gram,), (gram_dot,))
    if matrix_dot is not None:
        differences = divided_differences(sigma, at_sigma, sigma, at_sigma)
        mixed = differences * (basis @ matrix_dot @ basis.T)
        terms.append(jnp.einsum("qij,cj->qci", mixed, spectrum.coordinates))
    if not isinstance(h_dot, SymbolicZero):
        coordinates = h_dot.reshape(-1, basis.shape[1]) @ basis.T
        terms.append(at_sigma.values[:, None, :] * coordinates)
    if not terms:
        return None
    return (sum(terms[1:], terms[0]) @ basis).reshape(2, *h.shape)


class Solver:
    """Applies filters of ``K/n``; subclasses implement :meth:`check` and :meth:`solve`.

    Example::

        from numpyro_kscore import pytree, static
        from numpyro_kscore.regularizers import Tikhonov
        from numpyro_kscore.solvers import Solution, Solver


        @pytree
        class Richardson(Solver):
            num_steps: int = static(default=100)

            def check(self, regularizer):
                if not isinstance(regularizer, Tikhonov):
                    raise TypeError(f"regularizer: expected Tikhonov(lam); got {regularizer!r}")

            def solve(self, gram, h, regularizer):
                lam = regularizer.lam
                u = h / (gram.norm_bound + lam)
                for _ in range(self.num_steps):
                    rest = h - gram @ u - lam * u
                    u = u + rest / (gram.norm_bound + lam)
                steps = jnp.array(self.num_steps)
                residual = jnp.linalg.norm(rest) / jnp.linalg.norm(h)
                return Solution(-u, u / (lam * h.shape[1]), -1 / lam, steps, residual, jnp.ones(()))


        score = ScoreEstimator(regularizer=Tikhonov(0.1), solver=Richardson()).fit(samples)
    """

    def check(self, regularizer: Regularizer) -> None:
        """Raise ``TypeError`` if this solver cannot apply ``regularizer``."""
        raise NotImplementedError

    def solve(self, gram: Operator, h: jax.Array, regularizer: Regularizer) -> Solution:
        """Apply the filter to ``h``, shape (d, n), one coordinate a row."""
        raise NotImplementedError

    def _reject(self, expected: str, regularizer: Regularizer) -> None:
        raise TypeError(
            f"regularizer: expected {expected} with solver={type(self).__name__}(); "
            f"got {type(regularizer).__name__}"
        )
