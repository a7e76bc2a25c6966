"""The draws of latents in rows as sites of a guide."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpyro
import numpyro.distributions as dist

from numpyro_kscore._guides.row_blocks import RowBlock
from numpyro_kscore._guides.rows import Amortized, draw_plates
from numpyro_kscore._model.implicit import Implicit

__all__ = ["sample_rows"]


def sample_rows(
    amortized: Amortized,
    values: dict[str, jax.Array],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, jax.Array]:
    """Draw the latents in rows as sites of a guide.

    Args:
        amortized: the guide of the rows.
        values: the global latents, by site.
        args: arguments of the model.
        kwargs: its keyword arguments.
    """
    outline = amortized.outline(args, kwargs, values)
    inside = {name: plate for name, plate in outline.plates.items() if plate.dim is not None}
    plates = draw_plates(inside)
    rows = {name: plates[name]._indices for name in outline.subsampled}

    def noise(block: RowBlock) -> jax.Array:
        unit = dist.Normal().expand((*block.batch_shape, block.columns.shape[1])).to_event(1)
        with _inside(plates, list(block.plates)):
            name = f"_{amortized.prefix}_{block.plate}_noise"
            drawn = numpyro.sample(name, unit, infer={"is_auxiliary": True})
        return drawn.reshape(block.columns.shape)

    found = amortized.trace_rows(outline, rows, args, kwargs, noise)
    out = {}
    for block, log_density in zip(found.blocks, found.draws.log_density, strict=True):
        density: jax.Array | None = log_density / block.scale
        for site in block.sites:
            of_model = found.trace[site.name]
            fn = Implicit(
                of_model["value"],
                of_model["fn"].event_dim,
                unconstrained=found.draws.coordinates[site.name],
                local_log_density=density,
            )
            density = None  # one site has that of the block
            with _inside(plates, [frame.name for frame in site.frames]):
                out[site.name] = numpyro.sample(site.name, fn)
    return out


@contextlib.contextmanager
def _inside(plates: dict[str, numpyro.plate], names: Sequence[str]) -> Any:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(plates[name])
        yield
