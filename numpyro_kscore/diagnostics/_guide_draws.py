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
    check_mostly_finite,
    draw_many,
)
from numpyro_kscore._model.target import Density
from numpyro_kscore._model.weights import draw_weighted, has_density, unconstrained_draws
from numpyro_kscore._util.checks import check_count, first_that_traces
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
        The draws in the model's unconstrained coordinates (``biject_to(support).inv`` of every
        latent, one after another as in the model), with the model's log density, score and
        Laplacian, and the guide's log density where it is known (docs/weights).

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
    program, layout, target = fitted.program, fitted.layout, fitted.target
    weighted = None
    if has_density(layout):
        weighted = draw_weighted(key, program, layout, num_samples, is_defended=False)
        weighted = unconstrained_draws(weighted, target.push())
        samples = weighted.samples
    else:
        samples, push = np.asarray(draw_many(key, program, layout, num_samples)), target.push()
        samples = samples if push is None else push(samples)[0]
        samples = samples[np.isfinite(samples).all(axis=1)]
    scored, laplacian = jax.device_get(_evaluate(fitted, samples, key))
    valid = np.asarray(are_finite(*scored))
    check_mostly_finite(np.arange(num_samples) < np.sum(valid))
    num_lost = int(num_samples - np.sum(valid))
    values, scores = scored
    draws = GuideDraws(jnp.asarray(samples), values, scores, num_lost=num_lost)
    if laplacian is not None and np.all(np.isfinite(laplacian[valid])):
        draws = draws._replace(laplacian=laplacian)
    if weighted is not None:
        # They are of all rows of tall data, of which the score may have some.
        known = jnp.asarray(weighted.log_density), jnp.asarray(weighted.log_q)
        draws = draws._replace(log_density=known[0], log_q=known[1], folded=weighted.folded)
    found = take_rows(draws, valid)
    return jax.tree.map(jnp.asarray, found)._replace(num_lost=num_lost, folded=found.folded)


def _evaluate(fitted: FittedGuide, samples: np.ndarray, key: Array) -> Any:
    """The log density (n,), score (n, d) and perhaps Laplacian (n,) at unconstrained points."""
    layout, size = fitted.layout, min(DRAWS_AT_ONCE, len(samples))
    density = model_density(fitted, key, fitted.target.plain).evaluate
    point = jax.ShapeDtypeStruct((layout.size,), jnp.result_type(float))
    along = _second_derivative(density, point)

    @quick_jit
    def run(samples: Array, key: Array) -> Any:
        values, scores = lax.map(density, samples, batch_size=size)
        if along is None:
            return (values, scores), None
        valid = are_finite(values, scores)
        finite = jnp.where(valid[:, None], samples, samples[jnp.argmax(valid)])
        factor = whiten_samples(finite).root()

        def trace(pair: tuple[Array, Array]) -> Array:
            # The trace of LᵀHL: a sum over columns of L, or one random combination of them.
            flat, probe = pair
            if layout.size <= EXACT_LAPLACIAN:
                return jnp.sum(jax.vmap(partial(along, flat))(factor.T))
            return along(flat, factor @ jax.random.rademacher(probe, flat.shape, flat.dtype))

        keys = jax.random.split(key_apart(key, 1), len(samples))
        return (values, scores), lax.map(trace, (finite, keys), batch_size=size)

    return run(samples, key)


def _second_derivative(density: Density, point: Any) -> Callable[[Array, Array], Array] | None:
    """``x, v`` to the second derivative of the log density at x along v, if it can be had."""

    def gradient(x: Array) -> Array:
        return density(x)[1]

    def forward(x: Array, v: Array) -> Array:
        return v @ jax.jvp(gradient, (x,), (v,))[1]

    def backward(x: Array, v: Array) -> Array:
        return v @ jax.vjp(gradient, x)[1](v)[0]

    found: Callable[[Array, Array], Array] | None = first_that_traces(
        (forward, backward), point, point
    )
    return found
