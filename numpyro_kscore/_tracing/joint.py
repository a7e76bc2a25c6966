"""The model's log joint density at particles, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._tracing.anchor import Anchor, Expansion, center, replaced
from numpyro_kscore._tracing.coreset import (
    TallPlate,
    row_log_likelihoods,
    row_remainders,
    row_table,
    tall_plate,
)
from numpyro_kscore._tracing.draws import Draw
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particle_model import ParticleModel
from numpyro_kscore._tracing.particles import (
    are_finite,
    at_source,
    draw_particle,
    draw_sources,
    with_shared,
)
from numpyro_kscore._tracing.program import Program
from numpyro_kscore._tracing.subsampling import mean_over_rows, whole_plates, with_all_rows

__all__ = ["LogJoint", "expand", "expand_at", "log_joint_and_gradients", "mean_draw"]

# A pass over all rows is taken if it is at most so many times the rows of all particles.
MOST_PASSES = 4
# Draws whose mean an expansion is made at.
ANCHOR_DRAWS = 64
# Those of them at which it is seen what the expansion leaves of every row.
ROW_DRAWS = 4
# Most dimensions of an expansion to second order.
MOST_CURVED = 128


class LogJoint(NamedTuple):
    """The model at the particles.

    Attributes:
        log_density: log p(data, z) + log |dz/du|, (n,).
        scores: its gradient in u, (n, d).
        prior_scores: the part of that gradient that comes from the priors of pooled sites, (n, d);
            None if there are none.
        param_gradient: mean over particles of the gradient in the model's parameters.
    """

    log_density: jax.Array
    scores: jax.Array
    prior_scores: jax.Array | None
    param_gradient: dict[str, Any]


def log_joint_and_gradients(
    draws: Draw,
    program: Program,
    layout: Layout,
    map_particles: Callable[..., Any] | None,
    forward_mode: bool,
) -> LogJoint:
    """The model's log joint density and its gradients at every particle, in one evaluation.

    Random keys the model draws itself (``numpyro.prng_key``) are the same for all particles of a
    step: what it simulates, such as draws behind a prior, is simulated once.

    Args:
        draws: a batch of draws, leading axis n.
        program: the model, its parameters and arguments.
        layout: the layout of a particle.
        map_particles: ``(fn, xs) -> ys`` that maps over the particles; None evaluates all at once.
        forward_mode: differentiate in forward mode, d + parameters evaluations.
    """
    draws = lax.stop_gradient(draws)
    params = lax.stop_gradient(program.params)
    differentiated = {name: params[name] for name in layout.model_params if name in params}
    program = program._replace(params=params)
    model = ParticleModel(program, layout, draws.model_key[0], forward_mode)
    if map_particles is not None or forward_mode:
        map_particles = map_particles or (lambda fn, xs: jax.vmap(fn)(xs))
        one = partial(model.value_and_gradients, differentiated)
        values, scores, gradients, prior_scores = map_particles(one, draws)
        valid = are_finite(values, scores)
        return LogJoint(values, scores, prior_scores, _valid_mean(gradients, valid))
    anchor = program.anchor
    if anchor is None and program.reference is None and _is_affordable(layout, len(draws.flat)):
        anchor = _expanded(model, differentiated, _at_mean(draws))
    return _all_at_once(model, draws, differentiated, anchor)


def _all_at_once(
    model: ParticleModel, draws: Draw, theta: dict[str, Any], anchor: Anchor | None
) -> LogJoint:
    """The model at all particles as one batch.

    With an anchor all particles see the same rows, and the expansion there of the density of these
    rows is replaced by that of all rows, which is its expectation. What is left of the noise of the
    rows is of second or third order in the distance from the anchor, as small as the posterior is
    narrow (Johnson and Zhang 2013; Baker et al. 2019). It is smallest if rows are drawn in
    proportion to their part of it.
    """
    if anchor is not None:
        first = jax.tree.map(lambda a: a[0], draws)._replace(flat=anchor.point)
        model = model.with_rows(theta, first, anchor.rows)

    def total(flat: jax.Array, theta: dict[str, Any]) -> tuple[jax.Array, Any]:
        values, (_, priors) = jax.vmap(model.log_joint, (0, None, 0))(flat, theta, draws)
        return jnp.sum(values), (values, priors)

    one = partial(model.value_and_gradients, theta)
    is_random = model.program.reference is not None
    theta_total: Any = {}
    if is_random:
        # A small network in a large program, which would be compiled twice below.
        values, scores, theta_each, _ = jax.vmap(one)(draws)
    else:
        gradients = jax.grad(total, (0, 1), has_aux=True)
        (scores, theta_total), (values, _) = gradients(draws.flat, theta)
    if anchor is not None:
        is_curved = anchor.of_all.curvature is not None
        # The parameters of a reference are those of the anchor.
        shared = {} if is_random else theta
        of_rows = model.referred(anchor.params).expansion(
            shared, first, is_curved, lambda fn, xs: jax.vmap(fn)(xs)
        )
        found = Expansion(values, scores, theta_total if shared else {})
        moves = draws.flat - anchor.point
        values, scores, changed, _ = replaced(found, moves, of_rows, anchor.of_all)
        theta_total = changed if shared else theta_total
    prior_scores = None
    if model.layout.pooled_sites:
        prior_scores = jax.grad(lambda flat: jnp.sum(total(flat, theta)[1][1]))(draws.flat)
    if not theta:
        return LogJoint(values, scores, prior_scores, theta_total)
    count = draws.flat.shape[0]
    valid = are_finite(values, scores)
    if is_random:
        return LogJoint(values, scores, prior_scores, _valid_mean(theta_each, valid))
    if count == 1:
        # Without a branch: the result of one is copied, and a network has many parameters.
        alone = jax.tree.map(lambda g: jnp.where(valid[0], g, 0.0), theta_total)
        return LogJoint(values, scores, prior_scores, alone)
    # A sum over all particles is cheapest, but one bad particle spoils it. Only then are gradients
    # taken particle by particle.
    theta_gradient = lax.cond(
        jnp.all(valid),
        lambda: jax.tree.map(lambda g: g / count, theta_total),
        lambda: _valid_mean(lax.map(one, draws)[2], valid),
    )
    return LogJoint(values, scores, prior_scores, theta_gradient)


def _valid_mean(gradients: Any, valid: jax.Array) -> Any:
    """Means over the valid particles of arrays with leading axis n."""

    def mean(g: jax.Array) -> jax.Array:
        mask = valid.reshape(-1, *[1] * (g.ndim - 1))
        return jnp.sum(jnp.where(mask, g, 0.0), axis=0) / jnp.maximum(jnp.sum(valid), 1)

    return jax.tree.map(mean, gradients)


def _is_affordable(layout: Layout, rows: int) -> bool:
    """Whether a pass over all rows is, where the model sees so many times those of a batch."""
    counts = layout.row_counts
    return bool(counts) and all(size <= MOST_PASSES * rows * drawn for size, drawn in counts)


def _expanded(
    model: ParticleModel, theta: dict[str, Any], draw: Draw, with_curvature: bool = False
) -> Anchor | None:
    """The density of all rows at a draw; None where the model cannot tell it."""
    fixed, is_random = {}, model.program.reference is not None
    if is_random:
        fixed = {name: model.program.params[name] for name in model.layout.model_params}
    model = model.referred(fixed)
    program = model.program
    every = whole_plates(program.model, program.args, program.kwargs)
    if every is program.model:
        return None

    def of(some: Callable[..., Any]) -> Expansion:
        here = model._replace(program=program._replace(model=some))
        # One direction after another: a pass over all rows takes memory.
        return here.expansion(theta, draw, with_curvature, lax.map)

    if is_random and len(model.layout.row_counts) == 1:
        # A row with latents of its own takes as much memory as hundreds of numbers.
        size = model.layout.row_counts[0][0]
        return Anchor(draw.flat, mean_over_rows(of, program.model, size), fixed)
    return Anchor(draw.flat, of(every), fixed)


def expand(key: jax.Array, program: Program, layout: Layout, num_draws: int) -> Anchor | None:
    """The density of all rows, expanded to second order at the mean of the guide's draws.

    None where no plate is subsampled, where the model has parameters, with which the expansion
    changes (a reference keeps those that it is expanded with), and where a pass over all rows is
    too much.

    Args:
        key: random key.
        program: guide and model, at the guide's parameters.
        layout: the layout of a particle.
        num_draws: how many draws the expansion will serve, at least.

    Cost: a pass over all rows, and another two for each dimension up to 128; beyond, the expansion
    is of first order. Where rows are drawn by what it leaves of them, 17 of the likelihood alone.
    """
    is_fixed = not layout.model_params or program.reference is not None
    if not is_fixed or not _is_affordable(layout, num_draws):
        return None
    draws = _some_draws(key, program, layout)
    first = _at_mean(draws)
    model = _fixed_model(key, program, layout, first)
    anchor = _expanded(model, {}, first, layout.size <= MOST_CURVED)
    if anchor is None or program.reference is not None:
        return anchor
    tall = tall_plate(program.model, model.trace(first, {}), 0)
    if tall is None:
        return anchor
    return anchor._replace(rows=row_table(_row_sizes(model, tall, draws.flat, first)))


def _row_sizes(model: ParticleModel, tall: TallPlate, flat: jax.Array, draw: Draw) -> jax.Array:
    """How much the expansion at a draw leaves of every row, near some others (n, d); (rows,)."""
    every = with_all_rows(model.program.model)
    whole = model._replace(program=model.program._replace(model=every))

    def rows_at(point: jax.Array) -> jax.Array:
        return row_log_likelihoods(whole.trace(draw._replace(flat=point), {}), tall.name)

    flat = jnp.where(are_finite(flat)[:, None], flat, draw.flat)[:ROW_DRAWS]
    return row_remainders(rows_at, draw.flat, flat, len(draw.flat) <= MOST_CURVED)


def mean_draw(key: jax.Array, program: Program, layout: Layout) -> Draw:
    """A draw of the guide, moved to the mean of some: where its density is expanded.

    Args:
        key: random key.
        program: guide and model, at the guide's parameters.
        layout: the layout of a particle.
    """
    return _at_mean(_some_draws(key, program, layout))


def _some_draws(key: jax.Array, program: Program, layout: Layout) -> Draw:
    program = program._replace(params=lax.stop_gradient(program.params))
    program = with_shared(key, program, layout)
    sources = draw_sources(key, program, layout, (ANCHOR_DRAWS,))
    return jax.vmap(at_source(draw_particle, key, program, layout))(sources)


def expand_at(key: jax.Array, program: Program, layout: Layout, draw: Draw) -> Expansion:
    """The density of the data that the program has, expanded as by :func:`expand`.

    Args:
        key: the key of :func:`mean_draw`.
        program: guide and model, at the guide's parameters; the model has none.
        layout: the layout of a particle.
        draw: the draw at whose place to expand.
    """
    model = _fixed_model(key, program, layout, draw)
    is_curved = layout.size <= MOST_CURVED
    return model.expansion({}, draw, is_curved, lambda fn, xs: jax.vmap(fn)(xs))


def _fixed_model(key: jax.Array, program: Program, layout: Layout, draw: Draw) -> ParticleModel:
    program = program._replace(params=lax.stop_gradient(program.params))
    return ParticleModel(with_shared(key, program, layout), layout, draw.model_key, False)


def _at_mean(draws: Draw) -> Draw:
    """The first draw, moved to the mean of all."""
    return jax.tree.map(lambda a: a[0], draws)._replace(flat=center(draws.flat))
