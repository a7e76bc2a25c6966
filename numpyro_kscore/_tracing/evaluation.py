"""Fresh draws of a guide, and the model at them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particles import draw_particle, draw_plates, log_joint_and_gradients
from numpyro_kscore._tracing.program import Program
from numpyro_kscore._util.checks import as_points, as_scored

__all__ = ["GuideDraws", "evaluate_particles"]


class GuideDraws(NamedTuple):
    """Independent draws of a guide, in unconstrained coordinates, and the model at them.

    Attributes:
        samples: (n, d).
        log_density: the model's, with the log-Jacobian, up to a constant, (n,).
        scores: its gradient, (n, d).
        laplacian: its Laplacian in coordinates whitened by the samples, (n,), or None. Without it
            fewer estimates of the guide's density can be compared.
        log_q: the guide's log density, (n,), where it has one; otherwise None.
        num_lost: number of draws left out because something was not finite at them.
    """

    samples: Array
    log_density: Array
    scores: Array
    laplacian: Array | None = None
    log_q: Array | None = None
    num_lost: int = 0

    def take(self, rows: Any) -> GuideDraws:
        """The draws of some rows: a slice, or indices or a mask, (m,) or (n,)."""

        def some(values: Array | None) -> Any:
            return None if values is None else values[rows]

        return GuideDraws(
            some(self.samples),
            some(self.log_density),
            some(self.scores),
            some(self.laplacian),
            some(self.log_q),
            self.num_lost,
        )

    def checked(self, minimum: int = 100) -> GuideDraws:
        """The same draws as arrays of one precision.

        Args:
            minimum: least number of draws.

        Raises:
            TypeError: for entries that are not floating point.
            ValueError: for shapes that do not fit, too few draws, or entries that are not finite.
        """
        x, scores = as_scored(self.samples, self.scores, minimum)
        n = x.shape[0]

        def column(name: str, values: Array | None) -> Any:
            if values is None:
                return None
            if jnp.shape(values) != (n,):
                raise ValueError(f"{name}: expected shape ({n},); got {jnp.shape(values)}")
            return as_points(name, jnp.reshape(jnp.asarray(values), (n, 1)))[:, 0]

        return GuideDraws(
            x,
            column("log_density", self.log_density),
            scores,
            column("laplacian", self.laplacian),
            column("log_q", self.log_q),
            self.num_lost,
        )


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
    program = program._replace(
        params=lax.stop_gradient(program.params), plates=draw_plates(key, program, layout)
    )

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
