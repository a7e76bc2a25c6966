"""Guide draws as one matrix of unconstrained particles, and the model's density at them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import scale_and_mask, sum_rightmost
from numpyro.primitives import Messenger

from numpyro_kscore._tracing.coordinates import log_density_at, trace_at
from numpyro_kscore._tracing.dependencies import is_drawn
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.program import (
    Program,
    form_of,
    guide_of,
    is_subsampled,
    local_log_density_of,
    trace_both,
    unconstrain,
    values_of,
)
from numpyro_kscore._tracing.subsampling import Expansion, center, replaced, whole_plates
from numpyro_kscore._util.keys import key_apart

__all__ = [
    "Draw",
    "LogJoint",
    "are_finite",
    "at_source",
    "draw_local",
    "draw_particle",
    "draw_sources",
    "log_joint_and_gradients",
    "with_shared",
]


# A pass over all rows is taken if it is at most so many times the rows of all particles.
MOST_PASSES = 4


class Draw(NamedTuple):
    """One draw from the guide.

    Attributes:
        flat: unconstrained coordinates of all latents, (d,); differentiable in the parameters.
        log_density: of the sites with a density, in unconstrained coordinates; differentiable.
        plates: rows of subsampled plates that the guide drew, which the model must share; without
            those that all particles share.
        mutable: values at mutable sites of guide and model.
        model_key: key the model is seeded with.
    """

    flat: jax.Array
    log_density: jax.Array
    plates: dict[str, jax.Array]
    mutable: dict[str, Any]
    model_key: jax.Array


def with_shared(key: jax.Array, program: Program, layout: Layout) -> Program:
    """The program with what all particles share: rows of plates, and forms of latents."""
    if not layout.shared_plates and not layout.transformed:
        return program
    # The keys of particles are split from the same one.
    trace = trace_both(key_apart(key, 0), program).guide
    rows = values_of(trace, "plate")
    plates = {name: rows[name] for name in layout.shared_plates}
    forms = {name: lax.stop_gradient(form_of(trace[name])) for name in layout.transformed}
    return program._replace(plates=plates, forms=forms)


def draw_sources(key: jax.Array, program: Program, layout: Layout, shape: tuple[int, ...]) -> Any:
    """What particles are drawn from, with leading axes ``shape``: their noise, or else their keys.

    Noise that no parameter is behind is drawn here, at once for all particles and all passes over
    them; a key for each particle and site would take as many random bits more.
    """
    if not layout.noise_sites:
        return jax.random.split(key, shape)
    trace = handlers.trace(guide_of(key, program)).get_trace(*program.args, **program.kwargs)
    # The first two are those of guide and model (trace_both).
    keys = jax.random.split(key, 2 + len(layout.noise_sites))[2:]
    return {
        name: trace[name]["fn"].sample(one_key, shape)
        for name, one_key in zip(layout.noise_sites, keys, strict=True)
    }


def at_source(
    draw: Callable[[jax.Array, Program, Layout], Any],
    key: jax.Array,
    program: Program,
    layout: Layout,
) -> Callable[[Any], Any]:
    """A function of a key, such as :func:`draw_particle`, as one of what a particle is drawn from.

    Args:
        draw: the function.
        key: for the model, where a source is noise.
        program: guide and model.
        layout: the layout of a particle.
    """

    def from_source(source: Any) -> Any:
        if layout.noise_sites:
            return draw(key, program._replace(noise=source), layout)
        return draw(source, program, layout)

    return from_source


def draw_particle(key: jax.Array, program: Program, layout: Layout) -> Draw:
    """Run the guide once and express its latents in unconstrained coordinates."""
    traces = trace_both(key, program)
    latents = {
        name: unconstrain(site, traces.guide[name])
        for name, site in traces.model.items()
        if is_drawn(site)
    }
    flat = jnp.concatenate([jnp.ravel(u) for u in latents.values()])
    log_density = jnp.zeros((), flat.dtype)
    for name in sorted(layout.explicit_sites):
        log_density = log_density + _log_density(name, latents[name], traces.guide, traces.model)
    # Rows that all particles share stay with the program. Copied for each particle, everything the
    # model computes from them would be computed as often, such as a prior's covariance.
    plates = {
        name: site["value"]
        for name, site in traces.guide.items()
        if site["type"] == "plate" and is_subsampled(site) and name not in program.plates
    }
    return Draw(flat, log_density, plates, traces.mutable, traces.model_key)


def draw_local(key: jax.Array, program: Program, layout: Layout) -> jax.Array:
    """Local log densities, (b,), of the blocks that have one, at the draw from the same source.

    Apart from :func:`draw_particle`, since they cost more than the draw and fewer will do.
    """
    trace = trace_both(key, program).guide
    found = (local_log_density_of(trace, part.sites) for part in layout.local_parts)
    return jnp.stack([value for value in found if value is not None])


def _log_density(
    name: str, unconstrained: jax.Array, trace: dict[str, Any], model_trace: dict[str, Any]
) -> jax.Array:
    """Log density of a site, as one of its unconstrained value, scaled by plates."""
    site = trace[name]
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    log_prob = site["fn"].log_prob(site["value"], *intermediates)
    transform = biject_to(model_trace[name]["fn"].support)
    log_det = transform.log_abs_det_jacobian(unconstrained, site["value"])
    # An event dimension of the guide may be a batch dimension of the model, and vice versa.
    ndim = min(jnp.ndim(log_det), jnp.ndim(log_prob))
    log_prob, log_det = (sum_rightmost(a, jnp.ndim(a) - ndim) for a in (log_prob, log_det))
    return jnp.sum(scale_and_mask(log_prob + log_det, site["scale"]))


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
    return _all_at_once(model, draws, differentiated, _whole(model, len(draws.flat)))


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
        seeded = handlers.trace(handlers.seed(model, draw.model_key))
        latents = self.layout.unravel(flat)
        value = log_density_at(seeded, program.args, program.kwargs, latents, program.forms)
        prior = [
            _log_density(name, latents[name], seeded.trace, seeded.trace)
            for name in sorted(self.layout.pooled_sites)
        ]
        return value, (value, sum(prior) if prior else None)

    def with_rows(self, theta: dict[str, Any], draw: Draw) -> _Model:
        """The model with the rows of its subsampled plates as they are drawn for one particle."""
        latents = self.layout.unravel(draw.flat)
        data = {**self.program.params, **theta}
        common = handlers.substitute(CommonKeys(self.program.model, self.common_key), data=data)
        seeded = handlers.seed(common, draw.model_key)
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


def _whole(model: _Model, count: int) -> _Model | None:
    """The model of all rows, where it sees a part of them and a pass over all is affordable."""
    program, rows = model.program, model.layout.row_counts
    if not rows or any(size > MOST_PASSES * count * drawn for size, drawn in rows):
        return None
    whole = whole_plates(program.model, program.args, program.kwargs)
    return None if whole is program.model else model._replace(program=program._replace(model=whole))


def _all_at_once(
    model: _Model, draws: Draw, theta: dict[str, Any], whole: _Model | None
) -> LogJoint:
    """The model at all particles as one batch.

    Where a pass over all rows is affordable, all particles see the same rows, and the first-order
    expansion at their mean of the density of these rows is replaced by that of all rows, which is
    its expectation. What is left of the noise of the rows is of second order in the distance from
    the mean, as small as the posterior is narrow (Johnson and Zhang 2013; Baker et al. 2019).
    """
    if whole is not None:
        mean = center(draws.flat)
        first = jax.tree.map(lambda a: a[0], draws)._replace(flat=mean)
        model = model.with_rows(theta, first)

    def total(flat: jax.Array, theta: dict[str, Any]) -> tuple[jax.Array, Any]:
        values, (_, priors) = jax.vmap(model.log_joint, (0, None, 0))(flat, theta, draws)
        return jnp.sum(values), (values, priors)

    gradients = jax.grad(total, (0, 1), has_aux=True)
    (scores, theta_total), (values, _) = gradients(draws.flat, theta)
    if whole is not None:
        of_rows, of_all = (
            Expansion(*one.value_and_gradients(theta, first)[:3]) for one in (model, whole)
        )
        found = Expansion(values, scores, theta_total)
        values, scores, theta_total = replaced(found, draws.flat - mean, of_rows, of_all)
    prior_scores = None
    if model.layout.pooled_sites:
        prior_scores = jax.grad(lambda flat: jnp.sum(total(flat, theta)[1][1]))(draws.flat)
    if not theta:
        return LogJoint(values, scores, prior_scores, theta_total)
    count = draws.flat.shape[0]
    valid = are_finite(values, scores)
    if count == 1:
        # Without a branch: the result of one is copied, and a network has many parameters.
        alone = jax.tree.map(lambda g: jnp.where(valid[0], g, 0.0), theta_total)
        return LogJoint(values, scores, prior_scores, alone)
    # A sum over all particles is cheapest, but one bad particle spoils it. Only then are gradients
    # taken particle by particle.
    one = partial(model.value_and_gradients, theta)
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
        if msg["type"] == "prng_key" and msg["value"] is None:
            self.key, msg["value"] = jax.random.split(self.key)


def are_finite(*arrays: jax.Array) -> jax.Array:
    """At which particles all the values are finite: arrays (n,) or (n, d) -> (n,)."""
    columns = [jnp.isfinite(array).reshape(array.shape[0], -1) for array in arrays]
    return jnp.all(jnp.concatenate(columns, axis=1), axis=1)
