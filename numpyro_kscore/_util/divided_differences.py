"""Derivatives of a filter applied to a vector, exact also where Lanczos or ``eigh`` has none.

A Krylov space that ends early, as duplicated samples make it, and equal eigenvalues have no
derivative, and yet ``f(A) h`` has one (Higham 2008, Functions of Matrices, Theorem 3.11)::

    d f(A) h = f(A) dh + Σ_j β_j f[A, θ_j] dA y_j

for eigenpairs (θ_j, y_j) in which h has the coordinates β_j, or their Ritz pairs, where
``f[σ, θ] = (f(σ) - f(θ))/(σ - θ)`` is again a function of A. Each of the terms is applied in
a Krylov space of its own vector. The adjoint is the same functions of A of *one* vector: reverse
mode costs about as much as another fit, forward mode as many fits as the space has dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# A map from a vector v to the pairs of A that carry v.
Decompose = Callable[[jax.Array], "Pairs"]


class Pairs(NamedTuple):
    """Eigenpairs that carry a vector: f(A) v is ``Σ_i f(sigma_i) coordinates_i basis_i``."""

    sigma: jax.Array
    coordinates: jax.Array
    basis: jax.Array


class Sloped(NamedTuple):
    """Functions on a spectrum with their derivatives: (q, k) each."""

    values: jax.Array
    slopes: jax.Array


def with_slopes(functions: Callable[[jax.Array], jax.Array], sigma: jax.Array) -> Sloped:
    """Values and derivatives of functions (k,) -> (q, k) that act on each eigenvalue alone."""
    return Sloped(*jax.jvp(functions, (sigma,), (jnp.ones_like(sigma),)))


def divided_differences(
    sigma: jax.Array, at_sigma: Sloped, theta: jax.Array, at_theta: Sloped
) -> jax.Array:
    """``(f(σ_i) - f(θ_j))/(σ_i - θ_j)`` for q functions: (q, k, l)."""
    gap = sigma[:, None] - theta[None, :]
    f, slope = (a[:, :, None] for a in at_sigma)
    g, other_slope = (a[:, None, :] for a in at_theta)
    mean_slope = 0.5 * (slope + other_slope)
    # Rounding of the difference, eps f/gap, and the error of the mean slope, gap² f'''/12, are
    # alike where the functions change by this fraction.
    fraction = jnp.finfo(sigma.dtype).eps ** (1 / 3)
    largest = jnp.maximum(jnp.abs(f), jnp.abs(g))
    is_close = jnp.abs(gap) * 0.5 * (jnp.abs(slope) + jnp.abs(other_slope)) <= fraction * largest
    is_close = is_close | (gap == 0)
    return jnp.where(is_close, mean_slope, (f - g) / jnp.where(is_close, 1.0, gap))


def sum_of_functions(
    decompose: Decompose,
    functions: Callable[[jax.Array], jax.Array],
    vectors: jax.Array,
    zero: jax.Array,
) -> jax.Array:
    """``Σ_j f_qj(A) v_j`` for a symmetric A: vectors v_j (l, …) -> (q, …), linear in the vectors.

    ``decompose`` gives pairs of A that carry a vector of any shape, and ``functions`` map
    eigenvalues (k,) to f_qj, (q, k, l). ``zero`` has the shape of one vector and values unknown to
    the compiler: a product with zeros it knows is miscompiled on CPU.
    """
    number = jax.eval_shape(functions, jnp.zeros(1, vectors.dtype)).shape[0]

    def forward(vectors: jax.Array) -> jax.Array:
        def one(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            j, v = inputs
            sigma, coordinates, basis = decompose(v)
            return jnp.tensordot(functions(sigma)[:, :, j] * coordinates, basis, 1)

        return jnp.sum(lax.map(one, (jnp.arange(vectors.shape[0]), vectors)), axis=0)

    def adjoint(images: jax.Array) -> jax.Array:
        def one(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            q, w = inputs
            sigma, coordinates, basis = decompose(w)
            factors = functions(sigma)[q] * coordinates[:, None]
            return jnp.tensordot(factors.T, basis, 1)

        return jnp.sum(lax.map(one, (jnp.arange(number), images)), axis=0)

    # The maps are linear, but their code is not: a Krylov space depends on its vector. JAX accepts
    # such a map, with its transpose and under vmap, as the solution of a symmetric linear system.
    # With F the map, [[1 + FᵀF, Fᵀ], [F, 1]] has the inverse [[1, -Fᵀ], [-F, 1 + F Fᵀ]].
    count = vectors.shape[0]

    def matrix(x: jax.Array) -> jax.Array:
        total = forward(x[:count]) + x[count:]
        return jnp.concatenate([x[:count] + adjoint(total), total])

    def solve(_: object, b: jax.Array) -> jax.Array:
        rest = b[:count] - adjoint(b[count:])
        return jnp.concatenate([rest, b[count:] - forward(rest)])

    known = jnp.concatenate([vectors, *[zero[None]] * number])
    return -lax.custom_linear_solve(matrix, known, solve, symmetric=True)[count:]
