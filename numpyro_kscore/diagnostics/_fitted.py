"""A fitted guide with its model, checked, and the model's log density."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpyro.infer import SVI

from numpyro_kscore._model.call_checks import call_error, check_svi, misspelled
from numpyro_kscore._model.control_variate import center
from numpyro_kscore._model.coreset import TallPlate, tall_plate
from numpyro_kscore._model.dependencies import is_enumerated, is_latent
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.particles import (
    are_finite,
    check_mostly_finite,
    draw_many,
    open_for_weights,
)
from numpyro_kscore._model.program import Program, trace_both
from numpyro_kscore._model.subsampling import is_subsampled, whole_plates, with_all_rows
from numpyro_kscore._model.tall_density import FITTED, NUM_DRAWS, ModelDensity, tall_density
from numpyro_kscore._model.target import BATCH, Target
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import check_key, key_apart
from numpyro_kscore.diagnostics._chains import fit_metric
from numpyro_kscore.diagnostics._codes import MEAN_LIMIT, SD_LIMIT

# Settings of the functions that are given a fitted guide.
SETTINGS = (
    "budget", "coords", "dims", "infer_discrete", "khat", "log_likelihood", "max_gradients",
    "num_chains", "num_samples", "num_superchains", "posterior_predictive", "prior",
    "progress_bar", "resample", "rng_key", "search_modes", "tol",
)  # fmt: skip


class FittedGuide(NamedTuple):
    """A guide and its model at the fitted parameters.

    Attributes:
        program: both, with arguments and parameters.
        layout: the layout of their latents.
        forward_mode: whether the model is differentiated in forward mode.
        tall: the plate of many rows that the model could subsample, if it has one.
    """

    program: Program
    layout: Layout
    forward_mode: bool
    tall: TallPlate | None = None

    @property
    def target(self) -> Target:
        """The model alone, in the guide's coordinates."""
        return self.program.target(self.layout)

    @property
    def push(self) -> Callable[[Array], Array] | None:
        """Points (n, d) in the guide's coordinates to unconstrained values; None if they are."""
        if not self.layout.transformed:
            return None
        return quick_jit(partial(lax.map, self.target.unconstrained, batch_size=BATCH))


def fitted_guide(
    svi: SVI, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Array
) -> FittedGuide:
    """Guide and model at the fitted parameters, checked as for :func:`evaluate_guide`."""
    check_svi(svi)
    check_key("rng_key", key)
    if not hasattr(result, "params") or not hasattr(result, "state"):
        raise TypeError(
            f"result: expected what svi.run or fit returns; got {type(result).__name__}. "
            "svi.update returns a state: wrap it as SVIRunResult(svi.get_params(state), state, "
            "losses)"
        )
    kwargs = {**kwargs, **svi.static_kwargs}
    error = call_error(svi.model, args, kwargs)
    if error is not None:
        raise misspelled("args", SETTINGS, svi.model, kwargs) or TypeError(
            f"args: expected the arguments the guide was fitted with; got {len(args)} positional "
            f"and {sorted(kwargs)} ({error}). Pass the data as to svi.run"
        ) from error
    params = {**result.params, **(getattr(result.state, "mutable_state", None) or {})}
    program = Program(params, svi.model, svi.guide, args, kwargs, {})
    trace = _trace_checked(program)
    program = _of_all_rows(program, trace)
    forward = bool(getattr(svi.loss, "forward_mode_differentiation", False))
    program, layout = open_for_weights(key, program)
    tall = tall_plate(svi.model, trace)
    return FittedGuide(program, layout, forward, tall)


def _trace_checked(program: Program) -> dict[str, Any]:
    """The sites of the model, all of whose latents the guide must draw."""
    seen: dict[str, Any] = {}
    missing: list[str] = []

    def run(key: Array) -> None:
        # At draws of the guide, since an improper prior has none.
        traces = trace_both(key, program)
        seen.update(traces.model)
        sites = traces.model.values()
        # Without data a discrete site would be summed out, and tell nothing.
        is_blind = not any(site["type"] == "sample" and site["is_observed"] for site in sites)
        drawn = (s["name"] for s in sites if is_latent(s) or (is_blind and is_enumerated(s)))
        missing.extend(name for name in drawn if name not in traces.guide)

    jax.eval_shape(run, jax.random.key(0))
    if missing:
        raise ValueError(
            f"model: expected data at {missing}, which the guide does not draw; got none. Pass the "
            "data the guide was fitted to, not None"
        )
    return seen


def _of_all_rows(program: Program, trace: dict[str, Any]) -> Program:
    """Guide and model with all rows of the plates that they subsample."""
    drawn = [
        name for name, site in trace.items() if site["type"] == "plate" and is_subsampled(site)
    ]
    if not drawn:
        return program
    model = whole_plates(program.model, program.args, program.kwargs)
    if model is program.model:
        size, number = trace[drawn[0]]["args"]
        raise ValueError(
            f"model: expected one that takes its rows by the indices of the plate '{drawn[0]}'; "
            f"got one that draws {number} of {size} and is given no others. A random subset has "
            "another posterior: pass all data, with subsample_size=None"
        )
    return program._replace(model=model, guide=with_all_rows(program.guide))


def model_density(fitted: FittedGuide, key: Array, target: Target | None = None) -> ModelDensity:
    """The model's log density, with all rows or with some that stand for them.

    It is in the guide's coordinates, or in the unconstrained ones of a ``target``.

    Cost: if rows stand for others, 300 gradients of all rows and two for each dimension up to 128.
    """
    own = fitted.target
    target = (own if target is None else target)._replace(key=key)
    if fitted.tall is None:
        return ModelDensity(target.scored_density(fitted.forward_mode))
    draws = draw_many(key_apart(key, 5), fitted.program, fitted.layout, NUM_DRAWS)
    push = None if target.coordinates else own.push()
    if push is not None:
        draws = jnp.asarray(push(draws)[0])
    finite = are_finite(draws)
    check_mostly_finite(finite)
    draws = jnp.where(finite[:, None], draws, center(draws))
    root = fit_metric(draws[FITTED]).root
    limits = (MEAN_LIMIT, SD_LIMIT)
    return tall_density(target, fitted.tall, draws, root, limits, fitted.forward_mode)
