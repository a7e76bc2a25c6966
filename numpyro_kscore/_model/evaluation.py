"""Fresh draws of a guide, and the model at them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._model.draws import GuideDraws
from numpyro_kscore._model.joint import log_joint_and_gradients
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.particles import (
    LocalDraw,
    at_source,
    draw_local,
    draw_particle,
    draw_sources,
    with_shared,
)
from numpyro_kscore._model.program import Program

__all__ = ["evaluate_particles"]


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
        with_local: whether local log densities are wanted, of a layout that has some.

    Returns:
        The draws without a Laplacian, finite or not; ``log_q`` is the log density of those sites
        of the guide that have one, zero if none has. Local log densities at the draws, if wanted.
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
        return draws.flat, joint.log_density, joint.scores, draws.log_density, *local

    count = math.ceil(num_particles / batch_size)
    sources = draw_sources(key, program, layout, (count, batch_size))
    samples, log_density, scores, log_q, *local = (
        a.reshape(count * batch_size, *a.shape[2:])[:num_particles]
        for a in lax.map(batch, (jnp.arange(count), sources))
    )
    draws = GuideDraws(samples, log_density, scores, log_q=log_q)
    return draws, LocalDraw(*local) if local else None
