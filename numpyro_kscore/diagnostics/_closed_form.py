"""The closed form of an energy: a multiple of the model, a quadratic form, tails and skew.

The log density estimate of :mod:`numpyro_kscore.diagnostics._energy` without a kernel is ::

    α log p(z) + ½ zᵀA z + bᵀz + γ ρ(|z|²) + Σ_i [c_i t(z_i) + e_i u(z_i)]

with a heavy tail ``ρ(r) = (d/2) log(1 + r/d)`` and, for each whitened coordinate,
``u(x) = √(1 + x²)`` and ``t(x) = x u(x)``: added to a quadratic form they make the two tails of a
coordinate as different as those of a Gaussian and an exponential distribution. The free weights
minimize the score-matching loss ``E[½|ŝ|² + div ŝ]`` exactly: a Lyapunov equation for A, and a
linear system. Numbers, not structure, say which weights are free, so that one compiled program
serves every family of energies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._tracing.draws import GuideDraws

__all__ = [
    "Fields",
    "Switches",
    "Weights",
    "combine",
    "features",
    "known_laplacian",
    "solve",
    "take_rows",
]

# Ridge on a weight, as a fraction of its feature's mean square: it decides between features that
# are equal up to rounding, such as the model's log density and a quadratic form.
RIDGE = 1e-3
# Most dimensions in which coordinates have tails of their own, which take n d² numbers a fit.
LARGEST_SKEWED = 32
# Cap on √(d/n), so that the band of noise is bounded where n < d.
LARGEST_EDGE = 0.9


class Fields(NamedTuple):
    """A log density or a feature at draws: values (n,), gradients (n, d), Laplacians (n,)."""

    value: Array
    gradient: Array
    laplacian: Array


class Switches(NamedTuple):
    """The terms of the closed form that are used, as numbers.

    Attributes:
        model: the fixed α, 0 or 1; a fitted α is added to it.
        free: whether α, γ and the weights of single coordinates are fitted, 0 or 1, (3,).
        affine: whether A and b are fitted, 0 or 1.
        few: whether A keeps only directions that exceed sampling noise, 0 or 1.
    """

    model: Array
    free: Array
    affine: Array
    few: Array


class Weights(NamedTuple):
    """Weights of the closed form: α, γ, c and e in ``theta``, (k,), A, (d, d), and b, (d,)."""

    theta: Array
    matrix: Array
    vector: Array


def known_laplacian(target: GuideDraws) -> Array:
    """The model's Laplacian, (n,), or zeros if it is not known.

    Losses without it are comparable only among families with a fixed α.
    """
    if target.laplacian is None:
        return jnp.zeros_like(target.log_density)
    return target.laplacian


def take_rows(draws: GuideDraws, rows: Any) -> GuideDraws:
    """The draws of some rows: a slice, or indices or a mask, (m,) or (n,)."""

    def some(values: Array | None) -> Any:
        return None if values is None else values[rows]

    return GuideDraws(
        some(draws.samples),
        some(draws.log_density),
        some(draws.scores),
        some(draws.laplacian),
        some(draws.log_q),
        draws.num_lost,
    )


def features(target: GuideDraws) -> Fields:
    """The features that α, γ, c and e weight, with a leading axis k."""
    x = target.samples
    dim = x.shape[1]
    squared = jnp.sum(x**2, axis=1)
    first = 0.5 * dim / (dim + squared)
    second = -0.5 * dim / (dim + squared) ** 2
    parts = [
        Fields(target.log_density[None], target.scores[None], known_laplacian(target)[None]),
        Fields(
            0.5 * dim * jnp.log1p(squared / dim)[None],
            2 * first[:, None] * x[None],
            (2 * dim * first + 4 * squared * second)[None],
        ),
    ]
    if dim <= LARGEST_SKEWED:
        root = jnp.sqrt(1 + x**2)
        # Values, slopes and second derivatives of t and of u.
        sides = (x * root, root + x**2 / root, x / root * (2 + 1 / root**2))
        ends = (root, x / root, 1 / root**3)
        eye = jnp.eye(dim, dtype=x.dtype)[:, None, :]
        for value, slope, curvature in (sides, ends):
            parts.append(Fields(value.T, eye * slope, curvature.T))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def solve(target: GuideDraws, known: Fields, switches: Switches) -> Weights:
    """Minimize the score-matching loss, which is quadratic in all weights.

    Args:
        target: draws, centered.
        known: their :func:`features`.
        switches: the free weights. α is shrunk toward 1, the others toward 0, by ``RIDGE``.

    Cost: O(n d³) with weights for single coordinates.
    """
    x = target.samples
    n, dim = x.shape
    sigma, basis = jnp.linalg.eigh(x.T @ x / n)
    sigma = jnp.maximum(sigma, 10 * dim * jnp.finfo(x.dtype).eps)
    pairs = 0.5 * (sigma[:, None] + sigma[None, :])

    def lyapunov(matrix: Array) -> Array:
        # The symmetric A with ½(SA + AS) = matrix, S the covariance.
        return basis @ (basis.T @ matrix @ basis / pairs) @ basis.T

    # Gradients that A and b must balance: first that of the fixed part, then those of all features.
    gradients = jnp.concatenate([switches.model * target.scores[None], known.gradient])
    moments = jnp.einsum("knd,ne->kde", gradients, x) / n
    moments = 0.5 * (moments + jnp.swapaxes(moments, 1, 2))
    means = jnp.mean(gradients, axis=1)
    matrices = lyapunov(moments)

    flat = gradients.reshape(gradients.shape[0], -1)
    count = gradients.shape[0]
    # Products of gradients, less what A and b explain of them.
    products = flat @ flat.T / n - means @ means.T
    products = products - matrices.reshape(count, -1) @ moments.reshape(count, -1).T

    own = count - 3
    free = jnp.concatenate([switches.free[:2], jnp.broadcast_to(switches.free[2], own)])
    start = jnp.zeros(count - 1, x.dtype).at[0].set(1.0)
    size = jnp.mean(jnp.sum(known.gradient**2, axis=2), axis=1)
    size = RIDGE * jnp.where(size > 0, size, 1.0)
    traces = jnp.trace(matrices[1:], axis1=1, axis2=2)
    right = traces - jnp.mean(known.laplacian, axis=1) - products[1:, 0]
    # The equation of a weight that is not free sets it to 0.
    system = jnp.where(free[:, None] * free > 0, products[1:, 1:], 0.0) + jnp.diag(size)
    theta = jnp.linalg.solve(system, jnp.where(free > 0, right + size * start, 0.0))
    every = jnp.concatenate([jnp.ones(1, x.dtype), theta])
    matrix = lyapunov(-jnp.eye(dim, dtype=x.dtype)) - jnp.tensordot(every, matrices, 1)
    # A branch, since one family alone needs the spectrum.
    matrix = lax.cond(switches.few > 0, lambda a: _beyond_noise(a, n), lambda a: a, matrix)
    return Weights(theta, switches.affine * matrix, -switches.affine * (every @ means))


def _beyond_noise(matrix: Array, n: int) -> Array:
    """A without the eigenvalues inside the band of sampling noise.

    For a Gaussian guide that equals the model A is ``I - S⁻¹`` with S the covariance of n draws,
    whose spectrum lies within ``(1 ± √(d/n))²`` (Marchenko and Pastur 1967).
    """
    values, vectors = jnp.linalg.eigh(matrix)
    edge = min((matrix.shape[0] / n) ** 0.5, LARGEST_EDGE)
    is_noise = (values > 1 - (1 - edge) ** -2) & (values < 1 - (1 + edge) ** -2)
    return (vectors * jnp.where(is_noise, 0.0, values)) @ vectors.T


def combine(target: GuideDraws, known: Fields, weights: Weights, switches: Switches) -> Fields:
    """The log density estimate with these weights, at the draws."""
    x = target.samples
    theta = weights.theta.at[0].add(switches.model)
    field = x @ weights.matrix
    value = 0.5 * jnp.sum(x * field, axis=1) + x @ weights.vector
    return Fields(
        value + theta @ known.value,
        field + weights.vector + jnp.tensordot(theta, known.gradient, 1),
        jnp.trace(weights.matrix) + theta @ known.laplacian,
    )
