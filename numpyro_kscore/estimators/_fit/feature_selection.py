"""Automatic choice of the strength for random features, by held-out score matching.

The loss ``J = E[½|f|² + f·s0 + div f]`` of ``f = J(·)ᵀ w`` is ``½ wᵀ A w + w·h`` in the moments of
the samples it is an expectation over. So a fit to even samples is judged at all odd ones, however
many, and the other way round, without another pass; the path of strengths goes on to weaker ones
than a choice among 2048 samples could tell apart. The spread of the loss, for the rule of one
standard error, is that at a few samples.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
from numpyro_kscore.estimators._operators.feature_span import FeatureSpan, draw_features, make_span
from numpyro_kscore.estimators._operators.features import FeatureMoments, Features, Rows
from numpyro_kscore.estimators._operators.operator_options import RandomFeatures
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._spectrum import Decomposer, Solver, spectral_scale


def span_features(
    settings: FitSettings, rows: Rows, bandwidths: jax.Array
) -> tuple[Selection | None, Regularizer, FeatureSpan]:
    """Bandwidth and strength, if they are selected, with the regularizer and the operator.

    Each of several candidates for the bandwidth, (b,), costs a pass over the samples, which are in
    standardized units.
    """
    options: RandomFeatures = settings.features  # type: ignore[assignment]
    n, dim = rows.points.shape
    dealt, own = rows, jnp.arange(n)
    if settings.is_auto:
        # Even and odd samples are the halves.
        own = find_copies(rows.points)
        halves = deal(own, n)
        turns = jnp.stack(halves[:2], axis=1).ravel()
        dealt = jax.tree.map(lambda a: a.at[: turns.shape[0]].set(a[turns]), rows)

    def span(bandwidth: jax.Array) -> FeatureSpan:
        features = draw_features(options, settings.kernel, settings.scale(dim, bandwidth), dim)
        units = dealt.in_units(bandwidth)
        return make_span(features, units, options.operator_samples, settings.normalize)

    def in_order(found: FeatureSpan, bandwidth: jax.Array) -> FeatureSpan:
        return dataclasses.replace(found, rows=rows.in_units(bandwidth))

    if not settings.is_auto:
        return None, settings.regularizer, span(bandwidths[0])
    distinct = effective_number(own)
    if bandwidths.shape[0] == 1:
        only = span(bandwidths[0])
        chosen = choose_for_span(settings, only, some_rows(only.rows), bandwidths, distinct)
        return *chosen, in_order(only, bandwidths[0])
    path = path_for(settings.regularizer, dim, settings.normalize)

    def judged(bandwidth: jax.Array) -> _FeatureLosses:
        candidate = lax.stop_gradient(span(bandwidth))
        return _judge(candidate, path, settings.solver, some_rows(candidate.rows))

    selection, member = _choose(path, lax.map(judged, bandwidths), bandwidths, distinct)
    return selection, member, in_order(span(selection.bandwidth), selection.bandwidth)


def choose_for_span(
    settings: FitSettings,
    span: FeatureSpan,
    some: Rows,
    bandwidth: jax.Array,
    distinct: jax.Array | None = None,
) -> tuple[Selection, PathMember]:
    """The strength for an operator at its bandwidth, (1,), and its selection.

    ``distinct`` is the effective number of samples that are no copies, if that is known.

    The spread of the losses is that at ``some`` samples, even and odd ones in turn.
    """
    path = path_for(settings.regularizer, span.features.directions.shape[1], settings.normalize)
    # A selection has no derivative.
    judged = _judge(*lax.stop_gradient((span, path)), settings.solver, lax.stop_gradient(some))
    return _choose(path, jax.tree.map(lambda a: a[None], judged), bandwidth, distinct)


class _FeatureLosses(NamedTuple):
    """Held-out losses of every member of a path, less that of the base, (p,).

    Their quadratic parts ``½|f|²`` and linear parts ``f·s0 + div f`` are at some samples, (p, r);
    the numbers are those of samples that the two parts of the loss are averaged over.
    """

    loss: jax.Array
    quadratic: jax.Array
    linear: jax.Array
    operator_samples: jax.Array
    samples: jax.Array


def some_rows(rows: Rows) -> Rows:
    """At most 2048 of the samples, even and odd ones in turn."""
    stride = -(-rows.points.shape[0] // SELECTION_POINTS)
    stride += 1 - stride % 2
    return jax.tree.map(lambda a: a[::stride], rows)


def _judge(span: FeatureSpan, path: PathMember, solver: Solver, some: Rows) -> _FeatureLosses:
    """The losses of fits to each half at the other, and at ``some`` samples by themselves."""
    decomposer: Decomposer = solver  # type: ignore[assignment]
    # An even number, so that halves are of one length.
    even = 2 * (some.points.shape[0] // 2)
    parts = jax.tree.map(lambda a: jnp.stack([a[1:even:2], a[0:even:2]]), some)

    def one(arguments: tuple[FeatureMoments, FeatureMoments, Rows]) -> tuple[jax.Array, ...]:
        own, other, rows = arguments
        operator = span.operator(own)
        target = own.targets.values.own.reshape(1, -1)
        spectrum = decomposer.decompose(operator, target, decomposer.num_steps or 0)
        sigma = jnp.maximum(spectrum.sigma, 0.0)
        rho = spectral_scale(operator, jnp.max(sigma), path)
        filters = path.rescaled_path(sigma, rho)
        w = (-filters.g * spectrum.coordinates) @ spectrum.basis[:, 0, :]
        quadratic = 0.5 * jnp.sum((w @ span.operator(other).matrix) * w, axis=1)
        loss = quadratic + w @ other.targets.values.left_out.ravel()
        return loss, *_parts(span.features, w, rows)

    swapped = jax.tree.map(lambda a: a[::-1], span.halves)
    losses, quadratic, linear = lax.map(one, (span.halves, swapped, parts))
    numbers = span.halves.targets.number
    total = jnp.sum(numbers)
    # The first loss is over odd samples.
    share = (numbers[1] / jnp.maximum(total, 1)).astype(losses.dtype)
    return _FeatureLosses(
        losses[1] + share * (losses[0] - losses[1]),
        jnp.concatenate([quadratic[0], quadratic[1]], axis=1),
        jnp.concatenate([linear[0], linear[1]], axis=1),
        jnp.sum(span.halves.products.number),
        total,
    )


def _parts(features: Features, w: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """``½|f|²`` and ``f·s0 + div f`` at rows (r, d), for coefficients (p, m): (p, r)."""
    eye = jnp.eye(rows.points.shape[1], dtype=rows.points.dtype)

    def one(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        field = features.field(w.reshape(2, -1), rows.points)
        linear = features.divergence(w.reshape(2, -1), rows.points, eye)
        if rows.base_scores is not None:
            along = jnp.sum(field * rows.base_scores, axis=1)
            linear = linear + (along if rows.left_out is None else rows.left_out * along)
        return 0.5 * jnp.sum(field * field, axis=1), linear

    return lax.map(one, w)


def _choose(
    path: PathMember, judged: _FeatureLosses, bandwidths: jax.Array, distinct: jax.Array | None
) -> tuple[Selection, PathMember]:
    """A bandwidth among some, (b,), and the strength if the family leaves it open.

    The losses have an axis of bandwidths in front, and are in the coordinates of each.
    """
    # Fields are in units of the inverse bandwidth: losses are compared in units of the first one.
    factors = (bandwidths[0] / bandwidths)[:, None] ** 2
    quadratic, linear = (factors[..., None] * a for a in (judged.quadratic, judged.linear))
    num_some = quadratic.shape[2]
    if num_some < FEWEST_POINTS:
        return pick_unseen(path, bandwidths, judged.loss.dtype)
    loss = factors * judged.loss

    def error(members: jax.Array, rows: jax.Array) -> jax.Array:
        # The error of a mean over all samples of what varies over the operator's alone too.
        inverse = 1.0 / judged.samples
        rest = 1.0 / judged.operator_samples - inverse
        inverse, rest = (a.astype(loss.dtype)[:, None] for a in (inverse, rest))

        def variance(values: jax.Array) -> jax.Array:
            return jnp.var(values - values[rows, members][:, None], axis=2)

        both = inverse * variance(quadratic + linear)
        total = both + jnp.maximum(rest, 0.0) * variance(quadratic)
        return jnp.sqrt(total if distinct is None else total * judged.samples[0] / distinct)

    selection, member = pick(path, loss, error, bandwidths)
    return selection if distinct is None else selection._replace(distinct=distinct), member
