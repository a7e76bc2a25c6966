"""Draws of all latents of a model, in the rows of plates and outside, for all rows of data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro import handlers

from numpyro_kscore._guides.row_latents import Conditional
from numpyro_kscore._guides.rows import Amortized, Outline
from numpyro_kscore._tracing.coordinates import trace_at
from numpyro_kscore._tracing.coupling import Form
from numpyro_kscore._tracing.subsampling import whole_plates

__all__ = ["RowPosterior"]


class RowPosterior(NamedTuple):
    """The rows of some data, given the global latents.

    Attributes:
        amortized: the guide of the rows.
        args: arguments of the model; all rows are drawn, whatever the size of a minibatch.
        kwargs: its keyword arguments.
        params: fitted parameters.
        unpack: flat coordinates of the global latents (d,) by site.
        forms: of the global latents whose coordinate is not their unconstrained value.
    """

    amortized: Amortized
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    params: dict[str, Any]
    unpack: Callable[[jax.Array], dict[str, jax.Array]]
    forms: dict[str, Form]

    def draw(self, key: jax.Array, flat: jax.Array) -> dict[str, jax.Array]:
        """Unconstrained values of the latents in rows, at global ones (d,)."""
        outline = self._outline(flat)
        keys = iter(random.split(key, len(self.amortized.plates)))
        with handlers.block(), handlers.substitute(data=self.params):
            found = self.amortized.trace_rows(
                outline,
                self._rows(outline),
                self.args,
                self.kwargs,
                lambda block: random.normal(next(keys), block.columns.shape),
            )
        return found.draws.coordinates

    def values(self, flat: jax.Array, coordinates: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Values of latent and deterministic sites at coordinates of all latents."""
        outline = self._outline(flat)
        model = self.amortized.model
        conditional = Conditional.of(
            model, self.args, self.kwargs, outline.values, self._rows(outline)
        )
        trace = conditional.at(coordinates)[1]
        latents = {*self.unpack(flat), *coordinates}
        return {
            name: site["value"]
            for name, site in trace.items()
            if name in latents or site["type"] == "deterministic"
        }

    def draws(
        self, key: jax.Array, flat: jax.Array
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Coordinates of the latents in rows, and values of all sites, at (n, d), one by one."""

        def one(pair: tuple[jax.Array, jax.Array]) -> Any:
            coordinates = self.draw(*pair)
            return coordinates, self.values(pair[1], coordinates)

        return lax.map(one, (random.split(key, len(flat)), flat))

    def _outline(self, flat: jax.Array) -> Outline:
        outer = handlers.seed(self.amortized.outer, random.key(0))
        coordinates = self.unpack(flat)
        with handlers.block(), handlers.substitute(data=self.params):
            trace = trace_at(outer, self.args, self.kwargs, coordinates, self.forms)
            values = {name: trace[name]["value"] for name in coordinates}
            return self.amortized.outline(self.args, self.kwargs, values)

    def _rows(self, outline: Outline) -> dict[str, jax.Array]:
        """All rows, or those that the model knows if it is handed a batch from outside."""
        model = self.amortized.model
        is_whole = whole_plates(model, self.args, self.kwargs) is not model
        return {
            name: jnp.arange(plate.size if is_whole else plate.drawn)
            for name, plate in outline.subsampled.items()
        }
