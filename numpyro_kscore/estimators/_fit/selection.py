"""Automatic selection of strength and bandwidth, by held-out score matching.

The samples are dealt into two halves. A fit to one is judged at the other by the score-matching
loss ``J = E[½|ŝ|² + div ŝ]``, which is the error ``½ E|ŝ - s|²`` up to a constant and needs no
density. A fit is one Krylov space whatever the filter, and fields and divergences are linear: those
of the basis of the space at the held-out points give the losses of a whole path of filters, at
about the cost of the fit itself.

Of all members whose loss is within one standard error of the least, the strongest regularization
is found: held-out losses are noisy, and too little regularization costs far more than too much.
That suits half of the samples; for all of them a weaker member is selected
(benchmarks/results/2026-11-27-automatic-choice.md).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from numpyro_kscore._util.sharding import by_rows
from numpyro_kscore.estimators._base.copies import deal, effective_number, find_copies
from numpyro_kscore.estimators._fit.info import Selection
from numpyro_kscore.estimators._fit.path import (
    FEWEST_POINTS,
    SELECTION_POINTS,
    PathMember,
    path_for,
    pick,
    pick_unseen,
)
from numpyro_kscore.estimators._fit.settings import FitSettings
from numpyro_kscore.estimators._operators.features import Rows
from numpyro_kscore.kernels._gram import Gram, make_gram
from numpyro_kscore.kernels._pairwise import along_differences, cancels, squared_distances
from numpyro_kscore.solvers._spectrum import Decomposer, spectral_scale


def pair_distances(
    points: jax.Array, direct: jax.Array, sharding: NamedSharding | None
) -> jax.Array:
    """Squared distances of all pairs of samples, (n, n), each device the rows of its own."""
    return by_rows(lambda y, x: squared_distances(y, *x), sharding, points, (points, direct))


# Largest number of pairs times vectors that are worked on at once.
VECTOR_PAIRS = 2**19
# Dimensions up to which one product with moments costs less than weights for each vector.
FEW_DIMENSIONS = 3


def _held_out_losses(
    settings: FitSettings,
    path: PathMember,
    rows: Rows,
    halves: tuple[jax.Array, jax.Array],
    dim: int,
    bandwidth: jax.Array,
) -> jax.Array:
    """Loss of every member of the path at every sample, from the half it is not in: (p, 2 m).

    In the coordinates of the kernel, and less the loss of the base.
    """
    points, base, factors = rows.in_units(bandwidth)
    left_out = base
    if base is not None and factors is not None:
        left_out = base * factors[:, None]
    scale, sharding = settings.scale(dim, bandwidth), settings.sharding

    def stacked(rows: Rows, order: tuple[jax.Array, ...]) -> Rows:
        return jax.tree.map(lambda a: jnp.stack([a[half] for half in order]), rows)

    # One condition for both halves: under vmap, conditions of their own would run both branches.
    direct = cancels(points)

    def fold(own: Rows, other: Rows) -> jax.Array:
        x = own.points
        s = pair_distances(x, direct, sharding)
        gram = make_gram(settings.kernel, x, s, scale, dim, settings.normalize, sharding=sharding)
        solver: Any = settings.solver
        return _path_losses(gram, path, solver, own.base_scores, other, direct)

    own, other = Rows(points, base), Rows(points, left_out)
    values = jax.vmap(fold)(stacked(own, halves), stacked(other, halves[::-1]))
    return jnp.concatenate([values[0], values[1]], axis=1)


def _path_losses(
    gram: Gram,
    path: PathMember,
    solver: Decomposer,
    base: jax.Array | None,
    other: Rows,
    direct: jax.Array,
) -> jax.Array:
    """Loss, less that of the base, of every member fitted on ``gram``, at other rows: (p, m)."""
    y, y_base, _ = other
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
    vectors = jnp.swapaxes(spectrum.basis, 1, 2)
    weights = jnp.concatenate([-filters.g0[:, None], -filters.r / n * spectrum.coordinates], axis=1)

    def own(rows: jax.Array, whole: Any) -> tuple[jax.Array, jax.Array]:
        kernel, x, scale, base, vectors, direct = whole
        part = Gram(x, kernel, scale, None, gram.dim)
        fields, divergences = _fields(part, base, vectors, rows, direct)
        return jnp.swapaxes(fields, 0, 1), divergences.T

    if gram.sharding is None:
        fields, divergences = _fields(gram, base, vectors, y, direct)
    else:
        whole = (gram.kernel, gram.points, gram.scale, base, vectors, direct)
        by_point = by_rows(own, gram.sharding, y, whole)
        fields, divergences = jnp.swapaxes(by_point[0], 0, 1), by_point[1].T
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


# Fewest Krylov steps of an estimate whose strength is chosen here: from the samples the selection
# uses, and from more of them. 20 steps leave unconverged, and thereby large, an estimate that bears
# little regularization: an arc in eight dimensions loses 10 % at 1000 samples, a spiral has errors
# of 14 for 1.2 at 10 000 (docs/accuracy).
STEPS, STEPS_OF_MANY = 32, 48


def choose(
    settings: FitSettings, rows: Rows, dim: int, bandwidths: jax.Array, num_samples: int
) -> tuple[Selection, PathMember]:
    """The bandwidth among some, (b,), the strength if it is open, and their regularizer.

    At most 2048 of the samples are used, evenly spaced. They are in standardized units; where they
    are rotated into their span, (n, k), the space still has ``dim`` dimensions. ``num_samples`` is
    the number of those that the operator of the estimate is averaged over.
    """
    unchosen = path_for(settings.regularizer, dim, settings.normalize)
    stride, tried = -(-rows.points.shape[0] // SELECTION_POINTS), bandwidths
    rows = jax.tree.map(lambda a: a[::stride], rows)
    n = rows.points.shape[0]
    if n < FEWEST_POINTS:
        return pick_unseen(unchosen, tried, rows.points.dtype)

    # A selection has no derivative, and its input is not differentiated either.
    rows, bandwidths = lax.stop_gradient((rows, bandwidths))
    own = find_copies(rows.points)
    first, second, counted = deal(own)
    # Losses are at samples of the second half, then of the first.
    counted, source = counted[::-1].ravel(), own[jnp.concatenate([second, first])]
    number = jnp.sum(counted.astype(rows.points.dtype))

    def losses(bandwidth: jax.Array) -> jax.Array:
        values = _held_out_losses(settings, unchosen, rows, (first, second), dim, bandwidth)
        # Fields are in units of the inverse bandwidth. In units of the first one losses can be
        # compared, and their squares neither underflow nor overflow.
        return values * (bandwidths[0] / bandwidth) ** 2

    values = lax.map(losses, bandwidths)
    # Losses that are not finite are never selected.
    values = jnp.where(jnp.isfinite(values), values, jnp.inf)
    mean = jnp.sum(jnp.where(counted, values, 0.0), axis=2) / number

    def error(members: jax.Array, rows: jax.Array) -> jax.Array:
        differences = values - values[rows, members][:, None]
        center = jnp.sum(jnp.where(counted, differences, 0.0), axis=2, keepdims=True) / number
        centered = jnp.where(counted, differences - center, 0.0)
        # Copies are one observation.
        totals = jax.ops.segment_sum(jnp.moveaxis(centered, 2, 0), source, n)
        return jnp.sqrt(jnp.sum(jnp.square(totals), axis=0)) / number

    growth = max(num_samples / n, 1.0)
    selection, member = pick(unchosen, mean, error, tried, growth)
    selection = selection._replace(distinct=effective_number(own))
    steps = STEPS_OF_MANY if growth > 1 else STEPS
    return selection, dataclasses.replace(member, least_steps=steps)
