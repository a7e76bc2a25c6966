"""Fresh draws of a fitted guide, and the model evaluated at them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_kscore._tracing.coordinates import log_density_at, sites_at
from numpyro_kscore._tracing.dependencies import is_enumerated, is_latent
from numpyro_kscore._tracing.draws import GuideDraws
from numpyro_kscore._tracing.evaluation import evaluate_particles
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particles import (
    are_finite,
    at_source,
    draw_particle,
    draw_sources,
    with_shared,
)
from numpyro_kscore._tracing.program import Program, inspect_program, trace_both
from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._closed_form import take_rows
from numpyro_kscore.estimators._coordinates import whiten_samples

__all__ = [
    "FittedGuide",
    "check_mostly_finite",
    "constrain",
    "draw_fitted",
    "evaluate_fitted",
    "evaluate_guide",
    "fitted_guide",
    "log_joint_and_score",
]

# Most dimensions with an exact Laplacian; beyond, one random direction for each draw estimates it.
EXACT_LAPLACIAN = 32
# Draws evaluated at once.
BATCH = 256


class FittedGuide(NamedTuple):
    """A guide and its model at the fitted parameters.

    Attributes:
        program: both, with arguments and parameters.
        layout: the layout of their latents.
        forward_mode: whether the model is differentiated in forward mode.
    """

    program: Program
    layout: Layout
    forward_mode: bool


def fitted_guide(
    svi: SVI, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Array
) -> FittedGuide:
    """Guide and model at the fitted parameters, checked.

    Raises:
        TypeError: for anything but an ``SVI`` and its result, and arguments the model cannot take.
        ValueError: if the model has latents that the guide does not draw, or draws only some rows
            of a plate, and for guides that :class:`~numpyro_kscore.ImplicitELBO` does not accept.
    """
    if not isinstance(svi, SVI):
        raise TypeError(f"svi: expected an SVI of numpyro.infer; got {svi!r}")
    if not hasattr(result, "params") or not hasattr(result, "state"):
        raise TypeError(
            f"result: expected what svi.run or fit returns; got {type(result).__name__}. "
            "svi.update returns a state: wrap it as SVIRunResult(svi.get_params(state), state, "
            "losses)"
        )
    kwargs = {**kwargs, **svi.static_kwargs}
    try:
        inspect.signature(svi.model).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"args: expected the arguments the guide was fitted with; got {len(args)} positional "
            f"and {sorted(kwargs)} ({error}). Pass the data as to svi.run"
        ) from error
    params = {**result.params, **(getattr(result.state, "mutable_state", None) or {})}
    program = Program(params, svi.model, svi.guide, args, kwargs, {})
    _check_data(program)
    forward = bool(getattr(svi.loss, "forward_mode_differentiation", False))
    layout = inspect_program(key, program)
    return FittedGuide(with_shared(key, program, layout), layout, forward)


def _check_data(program: Program) -> None:
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
    for name, site in seen.items():
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            raise ValueError(
                f"model: expected whole plates; got '{name}', which draws {site['args'][1]} of "
                f"{site['args'][0]}. A random subset has another posterior: pass all data, with "
                "subsample_size=None"
            )


def evaluate_guide(
    svi: SVI,
    result: Any,
    *args: Any,
    num_samples: int = 4_000,
    rng_key: Array | None = None,
    **kwargs: Any,
) -> GuideDraws:
    """Draw from a fitted guide and evaluate the model, its score and its Laplacian there.

    Args:
        svi: model and guide; the loss may be any.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of model and guide, as in the fit.
        num_samples: number of fresh draws; for :func:`~numpyro_kscore.khat` at least ten a
            dimension.
        rng_key: random key; by default ``jax.random.key(0)``.
        **kwargs: keyword arguments of both.

    Returns:
        The draws in unconstrained coordinates, with the model's log density, score and Laplacian.

    Raises:
        TypeError: if ``svi`` is not an ``SVI``, or ``result`` has no parameters.
        ValueError: for a model with latents that the guide does not draw, and guides that
            :class:`~numpyro_kscore.ImplicitELBO` does not accept.
        FloatingPointError: if fewer than half of the draws are finite.

    Cost: ``num_samples`` values and gradients of the model, and up to 32 Hessian products each.
    """
    check_count("num_samples", num_samples, minimum=4)
    key = jax.random.key(0) if rng_key is None else rng_key
    return evaluate_fitted(fitted_guide(svi, result, args, kwargs, key), num_samples, key)


def evaluate_fitted(fitted: FittedGuide, num_samples: int, key: Array) -> GuideDraws:
    """:func:`evaluate_guide` for a guide from :func:`fitted_guide`."""
    program, layout, forward = fitted
    along = _second_derivative(fitted, key)

    @quick_jit
    def run(key: Array) -> tuple[GuideDraws, Array]:
        size = min(BATCH, num_samples)
        draws = evaluate_particles(key, program, layout, num_samples, size, forward)
        valid = are_finite(*(a for a in draws[:-1] if a is not None))
        finite = jnp.where(valid[:, None], draws.samples, draws.samples[jnp.argmax(valid)])
        if along is None:
            return draws, valid
        factor = whiten_samples(finite).root()
        keys = jax.random.split(key_apart(key, 1), num_samples)
        second = partial(_laplacian, along, factor)
        laplacian = lax.map(second, (finite, keys), batch_size=size)
        return draws._replace(laplacian=laplacian), valid

    draws, valid = jax.device_get(run(key))
    check_mostly_finite(int(np.sum(valid)), num_samples)
    draws = jax.tree.map(jnp.asarray, take_rows(draws, valid))
    is_explicit = not any(part.is_implicit for part in layout.parts)
    second_known = draws.laplacian is not None and np.all(np.isfinite(draws.laplacian))
    return draws._replace(
        laplacian=draws.laplacian if second_known else None,
        log_q=draws.log_q if is_explicit else None,
        num_lost=int(num_samples - np.sum(valid)),
    )


def check_mostly_finite(num_finite: int, num_samples: int) -> None:
    """Raise ``FloatingPointError`` if fewer than half of some draws are finite."""
    if 2 * num_finite < num_samples:
        raise FloatingPointError(
            f"guide: expected finite draws, densities and scores; got them at {num_finite} of "
            f"{num_samples} draws. Look for parameters that are not finite, or a model whose "
            "density vanishes where the guide is"
        )


def draw_fitted(fitted: FittedGuide, num_samples: int, key: Array) -> Array:
    """Draws of a guide alone, in unconstrained coordinates, (num_samples, d), finite or not."""

    @quick_jit
    def run(key: Array) -> Array:
        # Whole batches: a rest would be compiled as a program of its own.
        shape = (-(-num_samples // BATCH), BATCH)
        sources = draw_sources(key, fitted.program, fitted.layout, shape)
        draw = at_source(draw_particle, key, fitted.program, fitted.layout)
        return lax.map(jax.vmap(lambda source: draw(source).flat), sources)

    return run(key).reshape(-1, fitted.layout.size)[:num_samples]


def log_joint_and_score(fitted: FittedGuide, key: Array) -> Callable[[Array], tuple[Array, Array]]:
    """The model's log density at unconstrained latents (d,), with the log-Jacobian, and its score.

    The score is differentiated in the mode that the loss uses.
    """
    program, layout, forward = fitted

    def density(flat: Array) -> Array:
        model = handlers.substitute(handlers.seed(program.model, key), data=dict(program.params))
        latents = layout.unravel(flat)
        return log_density_at(model, program.args, program.kwargs, latents, program.forms)

    if not forward:
        return jax.value_and_grad(density)

    def both(flat: Array) -> tuple[Array, Array]:
        gradient, value = jax.jacfwd(lambda x: (density(x),) * 2, has_aux=True)(flat)
        return value, gradient

    return both


def _second_derivative(fitted: FittedGuide, key: Array) -> Callable[[Array, Array], Array] | None:
    """``x, v`` to the second derivative of the log density at x along v, if it can be had."""
    both = log_joint_and_score(fitted, key)

    def gradient(x: Array) -> Array:
        return both(x)[1]

    def forward(x: Array, v: Array) -> Array:
        return v @ jax.jvp(gradient, (x,), (v,))[1]

    def backward(x: Array, v: Array) -> Array:
        return v @ jax.vjp(gradient, x)[1](v)[0]

    point = jax.eval_shape(lambda k: draw_particle(k, fitted.program, fitted.layout).flat, key)
    # A custom rule for reverse mode has no forward mode, and a loop of unknown length no reverse
    # mode: what works is found out by tracing.
    for attempt in (forward, backward):
        try:
            jax.eval_shape(attempt, point, point)
        except (TypeError, ValueError):
            continue
        return attempt
    return None


def _laplacian(
    along: Callable[[Array, Array], Array], factor: Array, pair: tuple[Array, Array]
) -> Array:
    """Trace of ``Lᵀ H L``: a sum over columns of L, or one random combination of them."""
    flat, probe = pair
    dim = flat.shape[0]
    if dim <= EXACT_LAPLACIAN:
        return jnp.sum(jax.vmap(partial(along, flat))(factor.T))
    return along(flat, factor @ jax.random.rademacher(probe, (dim,), flat.dtype))


def constrain(program: Program, layout: Layout, flat: Array) -> dict[str, Array]:
    """Latent and deterministic sites of the model at unconstrained draws (n, d)."""

    def one(x: Array) -> dict[str, Array]:
        model = handlers.substitute(program.model, data=dict(program.params))
        seeded = handlers.seed(model, jax.random.key(0))
        return sites_at(seeded, program.args, program.kwargs, layout.unravel(x), program.forms)

    return quick_jit(partial(lax.map, one, batch_size=BATCH))(flat)
