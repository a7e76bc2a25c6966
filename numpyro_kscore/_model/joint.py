"""The model's log joint density with its gradients, at given particles and at fresh draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._model.control_variate import ControlVariate, Taylor, controlled
from numpyro_kscore._model.draws import Draw, GuideDraws
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.particle_model import (
    ParticleModel,
    at_mean,
    at_once,
    expanded,
    is_affordable,
)
from numpyro_kscore._model.particles import (
    LocalDraw,
    are_finite,
    at_source,
    draw_local,
    draw_particle,
    draw_sources,
    with_shared,
)
from numpyro_kscore._model.program import Program


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
    """The model's log joint density and its gradients at particles (n, d), in one evaluation.

    Random keys the model draws itself (``numpyro.prng_key``) are the same for all particles of a
    step: what it simulates, such as draws behind a prior, is simulated once. ``map_particles(fn,
    xs)`` maps over the particles; None evaluates all at once. In forward mode there are d +
    parameters evaluations.
    """
    draws = lax.stop_gradient(draws)
    params = lax.stop_gradient(program.params)
    differentiated = {name: params[name] for name in layout.model_params if name in params}
    program = program._replace(params=params)
    model = ParticleModel(program, layout, draws.model_key[0], forward_mode)
    if map_particles is not None or forward_mode:
        one = partial(model.value_and_gradients, differentiated)
        values, scores, gradients, prior_scores = (map_particles or at_once)(one, draws)
        valid = are_finite(values, scores)
        return LogJoint(values, scores, prior_scores, _valid_mean(gradients, valid))
    control_variate = program.control_variate
    if (
        control_variate is None
        and program.reference is None
        and is_affordable(layout, len(draws.flat))
    ):
        control_variate = expanded(model, differentiated, at_mean(draws))
    return _all_at_once(model, draws, differentiated, control_variate)


def _all_at_once(
    model: ParticleModel, draws: Draw, theta: dict[str, Any], control_variate: ControlVariate | None
) -> LogJoint:
    """The model at all particles as one batch.

    With a control variate all particles see the same rows, and the expansion there of the density
    of these rows is replaced by that of all rows, which is its expectation. The remaining noise of
    the rows is of second or third order in the distance from its point, as small as the posterior
    is narrow (Johnson and Zhang 2013; Baker et al. 2019). It is smallest if rows are drawn in
    proportion to their part of it.
    """
    if control_variate is not None:
        first = jax.tree.map(lambda a: a[0], draws)._replace(flat=control_variate.point)
        model = model.with_rows(theta, first, control_variate.rows, control_variate.kept)

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
    if control_variate is not None:
        is_curved = control_variate.of_all.curvature is not None
        # The parameters of a reference are those of the control variate.
        shared = {} if is_random else theta
        of_rows = model.referred(control_variate.params).expansion(shared, first, is_curved)
        found = Taylor(values, scores, None, theta_total if shared else {})
        moves = draws.flat - control_variate.point
        values, scores, _, changed = controlled(found, moves, of_rows, control_variate.of_all)
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
        # This needs no branch: the result of one is copied, and a network has many parameters.
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


def evaluate_particles(
    key: Array,
    program: Program,
    layout: Layout,
    num_particles: int,
    batch_size: int,
    forward_mode: bool = False,
    data: Callable[[Array], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
    with_local: bool = False,
) -> tuple[GuideDraws, LocalDraw | None]:
    """Draw from the guide and evaluate the model, ``batch_size`` draws at a time.

    The draws have no Laplacian and may not be finite; their ``log_q`` is the log density of those
    sites of the guide that have one, zero if none has, with the guide's factors. If wanted, their
    local log densities are returned, too. ``data`` goes from the number of a batch to arguments and
    keyword arguments of guide and model, which are by default the program's.
    """
    program = program._replace(params=lax.stop_gradient(program.params))
    program = with_shared(key, program, layout)

    def batch(numbered: tuple[Array, Any]) -> tuple[Array, ...]:
        number, sources = numbered
        args, kwargs = (program.args, program.kwargs) if data is None else data(number)
        here = program._replace(args=args, kwargs=kwargs)
        draws = jax.vmap(at_source(draw_particle, key, here, layout))(sources)
        joint = log_joint_and_gradients(draws, here, layout, None, forward_mode)
        local: tuple[Array, ...] = ()
        if with_local:
            local = jax.vmap(at_source(draw_local, key, here, layout))(sources)
        return draws.flat, joint.log_density, joint.scores, draws.counted, *local

    count = math.ceil(num_particles / batch_size)
    sources = draw_sources(key, program, layout, (count, batch_size))
    samples, log_density, scores, log_q, *local = (
        a.reshape(count * batch_size, *a.shape[2:])[:num_particles]
        for a in lax.map(batch, (jnp.arange(count), sources))
    )
    draws = GuideDraws(samples, log_density, scores, log_q=log_q)
    return draws, LocalDraw(*local) if local else None
