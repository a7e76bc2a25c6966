"""Fresh draws of a guide, and the model at them."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
from jax import Array, lax

from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particles import draw_particle, draw_plates, log_joint_and_gradients
from numpyro_kscore._tracing.program import Program

__all__ = ["Evaluation", "evaluate_particles"]


class Evaluation(NamedTuple):
    """Fresh draws of a guide and the model at them.

    Attributes:
        flat: unconstrained coordinates, (n, d).
        log_density: the model's, with the log-Jacobian, (n,).
        scores: its gradient, (n, d).
        guide_log_density: of the guide's sites with a density, in the same coordinates, (n,).
    """

    flat: Array
    log_density: Array
    scores: Array
    guide_log_density: Array


def evaluate_particles(
    key: Array,
    program: Program,
    layout: Layout,
    num_particles: int,
    batch_size: int,
    forward_mode: bool = False,
) -> Evaluation:
    """Draw from the guide and evaluate the model, a batch at a time.

    Args:
        key: random key.
        program: guide and model.
        layout: the layout of a particle.
        num_particles: number of draws; rounded up to whole batches.
        batch_size: draws that are in memory at once.
        forward_mode: differentiate the model in forward mode.
    """
    program = program._replace(
        params=lax.stop_gradient(program.params), plates=draw_plates(key, program, layout)
    )

    def batch(keys: Array) -> Evaluation:
        draw = partial(draw_particle, program=program, layout=layout)
        draws = jax.vmap(draw)(keys)
        joint = log_joint_and_gradients(draws, program, layout, None, forward_mode)
        return Evaluation(draws.flat, joint.log_density, joint.scores, draws.log_density)

    count = math.ceil(num_particles / batch_size)
    keys = jax.random.split(key, (count, batch_size))
    found = lax.map(batch, keys)
    return jax.tree.map(lambda a: a.reshape(count * batch_size, *a.shape[2:]), found)
