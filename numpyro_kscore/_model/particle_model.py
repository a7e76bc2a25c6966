"""The model as a function of one particle, at rows that are drawn and at all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro.primitives import Messenger, apply_stack

from numpyro_kscore._model.control_variate import (
    ControlVariate,
    KeptRows,
    Taylor,
    center,
    taylor,
    with_kept_rows,
)
from numpyro_kscore._model.coreset import RowWeights, draw_rows, tall_plate, weighted_rows
from numpyro_kscore._model.dependencies import is_enumerated
from numpyro_kscore._model.draws import Draw
from numpyro_kscore._model.handlers import message
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.program import Program
from numpyro_kscore._model.site_density import site_log_density
from numpyro_kscore._model.subsampling import (
    mean_over_rows,
    subsampled_plates,
    whole_plates,
    with_spread_rows,
)
from numpyro_kscore._model.target import Target
from numpyro_kscore._util.keys import key_apart

# A pass over all rows is taken if it is at most so many times the rows of all particles.
MOST_PASSES = 4


def at_once(fn: Callable[..., Any], xs: Any) -> Any:
    """The values of a function at all xs, in one batch."""
    return jax.vmap(fn)(xs)


class ParticleModel(NamedTuple):
    """The model as a function of one particle; ``common_key`` is for what all particles share."""

    program: Program
    layout: Layout
    common_key: jax.Array
    forward_mode: bool

    def log_joint(
        self, flat: jax.Array, theta: dict[str, Any], draw: Draw
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        """The log joint density at (d,); with it, itself and the part from priors of pooled sites.

        ``theta`` has the model's parameters. Only keys and plates of the draw are used.
        """
        program = self.program
        data = {**program.params, **theta, **program.plates, **draw.plates}
        target = self._target(draw.model_key, data)
        latents = self.layout.unravel(flat)
        value, trace = target.evaluate(latents)
        if self.layout.pooled_sites and any(is_enumerated(site) for site in trace.values()):
            raise ValueError(
                "aggregate: expected a model without discrete latents; got one, which a prior may "
                "depend on. Sum it out of the model"
            )
        prior = [
            site_log_density(name, latents[name], trace, trace)
            for name in sorted(self.layout.pooled_sites)
        ]
        return value, (value, sum(prior) if prior else None)

    def referred(self, params: dict[str, Any]) -> ParticleModel:
        """The model to expand: the reference, if there is one, with its parameters."""
        program = self.program
        if program.reference is None:
            return self
        params = {**program.params, **params}
        return self._replace(
            program=program._replace(model=program.reference, reference=None, params=params)
        )

    def trace(self, draw: Draw, theta: dict[str, Any]) -> dict[str, Any]:
        """Trace of the model at a draw, which draws rows of its plates for all particles."""
        target = self._target(draw.model_key, {**self.program.params, **theta})
        spread = with_spread_rows(target.model, key_apart(draw.model_key, 1))
        return target._replace(model=spread).trace(self.layout.unravel(draw.flat))

    def _target(self, key: jax.Array, data: dict[str, Any]) -> Target:
        """The model at its coordinates, with keys that all particles share."""
        common = CommonKeys(self.program.model, self.common_key)
        return self.program.target(self.layout, key)._replace(model=common, data=data)

    def with_rows(
        self,
        theta: dict[str, Any],
        draw: Draw,
        table: jax.Array | None = None,
        kept: KeptRows | None = None,
    ) -> ParticleModel:
        """The model with rows that all particles share, drawn, by a table or kept."""
        trace, program = self.trace(draw, theta), self.program
        rows = {name: site["value"] for name, site in subsampled_plates(trace).items()}
        tall = tall_plate(program.model, trace, 0)
        if table is not None and tall is not None:
            drawn = draw_rows(key_apart(draw.model_key, 2), table, len(rows[tall.name]))
        elif kept is not None and tall is not None:
            args, kwargs, weights = with_kept_rows(program.args, program.kwargs, kept, tall.size)
            program = program._replace(args=args, kwargs=kwargs)
            drawn = RowWeights(jnp.arange(len(weights)), weights)
        else:
            return self._replace(program=program._replace(plates=rows))
        return self._replace(program=program._replace(model=weighted_rows(tall, drawn)))

    def value_and_gradients(
        self, theta: dict[str, Any], draw: Draw
    ) -> tuple[jax.Array, jax.Array, dict[str, Any], jax.Array | None]:
        """Log joint density, score (d,), gradient in ``theta``, and score of pooled priors (d,)."""
        differentiate = jax.jacfwd if self.forward_mode else jax.grad
        gradients = differentiate(self.log_joint, (0, 1), has_aux=True)
        (score, theta_gradient), (value, _) = gradients(draw.flat, theta, draw)
        prior = None
        if self.layout.pooled_sites:
            prior = differentiate(lambda flat: self.log_joint(flat, theta, draw)[1][1])(draw.flat)
        return value, score, theta_gradient, prior

    def expansion(
        self,
        theta: dict[str, Any],
        draw: Draw,
        with_curvature: bool,
        map_directions: Callable[..., Any] = at_once,
    ) -> Taylor:
        """The density at a draw with its derivatives; ``map_directions`` is ``(fn, xs) -> ys``."""

        def at(flat: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
            return self.value_and_gradients(theta, draw._replace(flat=flat))[:3]

        return taylor(at, draw.flat, with_curvature, map_directions)


def is_affordable(layout: Layout, rows: int) -> bool:
    """Whether a pass over all rows is, where the model sees ``rows`` times those of a batch."""
    counts = layout.row_counts
    return bool(counts) and all(size <= MOST_PASSES * rows * drawn for size, drawn in counts)


def expanded(
    model: ParticleModel, theta: dict[str, Any], draw: Draw, with_curvature: bool = False
) -> ControlVariate | None:
    """The density of all rows at a draw; None where the model cannot compute it."""
    fixed, is_random = {}, model.program.reference is not None
    if is_random:
        fixed = {name: model.program.params[name] for name in model.layout.model_params}
    model = model.referred(fixed)
    program = model.program
    every = whole_plates(program.model, program.args, program.kwargs)
    if every is program.model:
        return None

    def of(some: Callable[..., Any]) -> Taylor:
        here = model._replace(program=program._replace(model=some))
        # Directions go one after another: a pass over all rows takes memory.
        return here.expansion(theta, draw, with_curvature, lax.map)

    if is_random and len(model.layout.row_counts) == 1:
        # A row with latents of its own takes as much memory as hundreds of numbers.
        size = model.layout.row_counts[0][0]
        return ControlVariate(draw.flat, mean_over_rows(of, program.model, size), fixed)
    return ControlVariate(draw.flat, of(every), fixed)


def at_mean(draws: Draw) -> Draw:
    """The first draw, moved to the mean of all."""
    return jax.tree.map(lambda a: a[0], draws)._replace(flat=center(draws.flat))


class CommonKeys(Messenger):
    """A handler that answers ``numpyro.prng_key`` by keys that all particles share."""

    def __init__(self, fn: Callable[..., Any], key: jax.Array) -> None:
        self.key = key
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        is_asked = msg["type"] == "prng_key" and msg["value"] is None
        if is_asked and not msg.get("is_own", False):
            self.key, msg["value"] = jax.random.split(self.key)


def own_key() -> jax.Array:
    """A random key for each particle, for a model whose density is random."""
    asked = message("prng_key", lambda rng_key: rng_key)
    return apply_stack(asked | {"kwargs": {"rng_key": None}, "is_own": True})["value"]
