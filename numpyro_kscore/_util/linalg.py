"""Factorizations that are safe and fast on CPU.

Safe: jaxlib splits a batched LAPACK call over its own thread pool and blocks a thread of that pool
until the parts are done. Two such calls that run at once on a machine with two cores therefore
wait for each other forever (seen with jaxlib 0.10.2: two batched ``eigh`` in one program). Under
``vmap`` the functions here loop over the batch instead; the matrices are small, and a loop costs
little. Not so on a GPU, where every turn of a loop is a launch: there they are batched calls.

Fast: LAPACK's own threads (OpenBLAS's) go on spinning for a while after a call that used them, and
take the cores from everything that comes next. On two cores one such call in a step doubled the
time of whole fits (docs/performance). Calls in a step stay below the sizes
that OpenBLAS divides over threads: 1024 numbers on the right of a triangular solve, so that
triangles are inverted by blocks here; eigenproblems of 25; Cholesky factors of about 200.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.scipy.linalg import block_diag, solve_triangular

from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.platforms import on_cpu_or
from numpyro_kscore._util.precision import full_precision

F = TypeVar("F", bound=Callable[..., Any])
# Rows of a triangle that one LAPACK call inverts: 31² numbers are solved for by one thread.
BLOCK = 31


def _looped_on_cpu(fn: F) -> F:
    """``fn`` of arrays, with a loop over the batch under ``vmap`` on a CPU."""
    one, sequential = custom_vmap(fn), sequential_vmap(fn)

    @one.def_vmap
    def _rule(_: int, is_batched: list[bool], *args: jax.Array) -> Any:
        axes = [0 if flag else None for flag in is_batched]
        loop, batch = jax.vmap(sequential, axes), jax.vmap(fn, axes)
        out = on_cpu_or(loop, batch, *args)
        return out, jax.tree.map(lambda _: True, out)

    return one  # type: ignore[return-value]


def _looped(fn: F) -> F:
    """``fn`` looped over as :func:`_looped_on_cpu` does, and differentiable."""
    mapped = _looped_on_cpu(fn)
    wrapped = jax.custom_jvp(mapped)

    # custom_vmap knows no reverse mode, so derivatives are those of the plain function.
    @wrapped.defjvp
    def _rule(primals: Any, tangents: Any) -> Any:
        return wrapped(*primals), jax.jvp(fn, primals, tangents)[1]

    return wrapped  # type: ignore[return-value]


@_looped
def eigh(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues, ascending, and eigenvectors (columns) of a symmetric matrix."""
    return on_cpu_or(lambda a: tuple(jnp.linalg.eigh(a)), _first_of_two, a)


def _first_of_two(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The decomposition as one launch, since CUDA's routine for a single small matrix is many."""
    values, vectors = jnp.linalg.eigh(jnp.stack([a, a]))
    return values[0], vectors[0]


@_looped
def cholesky(a: jax.Array) -> jax.Array:
    """Lower Cholesky factor."""
    return jnp.linalg.cholesky(a)


@_looped
def qr(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reduced QR factorization."""
    q, r = jnp.linalg.qr(a)
    return q, r


@jax.custom_jvp
@full_precision
def invert_lower(factor: jax.Array) -> jax.Array:
    """The inverse of a lower triangular matrix (d, d), by blocks: d³/3 multiplications.

    As accurate as forward substitution where the inverse is used in one product. Its work is
    matrix products, which XLA divides over threads.
    """
    dim = factor.shape[0]
    if not dim:
        return factor
    count = 2 ** max(0, math.ceil(math.log2(dim / BLOCK)))
    size = -(-dim // count)
    padding = count * size - dim
    padded = block_diag(factor, jnp.eye(padding, dtype=factor.dtype))

    inverses = jax.vmap(_invert_block)(_along_diagonal(padded, size))
    while count > 1:
        count //= 2
        first, last = inverses[0::2], inverses[1::2]
        below = _along_diagonal(padded, 2 * size)[:, size:, :size]
        across = -last @ (below @ first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=2)
        inverses = jnp.concatenate([upper, jnp.concatenate([across, last], axis=2)], axis=1)
        size *= 2
    return inverses[0, :dim, :dim]


@invert_lower.defjvp
@full_precision
def _invert_lower_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    inverse = invert_lower(*primals)
    return inverse, -inverse @ (jnp.tril(tangents[0]) @ inverse)


def _along_diagonal(matrix: jax.Array, size: int) -> jax.Array:
    """Square blocks along the diagonal, (count, size, size)."""
    count = matrix.shape[0] // size
    blocks = matrix.reshape(count, size, count, size)
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=0, axis2=2), -1, 0)


@_looped_on_cpu
def _invert_block(factor: jax.Array) -> jax.Array:
    return solve_triangular(factor, jnp.eye(factor.shape[0], dtype=factor.dtype), lower=True)


@_looped_on_cpu
def solve_transposed(factor: jax.Array, vector: jax.Array) -> jax.Array:
    """x with ``factorᵀ x = vector`` (d,) for a lower triangle (d, d). Not differentiable."""
    return solve_triangular(factor, vector, trans=1, lower=True)


@jax.custom_jvp
def log_abs_det(a: jax.Array) -> jax.Array:
    """``log |det a|`` of a matrix (d, d)."""
    return jnp.sum(jnp.log(jnp.abs(jnp.diagonal(_lu(a)[0]))))


@log_abs_det.defjvp
def _log_abs_det_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    _, value, inverse = slogdet_and_inverse(*primals)
    return value, jnp.sum(inverse.T * tangents[0])


@_looped_on_cpu
@full_precision
def slogdet_and_inverse(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sign and logarithm of ``det a``, and the inverse of a matrix (d, d). Not differentiable."""
    dim = len(a)
    factors, pivots, order = lax.linalg.lu(a)
    diagonal = jnp.diagonal(factors)
    exchanges = jnp.sum(pivots != jnp.arange(dim, dtype=pivots.dtype))
    sign = jnp.prod(jnp.sign(diagonal)) * (1 - 2 * (exchanges % 2))
    eye = jnp.eye(dim, dtype=a.dtype)
    if dim <= BLOCK:
        solve = partial(lax.linalg.triangular_solve, factors, left_side=True)
        inverse = solve(solve(eye[order], lower=True, unit_diagonal=True), lower=False)
    else:
        lower = invert_lower(jnp.tril(factors, -1) + eye)
        inverse = invert_lower(jnp.triu(factors).T).T @ lower[:, jnp.argsort(order)]
    return sign, jnp.sum(jnp.log(jnp.abs(diagonal))), inverse


@_looped_on_cpu
def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return lax.linalg.lu(a)


@jax.custom_jvp
def inverse_root(a: jax.Array, shift: jax.Array, least: jax.Array) -> jax.Array:
    """W with ``W Wᵀ = (a + shift)⁻¹`` for a positive semi-definite matrix, up to a rotation.

    Columns are zero where an eigenvalue of ``a + shift`` does not exceed ``least``. The
    derivative keeps that rank and is that of W up to a rotation, so that it exists for equal
    eigenvalues too, whose eigenvectors have none.
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
    # d(W Wᵀ) = -W Wᵀ da W Wᵀ is divided evenly between the factors.
    return root, -0.5 * root @ (root.T @ change @ root)


def solve_lower_transposed(triangle: Any, vectors: Any) -> Any:
    """``x`` with ``triangleᵀ x = vector``, for triangles (..., d, d) and vectors (..., d)."""
    if namespace(triangle, vectors) is np:
        if np.ndim(triangle) == 2:
            return solve_lower(triangle, vectors, transposed=True)
        return np.linalg.solve(np.swapaxes(triangle, -1, -2), vectors[..., None])[..., 0]
    return jnp.vectorize(solve_transposed, signature="(d,d),(d)->(d)")(triangle, vectors)


def solve_lower(triangle: np.ndarray, vectors: np.ndarray, transposed: bool = False) -> np.ndarray:
    """``x`` with ``triangle x = vector`` for vectors (..., d), or by the transpose, on the host."""
    from scipy.linalg import solve_triangular as solve

    if not vectors.size:
        return vectors
    columns = np.reshape(vectors, (-1, len(triangle))).T
    found = solve(triangle, columns, trans=int(transposed), lower=True, check_finite=False)
    return found.T.reshape(vectors.shape)


def inverse_of_lower(triangles: np.ndarray) -> np.ndarray:
    """Inverses of lower triangles (..., d, d) on the host; d³/3 operations for a single one."""
    from scipy.linalg.lapack import dtrtri

    if triangles.ndim > 2 or not triangles.size or triangles.dtype != np.float64:
        return np.linalg.inv(triangles)
    inverse, _ = dtrtri(triangles, lower=1)
    return np.tril(inverse)
