"""Guide draws as one matrix of unconstrained particles, and the model's density at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import helpful_support_errors, potential_energy

from numpyro_kscore.distributions import Implicit

__all__ = ["Draw", "LogJoint", "Site", "draw_particle", "log_joint_and_gradients"]


class Site(NamedTuple):
    """Where one latent site lives in a flat particle."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of unconstrained coordinates."""
        size = 1
        for length in self.shape:
            size *= length
        return size


class Structure:
    """What a trace of model and guide shows: static facts, filled in while tracing."""

    def __init__(self) -> None:
        self.sites: tuple[Site, ...] = ()
        self.model_params: tuple[str, ...] = ()

    def unravel(self, flat: jax.Array) -> dict[str, jax.Array]:
        """A flat particle (d,) as a dict of unconstrained sites."""
        out, start = {}, 0
        for site in self.sites:
            out[site.name] = flat[start : start + site.size].reshape(site.shape)
            start += site.size
        return out


class Draw(NamedTuple):
    """One draw from the guide.

    Attributes:
        flat: unconstrained coordinates of all latents, (d,); differentiable in the parameters.
        plates: subsample indices the guide drew, which the model must share.
        mutable: values at mutable sites of guide and model.
        model_key: key the model is seeded with.
    """

    flat: jax.Array
    plates: dict[str, jax.Array]
    mutable: dict[str, Any]
    model_key: jax.Array


def draw_particle(
    key: jax.Array,
    params: dict[str, Any],
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    structure: Structure,
) -> Draw:
    """Run the guide once and express its latents in unconstrained coordinates.

    Raises:
        ValueError: if guide and model do not match, or the model has latents this objective
            cannot handle.
    """
    guide_key, model_key = jax.random.split(key)
    seeded_guide = handlers.substitute(handlers.seed(guide, guide_key), data=params)
    guide_trace = handlers.trace(seeded_guide).get_trace(*args, **kwargs)
    mutable = _values(guide_trace, "mutable")
    plates = {
        name: value for name, value in _values(guide_trace, "plate").items() if value is not None
    }
    # The model runs only for its supports; what the likelihood costs here is dead code to XLA.
    seeded_model = handlers.seed(handlers.replay(model, guide_trace), model_key)
    model_trace = handlers.trace(
        handlers.substitute(seeded_model, data={**params, **mutable})
    ).get_trace(*args, **kwargs)
    check_sites(model_trace, guide_trace)
    mutable.update(_values(model_trace, "mutable"))

    sites, parts = [], []
    for name, site in model_trace.items():
        if not _is_latent(site):
            continue
        unconstrained = _unconstrain(site, guide_trace[name])
        sites.append(Site(name, jnp.shape(unconstrained)))
        parts.append(jnp.ravel(unconstrained))
    structure.sites = tuple(sites)
    structure.model_params = tuple(_values(model_trace, "param"))
    return Draw(jnp.concatenate(parts), plates, mutable, model_key)


def _values(trace: dict[str, Any], kind: str) -> dict[str, Any]:
    return {name: site["value"] for name, site in trace.items() if site["type"] == kind}


def _is_latent(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def _unconstrain(model_site: dict[str, Any], guide_site: dict[str, Any]) -> jax.Array:
    fn = guide_site["fn"]
    if isinstance(fn, Implicit) and fn.unconstrained is not None:
        return fn.unconstrained
    with helpful_support_errors(model_site):
        transform = biject_to(model_site["fn"].support)
    return transform.inv(guide_site["value"])


def check_sites(model_trace: dict[str, Any], guide_trace: dict[str, Any]) -> None:
    """Check that the guide draws every latent of the model, and that all are continuous.

    Raises:
        ValueError: naming the sites and what to do.
    """
    latents = {name: site for name, site in model_trace.items() if _is_latent(site)}
    if not latents:
        raise ValueError("model: expected at least one latent sample site; got none")
    discrete = [name for name, site in latents.items() if site["fn"].support.is_discrete]
    if discrete:
        raise ValueError(
            f"ImplicitELBO: expected continuous latent sites; got discrete {discrete}. Sum them "
            "out of the model (dist.MixtureSameFamily, numpyro.contrib.funsor), or use another "
            "objective for them"
        )
    drawn = {
        name
        for name, site in guide_trace.items()
        if _is_latent(site) and not site["infer"].get("is_auxiliary", False)
    }
    missing = [name for name in latents if name not in drawn]
    if missing:
        hint = ""
        others = [n for n in missing if guide_trace.get(n, {}).get("type") == "deterministic"]
        if others:
            hint = f" ({others} are deterministic there: use Implicit(value) sample sites)"
        raise ValueError(
            f"guide: expected a sample site for every latent of the model; got none for "
            f"{missing}{hint}"
        )
    extra = sorted(drawn - set(latents))
    if extra:
        raise ValueError(
            f"guide: expected only the model's latents {sorted(latents)} and auxiliary sites; "
            f"got {extra} besides. Mark noise with infer={{'is_auxiliary': True}}"
        )
    for name, site in latents.items():
        sample_shape = tuple(site["kwargs"].get("sample_shape", ()))
        model_shape = sample_shape + tuple(site["fn"].batch_shape) + tuple(site["fn"].event_shape)
        guide_shape = jnp.shape(guide_trace[name]["value"])
        if model_shape != guide_shape:
            raise ValueError(
                f"guide: expected shape {model_shape} at site '{name}', as the model has it; "
                f"got {guide_shape}"
            )
        for frame in site["cond_indep_stack"]:
            full_size = model_trace[frame.name]["args"][0]
            if frame.size != full_size:
                raise ValueError(
                    f"model: expected latent sites outside subsampled plates; got '{name}' in "
                    f"plate '{frame.name}', which draws {frame.size} of {full_size}. Subsample "
                    "observed sites only"
                )


class LogJoint(NamedTuple):
    """The model at the particles.

    Attributes:
        log_density: log p(data, z) + log |dz/du|, (n,).
        scores: its gradient in u, (n, d).
        param_gradient: mean over particles of the gradient in the model's parameters.
    """

    log_density: jax.Array
    scores: jax.Array
    param_gradient: dict[str, Any]


def log_joint_and_gradients(
    draws: Draw,
    params: dict[str, Any],
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    structure: Structure,
    map_particles: Callable[..., Any] | None,
    forward_mode: bool,
) -> LogJoint:
    """The model's log joint density and its gradients at every particle, in one evaluation.

    Args:
        draws: a batch of draws, leading axis n.
        params: values of all param and mutable sites.
        model: the model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        structure: the layout of a particle.
        map_particles: ``(fn, xs) -> ys`` to go through the particles with; None evaluates all
            at once.
        forward_mode: differentiate in forward mode, d + parameters evaluations.
    """
    draws = lax.stop_gradient(draws)
    params = lax.stop_gradient(params)
    differentiated = {name: params[name] for name in structure.model_params if name in params}

    def log_joint(flat: jax.Array, theta: dict[str, Any], draw: Draw) -> jax.Array:
        data = {**params, **theta, **draw.plates}
        seeded = handlers.seed(handlers.substitute(model, data=data), draw.model_key)
        return -potential_energy(seeded, args, kwargs, structure.unravel(flat))

    if map_particles is None and not forward_mode:

        def total(flat: jax.Array, theta: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            values = jax.vmap(log_joint, (0, None, 0))(flat, theta, draws)
            return jnp.sum(values), values

        gradients = jax.grad(total, (0, 1), has_aux=True)
        (scores, theta_gradient), values = gradients(draws.flat, differentiated)
        count = draws.flat.shape[0]
        return LogJoint(values, scores, jax.tree.map(lambda g: g / count, theta_gradient))

    def one(draw: Draw) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        def value_twice(flat: jax.Array, theta: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            value = log_joint(flat, theta, draw)
            return value, value

        differentiate = jax.jacfwd if forward_mode else jax.grad
        gradients = differentiate(value_twice, (0, 1), has_aux=True)
        (score, theta_gradient), value = gradients(draw.flat, differentiated)
        return value, score, theta_gradient

    map_particles = map_particles or (lambda fn, xs: jax.vmap(fn)(xs))
    values, scores, theta_gradients = map_particles(one, draws)
    return LogJoint(values, scores, jax.tree.map(lambda g: jnp.mean(g, 0), theta_gradients))
