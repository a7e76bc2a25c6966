"""A compiled chunk of optimizer steps, and a look at the guide after them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._fit.expansion import has_local_latents
from numpyro_kscore._fit.settings import LOSS_BLOCKS
from numpyro_kscore._fit.svi import Arguments, program_of, with_parameters
from numpyro_kscore._tracing.anchor import Anchor
from numpyro_kscore._tracing.evaluation import evaluate_particles
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particles import are_finite
from numpyro_kscore._tracing.program import Program
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._discrepancy import masked_stein_discrepancy

__all__ = ["LOOK_BATCHES", "Chunk", "make_chunk", "moment_errors"]

# Fresh draws for a discrepancy: they take a tenth of the time of a hundred steps, or less.
EVALUATION_DRAWS = 1024
# Most dimensions in which moments are compared with all correlations taken into account.
MOST_CORRELATED = 256
# Least number of draws evaluated at once: the few particles of an explicit guide would be slow.
SMALLEST_BATCH = 64
# Batches of a loader that a look takes, one for each group of so many draws.
LOOK_BATCHES = EVALUATION_DRAWS // SMALLEST_BATCH


class Chunk(NamedTuple):
    """The result of a chunk of steps.

    Attributes:
        state: the ``SVIState`` after the last step.
        averaged: the same state with the mean of the parameters over the steps.
        losses: one for each step; NaN where it was skipped.
        look: the fields of :class:`~numpyro_kscore._fit.stopping.Look`.
        finite: whether parameters and discrepancy are finite, and at least half of the losses.
    """

    state: SVIState
    averaged: SVIState
    losses: jax.Array
    look: dict[str, jax.Array]
    finite: jax.Array


def make_chunk(
    svi: SVI,
    layout: Layout | None,
    slots: tuple[int, ...],
    arguments: Arguments,
    forward_mode: bool,
) -> Callable[[SVIState, np.ndarray, Anchor | None, Any], Chunk]:
    """Compile ``(state, step sizes, expansion of all rows, batches) -> Chunk``.

    Each step has a batch of its own, and so have the :data:`LOOK_BATCHES` groups of fresh draws
    after them: their noise is not that of the batches that the guide has been fitted to. Without
    batches there is None in their place.

    Args:
        svi: model, guide, optimizer and loss.
        layout: the layout of a particle; without it no discrepancy is computed.
        slots: from :func:`parameter_slots`.
        arguments: from a batch to arguments and keyword arguments of model and guide.
        forward_mode: differentiate in forward mode.
    """

    def step(
        here: SVI, start: list[jax.Array], carry: Any, given: tuple[jax.Array, Any]
    ) -> tuple[Any, jax.Array]:
        (state, moved), (size, batch) = carry, given
        args, kwargs = arguments(batch)
        old = jax.tree.leaves(svi.optim.get_params(state.optim_state))
        state, loss = here.stable_update(
            state, *args, forward_mode_differentiation=forward_mode, **kwargs
        )
        new = jax.tree.leaves(svi.optim.get_params(state.optim_state))
        # At factor 1 keep the optimizer's own step, bit for bit.
        new = [jnp.where(size == 1, b, a + (size * (b - a)).astype(b.dtype))
               for a, b in zip(old, new, strict=True)]  # fmt: skip
        state = state._replace(optim_state=with_parameters(state.optim_state, slots, new))
        return (state, [m + (b - a) for m, a, b in zip(moved, start, new, strict=True)]), loss

    def chunk(state: SVIState, sizes: jax.Array, anchor: Anchor | None, batches: Any) -> Chunk:
        count = sizes.shape[0]
        of_steps, of_look = (jax.tree.map(itemgetter(k), batches)
                             for k in (slice(count), slice(count, None)))  # fmt: skip
        start = jax.tree.leaves(svi.optim.get_params(state.optim_state))
        carry = (state, [jnp.zeros_like(a) for a in start])
        here = copy.copy(svi)
        if anchor is not None:
            here.loss = svi.loss.expanded(anchor)
        (state, moved), losses = lax.scan(partial(step, here, start), carry, (sizes, of_steps))
        # Means of changes, so that parameters that do not change stay as they are.
        mean = [(a + m / count).astype(a.dtype) for a, m in zip(start, moved, strict=True)]
        averaged = state._replace(
            optim_state=with_parameters(state.optim_state, slots, mean),
        )
        look = _look_at_losses(losses)
        carried = [*mean, *jax.tree.leaves(state.mutable_state)]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in carried]))
        finite = finite & (2 * look["skipped"] <= count)
        if layout is not None:
            program = program_of(svi, averaged, arguments(_first(of_look)))
            program = program._replace(anchor=anchor)
            data = None if of_look is None else partial(_data, arguments, of_look, layout)
            key = key_apart(state.rng_key, 0)
            look.update(_look_at_guide(key, svi, program, layout, forward_mode, data))
            finite = finite & jnp.isfinite(look["discrepancy"])
        return Chunk(state, averaged, losses, look, finite)

    return quick_jit(chunk)


def _first(batches: Any) -> Any:
    return jax.tree.map(itemgetter(0), batches)


def _data(arguments: Arguments, batches: Any, layout: Layout, number: jax.Array) -> Any:
    """Arguments for a group of draws; rows with latents of their own are the same for all."""
    if has_local_latents(layout):
        return arguments(_first(batches))
    return arguments(jax.tree.map(lambda a: a[number % LOOK_BATCHES], batches))


def _look_at_losses(losses: jax.Array) -> dict[str, jax.Array]:
    whole = losses[: LOSS_BLOCKS * (losses.shape[0] // LOSS_BLOCKS)]
    blocks = jnp.nanmean(whole.reshape(LOSS_BLOCKS, -1), axis=1)
    loss = jnp.nanmean(losses)
    # Losses of many rows are in the millions, and coarse in single precision.
    rounding = jnp.finfo(losses.dtype).eps * jnp.abs(loss)
    return {
        "loss": loss,
        "loss_error": jnp.maximum(jnp.nanstd(blocks, ddof=1) / LOSS_BLOCKS**0.5, rounding),
        "skipped": jnp.sum(~jnp.isfinite(losses)),
    }


def _look_at_guide(
    key: jax.Array,
    svi: SVI,
    program: Program,
    layout: Layout,
    forward_mode: bool,
    data: Arguments | None,
) -> dict[str, jax.Array]:
    particles = svi.loss.num_particles or layout.default_num_particles
    batch = min(max(particles, SMALLEST_BATCH), EVALUATION_DRAWS)
    in_minibatches = bool(layout.row_counts) or data is not None
    if in_minibatches:
        # Draws of a batch share rows of the data, and the noise of these.
        batch = SMALLEST_BATCH
    if svi.loss.vectorize_particles is False:
        batch = 1
    draws = evaluate_particles(key, program, layout, EVALUATION_DRAWS, batch, forward_mode, data)
    x, s, log_density = draws.samples, draws.scores, draws.log_density
    valid = are_finite(log_density, x, s)
    first = jnp.argmax(valid)
    x, s = (jnp.where(valid[:, None], a, a[first]) for a in (x, s))
    discrepancy = masked_stein_discrepancy(x, s, valid)
    count = jnp.sum(valid)
    weight = valid / jnp.maximum(count, 1)
    mean = weight @ jnp.where(valid, log_density, 0.0)
    variance = weight @ jnp.where(valid, (log_density - mean) ** 2, 0.0)
    centered = x - weight @ x
    spread = weight @ centered**2
    shift, width = moment_errors(centered, s, weight)
    if in_minibatches:
        # Of a small group no batch may have a row, or one that counts a hundredfold.
        shift = width = jnp.full_like(shift, jnp.nan)
    return {
        "discrepancy": discrepancy.value,
        "shift": shift,
        "width": width,
        "discrepancy_error": discrepancy.standard_error,
        "log_density": mean,
        "log_density_error": jnp.sqrt(variance / jnp.maximum(count, 1)),
        "log_spread": 0.5 * jnp.mean(jnp.log(jnp.maximum(spread, jnp.finfo(x.dtype).tiny))),
    }


def moment_errors(
    centered: jax.Array, scores: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How far means and standard deviations of draws are from the model's, by Stein's identities.

    With the covariance C of the draws, ``E[C s] = 0`` and ``E[(C s)_i x_i] = -C_ii`` hold at the
    model. To first order their residuals are the error of each mean and twice that of each log
    standard deviation. For a Gaussian they have no Monte-Carlo error at all.

    Args:
        centered: draws less their mean, (n, d).
        scores: the model's score at the draws, (n, d).
        weight: weights of the draws, (n,), which sum to 1.

    Returns:
        The largest error of a mean, in standard deviations, and of a log standard deviation, each
        beyond two standard errors, and zero at least.
    """
    covariance = (centered * weight[:, None]).T @ centered
    if centered.shape[1] > MOST_CORRELATED:
        residual = scores * jnp.diag(covariance) + centered
    else:
        residual = scores @ covariance + centered
    variance = jnp.maximum(jnp.diag(covariance), jnp.finfo(centered.dtype).tiny)
    count = 1 / jnp.sum(weight**2)

    def largest(values: jax.Array) -> jax.Array:
        mean = weight @ values
        error = jnp.sqrt(weight @ (values - mean) ** 2 / count)
        return jnp.max(jnp.maximum(jnp.abs(mean) - 2 * error, 0.0))

    return largest(residual / jnp.sqrt(variance)), largest(0.5 * residual * centered / variance)
