"""The layout of a flat particle: which coordinates belong to which latent and which block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import helpful_support_errors


class PlateFrame(NamedTuple):
    """A plate that a site is in, with the numbers of elements drawn and of all.

    Attributes:
        dim: its dimension, negative.
        axis: its axis in the site's value, counted from the left.
    """

    name: str
    dim: int
    axis: int
    size: int
    full_size: int


class Site(NamedTuple):
    """The place of one latent site in a flat particle: unconstrained shape and first coordinate."""

    name: str
    shape: tuple[int, ...]
    start: int
    frames: tuple[PlateFrame, ...]

    @property
    def size(self) -> int:
        """Number of unconstrained coordinates."""
        return math.prod(self.shape)

    def coordinates(self, plates: dict[str, int]) -> np.ndarray:
        """Its coordinates by element of plates of some sizes, (elements, coordinates of each).

        All elements of a plate that the site is not in share its coordinates.
        """
        index = self.start + np.arange(self.size).reshape(self.shape)
        axes = {frame.name: frame.axis for frame in self.frames}
        inside = [name for name in plates if name in axes]
        index = np.moveaxis(index, [axes[name] for name in inside], range(len(inside)))
        rest = index.shape[len(inside) :]
        sizes = tuple(plates.values())
        index = index.reshape([plates[n] if n in axes else 1 for n in plates] + list(rest))
        index = np.broadcast_to(index, sizes + rest)
        return index.reshape(math.prod(sizes), math.prod(rest))


class Part(NamedTuple):
    """The part of a particle that belongs to one block.

    Attributes:
        sites: names of its latents.
        is_implicit: whether its entropy is estimated.
        columns: its coordinates in a particle, by element of its plates, (elements, d).
        context: coordinates of the latents it is conditional on, (elements, c), or None.
        scale: how many elements of subsampled plates each drawn one stands for.
        plates: sizes of its plates by name.
        is_pooled: whether its elements are draws of one distribution, see :meth:`Layout.pooled`.
        has_local: whether the guide gives its local log density.
        has_local_score: whether it gives the gradient of that, too.
        mixed: sites whose density is that of the part given other noise, if it is a mixture.
    """

    sites: tuple[str, ...]
    is_implicit: bool
    columns: np.ndarray
    context: np.ndarray | None
    scale: float
    plates: dict[str, int]
    is_pooled: bool = False
    has_local: bool = False
    has_local_score: bool = False
    mixed: tuple[str, ...] = ()

    @property
    def dim(self) -> int:
        """Dimension of the space one estimate lives in."""
        return self.columns.shape[1] + (0 if self.context is None else self.context.shape[1])


class Layout(NamedTuple):
    """Sites and blocks as traces of model and guide show them; all static.

    Attributes:
        sites: the latents, in the order of the model.
        parts: the guide's blocks.
        model_params: names of the model's parameters.
        shared_plates: subsampled plates of which all particles must draw the same rows, because
            rows are estimated one by one or latents are computed from them.
        transformed: names of the latents whose coordinate is not their unconstrained value.
        noise_sites: names of the guide's noise sites, if all that is random in a draw is there and
            no parameter is behind them; otherwise empty.
        row_counts: for every subsampled plate, if none is the guide's: all rows, and those drawn.
        has_factors: whether the guide observes something, such as a factor.
        has_masked: whether a latent of the guide is under ``.mask(False)``: the density of draws is
            then whatever the guide's factors say.
    """

    sites: tuple[Site, ...]
    parts: tuple[Part, ...]
    model_params: tuple[str, ...]
    shared_plates: tuple[str, ...]
    transformed: tuple[str, ...] = ()
    noise_sites: tuple[str, ...] = ()
    row_counts: tuple[tuple[int, int], ...] = ()
    has_factors: bool = False
    has_masked: bool = False

    @property
    def size(self) -> int:
        """Length of a flat particle."""
        return sum(site.size for site in self.sites)

    @property
    def dim(self) -> int:
        """Largest dimension of the space that an estimate is made in."""
        return max((part.dim for part in self.implicit_parts), default=1)

    @property
    def implicit_parts(self) -> tuple[Part, ...]:
        """The blocks whose entropy is estimated."""
        return tuple(part for part in self.parts if part.is_implicit)

    @property
    def local_parts(self) -> tuple[Part, ...]:
        """The blocks whose entropy is estimated and which have a local log density."""
        return tuple(part for part in self.implicit_parts if part.has_local)

    @property
    def mixtures(self) -> tuple[Part, ...]:
        """The blocks whose density is known given their noise."""
        return tuple(part for part in self.parts if part.mixed)

    @property
    def given_noise(self) -> Layout:
        """The layout with the density given noise as that of latents that are drawn so."""
        parts = (
            part._replace(is_implicit=part.is_implicit and part.mixed != part.sites)
            for part in self.parts
        )
        return self._replace(parts=tuple(parts))

    @property
    def has_all_rows(self) -> bool:
        """Whether the rows of no plate are subsampled."""
        return not (self.row_counts or self.shared_plates)

    @property
    def is_quiet(self) -> bool:
        """Whether gradients along paths leave no noise at the posterior (but for a kernel's)."""
        estimated = self.implicit_parts
        is_local = all(part.has_local_score for part in estimated)
        return bool(estimated) and is_local and self.has_all_rows

    @property
    def default_num_particles(self) -> int:
        """Number of particles of a step, unless a number is given."""
        return default_num_particles(self.dim, self.implicit_parts == self.local_parts != ())

    @property
    def explicit_sites(self) -> frozenset[str]:
        """Names of the latents whose guide has a density."""
        known = (part for part in self.parts if not (part.is_implicit or part.has_local))
        return frozenset(name for part in known for name in part.sites)

    @property
    def conditional_parts(self) -> tuple[Part, ...]:
        """The blocks whose density is given by the guide, row by row or given other latents."""
        return tuple(part for part in self.parts if part.has_local and not part.is_implicit)

    @property
    def pooled_sites(self) -> frozenset[str]:
        """Names of the latents whose elements are draws of one distribution."""
        return frozenset(n for part in self.parts if part.is_pooled for n in part.sites)

    def pooled(self, plate: str) -> Layout:
        """The latents in a plate as one part, whose elements are draws of one joint distribution.

        Latents that are independent within each element are dependent over all elements. Elements
        are shuffled, always in the same way, because the jackknife compares halves of them, which
        must be samples of the same distribution.
        """
        inside = [part for part in self.parts if plate in part.plates]
        rest = [part for part in self.parts if plate not in part.plates]
        columns = np.concatenate([part.columns for part in inside], axis=1)
        columns = np.random.default_rng(0).permutation(columns)
        names = tuple(name for part in inside for name in part.sites)
        together = inside[0]._replace(sites=names, columns=columns, is_pooled=True)
        return self._replace(parts=(*rest, together))

    def unravel(self, flat: jax.Array) -> dict[str, Any]:
        """A flat particle (d,) as a dict of unconstrained sites."""
        return {
            site.name: flat[site.start : site.start + site.size].reshape(site.shape)
            for site in self.sites
        }


def default_num_particles(dim: int, has_local: bool) -> int:
    """Number of particles for estimates in ``dim`` dimensions.

    The number is 8 for each dimension, from 128 to 512. Half of it, from 128 to 256, suffices where
    local log densities share the gradient with the estimates (docs/accuracy).
    """
    return min(max(128, 4 * dim), 256) if has_local else min(max(128, 8 * dim), 512)


def coordinate_names(sites: Sequence[Site]) -> tuple[str, ...]:
    """Names of all coordinates, such as ``"theta[3]"``."""
    return tuple(name for site in sites for name in element_names(site.name, site.shape))


def element_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """Names of the numbers of an array, or that of a single number."""
    indices = np.ndindex(shape)
    return [name + (f"[{','.join(map(str, index))}]" if index else "") for index in indices]


def num_rows(trace: dict[str, Any], frame: Any) -> int:
    """Number of rows of a frame's plate, drawn or not."""
    # Plates inside control flow are not in the trace, and are never subsampled.
    return trace[frame.name]["args"][0] if frame.name in trace else frame.size


def frames_of(trace: dict[str, Any], site: dict[str, Any]) -> tuple[PlateFrame, ...]:
    """The plates that a site of a trace is in."""
    # Axes from the left are the same for constrained and unconstrained values.
    batch_ndim = jnp.ndim(site["value"]) - len(site["fn"].event_shape)
    return tuple(
        PlateFrame(
            frame.name, frame.dim, batch_ndim + frame.dim, frame.size, num_rows(trace, frame)
        )
        for frame in site["cond_indep_stack"]
    )


def free_axes(model_site: dict[str, Any]) -> int:
    """Number of axes of a latent, from the left, whose elements have coordinates of their own.

    A vector of independent numbers has one, whatever its event shape. A simplex has none, and
    neither has an ordered vector, whose coordinates are its first number and the logarithms of its
    steps: each is a function of two neighbors.
    """
    support = model_site["fn"].support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return jnp.ndim(model_site["value"]) - support.event_dim


def support_transform(site: dict[str, Any]) -> Any:
    """The map from unconstrained values to the support of a site; ``ValueError`` without one."""
    try:
        with helpful_support_errors(site):
            return biject_to(site["fn"].support)
    except NotImplementedError as error:
        raise ValueError(
            f"model: expected a support that numpyro.distributions.biject_to maps unconstrained "
            f"values onto; got {site['fn'].support} of {type(site['fn']).__name__} at site "
            f"'{site['name']}'. Register a map for it, or draw unconstrained values and write what "
            "is computed from them as numpyro.deterministic"
        ) from error


def value_at_zero(site: dict[str, Any]) -> jax.Array:
    """The value of a latent at zero in unconstrained coordinates, a function of its support."""
    transform, value = support_transform(site), site["value"]
    if value is None:
        shape = tuple(site["kwargs"].get("sample_shape", ())) + site["fn"].shape()
    else:
        shape = jnp.shape(value)
    return transform(jnp.zeros(transform.inverse_shape(shape)))


def place_sites(
    trace: dict[str, Any], names: Sequence[str], plates_of: dict[str, Any]
) -> dict[str, Site]:
    """The places in a flat vector of sites of a trace, with the plates that another has them in."""
    sites: dict[str, Site] = {}
    start = 0
    for name in names:
        shape = tuple(support_transform(trace[name]).inverse_shape(jnp.shape(trace[name]["value"])))
        sites[name] = Site(name, shape, start, frames_of(plates_of, plates_of[name]))
        start += math.prod(shape)
    return sites
