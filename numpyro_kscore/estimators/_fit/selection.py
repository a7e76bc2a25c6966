"""Automatic selection of strength and bandwidth, by held-out score matching.

The samples are dealt into two halves. A fit to one is judged at the other by the score-matching
loss ``J = E[½|ŝ|² + div ŝ]``, which is the error ``½ E|ŝ - s|²`` up to a constant and needs no
density. One Krylov space gives the losses of a whole path of regularizations, so that the curve
costs about as much as the fit itself.

Of all members whose loss is within one standard error of the least, the strongest regularization
is found: held-out losses are noisy, and too little regularization costs far more than too much.
That suits half of the samples; for all of them a weaker member is selected (docs/accuracy).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from numpyro_kscore.estimators._fit.heldout import HeldOutProblem, held_out_losses
from numpyro_kscore.estimators._fit.info import Selection
from numpyro_kscore.estimators._fit.path import (
    FEWEST_POINTS,
    SELECTION_POINTS,
    PathMember,
    path_for,
    pick,
    pick_unseen,
)
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._spectrum import Decomposer

__all__ = ["choose"]

# Fewest Krylov steps of an estimate whose strength is chosen here: from the samples the selection
# uses, and from more of them. What bears little regularization is left unconverged by 20 steps,
# which makes it large: an arc in eight dimensions loses 10 % at 1000 samples, a spiral has errors
# of 14 for 1.2 at 10 000 (docs/accuracy).
STEPS, STEPS_OF_MANY = 32, 48


def choose(
    kernel: Kernel,
    family: Regularizer,
    solver: Decomposer,
    problem: HeldOutProblem,
    bandwidths: jax.Array,
    normalize: bool,
    num_samples: int,
    sharding: NamedSharding | None = None,
) -> tuple[Selection, PathMember]:
    """Choose a bandwidth among some, and the strength if ``family`` leaves it open.

    Args:
        kernel: the kernel at unit bandwidth.
        family: a regularizer, its strength ``"auto"`` or not.
        solver: whose Krylov space is used.
        problem: the samples; the selection uses at most 2048 of them, evenly spaced.
        bandwidths: candidates, (b,), in standardized units.
        normalize: whether the kernel is divided by its trace.
        num_samples: that the operator of the estimate is averaged over.
        sharding: how samples are divided over devices, or None.

    Returns:
        The selection, and the regularizer it amounts to.
    """
    unchosen = path_for(family, problem.dim, normalize)
    dtype = problem.points.dtype
    n = problem.points.shape[0]
    stride, tried = -(-n // SELECTION_POINTS), bandwidths
    problem = jax.tree.map(lambda a: a[::stride] if jnp.ndim(a) else a, problem)

    if problem.points.shape[0] < FEWEST_POINTS:
        return pick_unseen(unchosen, tried, dtype)

    def losses(bandwidth: jax.Array) -> jax.Array:
        values = held_out_losses(kernel, unchosen, solver, problem, bandwidth, normalize, sharding)
        # Fields are in units of the inverse bandwidth. In units of the first one losses can be
        # compared, and their squares neither underflow nor overflow.
        return values * (bandwidths[0] / bandwidth) ** 2

    # A selection has no derivative, and its input is not differentiated either. The dimension
    # stays a number, which programs depend on.
    problem = lax.stop_gradient(problem)._replace(dim=problem.dim)
    bandwidths = lax.stop_gradient(bandwidths)
    values = lax.map(losses, bandwidths)
    # Losses that are not finite are never selected.
    values = jnp.where(jnp.isfinite(values), values, jnp.inf)

    def error(members: jax.Array, rows: jax.Array) -> jax.Array:
        differences = values - values[rows, members][:, None]
        return jnp.std(differences, axis=2) / values.shape[2] ** 0.5

    growth = max(num_samples / problem.points.shape[0], 1.0)
    selection, member = pick(unchosen, jnp.mean(values, axis=2), error, tried, growth)
    steps = STEPS_OF_MANY if growth > 1 else STEPS
    return selection, dataclasses.replace(member, least_steps=steps)
