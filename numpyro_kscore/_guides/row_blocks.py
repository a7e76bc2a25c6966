"""The latents in the rows of a plate, as a block of numbers for each row.

The model at these latents, and the sites that depend on them, are here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._model.dependencies import is_latent, sources_of
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.layout import Site, free_axes, place_sites, value_at_zero
from numpyro_kscore._model.site_density import site_log_prob, sum_by_row
from numpyro_kscore._model.target import Target

# Most latent numbers of a row: each takes a pass over the data for a column of its Hessian.
LARGEST_ROW = 32
# Unconstrained values where the search for modes starts. Zero may make logits of zero, where the
# derivative of NumPyro's binomial distribution is wrong: its log density has |logits|.
START = 0.05


class RowBlock(NamedTuple):
    """The latents in the rows of one plate; a row is an element of all of ``plates``.

    Attributes:
        sites: latents, with their places in a flat vector of the block.
        plates: numbers of rows drawn by the plates that all of them are in, outer ones first.
        dims: dimensions of these plates, negative.
        scale: how many rows each row that is drawn stands for.
        columns: places by row, (rows, k).
    """

    plate: str
    sites: tuple[Site, ...]
    plates: dict[str, int]
    dims: tuple[int, ...]
    scale: float
    columns: np.ndarray

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of one number for each row, with the plates at their dimensions."""
        shape = [1] * max(-dim for dim in self.dims)
        for dim, size in zip(self.dims, self.plates.values(), strict=True):
            shape[dim] = size
        return tuple(shape)

    @property
    def names(self) -> frozenset[str]:
        """Names of its latents."""
        return frozenset(site.name for site in self.sites)

    def ravel(self, coordinates: dict[str, jax.Array]) -> jax.Array:
        """Unconstrained values by site as numbers by row, (rows, k)."""
        flat = jnp.concatenate([jnp.ravel(coordinates[site.name]) for site in self.sites])
        return flat[self.columns]

    def others(self, coordinates: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The coordinates of the latents of other blocks."""
        return {name: u for name, u in coordinates.items() if name not in self.names}

    def unravel(self, rows: jax.Array) -> dict[str, jax.Array]:
        """Numbers by row, (rows, k), as unconstrained values by site."""
        flat = jnp.ravel(rows)[np.argsort(self.columns, axis=None)]
        return {
            site.name: flat[site.start : site.start + site.size].reshape(site.shape)
            for site in self.sites
        }


def start_of(blocks: Sequence[RowBlock]) -> dict[str, jax.Array]:
    """Unconstrained values of the latents of blocks, where the search for their modes starts."""
    return {site.name: jnp.full(site.shape, START) for block in blocks for site in block.sites}


def plate_of(site: dict[str, Any], amortized: Sequence[str]) -> str | None:
    """The first of the amortized plates that a latent of a trace is in; None if it is in none."""
    if not is_latent(site):
        return None
    inside = {frame.name for frame in site["cond_indep_stack"]}
    return next((plate for plate in amortized if plate in inside), None)


def find_row_blocks(trace: dict[str, Any], amortized: Sequence[str]) -> tuple[RowBlock, ...]:
    """The blocks of rows, one for each amortized plate; a latent in several is in the first."""
    blocks = []
    for plate in amortized:
        names = [name for name, site in trace.items() if plate_of(site, amortized) == plate]
        if not names:
            _raise_without_latents(plate, trace, amortized)
        blocks.append(_block(plate, names, trace))
    return tuple(blocks)


def _raise_without_latents(plate: str, trace: dict[str, Any], amortized: Sequence[str]) -> NoReturn:
    taken = {
        name: plate_of(site, amortized)
        for name, site in trace.items()
        if plate_of(site, [plate]) is not None
    }
    if taken:
        owners = " and ".join(repr(owner) for owner in dict.fromkeys(taken.values()))
        rest = tuple(name for name in amortized if name != plate)
        raise ValueError(
            f"amortize: expected plates with latents of their own; got '{plate}', whose latents "
            f"{list(taken)} belong to {owners} already, the first of the plates they are in. Say "
            f"amortize={(rest[0] if len(rest) == 1 else rest)!r}"
        )
    known = [name for name, site in trace.items() if site["type"] == "plate"]
    raise ValueError(
        f"amortize: expected plates of the model {known} that have latents in them; got '{plate}'"
    )


def _block(plate: str, names: list[str], trace: dict[str, Any]) -> RowBlock:
    places = place_sites(trace, names, trace)
    for name, site in places.items():
        if any(frame.axis >= free_axes(trace[name]) for frame in site.frames):
            raise ValueError(
                f"amortize: expected latents that are free row by row in plate '{plate}'; got "
                f"'{name}', whose support ties rows to each other"
            )
    sites = tuple(places.values())
    shared = set.intersection(*({frame.name for frame in site.frames} for site in sites))
    frames = tuple(frame for frame in sites[0].frames if frame.name in shared)
    frames = tuple(sorted(frames, key=lambda frame: frame.dim))
    plates = {frame.name: frame.size for frame in frames}
    columns = np.concatenate([site.coordinates(plates) for site in sites], axis=1)
    if columns.shape[1] > LARGEST_ROW:
        raise ValueError(
            f"amortize: expected at most {LARGEST_ROW} latent numbers in a row of '{plate}', those "
            f"of plates within it included; got {columns.shape[1]} by {names}. Amortize the inner "
            "plate, and leave the outer one to the global latents"
        )
    scale = math.prod(frame.full_size / frame.size for frame in frames)
    dims = tuple(frame.dim for frame in frames)
    return RowBlock(plate, sites, plates, dims, scale, columns)


class RowSites(NamedTuple):
    """The names of the sites that depend on latents in rows, inside of the rows' plates or not."""

    inside: tuple[str, ...]
    outside: tuple[str, ...]


class RowTarget(NamedTuple):
    """A model whose global latents, parameters and rows of plates are given."""

    target: Target

    def blocks(self, amortized: Sequence[str]) -> tuple[RowBlock, ...]:
        """The blocks of rows, see :func:`find_row_blocks`."""

        def value(site: dict[str, Any]) -> jax.Array | None:
            return value_at_zero(site) if is_latent(site) and site["value"] is None else None

        return find_row_blocks(self.target.trace_by(value), amortized)

    def at(self, coordinates: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
        """Log joint density at unconstrained values of the latents in rows, and the trace."""
        with Hidden():
            return self.target.evaluate(coordinates)

    def of_block(
        self, block: RowBlock, others: dict[str, jax.Array]
    ) -> Callable[[jax.Array], jax.Array]:
        """Log density of the rows of a block, (E, k), up to a constant; not scaled."""
        return lambda rows: self.at({**others, **block.unravel(rows)})[0] / block.scale

    def by_row(
        self, block: RowBlock, others: dict[str, jax.Array], names: tuple[str, ...]
    ) -> Callable[[jax.Array], jax.Array]:
        """Log densities of rows by sites in their plates, (E, k) to (E,), as :meth:`of_block`."""

        def densities(rows: jax.Array) -> jax.Array:
            trace = self.at({**others, **block.unravel(rows)})[1]
            found = (sum_by_row(site_log_prob(trace[name]), block.dims) for name in names)
            return sum(found, jnp.zeros(block.columns.shape[0])) / block.scale

        return densities

    def row_sites(self, block: RowBlock, others: dict[str, jax.Array]) -> RowSites:
        """The sites whose densities are computed from the rows of a block."""
        in_plates: set[str] = set()

        def densities(latents: dict[str, jax.Array]) -> dict[str, jax.Array]:
            found = {}
            for name, site in self.at({**others, **latents})[1].items():
                if site["type"] == "sample":
                    plates = {frame.name for frame in site["cond_indep_stack"]}
                    if plates.issuperset(block.plates):
                        in_plates.add(name)
                    found[name] = site_log_prob(site)
            return found

        shapes = jax.eval_shape(block.unravel, jnp.zeros(block.columns.shape))
        names = [name for name, found in sources_of(densities, shapes).items() if found]
        inside = tuple(name for name in names if name in in_plates)
        return RowSites(inside, tuple(name for name in names if name not in in_plates))
