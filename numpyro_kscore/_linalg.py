"""Factorisations that are safe to ``vmap`` on CPU.

jaxlib splits a batched LAPACK call over its own thread pool and blocks a thread of that pool until
the parts are done. Two such calls that run at once on a machine with two cores therefore wait for
each other for ever (seen with jaxlib 0.10.2: two batched ``eigh`` in one program). Under ``vmap``
the functions here loop over the batch instead; the matrices are small, and a loop costs little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.scipy.linalg import solve_triangular

__all__ = ["cholesky", "eigh", "inverse_root", "qr", "solve_lower", "solve_lower_transposed"]

F = TypeVar("F", bound=Callable[..., Any])


def _looped(fn: F) -> F:
    """``fn``, with its batches under ``vmap`` taken one after another."""
    sequential = sequential_vmap(fn)
    wrapped = jax.custom_jvp(lambda *args: sequential(*args))

    # sequential_vmap knows no reverse mode, so derivatives are those of the plain function.
    @wrapped.defjvp
    def _rule(primals: Any, tangents: Any) -> Any:
        return wrapped(*primals), jax.jvp(fn, primals, tangents)[1]

    return wrapped  # type: ignore[return-value]


@_looped
def eigh(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues, ascending, and eigenvectors (columns) of a symmetric matrix."""
    values, vectors = jnp.linalg.eigh(a)
    return values, vectors


@_looped
def cholesky(a: jax.Array) -> jax.Array:
    """Lower Cholesky factor."""
    return jnp.linalg.cholesky(a)


@_looped
def qr(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reduced QR factorisation."""
    q, r = jnp.linalg.qr(a)
    return q, r


@_looped
def solve_lower(factor: jax.Array, b: jax.Array) -> jax.Array:
    """``factor⁻¹ b`` for a lower triangular factor."""
    return solve_triangular(factor, b, lower=True)


@_looped
def solve_lower_transposed(factor: jax.Array, b: jax.Array) -> jax.Array:
    """``factor⁻ᵀ b`` for a lower triangular factor."""
    return solve_triangular(factor, b, lower=True, trans=1)


@jax.custom_jvp
def inverse_root(a: jax.Array, shift: jax.Array, least: jax.Array) -> jax.Array:
    """W with ``W Wᵀ = (a + shift)⁻¹`` for a positive semi-definite matrix, up to a rotation.

    Columns are zero where an eigenvalue of ``a + shift`` does not exceed ``least``. The
    derivative keeps to that rank, and is that of W up to a rotation: equal eigenvalues, whose
    eigenvectors have none, do not matter.
    """
    sigma, vectors = eigh(a)
    sigma = jnp.maximum(sigma, 0.0) + shift
    # A NaN is kept: it must not look like a direction left out.
    keep = ~(sigma <= least)
    return vectors * jnp.where(keep, lax.rsqrt(jnp.where(keep, sigma, 1.0)), 0.0)


@inverse_root.defjvp
def _inverse_root_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    a, shift, _ = primals
    root = inverse_root(*primals)
    change = tangents[0] + tangents[1] * jnp.eye(a.shape[0], dtype=a.dtype)
    # d(W Wᵀ) = -W Wᵀ da W Wᵀ is shared out evenly.
    return root, -0.5 * root @ (root.T @ change @ root)
