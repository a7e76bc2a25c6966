"""``ImplicitELBO``: variational inference with guides that can only be sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from numpyro.infer import ELBO

from numpyro_kscore._objective.block_gradient import descend, put_columns
from numpyro_kscore._objective.stateful import STATE, Following, stateful_guide
from numpyro_kscore._tracing.layout import Layout, default_num_particles
from numpyro_kscore._tracing.particles import (
    Draw,
    LogJoint,
    are_finite,
    draw_particle,
    draw_plates,
    log_joint_and_gradients,
)
from numpyro_kscore._tracing.program import Program, inspect_program
from numpyro_kscore._util.checks import check_choice, check_count, check_positive
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore._util.sharding import check_sharding, constrain_rows, divides, num_shards
from numpyro_kscore.estimators._estimator import ScoreEstimator
from numpyro_kscore.estimators._selection import Median
from numpyro_kscore.regularizers._iterations import NuMethod
from numpyro_kscore.sliced._estimator import SlicedScoreMatching

__all__ = ["ImplicitELBO"]


class ImplicitELBO(ELBO):
    """An evidence lower bound for guides without a density.

    A drop-in for ``Trace_ELBO``: the guide's entropy gradient, which needs the score of the
    guide, comes from a kernel score estimate at the particles. The gradient of the objective in
    the guide's parameters φ is ``E[(ŝ_q - s_p)ᵀ ∂u/∂φ]`` over particles u in unconstrained
    coordinates, with s_p the model's score; the model's own parameters get ``-E[∂_θ log p]``.
    One value-and-gradient of the model a step is all that is needed.

    Which latents have a density is read off the guide: those keep their exact entropy, and only
    the others are estimated, in blocks that share noise, given the latents they depend on and row
    by row in plates whose rows have noise of their own
    (docs/guides). ``infer={"implicit": True}`` at a guide's site
    asks for an estimate all the same. Subsampled plates scale entropies as they scale densities;
    rows with estimates of their own are the same for all particles of a step.

    The reported loss is an *estimate* of the negative ELBO (its entropy by nearest neighbors);
    the gradient does not depend on it.

    Args:
        num_particles: guide draws a step, at least 2; by default 8 for each dimension of the
            largest block that is estimated, the latents it depends on included, from 128 to 512.
        estimator: the score estimator; the default is the curl-free ν-method with 45 steps in
            whitened coordinates at .8 of the median distance. Its own ``base`` gives way to the
            one below. A :class:`~numpyro_kscore.SlicedScoreMatching` is trained along with
            the guide; its network needs a place, see :meth:`stateful`.
        base: ``"model"``, the default for kernels, regresses the difference to the model's
            score, so that regularization shrinks toward "no update"; ``"moments"`` regresses the
            difference to the Gaussian with the draws' own mean and covariance, which is right for
            guides that are nearly Gaussian in many dimensions, such as the values of a random
            function, and needs more draws than dimensions; ``"gaussian"`` or None
            estimate the guide's score by itself (None is Zhou, Shi and Zhu 2020 to the letter,
            and collapses many guides). ``"auto"`` takes a network's own base, and
            ``"gaussian"`` with ``num_draws``.
        debias: ``"jackknife"`` removes the leading finite-sample bias, at 1.5 times the operations
            of an estimate (with few particles, twice its time); None leaves it. There is none of
            a network.
        num_draws: guide draws behind an estimate, where a draw of the guide is much cheaper than
            the model: at least ``num_particles``, which is the default. The model is evaluated at
            ``num_particles`` of them. Needs ``base="gaussian"``, which it then implies, or None:
            less bias, more noise, and no protection from heavy tails (docs/accuracy).
        clip: how far a step may ask a typical particle to move, in multiples of the noise of a
            converged fit; longer directions are scaled down as a whole. Where a fit starts far off
            they are a thousand times longer, and an optimizer that divides by the root mean square
            of what it has seen, as Adam does, would hardly move for thousands of steps afterwards.
            None never scales. Applies with the base ``"model"``, and not to aggregates.
        aggregate: name of a plate. The draws of all its elements are then taken as draws of one
            distribution, the aggregate posterior, whose divergence from the prior replaces that
            of every element: the objective of Wasserstein autoencoders.
        vectorize_particles: True evaluates all particles at once, False one after another
            (least memory), a callable ``(fn, xs) -> ys`` as it pleases.
        forward_mode_differentiation: differentiate the model in forward mode, for models with
            ``while_loop``; pass the same flag to ``SVI.run``.
        sharding: how particles are divided over devices, ``NamedSharding(mesh, P("particles"))``:
            each draws its own, evaluates the model there, and works on their pairs with all
            (docs/scaling). Needs a number of particles that divides evenly, and
            ``vectorize_particles=True``.

    A particle at which the model's density or gradient is not finite contributes nothing to the
    gradient, and makes the reported loss NaN: parameters stay finite, the trouble is seen, and
    ``stable_update=True`` skips the step. Where a region has no density nothing pushes particles
    out of it, and a guide that is wholly inside moves no more: write such a bound as a support.

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
        estimator: ScoreEstimator | SlicedScoreMatching | None = None,
        base: str | None = "auto",
        debias: str | None = "jackknife",
        num_draws: int | None = None,
        clip: float | None = 4.0,
        aggregate: str | None = None,
        vectorize_particles: bool | Callable[..., Any] = True,
        forward_mode_differentiation: bool = False,
        sharding: NamedSharding | None = None,
    ) -> None:
        if num_particles is not None:
            check_count("num_particles", num_particles, minimum=1 if aggregate else 2)
        if aggregate is not None and not isinstance(aggregate, str):
            raise TypeError(f"aggregate: expected the name of a plate or None; got {aggregate!r}")
        if num_draws is not None:
            if num_particles is None or aggregate is not None:
                raise ValueError(
                    "num_draws: expected num_particles beside it, and no aggregate; got "
                    f"num_particles={num_particles}, aggregate={aggregate!r}"
                )
            check_count("num_draws", num_draws, minimum=num_particles)
        if estimator is None:
            # Numbers, not "auto": what is best for one set of particles is far too strong for the
            # average over the steps of a fit (docs/accuracy).
            estimator = ScoreEstimator(regularizer=NuMethod(45), bandwidth=Median(0.8))
        if not isinstance(estimator, ScoreEstimator | SlicedScoreMatching):
            raise TypeError(
                f"estimator: expected a ScoreEstimator or SlicedScoreMatching; got {estimator!r}"
            )
        check_choice("base", base, ("auto", "model", "moments", "gaussian", None))
        if isinstance(estimator, SlicedScoreMatching):
            if base in ("model", "moments"):
                raise ValueError(
                    "base: expected 'gaussian' or None beside SlicedScoreMatching(); got "
                    f"{base!r}. A network that lags behind the guide runs away from a base that "
                    "does not"
                )
            base = estimator.base if base == "auto" else base
        elif base == "auto":
            base = "model" if num_draws is None else "gaussian"
        if num_draws is not None and base == "model":
            # Measured (docs/accuracy): with the model's score at some of the draws only, the noise
            # of the two terms of the regression no longer cancels, and the gradient gets worse.
            raise ValueError(
                "base: expected 'gaussian' or None beside num_draws; got 'model', which needs the "
                "model's score at every draw. Leave base out, or use num_particles alone"
            )
        check_choice("debias", debias, ("jackknife", None))
        if debias and isinstance(estimator, ScoreEstimator) and estimator.subset is not None:
            raise ValueError(
                "debias: expected None beside an estimator with a subset, whose halves would be "
                f"other operators; got {debias!r}. Give ImplicitELBO debias=None"
            )
        sharding = check_sharding(sharding)
        if sharding is not None and vectorize_particles is not True:
            raise ValueError(
                "vectorize_particles: expected True beside sharding, which evaluates each "
                f"device's particles at once; got {vectorize_particles!r}"
            )
        if clip is not None:
            check_positive("clip", clip)
        super().__init__(num_particles, vectorize_particles)
        self.base = base
        self.debias = debias
        self.num_draws = num_draws
        self.clip = clip
        self.aggregate = aggregate
        self.sharding = sharding
        self.estimator = dataclasses.replace(
            estimator, base="gaussian" if base == "gaussian" else None
        )
        if sharding is not None and isinstance(self.estimator, ScoreEstimator):
            self.estimator = dataclasses.replace(self.estimator, sharding=sharding)
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
        program = Program(param_map, model, guide, args, kwargs, {})
        layout, aggregated = self._pooled(inspect_program(rng_key, program))
        program = program._replace(plates=draw_plates(rng_key, program, layout))
        num_particles = self.num_particles or self._default_num_particles(layout, aggregated)
        if self.base == "moments":
            self._check_moments(layout, aggregated, self.num_draws or num_particles)

        # Draws that are not finite are replaced before anything is differentiated: a derivative
        # of the guide there would be NaN even against a zero gradient.
        if self.sharding is not None and not divides(self.sharding, num_particles):
            raise ValueError(
                f"num_particles: expected a multiple of {num_shards(self.sharding)}, as many for "
                f"every device; got {num_particles}. Give a number that is one"
            )
        keys = constrain_rows(jax.random.split(rng_key, num_particles), self.sharding)
        fixed = program._replace(params=lax.stop_gradient(param_map))
        drawn = jnp.ones(num_particles, bool)
        # One particle has no other to replace it, and an encoder need not run twice.
        if num_particles > 1:
            probe = self.vectorize_particles_fn(partial(_flat, program=fixed, layout=layout), keys)
            drawn = are_finite(probe)
            keys = constrain_rows(keys[_nearest_valid(drawn)], self.sharding)
        draws: Draw = self.vectorize_particles_fn(
            partial(draw_particle, program=program, layout=layout), keys
        )
        draws = constrain_rows(draws, self.sharding)
        joint = log_joint_and_gradients(
            draws,
            program,
            layout,
            None if self.vectorize_particles is True else self.vectorize_particles_fn,
            self.forward_mode_differentiation,
            aggregated,
        )
        if isinstance(self.estimator, SlicedScoreMatching) and STATE not in param_map:
            raise ValueError(
                "guide: expected a place for the network of SlicedScoreMatching(); got a guide "
                "without. Use SVI(model, elbo.stateful(model, guide), optimizer, elbo)"
            )
        extra = None
        if self.num_draws is not None and self.num_draws > num_particles:
            more = jax.random.split(key_apart(rng_key, 1), self.num_draws - num_particles)
            extra = self.vectorize_particles_fn(partial(_flat, program=fixed, layout=layout), more)
        valid, direction, guide_entropy, networks = self._descend(
            layout, aggregated, drawn, lax.stop_gradient(draws), joint, extra
        )

        # Neither the fit nor the model is differentiated a second time: their gradients are known.
        # Exact densities are differentiated.
        share = valid / jnp.maximum(jnp.sum(valid), 1)
        moved = (draws.flat, draws.log_density, {k: param_map[k] for k in joint.param_gradient})
        gradient = (
            jnp.where(valid[:, None], direction, 0.0),
            share.astype(direction.dtype),
            jax.tree.map(lambda g: -jnp.where(jnp.isfinite(g), g, 0.0), joint.param_gradient),
        )
        nelbo = jnp.mean(draws.log_density - joint.log_density) - guide_entropy
        nelbo = lax.stop_gradient(jnp.where(jnp.all(valid), nelbo, jnp.nan))
        loss = _with_gradient(nelbo, moved, gradient)
        mutable = jax.tree.map(_reduce_particles, draws.mutable)
        if networks:
            mutable = {**mutable, STATE: networks}
        mutable = mutable or None
        return {"loss": loss, "mutable_state": lax.stop_gradient(mutable)}

    def _descend(
        self,
        layout: Layout,
        aggregated: frozenset[str],
        drawn: jax.Array,
        draws: Draw,
        joint: LogJoint,
        extra: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
        """Which particles are finite, the KL gradient at each over their number, the entropy.

        The gradient leaves out the densities that are known, and the entropy is that of the rest.
        Last are the networks that were trained, if any.
        """
        flat = draws.flat
        valid = drawn & are_finite(joint.log_density, draws.log_density, joint.scores, flat)
        # Copies of good particles take the places of bad ones: shapes stay, nothing spreads.
        source = _nearest_valid(valid)
        any_valid = jnp.any(valid)

        def sound(values: jax.Array) -> jax.Array:
            return jnp.where(any_valid, values[source], 0.0)

        particles, scores = sound(flat), sound(joint.scores)
        prior_scores = None if joint.prior_scores is None else sound(joint.prior_scores)
        if extra is not None:
            stand_in = particles[np.arange(extra.shape[0]) % particles.shape[0]]
            extra = jnp.where(are_finite(extra)[:, None], extra, stand_in)
        direction = -scores
        guide_entropy = jnp.zeros((), flat.dtype)
        networks = {}
        for part in layout.parts:
            if not part.is_implicit:
                continue
            estimator: Any = self.estimator
            if isinstance(estimator, SlicedScoreMatching):
                network = draws.mutable[STATE][part.sites[0]]
                network = jax.tree.map(lambda leaf: leaf[0], network)
                estimator = Following(estimator, network, draws.model_key[0])
            is_aggregated = part.sites[0] in aggregated
            found = descend(
                estimator,
                part,
                particles,
                scores,
                base=self.base,
                debias=self.debias,
                clip=self.clip if self.base == "model" and not is_aggregated else None,
                prior_scores=prior_scores if is_aggregated else None,
                extra=extra,
            )
            guide_entropy = guide_entropy + found.entropy
            if isinstance(estimator, Following):
                networks[part.sites[0]] = estimator.state
            direction = put_columns(direction, part.rows, found.direction)
        return valid, direction / jnp.maximum(jnp.sum(valid), 1), guide_entropy, networks

    def stateful(self, model: Callable[..., Any], guide: Callable[..., Any]) -> Callable[..., Any]:
        """The guide with a place for what is trained along with it.

        Needed for ``estimator=SlicedScoreMatching(...)`` only. NumPyro keeps state in mutable
        sites, which a guide must declare::

            elbo = ImplicitELBO(estimator=SlicedScoreMatching())
            svi = SVI(model, elbo.stateful(model, guide), optimizer, elbo)

        Draws from the posterior are taken from the guide itself, with the fitted parameters.
        """
        if not isinstance(self.estimator, SlicedScoreMatching):
            return guide
        return stateful_guide(self.estimator, model, guide, self._pooled)

    def _pooled(self, layout: Layout) -> tuple[Layout, frozenset[str]]:
        """The sites whose elements are draws of one distribution, in one part, and their names."""
        if self.aggregate is None:
            return layout, frozenset()
        parts = [part for part in layout.parts if self.aggregate in part.plates]
        if not parts:
            raise ValueError(
                f"aggregate: expected a plate with latent sites that have noise of their own in "
                f"it; got {self.aggregate!r}, and the latents' plates are "
                f"{sorted({name for part in layout.parts for name in part.plates})}"
            )
        for part in parts:
            if not part.is_implicit or part.context is not None or len(part.plates) > 1:
                raise ValueError(
                    f"aggregate: expected sites in plate {self.aggregate!r} alone that depend on "
                    f"no other latent and are estimated; got {list(part.sites)}. Mark a site with "
                    "a density by infer={'implicit': True}"
                )
        names = frozenset(name for part in parts for name in part.sites)
        return layout.pooled(self.aggregate), names

    def _check_moments(self, layout: Layout, aggregated: frozenset[str], num_draws: int) -> None:
        for part in layout.parts:
            if not part.is_implicit or part.sites[0] in aggregated:
                continue
            if num_draws < part.dim + 2:
                raise ValueError(
                    f"num_particles: expected at least {part.dim + 2} beside base='moments', for "
                    f"the covariance of the {part.dim} numbers of {list(part.sites)}; got "
                    f"{num_draws}. Use more, or base='model'"
                )

    def _default_num_particles(self, layout: Layout, aggregated: frozenset[str]) -> int:
        count = default_num_particles(layout.dim)
        implicit = [part for part in layout.parts if part.is_implicit]
        if all(part.sites[0] in aggregated for part in implicit) and implicit:
            return -(-count // min(part.rows.shape[0] for part in implicit))
        return count


@jax.custom_jvp
def _with_gradient(value: jax.Array, moved: Any, gradient: Any) -> jax.Array:
    """``value``, with the derivative ``gradient`` in ``moved``: exactly that, and nothing more."""
    return value


@_with_gradient.defjvp
def _with_gradient_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    value, _, gradient = primals
    # A gradient of zero asks for nothing, whatever the tangent: also where that is NaN.
    products = jax.tree.map(
        lambda g, t: jnp.sum(g * jnp.where(g == 0, 0.0, t)).astype(value.dtype),
        gradient,
        tangents[1],
    )
    return value, sum(jax.tree.leaves(products), jnp.zeros((), value.dtype))


def _flat(key: jax.Array, program: Program, layout: Layout) -> jax.Array:
    return draw_particle(key, program, layout).flat


def _nearest_valid(valid: jax.Array) -> jax.Array:
    """For every particle the last valid one up to it, or the first valid one: indices (n,)."""
    last_valid = lax.cummax(jnp.where(valid, jnp.arange(valid.shape[0]), -1))
    return jnp.where(last_valid < 0, jnp.argmax(valid), last_valid)


def _reduce_particles(values: jax.Array) -> jax.Array:
    """One value of a mutable site from those of all particles."""
    if jnp.issubdtype(values.dtype, jnp.floating):
        return jnp.mean(values, axis=0)
    return values[0]
