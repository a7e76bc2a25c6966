"""Fresh draws of a fitted guide, and the model evaluated at them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.infer import SVI

from numpyro_kscore._model.draws import GuideDraws
from numpyro_kscore._model.particles import (
    DRAWS_AT_ONCE,
    are_finite,
    at_source,
    check_mostly_finite,
    draw_particle,
    draw_sources,
)
from numpyro_kscore._model.target import Density
from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._energy import take_rows
from numpyro_kscore.diagnostics._fitted import FittedGuide, fitted_guide, model_density
from numpyro_kscore.estimators._base.standardization import whiten_samples

# Most dimensions with an exact Laplacian; beyond, one random direction for each draw estimates it.
EXACT_LAPLACIAN = 32


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
            :class:`~numpyro_kscore.ImplicitELBO` does not accept; for fewer than 4 draws.
        FloatingPointError: if fewer than half of the draws are finite.

    Cost: ``num_samples`` values and gradients of the model, and up to 32 Hessian products each.

    Example::

        draws = evaluate_guide(svi, result, y, num_samples=1000)
        draws.samples  # (1000, 2)
        draws.scores  # (1000, 2)
    """
    check_count("num_samples", num_samples, minimum=4)
    key = jax.random.key(0) if rng_key is None else rng_key
    return evaluate_fitted(fitted_guide(svi, result, args, kwargs, key), num_samples, key)


def evaluate_fitted(fitted: FittedGuide, num_samples: int, key: Array) -> GuideDraws:
    """:func:`evaluate_guide` for a guide from :func:`fitted_guide`."""
    layout = fitted.layout
    density = model_density(fitted, key).evaluate
    along = _second_derivative(
        density, jax.ShapeDtypeStruct((layout.size,), jnp.result_type(float))
    )
    draw = at_source(draw_particle, key, fitted.program, layout)

    def evaluate(source: Any) -> GuideDraws:
        found = draw(source)
        return GuideDraws(found.flat, *density(found.flat), log_q=found.log_density)

    @quick_jit
    def run(key: Array) -> tuple[GuideDraws, Array]:
        size = min(DRAWS_AT_ONCE, num_samples)
        count = -(-num_samples // size)
        sources = draw_sources(key, fitted.program, layout, (count, size))
        batches = lax.map(jax.vmap(evaluate), sources)
        draws = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:num_samples], batches)
        valid = are_finite(*(a for a in draws[:-1] if a is not None))
        finite = jnp.where(valid[:, None], draws.samples, draws.samples[jnp.argmax(valid)])
        if along is None:
            return draws, valid
        factor = whiten_samples(finite).root()

        def trace(pair: tuple[Array, Array]) -> Array:
            # The trace of LᵀHL: a sum over columns of L, or one random combination of them.
            flat, probe = pair
            if layout.size <= EXACT_LAPLACIAN:
                return jnp.sum(jax.vmap(partial(along, flat))(factor.T))
            return along(flat, factor @ jax.random.rademacher(probe, flat.shape, flat.dtype))

        keys = jax.random.split(key_apart(key, 1), num_samples)
        laplacian = lax.map(trace, (finite, keys), batch_size=size)
        return draws._replace(laplacian=laplacian), valid

    draws, valid = jax.device_get(run(key))
    check_mostly_finite(valid)
    draws = jax.tree.map(jnp.asarray, take_rows(draws, valid))
    second_known = draws.laplacian is not None and np.all(np.isfinite(draws.laplacian))
    return draws._replace(
        laplacian=draws.laplacian if second_known else None,
        log_q=None if layout.implicit_parts else draws.log_q,
        num_lost=int(num_samples - np.sum(valid)),
    )


def _second_derivative(density: Density, point: Any) -> Callable[[Array, Array], Array] | None:
    """``x, v`` to the second derivative of the log density at x along v, if it can be had."""

    def gradient(x: Array) -> Array:
        return density(x)[1]

    def forward(x: Array, v: Array) -> Array:
        return v @ jax.jvp(gradient, (x,), (v,))[1]

    def backward(x: Array, v: Array) -> Array:
        return v @ jax.vjp(gradient, x)[1](v)[0]

    # A custom rule for reverse mode has no forward mode, and a loop of unknown length no reverse
    # mode: what works is found out by tracing.
    for attempt in (forward, backward):
        try:
            jax.eval_shape(attempt, point, point)
        except (TypeError, ValueError):
            continue
        return attempt
    return None
