"""Fresh draws of a guide, and the model at them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._tracing.draws import GuideDraws
from numpyro_kscore._tracing.joint import log_joint_and_gradients
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particles import (
    LocalDraw,
    at_source,
    draw_local,
    draw_particle,
    draw_sources,
    with_shared,
)
from numpyro_kscore._tracing.program import Program

__all__ = ["evaluate_local", "evaluate_particles"]


def evaluate_particles(
    key: Array,
    program: Program,
    layout: Layout,
    num_particles: int,
    batch_size: int,
    forward_mode: bool = False,
    data: Callable[[Array], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
) -> GuideDraws:
    """Draw from the guide and evaluate the model, a batch at a time.

    Args:
        key: random key.
        program: guide and model.
        layout: the layout of a particle.
        num_particles: number of draws.
        batch_size: draws that are in memory at once.
        forward_mode: differentiate the model in forward mode.
        data: arguments and keyword arguments of guide and model for the draws of each batch, whose
            number it is given; by default the program's.

    Returns:
        The draws without a Laplacian, finite or not; ``log_q`` is the log density of those sites
        of the guide that have one, zero if none has.
    """
    program, sources = _sources(key, program, layout, num_particles, batch_size)

    def batch(numbered: tuple[Array, Any]) -> tuple[Array, ...]:
        number, sources = numbered
        args, kwargs = (program.args, program.kwargs) if data is None else data(number)
        here = program._replace(args=args, kwargs=kwargs)
        draws = jax.vmap(at_source(draw_particle, key, here, layout))(sources)
        joint = log_joint_and_gradients(draws, here, layout, None, forward_mode)
        return draws.flat, joint.log_density, joint.scores, draws.log_density

    count = jax.tree.leaves(sources)[0].shape[0]
    found = lax.map(batch, (jnp.arange(count), sources))
    samples, log_density, scores, log_q = (_in_one(a, num_particles) for a in found)
    return GuideDraws(samples, log_density, scores, log_q=log_q)


def evaluate_local(
    key: Array, program: Program, layout: Layout, num_particles: int, batch_size: int
) -> LocalDraw:
    """Local log densities at the draws that :func:`evaluate_particles` takes with the same key.

    Args:
        key: random key.
        program: guide and model.
        layout: the layout of a particle, with blocks that have local log densities.
        num_particles: number of draws.
        batch_size: draws that are in memory at once.
    """
    program, sources = _sources(key, program, layout, num_particles, batch_size)
    found = lax.map(jax.vmap(at_source(draw_local, key, program, layout)), sources)
    return LocalDraw(*(_in_one(a, num_particles) for a in found))


def _sources(
    key: Array, program: Program, layout: Layout, num_particles: int, batch_size: int
) -> tuple[Program, Any]:
    """The program without derivatives, and what its draws are made from, batch by batch."""
    program = program._replace(params=lax.stop_gradient(program.params))
    program = with_shared(key, program, layout)
    count = math.ceil(num_particles / batch_size)
    return program, draw_sources(key, program, layout, (count, batch_size))


def _in_one(batches: Array, num_particles: int) -> Array:
    return batches.reshape(-1, *batches.shape[2:])[:num_particles]
