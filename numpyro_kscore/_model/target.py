"""The model at a point: its log density, and all that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax, random
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_kscore._model.coordinates import (
    LatentCoordinates,
    Shapes,
    is_identity,
    placed,
    pushed,
    ravel,
    unravel,
)
from numpyro_kscore._model.dependencies import is_enumerated, seeded, sources_of
from numpyro_kscore._model.enumeration import enumerated_log_density
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.layout import support_transform
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.pytree import named_leaves

# A point (d,) to a log density and its gradient (d,).
Density = Callable[[Array], tuple[Array, Array]]
# Points (n, d) to unconstrained values (n, d), and the log volume (n,).
Push = Callable[[Any], tuple[np.ndarray, np.ndarray]]

# Number of points that are evaluated at once.
BATCH = 256


class Target(NamedTuple):
    """A model with its arguments and parameters, as a function of its continuous latents.

    Discrete latents are summed out. Methods take the coordinates of the latents as one vector (d,)
    or by name.

    Attributes:
        shapes: names of the latents and shapes of their coordinates, d numbers in this order.
        coordinates: the coordinates of latents that are not unconstrained values.
        data: values of parameters, of mutable state and of rows of plates.
        key: key for what the model draws itself; 0 by default.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: Shapes = ()
    coordinates: tuple[LatentCoordinates, ...] = ()
    data: dict[str, Any] = {}  # noqa: RUF012
    key: Array | None = None

    def evaluate(self, x: Any) -> tuple[Array, dict[str, Any]]:
        """The log joint density of data and latents in these coordinates; a trace there."""
        latents, volume = self._latents(x)
        model = self.placed(latents)
        value, trace = log_density(model, self.args, self.kwargs, {})
        if any(is_enumerated(site) for site in trace.values()):
            # The value above, at draws of the discrete latents, is dead code, which XLA drops.
            value = enumerated_log_density(model, self.args, self.kwargs, trace)
        return value + volume, trace

    def log_density(self, x: Any) -> Array:
        """The log joint density of data and latents in these coordinates."""
        return self.evaluate(x)[0]

    def value_and_score(self, x: Array, forward_mode: bool = False) -> tuple[Array, Array]:
        """The log density at a point (d,) and its gradient."""
        if not forward_mode:
            return jax.value_and_grad(self.log_density)(x)
        gradient, value = jax.jacfwd(lambda x: (self.log_density(x),) * 2, has_aux=True)(x)
        return value, gradient

    def scored_density(self, forward_mode: bool = False) -> Density:
        """:meth:`value_and_score` as a function that programs can be kept for."""
        return lambda x: self.value_and_score(x, forward_mode)

    def trace(self, x: Any) -> dict[str, Any]:
        """The trace of the model."""
        return handlers.trace(self.placed(self._latents(x)[0])).get_trace(*self.args, **self.kwargs)

    def trace_by(self, choose: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The trace with values of open sites by a function of a site, hidden from handlers."""
        with Hidden():
            model = handlers.substitute(self.placed({}), substitute_fn=choose)
            return handlers.trace(model).get_trace(*self.args, **self.kwargs)

    def sites(self, x: Any) -> dict[str, Array]:
        """Values of the continuous latents and the deterministic sites.

        Deterministic sites that are computed from discrete latents have no value at coordinates of
        the continuous ones, and are left out.
        """
        latents = self._latents(x)[0]
        trace = handlers.trace(self.placed(latents)).get_trace(*self.args, **self.kwargs)
        computed = {n: s["value"] for n, s in trace.items() if s["type"] == "deterministic"}
        discrete = {name: site["value"] for name, site in trace.items() if is_enumerated(site)}
        if discrete and computed:

            def run(given: dict[str, Any]) -> dict[str, Any]:
                at_given = handlers.substitute(self.placed(latents), data=given)
                found = handlers.trace(at_given).get_trace(*self.args, **self.kwargs)
                return {name: found[name]["value"] for name in computed}

            sources = sources_of(run, discrete)
            computed = {n: v for n, v in computed.items() if not any(jax.tree.leaves(sources[n]))}
        return {name: trace[name]["value"] for name in trace if name in latents} | computed

    def constrain(self, x: Array) -> dict[str, Array]:
        """Arrays of latents and deterministic sites at points (n, d), by one compiled program."""
        return named_leaves(self.values(x))

    def values(self, x: Array) -> dict[str, Any]:
        """The same, where a deterministic site that is a tree remains one."""
        return quick_jit(partial(lax.map, self.sites, batch_size=BATCH))(x)

    def bounded(self, x: Any) -> dict[str, Array]:
        """Values of the latents that have bounds, at points (n, d), by one compiled program."""

        def at_point(point: Array) -> dict[str, Array]:
            trace = self.trace(point)
            sites = {name: trace[name] for name, _ in self.shapes}
            return {
                n: s["value"] for n, s in sites.items() if not is_identity(support_transform(s))
            }

        return quick_jit(partial(lax.map, at_point, batch_size=BATCH))(x)

    @property
    def plain(self) -> Target:
        """The model at unconstrained values."""
        return self._replace(coordinates=())

    def pushed(self, x: Array) -> tuple[Array, Array]:
        """Unconstrained values of the latents at a point (d,), (d,), and the log volume."""
        latents, volume = self._latents(x)
        # No value goes through its support and back, where it might overflow.
        moved, added = pushed(self.trace(x), latents, self._centerings)
        return ravel(moved, self.shapes), volume + added

    def unconstrained(self, x: Array) -> Array:
        """Unconstrained values of the latents at a point (d,), (d,)."""
        return self.pushed(x)[0] if self.coordinates else x

    def push(self) -> Push | None:
        """:meth:`pushed` at points (n, d), (n, d) and (n,), by one program for any number of them.

        None is returned where coordinates are unconstrained values.
        """
        if not self.coordinates:
            return None
        run = quick_jit(jax.vmap(self.pushed))

        def push(x: Any) -> tuple[np.ndarray, np.ndarray]:
            parts = []
            for start in range(0, len(x), BATCH):
                rows = np.asarray(x[start : start + BATCH])
                padding = np.repeat(rows[-1:], BATCH - len(rows), axis=0)
                found = jax.device_get(run(np.concatenate([rows, padding])))
                parts.append([a[: len(rows)] for a in found])
            u, log_volume = zip(*parts, strict=True)
            return np.concatenate(u), np.concatenate(log_volume)

        return push

    def _latents(self, x: Any) -> tuple[dict[str, Any], Any]:
        latents = x if isinstance(x, dict) else unravel(x, self.shapes)
        volume: Any = 0.0
        for one in self.coordinates:
            latents, added = one.latents(latents)
            volume = volume + added
        return latents, volume

    def placed(self, latents: dict[str, Any]) -> Callable[..., Any]:
        """The model at coordinates of some latents, whose sizes do not vary."""
        key = random.key(0) if self.key is None else self.key
        return placed(seeded(self.model, key, self.data), latents, self._centerings)

    @property
    def _centerings(self) -> dict[str, Any]:
        return {n: c for one in self.coordinates for n, c in one.centerings().items()}
