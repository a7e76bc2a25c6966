"""``ImplicitELBO``: variational inference with guides that can only be sampled."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from numpyro.infer import ELBO

from numpyro_kscore._model.all_rows import expand
from numpyro_kscore._model.control_variate import ControlVariate
from numpyro_kscore._model.draws import Draw
from numpyro_kscore._model.joint import LogJoint, log_joint_and_gradients
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.particles import (
    LocalDraw,
    are_finite,
    at_source,
    draw_local,
    draw_particle,
    draw_sources,
    with_shared,
)
from numpyro_kscore._model.program import Program, inspect_program, objective_program
from numpyro_kscore._objective.kl_gradient import kl_gradient, loss_of, nearest_valid
from numpyro_kscore._objective.objective_options import count_particles, pool, resolve_settings
from numpyro_kscore._objective.stateful import STATE, check_place, stateful_guide
from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.keys import check_key
from numpyro_kscore._util.sharding import constrain_rows
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.estimators._fit.settings import Median
from numpyro_kscore.estimators._operators.operator_options import Subset
from numpyro_kscore.regularizers._filters import Tikhonov
from numpyro_kscore.regularizers._iterations import NuMethod
from numpyro_kscore.sliced._estimator import SlicedScoreMatching
from numpyro_kscore.solvers._solvers import ConjugateGradient

# Numbers, not "auto": the best choice for one set of particles is far too strong for the average
# over the steps of a fit (benchmarks/results/2026-11-21-choice-inside-a-fit.md).
OF_POSTERIORS = ScoreEstimator(regularizer=NuMethod(45), bandwidth=Median(0.8), standardize="full")
# A fit settles with more particles, whose estimates are finer. An operator averaged over a part of
# them costs a fifth of that of all, and is as good (benchmarks/results/2026-11-30-own-guides.md).
SETTLING_PARTICLES = 1024
OF_SETTLING = ScoreEstimator(
    regularizer=NuMethod(128), bandwidth="median", standardize="full", subset=Subset(256)
)
# KEF-CG with λ = 1e-4 where codes have unit variance, the same in every unit (docs/wae_report).
OF_AGGREGATES = ScoreEstimator(
    regularizer=Tikhonov(2e-4), solver=ConjugateGradient(), bandwidth="median", standardize="none"
)

# Most columns of derivatives that local log densities are computed for, at half of the particles at
# most: each takes O(d) evaluations of the network's derivative, and a determinant. They may be more
# where fewer draws than the second number are left, and the third is the least number of draws.
LOCAL_COLUMNS, ENOUGH_LOCAL, FEWEST_LOCAL = 1280, 20, 4


class ImplicitELBO(ELBO):
    """An evidence lower bound for guides without a density.

    A drop-in for ``Trace_ELBO``: the gradient of the guide's entropy needs the guide's score,
    which is estimated from the particles. The gradient of the objective in the guide's parameters
    φ is ``E[(ŝ_q - s_p)ᵀ ∂u/∂φ]`` over particles u in unconstrained coordinates, where s_p is the
    model's score; the model's own parameters get ``-E[∂_θ log p]``. A step takes one value and
    gradient of the model at each particle.

    The guide's trace shows which latents have a density: these keep their exact entropy. The
    others are estimated in blocks that share noise, given the latents they depend on, and row by
    row in plates whose rows have noise of their own (docs/guides). ``infer={"implicit": True}`` at
    a guide's site asks for an estimate although its density is known. Subsampled plates scale
    entropies as they scale densities; in plates that are estimated row by row, all particles of a
    step draw the same rows.

    Discrete latents of the model are summed out (docs/discrete); the guide draws the others.

    The reported loss is an *estimate* of the negative ELBO. Its entropy is that of the local
    densities where the guide gives them (below), and otherwise comes from nearest neighbors; the
    gradient does not depend on it.

    A kernel sees nothing finer than its bandwidth, and in a long fit a guide drifts into what it
    does not see: it folds, and its draws fill a thin set whose blurred image is right. Where a
    guide gives a :class:`~numpyro_kscore.Implicit` site the ``local_log_density`` of its draws, as
    :class:`~numpyro_kscore.AutoImplicit` does, the gradient is ``1 - local_share`` parts of the
    kernel estimate and ``local_share`` parts of the gradient with that density, which is infinite
    at folds. The two agree wherever the map from noise is one-to-one (docs/theory). With the
    density's ``local_score`` the gradient is taken along the paths of half of the draws (Roeder, Wu
    and Duvenaud 2017), and this part of it has no noise at the posterior.

    Args:
        num_particles: guide draws in a step, at least 2 (1 with ``aggregate``); by default 8 for
            each dimension of the largest block that is estimated, the latents it depends on
            included, from 128 to 512, and 1024 where :func:`~numpyro_kscore.fit` settles; 4 for
            each, from 128 to 256, if all blocks have local log densities.
        estimator: the score estimator; the default is the curl-free ν-method with 45 steps in
            whitened coordinates at .8 of the median distance, and for an ``aggregate`` the kernel
            exponential family at the median distance. The ``base`` below replaces its own.
            A :class:`~numpyro_kscore.sliced.SlicedScoreMatching` is trained along with the guide;
            its network needs a place, see :meth:`stateful`.
        base: ``"model"`` regresses the difference from the model's score, so that regularization
            shrinks toward "no update"; ``"moments"`` regresses the difference from the Gaussian
            with the draws' own mean and covariance, which suits guides that are nearly Gaussian in
            many dimensions, such as the values of a random function, and needs more draws than
            dimensions; ``"gaussian"`` and None estimate the guide's score by itself (None is Zhou,
            Shi and Zhu 2020 exactly, and collapses many guides). ``"auto"`` is ``"model"``
            for kernels and a network's own base, which cannot be ``"model"`` or ``"moments"``.
        debias: ``"jackknife"`` removes the leading finite-sample bias, at 1.5 times the operations
            of an estimate (with few particles, twice its time); None leaves it. ``"auto"`` is the
            jackknife where the estimator has one, not with a network or a ``subset``, and None for
            an ``aggregate``.
        clip: longest typical move that a step may ask of a particle, in multiples of the noise of
            a converged fit; longer directions are scaled down as a whole. Far from the optimum
            they are a thousand times longer, and an optimizer that divides by the root mean square
            of past gradients, as Adam does, would hardly move for thousands of steps afterwards.
            None never scales. Applies with the base ``"model"``, and not to aggregates.
        local_share: weight of the local log densities, from 0 (estimates alone) to 1 (they alone).
        aggregate: name of a plate. The draws of all its elements are then taken as draws of one
            distribution, the aggregate posterior, whose divergence from the prior replaces that
            of every element: the objective of Wasserstein autoencoders.
        vectorize_particles: True evaluates all particles at once, False one after another, which
            takes the least memory; a callable ``(fn, xs) -> ys`` maps over the particles itself.
        forward_mode_differentiation: differentiate the model in forward mode, for models with
            ``while_loop``; pass the same flag to ``SVI.run``.
        sharding: how particles are divided over devices, ``NamedSharding(mesh, P("particles"))``:
            each draws its own, evaluates the model there, and works on their pairs with all
            particles (docs/scaling). Needs a number of particles that divides evenly, and
            ``vectorize_particles=True``.

    A particle at which the model's density or gradient is not finite contributes nothing to the
    gradient, and makes the reported loss NaN: parameters stay finite, the trouble is seen, and
    ``stable_update=True`` skips the step. Nothing pushes particles out of a region of zero density,
    and a guide entirely inside one gets no gradient: write such a bound as a support.

    Where the model sees some rows of its observations only, drawn by a subsampled plate, and a pass
    over all rows is affordable, an expansion of the density at the mean of the particles is a
    control variate, which leaves little of the noise of the rows (docs/minibatches).

    Floating-point values at mutable sites are averaged over the particles; others are those of the
    first particle.

    Raises:
        TypeError: for an estimator, a count or a plate's name of the wrong kind.
        ValueError: for options that exclude each other; while tracing, for a model or guide that
            this objective cannot handle.

    Example::

        svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(num_particles=64))
        result = svi.run(random.key(0), 400, y, progress_bar=False)
        result.losses  # (400,)
    """

    # SVI reads this before it warns about discrete latents of the model.
    can_infer_discrete = True

    def __init__(
        self,
        num_particles: int | None = None,
        *,
        estimator: ScoreEstimator | SlicedScoreMatching | None = None,
        base: str | None = "auto",
        debias: str | None = "auto",
        clip: float | None = 4.0,
        local_share: float = 0.8,
        aggregate: str | None = None,
        vectorize_particles: bool | Callable[..., Any] = True,
        forward_mode_differentiation: bool = False,
        sharding: NamedSharding | None = None,
    ) -> None:
        if num_particles is not None:
            check_count("num_particles", num_particles, minimum=1 if aggregate else 2)
        is_default = all(x is None for x in (num_particles, estimator, aggregate, sharding))
        if estimator is None:
            estimator = OF_POSTERIORS if aggregate is None else OF_AGGREGATES
        self.settings = resolve_settings(
            estimator, base, debias, clip, local_share, aggregate, sharding
        )
        if sharding is not None and vectorize_particles is not True:
            raise ValueError(
                "vectorize_particles: expected True with sharding, which evaluates each "
                f"device's particles at once; got {vectorize_particles!r}"
            )
        super().__init__(num_particles, vectorize_particles)
        self.forward_mode_differentiation = forward_mode_differentiation
        self._control_variate: ControlVariate | None = None
        self._is_covering = False
        self._is_default = is_default and (base, debias) == ("auto", "auto")
        # How the model is mapped over particles; None is all at once.
        whole = vectorize_particles is True
        self._map_model = None if whole else self.vectorize_particles_fn

    @property
    def estimator(self) -> Any:
        """The score estimator, with the base of the objective."""
        return self.settings.estimator

    @property
    def aggregate(self) -> str | None:
        """Name of the plate whose aggregate is fitted, or None."""
        return self.settings.aggregate

    def stateful(self, model: Callable[..., Any], guide: Callable[..., Any]) -> Callable[..., Any]:
        """The guide with a place for what is trained along with it.

        Needed for ``estimator=SlicedScoreMatching(...)`` only. NumPyro keeps state in mutable
        sites, which a guide must declare::

            elbo = ImplicitELBO(estimator=SlicedScoreMatching())
            svi = SVI(model, elbo.stateful(model, guide), optimizer, elbo)

        Draws from the posterior are taken from the guide itself, with the fitted parameters.
        """
        if not self.settings.estimator.is_stateful:
            return guide
        return stateful_guide(self.settings, model, guide)

    def expand(
        self,
        rng_key: jax.Array,
        param_map: dict[str, Any],
        model: Callable[..., Any],
        guide: Callable[..., Any],
        *args: Any,
        num_steps: int,
        **kwargs: Any,
    ) -> ControlVariate | None:
        """The log density of all rows near the guide, for :meth:`expanded`.

        Args:
            rng_key: random key.
            param_map: parameters of guide and model.
            model: the model.
            guide: the guide.
            *args: arguments of both.
            num_steps: how many steps it will serve, at least.
            **kwargs: keyword arguments of both.

        Returns:
            None without subsampled plates, for models with parameters, where particles are not
            vectorized, and where a pass over all rows takes more than the steps it is for.

        Cost: a pass over all rows, and two more for each latent dimension up to 128.
        """
        check_key("rng_key", rng_key, "the parameters")
        if self.vectorize_particles is not True or self.forward_mode_differentiation:
            return None
        program = objective_program(param_map, model, guide, args, kwargs)
        layout = pool(inspect_program(rng_key, program), self.settings.aggregate)
        num_particles = count_particles(layout, self.settings, self.num_particles)
        return expand(rng_key, program, layout, num_steps * num_particles)

    def expanded(self, control_variate: ControlVariate | None) -> ImplicitELBO:
        """The objective in minibatches with less noise, as long as the guide is not far.

        Where :meth:`expand` gave an expansion of all rows, that of the rows drawn is replaced by it
        (docs/minibatches). :func:`~numpyro_kscore.fit` does this, with a new expansion now and
        then. Without one, every step makes its own, of first order, where that is affordable.
        """
        if control_variate is None:
            return self
        here = copy.copy(self)
        here._control_variate = control_variate
        return here

    def covering(self) -> ImplicitELBO:
        """The objective with Hellinger's distance where the guide's density is known.

        It covers tails that KL(q || p) leaves thin. Weights of draws must not vary with rows of the
        data, so that :func:`~numpyro_kscore.fit` does this wherever every step sees all of them.
        """
        here = copy.copy(self)
        here._is_covering = True
        return here

    def settling(self, layout: Layout) -> ImplicitELBO:
        """The objective with more particles, for the end of a fit.

        A kernel sees nothing finer than its bandwidth and the number of particles allow, and a
        network that has converged with few of them is off by what they do not show. Memory is that
        of as many particles as before, unless the model has parameters.

        Returns:
            The objective itself where its number of particles or its estimator was given, where
            densities are known, and where rows are estimated one by one or drawn anew in each step,
            whose noise more particles do not lower.
        """
        parts = layout.implicit_parts
        is_alone = all(
            part.context is None and not part.has_local and len(part.columns) == 1 for part in parts
        )
        can_settle = self._is_default and parts and is_alone and layout.has_all_rows
        if not can_settle or self.vectorize_particles is not True:
            return self
        here = copy.copy(self)
        few = count_particles(layout, self.settings, None)
        here.num_particles = max(few, SETTLING_PARTICLES)
        here._map_model = None if layout.model_params else partial(lax.map, batch_size=few)
        finer = OF_SETTLING.in_objective(self.settings.base, None)
        here.settings = dataclasses.replace(self.settings, estimator=finer, debias=None)
        return here

    def loss(self, *args: Any, **kwargs: Any) -> jax.Array:
        """The loss; see :class:`numpyro.infer.ELBO`."""
        _check_instance(self)
        loss: jax.Array = super().loss(*args, **kwargs)
        return loss

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
        _check_instance(self)
        check_key("rng_key", rng_key, "the parameters")
        settings = self.settings
        program = objective_program(param_map, model, guide, args, kwargs)
        program = program._replace(control_variate=self._control_variate)
        layout = pool(inspect_program(rng_key, program), settings.aggregate)
        if layout.has_factors:
            # At the optimum the KL gradient balances that of the factors, and both must be whole.
            settings = dataclasses.replace(settings, clip=None)
        program = with_shared(rng_key, program, layout)
        num_particles = count_particles(layout, settings, self.num_particles)
        check_place(settings.estimator, param_map)
        drawn, draws, local = self._draw(rng_key, program, layout, num_particles)
        joint = log_joint_and_gradients(
            draws,
            program,
            layout,
            self._map_model,
            self.forward_mode_differentiation,
        )
        fixed = lax.stop_gradient(draws)
        known = lax.stop_gradient(local.log_density)
        log_weights = None if layout.has_factors else self._log_weights(fixed, joint, known)
        kl = kl_gradient(settings, layout, drawn, fixed, joint, local.scores, log_weights)
        mutable = jax.tree.map(
            lambda a: jnp.mean(a, axis=0) if jnp.issubdtype(a.dtype, jnp.floating) else a[0],
            draws.mutable,
        )
        if kl.states:
            mutable = {**mutable, STATE: kl.states}
        return {
            "loss": loss_of(draws, local.log_density, joint, kl, param_map),
            "mutable_state": lax.stop_gradient(mutable or None),
        }

    def _log_weights(self, draws: Draw, joint: LogJoint, local: jax.Array) -> jax.Array | None:
        """Logarithms of the weights of the particles with local log densities (m, b), (m,)."""
        if not self._is_covering or not local.size:
            return None
        few = len(local)
        return joint.log_density[:few] - draws.log_density[:few] - jnp.sum(local, axis=1)

    def _draw(
        self, key: jax.Array, program: Program, layout: Layout, num_particles: int
    ) -> tuple[jax.Array, Draw, LocalDraw]:
        """Draw the particles, and replace draws that are not finite.

        Returned are which draws were finite at first, (n,); the particles; and local log densities
        of the first m of them, (m, b), with their gradients, (m, d). Draws are replaced before
        anything is differentiated: a derivative of the guide there would be NaN even where it is
        multiplied by zero.
        """
        sharding, map_particles = self.settings.sharding, self.vectorize_particles_fn
        sources = draw_sources(key, program, layout, (num_particles,))
        sources = constrain_rows(sources, sharding)
        drawn = jnp.ones(num_particles, bool)
        # A single particle has no other to replace it, so an encoder need not run twice.
        if num_particles > 1:
            fixed = program._replace(params=lax.stop_gradient(program.params))
            draw = at_source(draw_particle, key, fixed, layout)
            drawn = are_finite(map_particles(lambda source: draw(source).flat, sources))
            source = nearest_valid(drawn)
            sources = constrain_rows(jax.tree.map(lambda a: a[source], sources), sharding)
        draws: Draw = map_particles(at_source(draw_particle, key, program, layout), sources)
        local = LocalDraw(jnp.zeros((0, 0), draws.flat.dtype), draws.flat[:0])
        if layout.local_parts:
            enough = max(ENOUGH_LOCAL, LOCAL_COLUMNS // layout.dim)
            few = max(FEWEST_LOCAL, min(num_particles // 2, enough))
            first = jax.tree.map(lambda a: a[:few], sources)
            local = map_particles(at_source(draw_local, key, program, layout), first)
        return drawn, constrain_rows(draws, sharding), local


def _check_instance(objective: Any) -> None:
    """Raise ``TypeError`` if SVI was given the class: what stands in its place is then the key."""
    if not isinstance(objective, ImplicitELBO):
        raise TypeError("loss: expected an instance, ImplicitELBO(); got the class itself")
