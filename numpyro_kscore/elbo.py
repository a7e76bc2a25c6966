"""``ImplicitELBO``: variational inference with guides that can only be sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from numpyro.infer import ELBO

from numpyro_kscore._pytree import check_choice, check_count
from numpyro_kscore.entropy import entropy
from numpyro_kscore.estimators import Median, ScoreEstimator
from numpyro_kscore.iterations import NuMethod
from numpyro_kscore.particles import (
    Draw,
    LogJoint,
    Program,
    Structure,
    draw_particle,
    inspect_program,
    log_joint_and_gradients,
)

__all__ = ["ImplicitELBO", "default_num_particles"]


def default_num_particles(dim: int) -> int:
    """Particles for a posterior of ``dim`` dimensions: 8 a dimension, from 128 to 512.

    Guides come out a little narrow with fewer: at 22 dimensions by 2 % with 128 particles, and a
    30-d Gaussian of condition 10⁴ is on the sampling floor with 240 (docs/accuracy).
    """
    return min(max(128, 8 * dim), 512)


class ImplicitELBO(ELBO):
    """An evidence lower bound for guides without a density.

    A drop-in for ``Trace_ELBO``: the guide's entropy gradient, which needs the score of the
    guide, comes from a kernel score estimate at the particles. The gradient of the objective in
    the guide's parameters φ is ``E[(ŝ_q - s_p)ᵀ ∂u/∂φ]`` over particles u in unconstrained
    coordinates, with s_p the model's score; the model's own parameters get ``-E[∂_θ log p]``.
    One value-and-gradient of the model a step is all that is needed.

    The reported loss is an *estimate* of the negative ELBO (its entropy by nearest neighbours);
    the gradient does not depend on it.

    Args:
        num_particles: guide draws a step, at least 2; by default 8 a dimension of the latent
            space, from 128 to 512.
        estimator: the score estimator; the default is the curl-free ν-method with 45 steps in
            whitened coordinates at .8 of the median distance. Its own ``base`` gives way to the
            one below.
        base: ``"model"`` regresses the difference to the model's score, so that regularisation
            shrinks towards "no update"; ``"gaussian"`` or None estimate the guide's score by
            itself (None is Zhou, Shi and Zhu 2020 to the letter, and collapses many guides).
        debias: ``"jackknife"`` removes the leading finite-sample bias at twice the cost; None
            leaves it.
        vectorize_particles: True evaluates all particles at once, False one after another
            (least memory), a callable ``(fn, xs) -> ys`` as it pleases.
        forward_mode_differentiation: differentiate the model in forward mode, for models with
            ``while_loop``; pass the same flag to ``SVI.run``.

    A particle at which the model's density or gradient is not finite contributes nothing to the
    gradient, and makes the reported loss NaN: parameters stay finite, the trouble is seen, and
    ``stable_update=True`` skips the step.

    Mutable sites: floating-point values are averaged over the particles, others taken from the
    first.

    Raises:
        ValueError: for a model or guide this objective cannot handle, while tracing.

    Example::

        optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 5_000))
        svi = SVI(model, AutoImplicit(model), optimizer, ImplicitELBO())
        result = svi.run(random.key(0), 5_000, data)
    """

    def __init__(
        self,
        num_particles: int | None = None,
        *,
        estimator: ScoreEstimator | None = None,
        base: str | None = "model",
        debias: str | None = "jackknife",
        vectorize_particles: bool | Callable[..., Any] = True,
        forward_mode_differentiation: bool = False,
    ) -> None:
        if num_particles is not None:
            check_count("num_particles", num_particles, minimum=2)
        if estimator is None:
            # Numbers, not "auto": what is best for one set of particles is far too strong for the
            # average over the steps of a fit (docs/accuracy).
            estimator = ScoreEstimator(regularizer=NuMethod(45), bandwidth=Median(0.8))
        if not isinstance(estimator, ScoreEstimator):
            raise TypeError(f"estimator: expected a ScoreEstimator; got {estimator!r}")
        check_choice("base", base, ("model", "gaussian", None))
        check_choice("debias", debias, ("jackknife", None))
        super().__init__(num_particles, vectorize_particles)
        self.base = base
        self.debias = debias
        self.estimator = dataclasses.replace(
            estimator, base="gaussian" if base == "gaussian" else None
        )
        self.forward_mode_differentiation = forward_mode_differentiation

    def loss_with_mutable_state(
        self,
        rng_key: jax.Array,
        param_map: dict[str, Any],
        model: Callable[..., Any],
        guide: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Loss and mutable state; see :class:`numpyro.infer.ELBO`."""
        structure = Structure()
        program = Program(param_map, model, guide, args, kwargs)
        inspect_program(rng_key, program, structure)
        num_particles = self.num_particles or default_num_particles(structure.dim)

        # Draws that are not finite are replaced before anything is differentiated: a derivative
        # of the guide there would be NaN even against a zero gradient.
        keys = jax.random.split(rng_key, num_particles)
        fixed = program._replace(params=lax.stop_gradient(param_map))
        probe = self.vectorize_particles_fn(partial(_flat, program=fixed), keys)
        drawn = jnp.all(jnp.isfinite(probe), axis=1)
        keys = keys[_nearest_valid(drawn)]
        draws: Draw = self.vectorize_particles_fn(
            partial(draw_particle, program=program, structure=structure), keys
        )
        joint = log_joint_and_gradients(
            draws,
            program,
            structure,
            None if self.vectorize_particles is True else self.vectorize_particles_fn,
            self.forward_mode_differentiation,
        )
        valid, direction, nelbo = self._descend(drawn, lax.stop_gradient(draws.flat), joint)

        # A function that is linear in the parameters and has the wanted gradient: neither the
        # fit nor the model is differentiated a second time.
        surrogate = jnp.sum(direction * jnp.where(valid[:, None], draws.flat, 0.0))
        for name, gradient in joint.param_gradient.items():
            products = jax.tree.map(
                lambda g, p: jnp.sum(jnp.where(jnp.isfinite(g), g, 0.0) * p),
                gradient,
                param_map[name],
            )
            surrogate = surrogate - sum(jax.tree.leaves(products))
        loss = lax.stop_gradient(nelbo) + surrogate - lax.stop_gradient(surrogate)
        mutable = jax.tree.map(_reduce_particles, draws.mutable) or None
        return {"loss": loss, "mutable_state": lax.stop_gradient(mutable)}

    def _descend(
        self, drawn: jax.Array, flat: jax.Array, joint: LogJoint
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Which particles are finite, the KL gradient at each over their number, and the loss."""
        valid = (
            drawn
            & jnp.isfinite(joint.log_density)
            & jnp.all(jnp.isfinite(joint.scores), axis=1)
            & jnp.all(jnp.isfinite(flat), axis=1)
        )
        # Copies of good particles take the places of bad ones: shapes stay, nothing spreads.
        source = _nearest_valid(valid)
        any_valid = jnp.any(valid)
        particles = jnp.where(any_valid, flat[source], 0.0)
        model_scores = jnp.where(any_valid, joint.scores[source], 0.0)

        base_scores = model_scores if self.base == "model" else None
        estimate = self.estimator.at_samples(particles, base_scores, debias=self.debias)
        if self.base == "model":
            direction = estimate.residual
        else:
            direction = estimate.scores - model_scores
        direction = jnp.where(valid[:, None], direction, 0.0)
        direction = direction / jnp.maximum(jnp.sum(valid), 1)
        rule = self.estimator.standardize
        if self.base == "gaussian" and rule == "full":
            rule = "gaussian"
        guide_entropy = entropy(estimate.nearest, estimate.coordinates, rule, particles.shape[0])
        nelbo = -(jnp.mean(joint.log_density) + guide_entropy)
        return valid, direction, jnp.where(jnp.all(valid), nelbo, jnp.nan)


def _flat(key: jax.Array, program: Program) -> jax.Array:
    return draw_particle(key, program, Structure()).flat


def _nearest_valid(valid: jax.Array) -> jax.Array:
    """For every particle the last valid one up to it, or the first valid one: indices (n,)."""
    last_valid = lax.cummax(jnp.where(valid, jnp.arange(valid.shape[0]), -1))
    return jnp.where(last_valid < 0, jnp.argmax(valid), last_valid)


def _reduce_particles(values: jax.Array) -> jax.Array:
    """One value of a mutable site from those of all particles."""
    if jnp.issubdtype(values.dtype, jnp.floating):
        return jnp.mean(values, axis=0)
    return values[0]
