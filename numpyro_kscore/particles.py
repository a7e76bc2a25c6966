"""Guide draws as one matrix of unconstrained particles, and the model's density at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import helpful_support_errors, is_identically_one, potential_energy
from numpyro.ops.provenance import eval_provenance

from numpyro_kscore.distributions import Implicit

__all__ = [
    "Draw",
    "LogJoint",
    "Program",
    "Structure",
    "draw_particle",
    "inspect_program",
    "log_joint_and_gradients",
]


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

    @property
    def dim(self) -> int:
        """Length of a flat particle."""
        return sum(site.size for site in self.sites)

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


class Program(NamedTuple):
    """A guide and a model with their parameters and arguments."""

    params: dict[str, Any]
    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def inspect_program(key: jax.Array, program: Program, structure: Structure) -> None:
    """Trace guide and model once, abstractly: fill in ``structure`` and check them.

    Raises:
        ValueError: if guide and model do not match, the model has latents this objective cannot
            handle, or a latent is drawn without noise.
    """
    provenance = eval_provenance(lambda key: _trace(key, program, structure)[0], key=key)
    points = [name for name, inputs in provenance.items() if "key" not in inputs]
    if points:
        raise ValueError(
            f"guide: expected latent sites computed from noise; got a point without any at "
            f"{points}. A point has no entropy, and the fit would be the posterior's mode: draw "
            "the site from a distribution, or from noise by Implicit(...)"
        )


def draw_particle(key: jax.Array, program: Program, structure: Structure) -> Draw:
    """Run the guide once and express its latents in unconstrained coordinates."""
    unconstrained, plates, mutable, model_key = _trace(key, program, structure)
    flat = jnp.concatenate([jnp.ravel(u) for u in unconstrained.values()])
    return Draw(flat, plates, mutable, model_key)


def _trace(
    key: jax.Array, program: Program, structure: Structure
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, Any], jax.Array]:
    """Unconstrained latents by site, plate indices, mutable values, and the model's key."""
    # New containers: a guide may change nested mutable state in place.
    params = jax.tree.map(lambda leaf: leaf, program.params)
    args, kwargs = program.args, program.kwargs
    guide_key, model_key = jax.random.split(key)
    seeded_guide = handlers.substitute(handlers.seed(program.guide, guide_key), data=params)
    guide_trace = handlers.trace(seeded_guide).get_trace(*args, **kwargs)
    mutable = _values(guide_trace, "mutable")
    plates = {
        name: value for name, value in _values(guide_trace, "plate").items() if value is not None
    }
    # The model runs only for its supports; what the likelihood costs here is dead code to XLA.
    drawn = {n: site for n, site in guide_trace.items() if site["type"] in ("sample", "plate")}
    seeded_model = handlers.seed(handlers.replay(program.model, drawn), model_key)
    model_trace = handlers.trace(
        handlers.substitute(seeded_model, data={**params, **mutable})
    ).get_trace(*args, **kwargs)
    check_sites(model_trace, guide_trace)
    mutable.update(_values(model_trace, "mutable"))
    unconstrained = {
        name: _unconstrain(site, guide_trace[name])
        for name, site in model_trace.items()
        if _is_latent(site)
    }
    structure.sites = tuple(Site(name, jnp.shape(u)) for name, u in unconstrained.items())
    structure.model_params = tuple(_values(model_trace, "param"))
    return unconstrained, plates, mutable, model_key


def _values(trace: dict[str, Any], kind: str) -> dict[str, Any]:
    return {name: site["value"] for name, site in trace.items() if site["type"] == kind}


def _is_latent(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def _unconstrain(model_site: dict[str, Any], guide_site: dict[str, Any]) -> jax.Array:
    fn = guide_site["fn"]
    with helpful_support_errors(model_site):
        transform = biject_to(model_site["fn"].support)
    if not isinstance(fn, Implicit) or fn.unconstrained is None:
        return transform.inv(guide_site["value"])
    expected, got = transform.inverse_shape(jnp.shape(fn.value)), jnp.shape(fn.unconstrained)
    if expected != got:
        raise ValueError(
            f"Implicit: expected unconstrained of shape {expected} at site "
            f"'{guide_site['name']}', to match its value; got {got}"
        )
    return fn.unconstrained


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
        scale = guide_trace[name]["scale"]
        if scale is not None and not is_identically_one(scale):
            raise ValueError(
                f"guide: expected unscaled latent sites; got '{name}' under a scale handler or a "
                "subsampled plate. Remove the scale: the entropy is that of all latents jointly"
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
    program: Program,
    structure: Structure,
    map_particles: Callable[..., Any] | None,
    forward_mode: bool,
) -> LogJoint:
    """The model's log joint density and its gradients at every particle, in one evaluation.

    Args:
        draws: a batch of draws, leading axis n.
        program: the model, its parameters and arguments.
        structure: the layout of a particle.
        map_particles: ``(fn, xs) -> ys`` to go through the particles with; None evaluates all
            at once.
        forward_mode: differentiate in forward mode, d + parameters evaluations.
    """
    draws = lax.stop_gradient(draws)
    params = lax.stop_gradient(program.params)
    differentiated = {name: params[name] for name in structure.model_params if name in params}

    def log_joint(flat: jax.Array, theta: dict[str, Any], draw: Draw) -> jax.Array:
        data = jax.tree.map(lambda leaf: leaf, {**params, **theta, **draw.plates})
        seeded = handlers.seed(handlers.substitute(program.model, data=data), draw.model_key)
        latents = structure.unravel(flat)
        return -potential_energy(seeded, program.args, program.kwargs, latents)

    def one(draw: Draw) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        def value_twice(flat: jax.Array, theta: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            value = log_joint(flat, theta, draw)
            return value, value

        differentiate = jax.jacfwd if forward_mode else jax.grad
        gradients = differentiate(value_twice, (0, 1), has_aux=True)
        (score, theta_gradient), value = gradients(draw.flat, differentiated)
        return value, score, theta_gradient

    def valid_mean(theta_gradients: Any, valid: jax.Array) -> Any:
        def mean(g: jax.Array) -> jax.Array:
            mask = valid.reshape(-1, *[1] * (g.ndim - 1))
            return jnp.sum(jnp.where(mask, g, 0.0), axis=0) / jnp.maximum(jnp.sum(valid), 1)

        return jax.tree.map(mean, theta_gradients)

    if map_particles is not None or forward_mode:
        map_particles = map_particles or (lambda fn, xs: jax.vmap(fn)(xs))
        values, scores, theta_gradients = map_particles(one, draws)
        valid = _finite(values, scores)
        return LogJoint(values, scores, valid_mean(theta_gradients, valid))

    def total(flat: jax.Array, theta: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        values = jax.vmap(log_joint, (0, None, 0))(flat, theta, draws)
        return jnp.sum(values), values

    gradients = jax.grad(total, (0, 1), has_aux=True)
    (scores, theta_total), values = gradients(draws.flat, differentiated)
    if not differentiated:
        return LogJoint(values, scores, theta_total)
    # A sum over all particles is cheapest, but one bad particle spoils it: only then is every
    # particle's gradient taken by itself.
    count = draws.flat.shape[0]
    valid = _finite(values, scores)
    theta_gradient = lax.cond(
        jnp.all(valid),
        lambda: jax.tree.map(lambda g: g / count, theta_total),
        lambda: valid_mean(lax.map(one, draws)[2], valid),
    )
    return LogJoint(values, scores, theta_gradient)


def _finite(values: jax.Array, scores: jax.Array) -> jax.Array:
    """At which particles the model's density and gradient are finite, (n,)."""
    return jnp.isfinite(values) & jnp.all(jnp.isfinite(scores), axis=1)
