"""A model at given coordinates of its latents.

The coordinates of a latent are its unconstrained value, or another form of it: partially
non-centered (see ``centering``) and of a size that varies with other latents (see ``coupling``).
Densities are those of the coordinates: the logarithms of all Jacobians are added at the latent's
place in the model, so that its plates scale them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.infer.util import helpful_support_errors, log_density

from numpyro_kscore._tracing.centering import (
    LocationScale,
    from_centered,
    location_and_scale,
    to_centered,
)
from numpyro_kscore._tracing.coupling import Form, log_size
from numpyro_kscore._tracing.dependencies import KEY, is_drawn, seeded, sources_of

__all__ = ["evaluate_at", "hierarchical_sites", "log_density_at", "moved_coordinates", "trace_at"]


def log_density_at(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    coordinates: dict[str, jax.Array],
    forms: dict[str, Form],
) -> jax.Array:
    """Log joint density of data and latents, as one of the latents' coordinates.

    Args:
        model: a seeded model.
        args: its arguments.
        kwargs: its keyword arguments.
        coordinates: of every latent, by name.
        forms: of the latents whose coordinate is not their unconstrained value.
    """
    return evaluate_at(model, args, kwargs, coordinates, forms)[0]


def evaluate_at(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    coordinates: dict[str, jax.Array],
    forms: dict[str, Form],
) -> tuple[jax.Array, dict[str, Any]]:
    """The log joint density of :func:`log_density_at`, and the trace it was computed from."""
    value, trace = log_density(_at(model, coordinates, forms), args, kwargs, {})
    return value, trace


def trace_at(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    coordinates: dict[str, jax.Array],
    forms: dict[str, Form],
) -> dict[str, Any]:
    """The trace of a seeded model at coordinates, as for :func:`log_density_at`."""
    return handlers.trace(_at(model, coordinates, forms)).get_trace(*args, **kwargs)


def moved_coordinates(
    trace: dict[str, Any], names: list[str], centering: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """The coordinates of the latents of a trace, without couplings, for degrees of centering."""
    out = {}
    for name in names:
        site = trace[name]
        u = biject_to(site["fn"].support).inv(site["value"])
        if name in centering:
            u = from_centered(u, _prior(site), centering[name])
        out[name] = u
    return out


def _at(
    model: Callable[..., Any], coordinates: dict[str, Any], forms: dict[str, Form]
) -> Callable[..., Any]:
    return handlers.substitute(model, substitute_fn=partial(_value, coordinates, forms))


def _value(coordinates: dict[str, Any], forms: dict[str, Form], site: dict[str, Any]) -> Any:
    """The value of a site at its coordinate; adds the log-Jacobians to the density."""
    name = site["name"]
    if name not in coordinates or site["type"] != "sample":
        return coordinates.get(name)
    with helpful_support_errors(site):
        transform = biject_to(site["fn"].support)
    # Inside a scan the coordinates of all its steps are at hand, and one step is wanted.
    index = site["infer"].get("_scan_current_index")
    shape = transform.inverse_shape(site["fn"].shape())
    u = _step(coordinates[name], shape, index)
    form = forms.get(name, Form())
    log_dets = []
    if form.couplings:
        size = _step(log_size(form.couplings, coordinates), shape, index)
        u = u * jnp.exp(size)
        log_dets.append(size)
    if form.centering is not None:
        u, log_det = to_centered(u, _prior(site), _step(form.centering, shape, index))
        log_dets.append(log_det)
    value = transform(u)
    # An event of the support may have fewer dimensions than one of the distribution.
    event_dim = len(site["fn"].event_shape)
    jacobian = transform.log_abs_det_jacobian(u, value)
    jacobian = sum_rightmost(jacobian, jnp.ndim(jacobian) - jnp.ndim(value) + event_dim)
    for log_det in log_dets:
        jacobian += sum_rightmost(log_det, jnp.ndim(log_det) - jnp.ndim(value) + event_dim)
    numpyro.factor(f"_{name}_log_det", jacobian)
    return value


def _step(array: jax.Array, shape: tuple[int, ...], index: Any) -> jax.Array:
    return array[index] if index is not None and jnp.ndim(array) > len(shape) else array


def _prior(site: dict[str, Any]) -> LocationScale:
    prior = location_and_scale(site["fn"])
    if prior is None:
        raise ValueError(
            f"centering: expected a prior with location and scale at site '{site['name']}'; got "
            f"{type(site['fn']).__name__}. The model's structure must not change between calls"
        )
    return prior


def hierarchical_sites(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    latents: dict[str, Any],
) -> tuple[str, ...]:
    """Names of the latents whose prior has a location or scale that depends on other latents.

    Priors that depend on what the model draws and nobody sees, as of a model of which a part is
    blocked, are left out: their location is not known where the model is evaluated elsewhere.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        latents: values of the latents; only shapes matter.
    """

    def priors(given: dict[str, Any]) -> dict[str, Any]:
        key = given.pop(KEY, None)
        run = handlers.substitute(model, data=given) if key is None else seeded(model, key, given)
        trace = handlers.trace(run).get_trace(*args, **kwargs)
        found = {}
        for name in latents:
            site = trace[name]
            prior = location_and_scale(site["fn"]) if is_drawn(site) else None
            found[name] = None if prior is None else (prior.loc, prior.scale)
        return found

    shapes = {
        name: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
        for name, value in latents.items()
    }
    with handlers.block():
        try:
            sources = sources_of(priors, shapes)
        except Exception:
            # The model wants a key, for draws of its own. Inside control flow everything then
            # depends on the key, so it is left out where it can be.
            sources = sources_of(priors, {KEY: jax.random.key(0), **shapes})
    found = {name: frozenset().union(*s) for name, s in sources.items() if s is not None}
    chosen = {name for name, s in found.items() if s - {name} and KEY not in s}
    return tuple(name for name in latents if name in chosen)
