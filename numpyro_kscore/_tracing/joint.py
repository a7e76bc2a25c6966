"""The model's log joint density at particles, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro import handlers
from numpyro.primitives import Messenger, apply_stack

from numpyro_kscore._tracing.coordinates import evaluate_at, trace_at
from numpyro_kscore._tracing.dependencies import is_enumerated
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particles import (
    Draw,
    are_finite,
    at_source,
    draw_particle,
    draw_sources,
    site_log_density,
    with_shared,
)
from numpyro_kscore._tracing.program import Program, is_subsampled
from numpyro_kscore._tracing.subsampling import (
    Anchor,
    Expansion,
    center,
    mean_over_rows,
    replaced,
    whole_plates,
    with_spread_rows,
)
from numpyro_kscore._util.keys import key_apart

__all__ = ["LogJoint", "expand", "expand_at", "log_joint_and_gradients", "mean_draw", "own_key"]

# A pass over all rows is taken if it is at most so many times the rows of all particles.
MOST_PASSES = 4
# Draws whose mean an expansion is made at.
ANCHOR_DRAWS = 64
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
    model = _Model(program, layout, draws.model_key[0], forward_mode)
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


class _Model(NamedTuple):
    """The model as a function of one particle.

    Attributes:
        program: the model, its parameters and arguments.
        layout: the layout of a particle.
        common_key: key for what the model simulates once for all particles.
        forward_mode: differentiate in forward mode.
    """

    program: Program
    layout: Layout
    common_key: jax.Array
    forward_mode: bool

    def log_joint(
        self, flat: jax.Array, theta: dict[str, Any], draw: Draw
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        """The log joint density; with it, itself and the part of the priors of pooled sites.

        Args:
            flat: unconstrained coordinates, (d,).
            theta: the model's parameters.
            draw: the particle; only its keys and plates are used.
        """
        program = self.program
        data = {**program.params, **theta, **program.plates, **draw.plates}
        data = jax.tree.map(lambda leaf: leaf, data)
        model = handlers.substitute(CommonKeys(program.model, self.common_key), data=data)
        seeded = handlers.seed(model, draw.model_key)
        latents = self.layout.unravel(flat)
        value, trace = evaluate_at(seeded, program.args, program.kwargs, latents, program.forms)
        if self.layout.pooled_sites and any(is_enumerated(site) for site in trace.values()):
            raise ValueError(
                "aggregate: expected a model without discrete latents; got one, which a prior may "
                "depend on. Sum it out of the model"
            )
        prior = [
            site_log_density(name, latents[name], trace, trace)
            for name in sorted(self.layout.pooled_sites)
        ]
        return value, (value, sum(prior) if prior else None)

    def referred(self, params: dict[str, Any]) -> _Model:
        """The model that is expanded: the reference, if there is one, with its parameters."""
        program = self.program
        if program.reference is None:
            return self
        params = {**program.params, **params}
        return self._replace(
            program=program._replace(model=program.reference, reference=None, params=params)
        )

    def with_rows(self, theta: dict[str, Any], draw: Draw) -> _Model:
        """The model with rows of its subsampled plates that are drawn for all particles."""
        latents = self.layout.unravel(draw.flat)
        data = {**self.program.params, **theta}
        common = handlers.substitute(CommonKeys(self.program.model, self.common_key), data=data)
        seeded = with_spread_rows(
            handlers.seed(common, draw.model_key), key_apart(draw.model_key, 1)
        )
        args, kwargs, forms = self.program.args, self.program.kwargs, self.program.forms
        trace = trace_at(seeded, args, kwargs, latents, forms)
        rows = {
            name: site["value"]
            for name, site in trace.items()
            if site["type"] == "plate" and is_subsampled(site)
        }
        return self._replace(program=self.program._replace(plates=rows))

    def value_and_gradients(
        self, theta: dict[str, Any], draw: Draw
    ) -> tuple[jax.Array, jax.Array, dict[str, Any], jax.Array | None]:
        """Log joint density, score (d,), gradient in ``theta``, and score of pooled priors (d,)."""
        differentiate = jax.jacfwd if self.forward_mode else jax.grad
        gradients = differentiate(self.log_joint, (0, 1), has_aux=True)
        (score, theta_gradient), (value, _) = gradients(draw.flat, theta, draw)
        prior = None
        if self.layout.pooled_sites:
            prior = differentiate(lambda flat: self.log_joint(flat, theta, draw)[1][1])(draw.flat)
        return value, score, theta_gradient, prior


def _is_affordable(layout: Layout, rows: int) -> bool:
    """Whether a pass over all rows is, where the model sees so many times those of a batch."""
    counts = layout.row_counts
    return bool(counts) and all(size <= MOST_PASSES * rows * drawn for size, drawn in counts)


def _expansion(
    model: _Model,
    theta: dict[str, Any],
    draw: Draw,
    with_curvature: bool,
    map_directions: Callable[..., Any],
) -> Expansion:
    """The density at a draw with its derivatives; ``map_directions`` is ``(fn, xs) -> ys``."""

    def at(flat: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        return model.value_and_gradients(theta, draw._replace(flat=flat))[:3]

    def along(direction: jax.Array) -> Any:
        found, changes = jax.jvp(at, (draw.flat,), (direction,))
        return found, changes[1]

    if not with_curvature:
        return Expansion(*at(draw.flat))
    directions = jnp.eye(len(draw.flat), dtype=draw.flat.dtype)
    found, curvature = map_directions(along, directions)
    value, slope, params = jax.tree.map(lambda a: a[0], found)
    return Expansion(value, slope, params, curvature)


def _expanded(
    model: _Model, theta: dict[str, Any], draw: Draw, with_curvature: bool = False
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
        return _expansion(here, theta, draw, with_curvature, lax.map)

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
    is of first order.
    """
    is_fixed = not layout.model_params or program.reference is not None
    if not is_fixed or not _is_affordable(layout, num_draws):
        return None
    first = mean_draw(key, program, layout)
    model = _fixed_model(key, program, layout, first)
    return _expanded(model, {}, first, layout.size <= MOST_CURVED)


def mean_draw(key: jax.Array, program: Program, layout: Layout) -> Draw:
    """A draw of the guide, moved to the mean of some: where its density is expanded.

    Args:
        key: random key.
        program: guide and model, at the guide's parameters.
        layout: the layout of a particle.
    """
    program = program._replace(params=lax.stop_gradient(program.params))
    program = with_shared(key, program, layout)
    sources = draw_sources(key, program, layout, (ANCHOR_DRAWS,))
    draws = jax.vmap(at_source(draw_particle, key, program, layout))(sources)
    return _at_mean(draws)


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
    return _expansion(model, {}, draw, is_curved, lambda fn, xs: jax.vmap(fn)(xs))


def _fixed_model(key: jax.Array, program: Program, layout: Layout, draw: Draw) -> _Model:
    program = program._replace(params=lax.stop_gradient(program.params))
    return _Model(with_shared(key, program, layout), layout, draw.model_key, False)


def _at_mean(draws: Draw) -> Draw:
    return jax.tree.map(lambda a: a[0], draws)._replace(flat=center(draws.flat))


def _all_at_once(
    model: _Model, draws: Draw, theta: dict[str, Any], anchor: Anchor | None
) -> LogJoint:
    """The model at all particles as one batch.

    With an anchor all particles see the same rows, and the expansion there of the density of these
    rows is replaced by that of all rows, which is its expectation. What is left of the noise of the
    rows is of second or third order in the distance from the anchor, as small as the posterior is
    narrow (Johnson and Zhang 2013; Baker et al. 2019).
    """
    if anchor is not None:
        first = jax.tree.map(lambda a: a[0], draws)._replace(flat=anchor.point)
        model = model.with_rows(theta, first)

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
        of_rows = _expansion(
            model.referred(anchor.params), shared, first, is_curved, lambda fn, xs: jax.vmap(fn)(xs)
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


class CommonKeys(Messenger):
    """Answers ``numpyro.prng_key`` by keys split from one that all particles share."""

    def __init__(self, fn: Callable[..., Any], key: jax.Array) -> None:
        self.key = key
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Set the value of a key that is asked for."""
        is_asked = msg["type"] == "prng_key" and msg["value"] is None
        if is_asked and not msg.get("is_own", False):
            self.key, msg["value"] = jax.random.split(self.key)


def own_key() -> jax.Array:
    """A random key of a model for each particle, which its density is random with."""
    message = {
        "type": "prng_key",
        "fn": lambda rng_key: rng_key,
        "args": (),
        "kwargs": {"rng_key": None},
        "value": None,
        "is_own": True,
    }
    return apply_stack(message)["value"]
