"""The compiled programs of a fit: chunks of optimizer steps, and looks at the guide."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._fit.expansion import has_local_latents
from numpyro_kscore._fit.fit_options import LOSS_BLOCKS
from numpyro_kscore._fit.progress import (
    EVALUATION_DRAWS,
    LOOK_BATCHES,
    SMALLEST_BATCH,
    Chunk,
    Rule,
    Seen,
)
from numpyro_kscore._fit.svi import Given, Inference, with_parameters
from numpyro_kscore._model.control_variate import ControlVariate
from numpyro_kscore._model.draws import GuideDraws
from numpyro_kscore._model.joint import evaluate_particles
from numpyro_kscore._model.particles import are_finite
from numpyro_kscore._starts.start import ExactDraws
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import FitKey, key_apart
from numpyro_kscore.diagnostics._discrepancy import masked_stein_discrepancy

# Largest dimension in which moments are compared with all correlations taken into account.
MOST_CORRELATED = 256


def make_chunk(
    inference: Inference,
    forward_mode: bool,
    look: Callable[[SVIState, jax.Array, ControlVariate | None, Any], Seen] | None,
) -> Callable[[SVIState, tuple[Any, ControlVariate | None, Any], bool], Chunk]:
    """Compile ``(state, (step sizes, expansion of all rows, batches), settles) -> Chunk``.

    ``settles`` says that the fit settles, where steps may have more particles
    (:meth:`~numpyro_kscore.ImplicitELBO.settling`). Each step has a batch of its own, and those
    that follow are for the look; without a loader batches are None. ``look`` comes from
    :func:`make_look`; without it nothing but losses is seen.
    """
    svi, slots, finer = inference.svi, inference.slots, inference.settling

    def steps(
        state: SVIState,
        sizes: jax.Array,
        control_variate: ControlVariate | None,
        batches: Any,
        is_finer: bool,
    ) -> Chunk:
        count = sizes.shape[0]
        of_steps = jax.tree.map(itemgetter(slice(count)), batches)
        start = jax.tree.leaves(svi.optim.get_params(state.optim_state))
        carry = (state, [jnp.zeros_like(a) for a in start])
        here = copy.copy(svi)
        if control_variate is not None:
            here.loss = svi.loss.expanded(control_variate)
        elif inference.is_quiet and hasattr(svi.loss, "covering"):
            here.loss = svi.loss.covering()
        elif is_finer:
            here.loss = finer
        step = partial(_step, inference, here, forward_mode, start)
        (state, moved), losses = lax.scan(step, carry, (sizes, of_steps))
        # Means of changes, so that parameters that do not change stay as they are.
        mean = [(a + m / count).astype(a.dtype) for a, m in zip(start, moved, strict=True)]
        averaged = state._replace(optim_state=with_parameters(state.optim_state, slots, mean))
        numbers = _look_at_losses(losses)
        carried = [*mean, *jax.tree.leaves(state.mutable_state)]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in carried]))
        finite = finite & (2 * numbers["skipped"] <= count)
        return Chunk(state, averaged, losses, numbers, finite)

    search = quick_jit(partial(steps, is_finer=False))
    settle = quick_jit(partial(steps, is_finer=True), runs_long=True)

    def chunk(
        state: SVIState, given: tuple[Any, ControlVariate | None, Any], settles: bool
    ) -> Chunk:
        sizes, control_variate, batches = given
        take = settle if settles and finer is not None else search
        taken: Chunk = take(state, sizes, control_variate, batches)
        if look is None:
            return taken
        seen = look(taken.averaged, taken.finite, control_variate, batches)
        numbers = {**taken.look, **seen.numbers}
        return taken._replace(look=numbers, finite=seen.finite, gaps=seen.gaps)

    return chunk


def _step(
    inference: Inference,
    here: SVI,
    forward_mode: bool,
    start: list[jax.Array],
    carry: tuple[SVIState, list[jax.Array]],
    given: tuple[jax.Array, Any],
) -> tuple[Any, jax.Array]:
    """Take one step of an SVI, with a factor of its size and a batch.

    Carried are the state and the sums of the parameters' moves from ``start``, where the chunk
    began.
    """
    (state, moved), (size, batch) = carry, given
    args, kwargs = inference.arguments(batch)
    old = jax.tree.leaves(here.optim.get_params(state.optim_state))
    state, loss = here.stable_update(
        state, *args, forward_mode_differentiation=forward_mode, **kwargs
    )
    new = jax.tree.leaves(here.optim.get_params(state.optim_state))
    # Factor 1 keeps the optimizer's own step, bit for bit.
    new = [jnp.where(size == 1, b, a + (size * (b - a)).astype(b.dtype))
           for a, b in zip(old, new, strict=True)]  # fmt: skip
    state = state._replace(optim_state=with_parameters(state.optim_state, inference.slots, new))
    return (state, [m + (b - a) for m, a, b in zip(moved, start, new, strict=True)]), loss


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


def make_look(
    inference: Inference, forward_mode: bool, rng_key: jax.Array
) -> Callable[[SVIState, jax.Array, ControlVariate | None, Any], Seen] | None:
    """Compile ``(state, finite, expansion of all rows, batches) -> Seen``; None without a layout.

    Each group of draws has a batch of its own, the last ones of those given: their noise is not
    that of the batches that the guide has been fitted to.

    ``rng_key`` gives the key of the draws of every look, for guides whose density is known at them:
    where the noise is the same, so is most of the error of a bound, which then drops out of its
    changes. Elsewhere every look has noise of its own.
    """
    svi, layout = inference.svi, inference.layout
    if layout is None:
        return None
    noise_key = key_apart(rng_key, FitKey.LOOK) if inference.is_quiet else None

    def look(
        state: SVIState, finite: jax.Array, control_variate: ControlVariate | None, batches: Any
    ) -> Seen:
        of_look = jax.tree.map(itemgetter(slice(-LOOK_BATCHES, None)), batches)
        program = inference.program_at(state, _first(of_look))
        program = program._replace(control_variate=control_variate)
        is_one = has_local_latents(layout)
        data = None if of_look is None else partial(_data, inference, of_look, is_one)
        key = key_apart(state.rng_key, FitKey.LOOK) if noise_key is None else noise_key
        particles = svi.loss.num_particles or layout.default_num_particles
        batch = min(max(particles, SMALLEST_BATCH), EVALUATION_DRAWS)
        in_minibatches = bool(layout.row_counts) or data is not None
        if in_minibatches:
            # Draws of a batch share rows of the data, and the noise of these.
            batch = SMALLEST_BATCH
        if svi.loss.vectorize_particles is False:
            batch = 1
        draws, local = evaluate_particles(
            key, program, layout, EVALUATION_DRAWS, batch, forward_mode, data, noise_key is not None
        )
        gaps = own = None
        if local is not None:
            # The sum of known densities, zero without any, and of the others' local densities.
            log_q = jnp.asarray(draws.log_q) + jnp.sum(local.log_density, axis=1)
            gaps = draws.log_density - log_q
            covered = sum(part.columns.size for part in layout.local_parts)
            own = local.scores if covered == layout.size else None
        numbers, moments = _measure(draws, own)
        if in_minibatches:
            # Batches may have no row of a small group, or one that counts a hundredfold.
            unknown = jnp.full_like(numbers["shift"], jnp.nan)
            numbers |= {"shift": unknown, "width": unknown}
        if gaps is not None:
            numbers |= _bound(gaps)
        return Seen(numbers, finite & jnp.isfinite(numbers["discrepancy"]), gaps, moments)

    return quick_jit(look)


def make_first_looks(
    inference: Inference, look: Callable[..., Seen] | None, rule: Rule
) -> list[Callable[[SVIState], Seen]]:
    """Looks at the start: at exact draws, which needs no program of the model, and at the guide."""
    layout = inference.layout
    if look is None or layout is None or inference.batches or not layout.has_all_rows:
        return []
    looks: list[Callable[[SVIState], Seen]] = []
    draws = inference.exact_draws if inference.can_be_exact else None
    # Nothing is compiled for draws that are known not to be near enough.
    if draws is not None and (rule.is_final or draws.divergence <= rule.near_at_start):
        looks.append(lambda state: look_at_exact_draws(draws))
    if inference.is_quiet:
        looks.append(lambda state: look(state, jnp.array(True), None, None))
    return looks


def look_at_exact_draws(draws: ExactDraws) -> Seen:
    """Look at draws of a start, at which its density and the model's are known already.

    The look is in the coordinates in which the start is a standard normal.
    """
    first = (a[:EVALUATION_DRAWS] for a in draws[:4])
    arrays = (jnp.asarray(a, jnp.result_type(float)) for a in first)
    points, scores, log_density, gaps = arrays
    return _seen(GuideDraws(points, log_density, scores), gaps)


@quick_jit
def _seen(draws: GuideDraws, gaps: jax.Array) -> Seen:
    numbers, moments = _measure(draws, -draws.samples)
    numbers |= _bound(gaps)
    return Seen(numbers, jnp.isfinite(numbers["discrepancy"]), gaps, moments)


def _first(batches: Any) -> Any:
    return jax.tree.map(itemgetter(0), batches)


def _data(inference: Inference, batches: Any, is_one: bool, number: jax.Array) -> Given:
    """Arguments for a group of draws, by its number; ``is_one`` says that one batch is for all."""
    chosen = 0 if is_one else number % LOOK_BATCHES
    args, kwargs = inference.arguments(jax.tree.map(itemgetter(chosen), batches))
    return args, {**kwargs, **inference.svi.static_kwargs}


def _bound(gaps: jax.Array) -> dict[str, jax.Array]:
    """The evidence lower bound, and its gap to the evidence by importance sampling."""
    known = jnp.isfinite(gaps)
    count = jnp.sum(known)
    weight = known / jnp.maximum(count, 1)
    gaps = jnp.where(known, gaps, 0.0)
    mean = weight @ gaps
    highest = jnp.max(jnp.where(known, gaps, -jnp.inf))
    ratios = jnp.where(known, jnp.exp(gaps - highest), 0.0)
    return {
        "bound": mean,
        "bound_error": jnp.sqrt(weight @ (gaps - mean) ** 2 / jnp.maximum(count, 1)),
        "divergence": jnp.log(weight @ ratios) + highest - mean,
    }


def _measure(draws: GuideDraws, own: jax.Array | None) -> tuple[dict[str, jax.Array], jax.Array]:
    """Discrepancy, density and spread of the draws that are finite, and errors of moments.

    ``own`` are the guide's scores at the draws, (n, d), if they are known.
    """
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
    moments = moment_errors(centered, s, weight, own)
    shift, width = largest_errors(moments)
    numbers = {
        "discrepancy": discrepancy.value,
        "shift": shift,
        "width": width,
        "discrepancy_error": discrepancy.standard_error,
        "log_density": mean,
        "log_density_error": jnp.sqrt(variance / jnp.maximum(count, 1)),
        "log_spread": 0.5 * jnp.mean(jnp.log(jnp.maximum(spread, jnp.finfo(x.dtype).tiny))),
    }
    return numbers, moments


def moment_errors(
    centered: jax.Array, scores: jax.Array, weight: jax.Array, own: jax.Array | None = None
) -> jax.Array:
    """Measure how far means and deviations of draws are from the model's, by Stein's identities.

    With the covariance C of the draws, ``E[C s] = 0`` and ``E[(C s)_i x_i] = -C_ii`` hold at the
    model. To first order their residuals are the error of each mean and twice that of each log
    standard deviation. For a Gaussian they have no Monte-Carlo error at all. The guide's own scores
    fulfil the same identities wherever it is, so that the difference ``s - s_q`` has no error at
    the model, whatever its shape.

    Draws less their mean, the model's scores and the guide's ``own``, if known, are (n, d); weights
    sum to 1; draws where the own score is NaN do not count. Returned are the errors of means, in
    standard deviations, and of log standard deviations, then the standard errors of both, in one
    array (2, 2, d).
    """
    covariance = (centered * weight[:, None]).T @ centered
    variance = jnp.maximum(jnp.diag(covariance), jnp.finfo(centered.dtype).tiny)
    offset = centered
    if own is not None:
        known = jnp.all(jnp.isfinite(own), axis=1)
        scores = jnp.where(known[:, None], scores - own, 0.0)
        weight = weight * known
        weight = weight / jnp.maximum(jnp.sum(weight), jnp.finfo(weight.dtype).tiny)
        offset = jnp.zeros_like(centered)
    if centered.shape[1] > MOST_CORRELATED:
        residual = scores * jnp.diag(covariance) + offset
    else:
        residual = scores @ covariance + offset
    count = 1 / jnp.sum(weight**2)

    values = (residual / jnp.sqrt(variance), 0.5 * residual * centered / variance)
    means = [weight @ value for value in values]
    errors = [
        jnp.sqrt(weight @ (value - mean) ** 2 / count)
        for value, mean in zip(values, means, strict=True)
    ]
    return jnp.stack([*means, *errors]).reshape(2, 2, -1)


def largest_errors(moments: jax.Array) -> jax.Array:
    """The largest errors of a mean and of a log standard deviation beyond two standard errors."""
    errors, standard_errors = moments
    return jnp.max(jnp.maximum(jnp.abs(errors) - 2 * standard_errors, 0.0), axis=1)
