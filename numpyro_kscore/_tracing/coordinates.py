"""A model at given coordinates of its latents.

The coordinates of a latent are its unconstrained value, or another form of it: partially
non-centered (see ``centering``), and of a size that varies with other latents, in a basis in which
sizes do (see ``coupling``).
Densities are those of the coordinates: the logarithms of all Jacobians are added at the latent's
place in the model, so that its plates scale them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.infer.util import helpful_support_errors, log_density

from numpyro_kscore._tracing.apart import Apart
from numpyro_kscore._tracing.centering import (
    LocationScale,
    from_centered,
    location_and_scale,
    to_centered,
)
from numpyro_kscore._tracing.coupling import Centering, Form, log_size
from numpyro_kscore._tracing.dependencies import KEY, is_drawn, is_enumerated, seeded, sources_of
from numpyro_kscore._tracing.enumeration import enumerated_log_density

__all__ = [
    "evaluate_at",
    "hierarchical_sites",
    "log_density_at",
    "moved_coordinates",
    "priors_of",
    "sites_at",
    "trace_at",
]


def log_density_at(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    coordinates: dict[str, jax.Array],
    forms: dict[str, Form],
) -> jax.Array:
    """Log joint density of data and continuous latents, as one of the latents' coordinates.

    Discrete latents are summed out.

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
    """The log joint density of :func:`log_density_at`, and a trace of the model there."""
    placed = _at(model, coordinates, forms)
    value, trace = log_density(placed, args, kwargs, {})
    if any(is_enumerated(site) for site in trace.values()):
        # What was computed above at draws of the discrete latents is dead code, which XLA drops.
        value = enumerated_log_density(placed, args, kwargs, trace)
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


def sites_at(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    coordinates: dict[str, jax.Array],
    forms: dict[str, Form],
) -> dict[str, jax.Array]:
    """Values of the continuous latents and the deterministic sites of a seeded model.

    Deterministic sites that are computed from discrete latents have no value at coordinates of the
    continuous ones, and are left out.
    """
    trace = trace_at(model, args, kwargs, coordinates, forms)
    computed = {n: site["value"] for n, site in trace.items() if site["type"] == "deterministic"}
    discrete = {name: site["value"] for name, site in trace.items() if is_enumerated(site)}
    if discrete and computed:

        def run(given: dict[str, Any]) -> dict[str, Any]:
            placed = handlers.substitute(_at(model, coordinates, forms), data=given)
            at_given = handlers.trace(placed).get_trace(*args, **kwargs)
            return {name: at_given[name]["value"] for name in computed}

        sources = sources_of(run, discrete)
        computed = {name: value for name, value in computed.items() if not sources[name]}
    return {name: trace[name]["value"] for name in trace if name in coordinates} | computed


def moved_coordinates(
    trace: dict[str, Any], names: list[str], centering: dict[str, Centering]
) -> dict[str, jax.Array]:
    """The coordinates of the latents of a trace, without couplings."""
    out = {}
    for name in names:
        site = trace[name]
        u = biject_to(site["fn"].support).inv(site["value"])
        if name in centering:
            u = from_centered(u, _prior(site), centering[name])
        out[name] = u
    return out


def priors_of(
    trace: dict[str, Any], names: Collection[str]
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Locations and logarithms of the scales of the priors of latents, in unconstrained values.

    Their shapes are those of these values, or broadcast to them.
    """
    priors = {name: _prior(trace[name]) for name in names}
    return {name: (prior.loc, jnp.log(prior.diagonal)) for name, prior in priors.items()}


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
    u = coordinates[name]
    form = forms.get(name, Form())
    log_dets = []
    if form.couplings:
        size = log_size(form.couplings, coordinates)
        u = u * jnp.exp(size)
        log_dets.append(_step(size, index))
    if form.basis is not None:
        u = jnp.tensordot(form.basis, u, axes=jnp.ndim(u))
    u = _step(u, index)
    prior = None if form.centering is None else _prior(site)
    value_ndim = jnp.ndim(u) - transform.domain.event_dim + transform.codomain.event_dim
    _check_place(site, value_ndim, prior)
    if prior is not None and form.centering is not None:
        step = Centering(*(_step(array, index) for array in form.centering))
        u, log_det = to_centered(u, prior, step)
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


def _check_place(site: dict[str, Any], value_ndim: int, prior: LocationScale | None) -> None:
    """Raise for a latent whose value at a coordinate depends on a discrete one, which has none.

    All values of discrete latents are axes left of all plates, so that they are seen by their axes.

    Args:
        site: the site of the latent.
        value_ndim: number of axes of its value.
        prior: its location and scale, where its coordinate is relative to them.
    """
    of_prior = () if prior is None else (prior.loc, prior.diagonal)
    axes = max(map(jnp.ndim, jax.tree.leaves((site["fn"].support, of_prior))), default=0)
    if axes > value_ndim:
        raise ValueError(
            f"model: expected a support of '{site['name']}' that depends on no discrete latent, "
            "and no centering where its prior does; got one for each value. Give it the same "
            "support for all of them"
        )
    if site["infer"].get("_scan_current_index") is not None and (
        value_ndim < len(site["fn"].shape())
    ):
        raise ValueError(
            f"model: expected continuous latents inside a scan that depend on no discrete latent; "
            f"got '{site['name']}', which NumPyro's scan cannot place. Sum the discrete one out by "
            "hand, or draw standardized values before the scan"
        )


def _step(array: jax.Array, index: Any) -> jax.Array:
    return array if index is None else array[index]


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
    with Apart():
        try:
            sources = sources_of(priors, shapes)
        except Exception:
            # The model wants a key, for draws of its own. Inside control flow everything then
            # depends on the key, so it is left out where it can be.
            sources = sources_of(priors, {KEY: jax.random.key(0), **shapes})
    found = {name: frozenset().union(*s) for name, s in sources.items() if s is not None}
    chosen = {name for name, s in found.items() if s - {name} and KEY not in s}
    return tuple(name for name in latents if name in chosen)
