"""Fresh draws of a fitted guide with all that diagnostics want to know about them."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.util import constrain_fn, potential_energy

from numpyro_kscore._tracing.dependencies import is_drawn
from numpyro_kscore._tracing.evaluation import evaluate_particles
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._tracing.particles import are_finite
from numpyro_kscore._tracing.program import Program, inspect_program, trace_both
from numpyro_kscore._util.checks import as_points, as_scored, check_count
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._discrepancy import LARGEST_WHITENED
from numpyro_kscore.estimators._coordinates import Coordinates, standardize_samples

__all__ = [
    "FittedGuide",
    "GuideDraws",
    "constrain",
    "evaluate_fitted",
    "evaluate_guide",
    "fitted_guide",
    "log_joint",
    "whitening",
]

# Up to so many dimensions the Laplacian is exact; beyond, one random direction a draw estimates it.
EXACT_LAPLACIAN = 32
BATCH = 256


class GuideDraws(NamedTuple):
    """Independent draws of a guide, in unconstrained coordinates, and the model at them.

    Attributes:
        samples: (n, d).
        log_density: the model's, with the log-Jacobian, up to a constant, (n,).
        scores: its gradient, (n, d).
        laplacian: its Laplacian in coordinates whitened by the samples, (n,), or None. Without it
            fewer energies can be compared.
        log_q: the guide's log density, (n,), where it has one; otherwise None.
        num_lost: draws at which something was not finite; they are left out.
    """

    samples: Array
    log_density: Array
    scores: Array
    laplacian: Array | None = None
    log_q: Array | None = None
    num_lost: int = 0

    def checked(self, minimum: int = 100) -> GuideDraws:
        """The same as arrays of one precision.

        Raises:
            TypeError: for entries that are not floating point.
            ValueError: for shapes that do not fit, too few draws, or entries that are not finite.
        """
        x, scores = as_scored(self.samples, self.scores, minimum)
        n = x.shape[0]
        columns = {
            "log_density": self.log_density,
            "laplacian": self.laplacian,
            "log_q": self.log_q,
        }
        found: dict[str, Any] = {}
        for name, values in columns.items():
            if values is None:
                found[name] = None
                continue
            if jnp.shape(values) != (n,):
                raise ValueError(f"{name}: expected shape ({n},); got {jnp.shape(values)}")
            found[name] = as_points(name, jnp.reshape(jnp.asarray(values), (n, 1)))[:, 0]
        return GuideDraws(x, scores=scores, num_lost=self.num_lost, **found)


def whitening(samples: Array) -> Coordinates:
    """The map to coordinates whitened by the draws; beyond 256 dimensions only scaled."""
    how = "full" if samples.shape[1] <= LARGEST_WHITENED else "diagonal"
    return standardize_samples(samples, how)


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
        ValueError: if the model observes nothing, or draws only some rows of a plate, and for
            guides that :class:`~numpyro_kscore.ImplicitELBO` could not take either.
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
    _check_observed(program)
    forward = bool(getattr(svi.loss, "forward_mode_differentiation", False))
    return FittedGuide(program, inspect_program(key, program), forward)


def _check_observed(program: Program) -> None:
    seen: dict[str, Any] = {}
    missing: list[str] = []

    def run(key: Array) -> None:
        # At draws of the guide: an improper prior has none.
        traces = trace_both(key, program)
        seen.update(traces.model)
        drawn = [name for name, site in traces.model.items() if is_drawn(site)]
        missing.extend(name for name in drawn if name not in traces.guide)

    jax.eval_shape(run, jax.random.key(0))
    if not any(site["type"] == "sample" and site["is_observed"] for site in seen.values()):
        raise ValueError(
            "model: expected at least one observed site at these arguments; got none. Pass the "
            "data the guide was fitted to, not None"
        )
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
        svi: model and guide; whatever the loss was.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of model and guide, as in the fit.
        num_samples: fresh draws, more than a fit has particles: an energy needs at least ten a
            dimension.
        rng_key: random key; by default ``jax.random.key(0)``.
        **kwargs: keyword arguments of both.

    Returns:
        The draws in unconstrained coordinates, with the model's log density, score and Laplacian.

    Raises:
        TypeError: if ``svi`` is no ``SVI``, or ``result`` has no parameters.
        ValueError: for a model that observes nothing at these arguments, and guides that
            :class:`~numpyro_kscore.ImplicitELBO` could not take either.
        FloatingPointError: if fewer than half of the draws are finite.

    Cost: ``num_samples`` values and gradients of the model, and up to 32 Hessian products each.
    """
    check_count("num_samples", num_samples, minimum=4)
    key = jax.random.key(0) if rng_key is None else rng_key
    return evaluate_fitted(fitted_guide(svi, result, args, kwargs, key), num_samples, key)


def evaluate_fitted(fitted: FittedGuide, num_samples: int, key: Array) -> GuideDraws:
    """:func:`evaluate_guide` of a guide that has been looked at."""
    program, layout, forward = fitted

    @jax.jit
    def run(key: Array) -> tuple[Any, Array, Array]:
        size = min(BATCH, num_samples)
        found = evaluate_particles(key, program, layout, num_samples, size, forward)
        found = jax.tree.map(lambda a: a[:num_samples], found)
        valid = are_finite(found.log_density, found.flat, found.scores, found.guide_log_density)
        sound = jnp.where(valid[:, None], found.flat, found.flat[jnp.argmax(valid)])
        factor = whitening(sound).root()

        def second(pair: tuple[Array, Array]) -> Array:
            return _laplacian(*pair, factor, program, layout, key)

        keys = jax.random.split(key_apart(key, 1), num_samples)
        laplacian = lax.map(second, (sound, keys), batch_size=size)
        return found, laplacian, valid

    found, laplacian, valid = jax.device_get(run(key))
    if 2 * np.sum(valid) < num_samples:
        raise FloatingPointError(
            f"guide: expected finite draws, densities and scores; got them at {np.sum(valid)} of "
            f"{num_samples} draws. Look for parameters that are not finite, or a model whose "
            "density vanishes where the guide is"
        )
    is_explicit = not any(part.is_implicit for part in layout.parts)
    return GuideDraws(
        samples=jnp.asarray(found.flat[valid]),
        log_density=jnp.asarray(found.log_density[valid]),
        scores=jnp.asarray(found.scores[valid]),
        laplacian=jnp.asarray(laplacian[valid]) if np.all(np.isfinite(laplacian[valid])) else None,
        log_q=jnp.asarray(found.guide_log_density[valid]) if is_explicit else None,
        num_lost=int(num_samples - np.sum(valid)),
    )


def log_joint(flat: Array, program: Program, layout: Layout, key: Array) -> Array:
    """The model's log density at unconstrained latents (d,), with the log-Jacobian."""
    model = handlers.substitute(handlers.seed(program.model, key), data=dict(program.params))
    latents = layout.unravel(flat)
    return -potential_energy(model, program.args, program.kwargs, latents)


def _laplacian(
    flat: Array, probe: Array, factor: Array, program: Program, layout: Layout, key: Array
) -> Array:
    """Trace of ``Lᵀ H L``, by columns of L or by one random combination of them."""

    def gradient(x: Array) -> Array:
        return jax.grad(lambda u: log_joint(u, program, layout, key))(x)

    def along(direction: Array) -> Array:
        return direction @ jax.jvp(gradient, (flat,), (direction,))[1]

    dim = flat.shape[0]
    if dim <= EXACT_LAPLACIAN:
        return jnp.sum(jax.vmap(along)(factor.T))
    return along(factor @ jax.random.rademacher(probe, (dim,), flat.dtype))


def constrain(program: Program, layout: Layout, flat: Array) -> dict[str, Array]:
    """Latent and deterministic sites of the model at unconstrained draws (n, d)."""

    def one(x: Array) -> dict[str, Array]:
        model = handlers.substitute(program.model, data=dict(program.params))
        found = constrain_fn(
            handlers.seed(model, jax.random.key(0)),
            program.args,
            program.kwargs,
            layout.unravel(x),
            return_deterministic=True,
        )
        return {name: value for name, value in found.items() if name not in program.params}

    return jax.jit(partial(lax.map, one, batch_size=BATCH))(flat)
