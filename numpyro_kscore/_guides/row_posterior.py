"""Draws of all latents of a model, in the rows of plates and outside, for all rows of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro import handlers

from numpyro_kscore._guides.rows import Amortized, Outline
from numpyro_kscore._model.call_checks import call_error
from numpyro_kscore._model.coordinates import LatentCoordinates, Shapes
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.subsampling import whole_plates
from numpyro_kscore._model.target import Target
from numpyro_kscore._util.compiling import quick_jit

Params = dict[str, Any]


# Most numbers in the draws for a median, and the fewest draws: all rows may take much memory.
MOST_NUMBERS, FEWEST_DRAWS = 2**26, 200


class RowPosterior(NamedTuple):
    """The posterior of all latents for some data, with all rows, whatever the size of a minibatch.

    Attributes:
        amortized: the guide of the rows.
        shapes: names of the global latents and shapes of their coordinates.
        draw_globals: from a key, parameters and a count to flat coordinates (count, d).
        coordinates: from parameters to the coordinates of the global latents.
    """

    amortized: Amortized
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: Shapes
    draw_globals: Callable[[jax.Array, Params, int], jax.Array]
    coordinates: Callable[[Params], LatentCoordinates]

    def sample(self, key: jax.Array, params: Params, count: int) -> dict[str, jax.Array]:
        """Values of latent and deterministic sites, leading axis ``count``."""
        try:
            return self._draws(key, params, count)[2]
        except Exception as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Raise or add a note if the arguments are why the model failed."""
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves((self.args, self.kwargs))]
        if any(shape[:1] == (0,) for shape in shapes):
            raise ValueError(
                f"args: expected data of at least one row; got arrays of shapes {shapes}"
            ) from error
        if call_error(self.amortized.model, self.args, self.kwargs) is not None:
            error.add_note(
                "sample_posterior: the arguments after params are those of the model, all of "
                "them, for new data; without any it draws for the data of the fit"
            )

    def median(self, params: Params, most: int) -> dict[str, jax.Array]:
        """Values at the medians of all coordinates, from at most so many draws."""
        flat, rows, _ = self._draws(random.key(0), params, self.num_draws(params, most))
        middle = {name: jnp.median(u, axis=0) for name, u in rows.items()}
        return quick_jit(self._values)(params, jnp.median(flat, axis=0), middle)

    def num_draws(self, params: Params, most: int) -> int:
        """The number of draws of all rows for a quantile, at most ``most``."""
        one = jax.eval_shape(lambda p: self.sample(random.key(0), p, 1), params)
        size = sum(math.prod(value.shape) for value in jax.tree.leaves(one))
        return max(FEWEST_DRAWS, min(most, MOST_NUMBERS // size))

    def _draws(self, key: jax.Array, params: Params, count: int) -> Any:
        """Coordinates of global latents and of those in rows, and values of all sites."""

        def draw(key: jax.Array, params: Params) -> Any:
            global_key, row_key = random.split(key)
            flat = self.draw_globals(global_key, params, count)

            def one(pair: tuple[jax.Array, jax.Array]) -> Any:
                coordinates = self._rows_at(params, *pair)
                return coordinates, self._values(params, pair[1], coordinates)

            # Draws are made one after another: each takes the memory of all rows.
            return flat, *lax.map(one, (random.split(row_key, count), flat))

        return quick_jit(draw)(key, params)

    def _rows_at(self, params: Params, key: jax.Array, flat: jax.Array) -> dict[str, jax.Array]:
        """Unconstrained values of the latents in rows, at global ones (d,)."""
        outline = self._outline(params, flat)
        keys = iter(random.split(key, len(self.amortized.plates)))
        with Hidden(), handlers.substitute(data=params):
            found = self.amortized.trace_rows(
                outline,
                self._rows(outline),
                lambda block: random.normal(next(keys), block.columns.shape),
            )
        return found.draws.coordinates

    def _values(
        self, params: Params, flat: jax.Array, coordinates: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Values of latent and deterministic sites at coordinates of all latents."""
        outline = self._outline(params, flat)
        trace = outline.conditional(self._rows(outline)).at(coordinates)[1]
        latents = {*(name for name, _ in self.shapes), *coordinates}
        return {
            name: site["value"]
            for name, site in trace.items()
            if name in latents or site["type"] == "deterministic"
        }

    def _outline(self, params: Params, flat: jax.Array) -> Outline:
        given = self.amortized.outer, self.args, self.kwargs, self.shapes
        with Hidden(), handlers.substitute(data=params):
            trace = Target(*given, (self.coordinates(params),)).trace(flat)
            values = {name: trace[name]["value"] for name, _ in self.shapes}
            return self.amortized.outline(self.args, self.kwargs, values)

    def _rows(self, outline: Outline) -> dict[str, jax.Array]:
        """All rows, or those that the model knows if it is handed a batch from outside."""
        model = self.amortized.model
        is_whole = whole_plates(model, self.args, self.kwargs) is not model
        return {
            name: jnp.arange(plate.size if is_whole else plate.drawn)
            for name, plate in outline.subsampled.items()
        }
