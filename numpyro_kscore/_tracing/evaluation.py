"""Fresh draws of a guide, and the model at them."""

from __future__ import annotations

import math
from functools import partial

import jax
from jax import Array, lax

from numpyro_kscore._tracing.draws import GuideDraws
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particles import draw_particle, log_joint_and_gradients, with_shared
from numpyro_kscore._tracing.program import Program

__all__ = ["evaluate_particles"]


def evaluate_particles(
    key: Array,
    program: Program,
    layout: Layout,
    num_particles: int,
    batch_size: int,
    forward_mode: bool = False,
) -> GuideDraws:
    """Draw from the guide and evaluate the model, a batch at a time.

    Args:
        key: random key.
        program: guide and model.
        layout: the layout of a particle.
        num_particles: number of draws.
        batch_size: draws that are in memory at once.
        forward_mode: differentiate the model in forward mode.

    Returns:
        The draws without a Laplacian, finite or not; ``log_q`` is the log density of those sites
        of the guide that have one, zero if none has.
    """
    program = program._replace(params=lax.stop_gradient(program.params))
    program = with_shared(key, program, layout)

    def batch(keys: Array) -> tuple[Array, ...]:
        draw = partial(draw_particle, program=program, layout=layout)
        draws = jax.vmap(draw)(keys)
        joint = log_joint_and_gradients(draws, program, layout, None, forward_mode)
        return draws.flat, joint.log_density, joint.scores, draws.log_density

    count = math.ceil(num_particles / batch_size)
    keys = jax.random.split(key, (count, batch_size))
    samples, log_density, scores, log_q = (
        a.reshape(count * batch_size, *a.shape[2:])[:num_particles] for a in lax.map(batch, keys)
    )
    return GuideDraws(samples, log_density, scores, log_q=log_q)
