"""Automatic choice of the regularisation and the bandwidth, by held-out score matching.

The samples are dealt into two halves. A fit to one is judged at the other by the score-matching
loss ``J = E[½|ŝ|² + div ŝ]``, which is the error ``½ E|ŝ - s|²`` up to a constant and needs no
density. A fit is one Krylov space whatever the filter, and fields and divergences are linear, so
that the fields of the space's basis at the held-out points give the loss of every member of a
path of filters: the whole curve costs about as much as the fit it is made for.

Of all members whose loss is within one standard error of the least, the strongest regularisation
is chosen: held-out losses are noisy, and too little regularisation costs far more than too much
(docs/accuracy).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._pytree import check_positive, pytree, static
from numpyro_kscore.gram import Gram, make_gram
from numpyro_kscore.kernels import Kernel
from numpyro_kscore.pairwise import along_differences, cancels, squared_distances
from numpyro_kscore.regularizers import Filter, Regularizer, Tikhonov
from numpyro_kscore.solvers import Krylov
from numpyro_kscore.spectrum import spectral_scale

__all__ = ["AutoBandwidth", "Choice", "Chosen", "HeldOut", "choose"]

# More samples than these are not looked at for the choice: half of them in a fit.
CHOICE_POINTS = 2048
# Weights of pairs, times vectors, that are worked on at once.
VECTOR_PAIRS = 2**19
# Up to so many dimensions weights times moments cost less than weights of each vector's own.
FEW_DIMENSIONS = 3
# With fewer there is nothing to hold out.
FEWEST_POINTS = 4


@pytree
class AutoBandwidth:
    """Bandwidth rule: the multiple of the median distance with the least held-out loss.

    Args:
        factors: positive multiples that are tried; each costs as much as the fit itself.
    """

    factors: tuple[float, ...] = static(default=(1.0, 2.0, 4.0))

    def __post_init__(self) -> None:
        # A static field must be hashable, which lists and arrays are not.
        factors = tuple(float(factor) for factor in np.atleast_1d(self.factors))
        if not factors:
            raise ValueError("factors: expected at least one multiple; got none")
        check_positive("factors", np.array(factors))
        object.__setattr__(self, "factors", factors)


class Choice(NamedTuple):
    """What an automatic choice saw, b bandwidths by p strengths.

    Attributes:
        strengths: λ or the number of steps, (p,), strongest first; the first stands for the base
            score alone (λ = ∞, no steps).
        bandwidths: in standardised units, (b,).
        loss: held-out score-matching loss less that of the base, in standardised units, (b, p);
            infinite where it is not finite, NaN for fewer than 4 samples, which are not judged.
        standard_error: of the loss's difference from the least at that bandwidth, (b, p).
        row: index of the chosen bandwidth.
        column: index of the chosen strength.
    """

    strengths: jax.Array
    bandwidths: jax.Array
    loss: jax.Array
    standard_error: jax.Array
    row: jax.Array
    column: jax.Array

    @property
    def strength(self) -> jax.Array:
        """The chosen λ or number of steps."""
        return _entry(self.strengths, self.column)

    @property
    def bandwidth(self) -> jax.Array:
        """The chosen bandwidth, in standardised units."""
        return _entry(self.bandwidths, self.row)


def _entry(values: jax.Array, index: jax.Array) -> jax.Array:
    """``values[index]``, also where ``vmap`` has put axes in front of both."""
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]


class HeldOut(NamedTuple):
    """A problem a choice is made for, in standardised coordinates.

    Attributes:
        points: (n, k), perhaps rotated into their span.
        base_scores: s0 at the samples, (n, k), or None.
        factors: what turns s0 at a sample into s0 fitted without it, (n,), or None.
        dim: dimension d of the space, at least k.
    """

    points: jax.Array
    base_scores: jax.Array | None
    factors: jax.Array | None
    dim: int


@pytree
class Chosen(Regularizer):
    """One member of the path of an automatic choice; the first is "no estimate but the base".

    Attributes:
        family: the regulariser whose strength was left open.
        index: which member, an integer; 0 is the zero filter.
        bound: as for :meth:`Regularizer.path`.
    """

    family: Regularizer
    index: jax.Array
    bound: float | None = static(default=None)

    @property
    def spectral_bound(self) -> Any:
        return self.family.spectral_bound

    def krylov_steps(self, bound: float | None) -> int:
        return self.family.krylov_steps(bound)

    def evaluate(self, sigma: jax.Array) -> Filter:
        return jax.tree.map(lambda rows: rows[self.index], self._path(sigma))

    def rescaled_path(self, sigma: jax.Array, rho: jax.Array) -> Filter:
        """All members, the filters ``g(σ/ρ)/ρ``: (p, k), g0 (p,)."""
        g, g0, r = self._path(sigma / rho)
        return Filter(g / rho, g0 / rho, r / rho**2)

    def _path(self, sigma: jax.Array) -> Filter:
        path = self.family.evaluate_path(sigma, self.bound)
        return jax.tree.map(lambda rows: jnp.concatenate([0.0 * rows[:1], rows]), path)


def choose(
    kernel: Kernel,
    family: Regularizer,
    solver: Krylov,
    problem: HeldOut,
    bandwidths: jax.Array,
    normalize: bool,
) -> tuple[Choice, Chosen]:
    """Choose a bandwidth among some, and the strength if ``family`` leaves it open.

    Args:
        kernel: the kernel at unit bandwidth.
        family: a regulariser, its strength ``"auto"`` or not.
        solver: whose Krylov space is used.
        problem: the samples; the choice uses at most 2048 of them, evenly spaced.
        bandwidths: what is tried, (b,), in standardised units.
        normalize: whether the kernel is divided by its trace.

    Returns:
        The choice, and the regulariser it amounts to.
    """
    bound = 1.0 / problem.dim if normalize else None
    unchosen = Chosen(family, jnp.asarray(0), bound)
    dtype = problem.points.dtype
    strengths = _strengths(family, bound, dtype)
    n = problem.points.shape[0]
    stride, tried = -(-n // CHOICE_POINTS), bandwidths
    problem = jax.tree.map(lambda a: a[::stride] if jnp.ndim(a) else a, problem)

    if problem.points.shape[0] < FEWEST_POINTS:
        # Nothing can be held out: the strongest member that estimates at all.
        shape = (bandwidths.shape[0], strengths.shape[0])
        unknown = jnp.full(shape, jnp.nan, dtype)
        index = jnp.asarray(1)
        choice = Choice(strengths, tried, unknown, unknown, jnp.asarray(0), index)
        return choice, dataclasses.replace(unchosen, index=index)

    def losses(bandwidth: jax.Array) -> jax.Array:
        values = _held_out_losses(kernel, unchosen, solver, problem, bandwidth, normalize)
        # Fields are in units of the inverse bandwidth. In units of the first one losses can be
        # compared, and their squares neither underflow nor overflow.
        return values * (bandwidths[0] / bandwidth) ** 2

    # A choice has no derivative, and what it is made from is not differentiated either.
    problem, bandwidths = lax.stop_gradient((problem, bandwidths))
    values = lax.map(losses, bandwidths)
    # What is not finite is never chosen.
    values = jnp.where(jnp.isfinite(values), values, jnp.inf)
    loss = jnp.mean(values, axis=2)
    # The base alone is a member of the path only where its strength is open.
    admissible = loss if family.is_auto else loss.at[:, 0].set(jnp.inf)
    row = jnp.argmin(jnp.min(admissible, axis=1))
    least = jnp.argmin(admissible, axis=1)
    best = jnp.take_along_axis(values, least[:, None, None], axis=1)
    error = jnp.std(values - best, axis=2) / values.shape[2] ** 0.5
    error = jnp.where(jnp.isfinite(error), error, jnp.inf)
    within = admissible[row] - admissible[row, least[row]] <= error[row]
    within = within & jnp.isfinite(admissible[row])
    # Where nothing is finite, the strongest there is.
    index = jnp.where(jnp.any(within), jnp.argmax(within), 0 if family.is_auto else 1)
    unit = bandwidths[0] ** 2
    choice = Choice(strengths, tried, loss / unit, error / unit, row, index)
    return choice, dataclasses.replace(unchosen, index=index)


def _strengths(family: Regularizer, bound: float | None, dtype: Any) -> jax.Array:
    path = [member.strength() for member in family.path(bound)]
    nothing = jnp.inf if isinstance(family, Tikhonov) else 0.0
    return jnp.stack([jnp.asarray(value, dtype) for value in (nothing, *path)])


def _held_out_losses(
    kernel: Kernel,
    path: Chosen,
    solver: Krylov,
    problem: HeldOut,
    bandwidth: jax.Array,
    normalize: bool,
) -> jax.Array:
    """Loss of every member of the path at every sample, from the half it is not in: (p, 2 m).

    In the coordinates of the kernel, and less the loss of the base.
    """
    points = problem.points / bandwidth
    base = None if problem.base_scores is None else problem.base_scores * bandwidth
    left_out = base
    if base is not None and problem.factors is not None:
        left_out = base * problem.factors[:, None]
    scale = jnp.asarray(1.0 / kernel.trace(problem.dim), points.dtype)
    if not normalize:
        scale = jnp.asarray(bandwidth ** -kernel.scale_exponent(), points.dtype)

    # Dealt in turn: samples that come sorted, or in batches, then look alike in both halves.
    m = points.shape[0] // 2
    halves = (slice(0, 2 * m, 2), slice(1, 2 * m, 2))

    def stacked(a: Any, order: tuple[slice, slice]) -> Any:
        return None if a is None else jnp.stack([a[rows] for rows in order])

    # One answer for both halves: under vmap a condition of each half's own would make both of its
    # branches run.
    direct = cancels(points)

    def fold(x: jax.Array, x_base: jax.Array | None, y: jax.Array, y_base: Any) -> jax.Array:
        gram = make_gram(kernel, x, squared_distances(x, x, direct), scale, problem.dim, normalize)
        return _path_losses(gram, path, solver, x_base, y, y_base, direct)

    swapped = halves[::-1]
    values = jax.vmap(fold)(
        stacked(points, halves),
        stacked(base, halves),
        stacked(points, swapped),
        stacked(left_out, swapped),
    )
    return jnp.concatenate([values[0], values[1]], axis=1)


def _path_losses(
    gram: Gram,
    path: Chosen,
    solver: Krylov,
    base: jax.Array | None,
    y: jax.Array,
    y_base: jax.Array | None,
    direct: jax.Array,
) -> jax.Array:
    """Loss, less that of the base, of every member fitted on ``gram``, at points y: (p, m)."""
    target = gram.zeta()
    if base is not None:
        target = target + gram @ base.T
    num_steps = solver.num_steps or path.krylov_steps(gram.spectral_bound)
    spectrum = solver.decompose(gram, target, num_steps)
    sigma = jnp.maximum(spectrum.sigma, 0.0)
    rho = spectral_scale(gram, jnp.max(sigma), path)
    filters = path.rescaled_path(sigma, rho)

    n, k = gram.points.shape
    # The estimate is a ζ' + K c, with c in the span of the Ritz vectors.
    vectors = jnp.swapaxes(spectrum.basis.reshape(-1, k, n), 1, 2)
    weights = jnp.concatenate([-filters.g0[:, None], -filters.r / n * spectrum.coordinates], axis=1)
    fields, divergences = _fields(gram, base, vectors, y, direct)
    values = jnp.einsum("pk,kmd->pmd", weights, fields)
    products = 0.5 * values * values
    if y_base is not None:
        products = products + values * y_base
    return jnp.sum(products, axis=2) + weights @ divergences


def _fields(
    gram: Gram, base: jax.Array | None, vectors: jax.Array, y: jax.Array, direct: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Fields (k+1, m, d) and divergences (k+1, m) at y of ζ' and of K applied to k vectors."""
    x, dim = gram.points, gram.dim
    n = x.shape[0]
    s = squared_distances(y, x, direct)
    of_field = jax.tree.map(lambda w: gram.scale * w, gram.kernel.field_weights(s, dim))
    of_divergence = jax.tree.map(lambda w: gram.scale * w, gram.kernel.divergence_weights(s, dim))
    factors = of_divergence.cross
    if of_divergence.along is not None:
        factors = factors + of_divergence.along * s + of_divergence.trace * dim

    m, size = y.shape
    x_one = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
    y_one = jnp.concatenate([y, -jnp.ones_like(y[:, :1])], axis=1)

    def several(c: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Few large products, not k small ones. With x_j·c_j as one more entry of c_j,
        # (y_i - x_j)·c_j is (y_i, -1)·c_j.
        count = c.shape[0]
        c = jnp.swapaxes(jnp.concatenate([c, jnp.sum(x * c, axis=2, keepdims=True)], axis=2), 0, 1)
        columns = c.reshape(n, -1)
        divergence = jnp.einsum(
            "mkb,mb->km", (factors @ columns).reshape(m, count, size + 1), y_one
        )
        field = (of_field.inner @ columns).reshape(m, count, size + 1)[:, :, :-1]
        if of_field.outer is None:
            return jnp.swapaxes(field, 0, 1), divergence
        if size <= FEW_DIMENSIONS:
            # All moments of x and c at once: no weights for each vector.
            moments = (c[:, :, :, None] * x_one[:, None, None, :]).reshape(n, -1)
            moments = (of_field.outer @ moments).reshape(m, count, size + 1, size + 1)
            sums = jnp.einsum("mkba,mb->mka", moments, y_one)
        else:
            inner = (y_one @ c.transpose(2, 1, 0).reshape(size + 1, -1)).reshape(m, count, n)
            sums = (of_field.outer[:, None, :] * inner).reshape(-1, n) @ x_one
            sums = sums.reshape(m, count, size + 1)
        field = field + y[:, None, :] * sums[:, :, -1:] - sums[:, :, :-1]
        return jnp.swapaxes(field, 0, 1), divergence

    field, divergence = (
        along_differences(of_field.zeta / n, y, x),
        jnp.mean(of_divergence.zeta_along * s + of_divergence.zeta * dim, axis=1),
    )
    if base is not None:
        (base_field,), (base_divergence,) = several(base[None] / n)
        field, divergence = field + base_field, divergence + base_divergence
    # All at once while that fits into cache.
    if vectors.shape[0] * s.size <= VECTOR_PAIRS:
        fields, divergences = several(vectors)
    else:
        fields, divergences = (part[:, 0] for part in lax.map(lambda c: several(c[None]), vectors))
    return (
        jnp.concatenate([field[None], fields]),
        jnp.concatenate([divergence[None], divergences]),
    )
