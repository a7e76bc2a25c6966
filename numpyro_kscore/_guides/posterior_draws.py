"""Draws of the posterior from a fitted guide, with their medians and quantiles."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous

from numpyro_kscore._guides.guide_checks import check_levels, check_set_up
from numpyro_kscore._model.coordinates import LatentCoordinates, Shapes
from numpyro_kscore._model.dependencies import seeded
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.particles import open_for_weights
from numpyro_kscore._model.program import Program
from numpyro_kscore._model.target import BATCH, Target
from numpyro_kscore._model.weights import (
    NUM_DRAWS,
    check_has_density,
    draw_weighted,
    warn_of_weights,
)
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import check_key, key_apart
from numpyro_kscore._util.line import Line
from numpyro_kscore._util.pareto import importance_resample
from numpyro_kscore._util.pytree import with_leading

# Number of draws for median and quantiles: a Monte-Carlo error of about 1 % of the standard
# deviation.
QUANTILE_DRAWS = 10_000


class PosteriorDraws(AutoContinuous):
    """The half of an automatic guide that is used after a fit, and has no density."""

    amortize: tuple[str, ...]
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _programs: dict[Any, Callable[..., Any]]
    _shapes: Shapes
    _is_in_batches: bool

    @abstractmethod
    def _row_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The posterior of all latents where rows are amortized, by default for the fit's data."""

    @abstractmethod
    def _coordinates(self) -> LatentCoordinates:
        """The coordinates of the latents of a draw."""

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        resample: bool = False,
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Draws of latent and deterministic sites, with leading dimensions ``sample_shape``.

        Args:
            rng_key: random key.
            params: fitted parameters, and ``result.state.mutable_state`` with them where
                deterministic sites are computed from mutable values.
            *args: with ``amortize``, arguments of the model, by default those of the fit, such as
                the data of new rows. All rows are drawn, whatever the size of a minibatch.
            sample_shape: leading dimensions.
            resample: whether to choose the draws from 10 000 or more by Pareto-smoothed importance
                weights against the model, with replacement: draws of the posterior itself where
                weights are reliable (docs/weights). Not under ``jit``.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: with ``resample``, for a guide whose density is not known at its draws, with
                ``amortize``, and for a model that draws a minibatch.

        Warns:
            UserWarning: with ``resample``, if weights are not reliable.

        Cost: with ``resample`` 10 000 or more values of the model.
        """
        check_key("rng_key", rng_key, "the parameters")
        params = self._with_state(params)
        if resample:
            return self._resampled(rng_key, params, sample_shape)
        if self.amortize:
            rows = self._row_posterior(*args, **kwargs)
            values = rows.sample(rng_key, params, math.prod(sample_shape))
            return with_leading(sample_shape, values)

        def draw(key: jax.Array, params: dict[str, Any]) -> dict[str, jax.Array]:
            return self._constrained(self._draw_latent(key, params, sample_shape), params)

        return self._compiled(("draw", sample_shape), draw)(rng_key, params)

    def _resampled(
        self, rng_key: jax.Array, params: dict[str, Any], sample_shape: tuple[int, ...]
    ) -> dict[str, jax.Array]:
        """Draws chosen by importance weights from many."""
        args, kwargs = self._arguments
        given = Program(params, self.model, self, args, kwargs, {})
        program, layout = open_for_weights(rng_key, given)
        if self.amortize or layout.row_counts or self._is_in_batches:
            raise ValueError(
                "resample: expected a guide of a model with all its data; got one with amortized "
                "rows, minibatches or a loader. Use to_arviz(svi, result, ..., resample=True)"
            )
        check_has_density(layout, "resample")
        count = math.prod(sample_shape)
        with Line("sample_posterior") as line:
            draws = draw_weighted(
                rng_key, program, layout, max(NUM_DRAWS, count), tell=line.weights
            )
        warn_of_weights(draws, stacklevel=4)
        samples = jnp.asarray(draws.samples)
        chosen = importance_resample(key_apart(rng_key, 0), samples, draws.log_weights, count)
        with Hidden():
            values = program.target(layout).values(chosen)
        return with_leading(sample_shape, values)

    def median(self, params: dict[str, Any]) -> dict[str, jax.Array]:
        """A point in the middle of the draws, in the support: medians of unconstrained coordinates.

        It is taken from 10 000 draws with a fixed key. For a site of single numbers it is their
        median; a constraint that ties numbers to each other, as on a simplex, holds.
        """
        params = self._with_state(params)
        if self.amortize:
            return self._row_posterior().median(params, QUANTILE_DRAWS)

        def middle(params: dict[str, Any]) -> dict[str, jax.Array]:
            flat = self._draw_latent(random.key(0), params, (QUANTILE_DRAWS,))
            target = self._target(params)
            with Hidden():
                flat = lax.map(target.unconstrained, flat, batch_size=BATCH)
                return target.plain.sites(jnp.median(flat, axis=0))

        return self._compiled("median", middle)(params)

    def _constrained(self, flat: jax.Array, params: dict[str, Any]) -> dict[str, jax.Array]:
        """Values of latent and deterministic sites at coordinates, (..., latent_dim)."""
        shape = flat.shape[:-1]
        with Hidden():
            values = lax.map(self._target(params).sites, flat.reshape(-1, flat.shape[-1]))
        return with_leading(shape, values)

    def _with_state(self, params: dict[str, Any]) -> dict[str, Any]:
        """Parameters, with mutable values of the model as it was first seen unless they are given.

        NumPyro keeps those of a fit apart, in ``result.state.mutable_state``.
        """
        check_set_up(self, params)
        sites = self.prototype_trace.items()
        first = {name: site["value"] for name, site in sites if site["type"] == "mutable"}
        return {**first, **params}

    def _target(self, params: dict[str, Any]) -> Target:
        """The model at coordinates of a draw."""
        coordinates = handlers.substitute(self._coordinates, data=params)()
        return Target(self.model, *self._arguments, self._shapes, (coordinates,), params)

    def quantiles(self, params: dict[str, Any], quantiles: Any) -> dict[str, jax.Array]:
        """Quantiles of every number of every latent site, from 10 000 draws with a fixed key.

        Args:
            params: fitted parameters.
            quantiles: levels in [0, 1], shape (k,) or a scalar.

        Returns:
            A dict of arrays with leading dimension k (none for a scalar). Quantiles are taken
            number by number: those of a simplex do not sum to one.

        Raises:
            ValueError: for levels outside [0, 1].
        """
        check_levels(quantiles)
        levels = jnp.asarray(quantiles)
        most = QUANTILE_DRAWS
        count = self._row_posterior().num_draws(params, most) if self.amortize else most
        draws = self.sample_posterior(random.key(0), params, sample_shape=(count,))
        return jax.tree.map(lambda value: jnp.quantile(value, levels, axis=0), draws)

    def _compiled(self, name: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled ``fn``, which is kept under a name for the next call."""
        return self._programs.setdefault(name, quick_jit(fn))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_programs": {}}

    def _draw_latent(
        self, rng_key: jax.Array, params: dict[str, Any], sample_shape: tuple[int, ...]
    ) -> jax.Array:
        def one(key: jax.Array) -> jax.Array:
            return seeded(self._sample_latent, key, params)()

        if not sample_shape:
            return one(rng_key)
        flat = jax.vmap(one)(random.split(rng_key, math.prod(sample_shape)))
        return flat.reshape(*sample_shape, -1)

    def get_posterior(self, params: Any = None) -> NoReturn:
        """Not available: the guide is not a transformed distribution with a density.

        Use ``sample_posterior``.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: expected no use of a density; the guide can only be "
            "sampled. Use guide.sample_posterior(rng_key, params, sample_shape=...)"
        )

    get_base_dist = get_transform = _get_posterior = get_posterior
