"""The last look of a fit: importance weights of the guide that is returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._fit.programs import largest_errors
from numpyro_kscore._fit.progress import (
    CONVERGED,
    EVALUATION_DRAWS,
    SMALLEST_BATCH,
    CloseLook,
    Run,
    Seen,
)
from numpyro_kscore._fit.svi import Inference
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.particles import (
    at_source,
    draw_particle,
    draw_sources,
    open_for_weights,
)
from numpyro_kscore._model.weights import (
    NUM_DRAWS,
    Weigher,
    has_density,
    unconstrained_draws,
)
from numpyro_kscore._starts.start import ExactDraws
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import FitKey, key_apart
from numpyro_kscore.diagnostics._codes import Cause
from numpyro_kscore.diagnostics._rays import move_along_rays
from numpyro_kscore.diagnostics._weighing import Weighing, evidence_of, weigh, weigh_closely

# The seconds that weights may take without compilation: a share of those of the fit, and so many.
SHARE, LEAST = 0.25, 5.0
# Looks at a guide without a density, each at other draws.
CLOSE_LOOKS = 10


def last_look(
    inference: Inference, run: Run, rng_key: jax.Array, seconds: float, stopped: Cause
) -> Weighing | None:
    """Weigh draws of the guide after a fit of some seconds, with its key, that converged.

    None is returned where its density is not known, for minibatches, and if the fit was stopped.

    Cost: 10 000 values of the model, or what there is time for, and 40 000 more where these leave
    a tail in doubt; nothing where no step was needed.
    """
    progress, exact = run.progress, inference.exact_draws
    if not _may_look(inference, run, stopped):
        return None
    try:
        key = key_apart(rng_key, FitKey.WEIGHTS)
        if exact is not None and not progress.looks:
            # Few weights of very many latents tell whether some are far off, but not which.
            if exact.is_final and exact.weighted is None and not evidence_of(exact.gaps).is_poor:
                return None
            return _weigh_exact(inference, exact, run.best, key)
        return _weigh(inference, run.best, key, max(LEAST, SHARE * seconds))
    except Exception as error:  # whatever a model does: the fit is done
        warnings.warn(
            f"fit: importance weights of the guide could not be computed ({error}). "
            "diagnose(svi, result, ...) may tell more",
            UserWarning,
            stacklevel=4,
        )
        return None


def look_closely(
    inference: Inference, run: Run, look: Callable[..., Seen] | None, stopped: Cause
) -> CloseLook | None:
    """Look ten times at a guide without a density, each time at other draws, and along their rays.

    None is returned for a guide whose density is known, all looks at which have the same noise; for
    minibatches; and if the fit was stopped or did not converge.

    Cost: ten looks, whose program is compiled already, and 32 768 values of the model.
    """
    layout = inference.layout
    if look is None or layout is None or inference.is_quiet:
        return None
    if not _may_look(inference, run, stopped):
        return None
    seen = []
    for number in range(CLOSE_LOOKS):
        key = key_apart(jax.random.fold_in(run.best.rng_key, number), FitKey.WEIGHTS)
        seen.append(look(run.best._replace(rng_key=key), jnp.array(True), None, None))
    if not all(bool(one.finite) for one in seen):
        return None
    means, errors = np.moveaxis(np.stack([np.asarray(one.moments, float) for one in seen]), 1, 0)
    error = np.sqrt(np.mean(errors**2, axis=0) / CLOSE_LOOKS)
    at_draws = np.stack([np.mean(means, axis=0), error])
    moments = np.concatenate([at_draws, _look_along_rays(inference, layout, run.best)], axis=-1)
    shift, width = largest_errors(jnp.asarray(moments))
    values, spreads = (
        np.array([float(one.numbers[name]) for one in seen])
        for name in ("discrepancy", "discrepancy_error")
    )
    spread = float(np.sqrt(np.mean(spreads**2) / CLOSE_LOOKS))
    most = float(np.max(np.abs(moments[0]) + 2 * moments[1]))
    return CloseLook(float(np.mean(values)), spread, float(shift), float(width), most)


def _look_along_rays(inference: Inference, layout: Layout, state: Any) -> np.ndarray:
    """Errors of moments by what lies beyond the draws, (2, 2, d); unknown if that fails."""
    one_by_one = inference.svi.loss.vectorize_particles is False

    @quick_jit
    def moved(state: Any) -> jax.Array:
        key, program = key_apart(state.rng_key, FitKey.WEIGHTS), inference.program_at(state)
        sources = draw_sources(key, program, layout, (EVALUATION_DRAWS,))
        draw = at_source(draw_particle, key, program, layout)
        samples = lax.map(lambda source: draw(source).flat, sources, batch_size=SMALLEST_BATCH)
        density = program.target(layout).log_density
        return move_along_rays(density, samples, key, 1 if one_by_one else SMALLEST_BATCH)

    try:
        return np.asarray(moved(state), float)
    except Exception as error:  # whatever a model does: the fit is done
        warnings.warn(
            f"fit: what lies beyond the guide's draws could not be computed ({error}), so that no "
            "distance from the model is claimed. diagnose(svi, result, ...) may tell more",
            UserWarning,
            stacklevel=4,
        )
        unknown = np.zeros((2, 2, layout.size))
        unknown[1] = np.inf
        return unknown


def _may_look(inference: Inference, run: Run, stopped: Cause) -> bool:
    """Whether a fit converged, and every look at it sees all rows."""
    layout = inference.layout
    if stopped or run.progress.cause not in CONVERGED or layout is None or not layout.has_all_rows:
        return False
    return inference.batches is None and inference.program.reference is None


def covers(exact: ExactDraws | None) -> bool:
    """Whether draws of a start leave no tail of the model thin, as far as they can tell.

    Steps have nothing to fill in a tail whose spread is above that by weights, however unsure these
    are of it; they were seen to narrow some that were right.
    """
    if exact is None:
        return True
    weights = weigh(exact.as_weighted())
    return not (weights.is_poor or bool(np.any(weights.is_thin & (weights.ratio < 1))))


def _weigh(inference: Inference, state: Any, key: jax.Array, seconds: float) -> Weighing | None:
    program, layout = open_for_weights(key, inference.program_at(state))
    if not has_density(layout) or not (layout.implicit_parts or layout.mixtures):
        return None
    weigher, push = Weigher(key, program, layout, seconds), program.target(layout).push()
    return weigh_closely(
        weigher.draw, lambda draws: unconstrained_draws(draws, push), NUM_DRAWS, seconds
    )[1]


def _weigh_exact(inference: Inference, exact: ExactDraws, state: Any, key: jax.Array) -> Weighing:
    """Weigh draws of a start, at which both densities are known already."""
    draws = exact.as_weighted()
    if inference.layout is not None and inference.layout.transformed:
        program, layout = open_for_weights(key, inference.program_at(state))
        draws = unconstrained_draws(draws, program.target(layout).push())
    return weigh(draws)
