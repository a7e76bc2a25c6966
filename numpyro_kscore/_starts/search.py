"""What all parts of a search use: the density at points, the latents, and random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.sparsity import Held, Products
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.features import MANY
from numpyro_kscore._transports.stretch import Marginals
from numpyro_kscore._transports.transport import Evaluate

# Most numbers of a site whose latents may be scales of all others.
MOST_OF_SITE = 8
# Quantiles of the prior that scales are held at first.
QUANTILES = (0.25, 0.5, 0.75)
# Fewest draws that tell widths.
FEWEST_DRAWS = 16
# Radius of random starts in unconstrained coordinates, as NumPyro's.
RADIUS = 2.0


class AtPoints(NamedTuple):
    """A model at points (m, d).

    Attributes:
        energies: minus log densities, (m,).
        gradients: gradients of the energy, (m, d).
        moved: the points in the other coordinates, (m, d).
        values: unconstrained values there, (m, d).
        locs: locations of their priors, (m, d); 0 for those that are not hierarchical.
        log_scales: logarithms of the scales of their priors, likewise.
    """

    energies: np.ndarray
    gradients: np.ndarray
    moved: np.ndarray
    values: np.ndarray
    locs: np.ndarray
    log_scales: np.ndarray


# The model at points (m, d) in the coordinates of a centering; the points are also given in those
# of another one.
Density = Callable[[np.ndarray, Centering, Centering], AtPoints]
# The mean of the energy's Hessians at points (n, d) times vectors (m, d), in the coordinates of a
# centering. Scales are held: their rows and columns count as 0.
ProductsInForms = Callable[[np.ndarray, np.ndarray, Centering], np.ndarray]
# Energies (n,) and gradients (n, d) at points (n, d) that share their scales, in the coordinates of
# a centering. In the scales, gradients are the mean over all points if that is asked for, and 0 if
# not.
HeldInForms = Callable[[np.ndarray, bool, Centering], tuple[np.ndarray, np.ndarray]]


class TooManyGradients(Exception):  # noqa: N818  # no error, but the end of a search
    """The end of a search that has taken more gradients than it may."""


class CountedDensity:
    """The density at points, with a count of its gradients.

    Attributes:
        count: gradients and products of Hessians so far.

    Raises:
        TooManyGradients: by all methods, if the count is beyond ``most``.
    """

    def __init__(
        self,
        density: Density,
        products: ProductsInForms | None = None,
        held: HeldInForms | None = None,
        most: float = np.inf,
    ) -> None:
        self._density, self._products, self._held, self.count = density, products, held, 0
        self._most = most

    def _add(self, count: int) -> None:
        self.count += count
        if self.count > self._most:
            raise TooManyGradients

    def at(self, points: np.ndarray, centering: Centering, other: Centering) -> AtPoints:
        """The density at points (n, d) in one form of coordinates, and the points in another."""
        self._add(len(points))
        return self._density(points, centering, other)

    def in_form(self, centering: Centering) -> Evaluate:
        """Energies and gradients as functions of the points alone."""

        def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found = self.at(points, centering, centering)
            return found.energies, found.gradients

        return evaluate

    def products_in(self, centering: Centering) -> Products:
        """Products of Hessians in one form of coordinates.

        Raises:
            ValueError: if there are none.
        """
        given = self._products
        if given is None:
            raise ValueError("products: expected a density that has them; got none")

        def products(points: np.ndarray, vectors: np.ndarray) -> np.ndarray:
            self._add(len(points) * len(vectors))
            return given(points, vectors, centering)

        return products

    def held_in(self, centering: Centering) -> Held | None:
        """The density at points that share their scales, in one form of coordinates."""
        given = self._held
        if given is None:
            return None

        def held(points: np.ndarray, with_scales: bool) -> tuple[np.ndarray, np.ndarray]:
            self._add(len(points))
            return given(points, with_scales, centering)

        return held


class Latents(NamedTuple):
    """A model's latents before a search, in its coordinates.

    Attributes:
        first: values at which the density is finite, (d,); the first path starts there.
        from_prior: draws of the prior, (m, d), from which other paths start; none where it cannot
            be drawn from.
        is_hierarchical: which coordinates have a degree of centering, (d,).
        is_scale: which may be scales of others: those of positive numbers, (d,).
        is_between: which others have values between two bounds, such as correlations, (d,).
        sizes: numbers of coordinates of the latents, in their order.
        marginals: the functions that unconstrained values are of coordinates, if there are some.
    """

    first: np.ndarray
    from_prior: np.ndarray
    is_hierarchical: np.ndarray
    is_scale: np.ndarray
    is_between: np.ndarray
    sizes: tuple[int, ...]
    marginals: Marginals | None = None

    @property
    def scales(self) -> np.ndarray:
        """Indices of the latents that count as scales: sites of few numbers."""
        is_small = np.repeat(self.sizes, self.sizes) <= MOST_OF_SITE
        return np.flatnonzero((self.is_scale | self.is_between) & is_small)

    @property
    def held(self) -> np.ndarray:
        """Indices of the scales that are held: eight at most, and none if they are all latents."""
        scales = self.scales[:MANY]
        return scales[:0] if len(scales) == len(self.first) else scales

    @property
    def prior_widths(self) -> np.ndarray:
        """Standard deviations of the prior by quantiles, (d,); 1 where draws say nothing."""
        if len(self.from_prior) < FEWEST_DRAWS:
            return np.ones(len(self.first))
        low, high = np.quantile(self.from_prior, [0.16, 0.84], axis=0)
        found = 0.5 * (high - low)
        return np.where(np.isfinite(found) & (found > 0), found, 1.0)

    def with_spread(self, rng: np.random.Generator) -> Latents:
        """The same with random numbers for coordinates that are equal in all draws of the prior.

        A ``sample`` that returns zeros, as that of a potential often does, says nothing.
        """
        draws = self.from_prior
        if len(draws) < FEWEST_DRAWS:
            return self
        is_same = np.ptp(draws, axis=0) == 0
        if not np.any(is_same):
            return self
        spread = rng.uniform(-RADIUS, RADIUS, draws.shape)
        return self._replace(from_prior=np.where(is_same, spread, draws))


class Search(NamedTuple):
    """What all parts of a search use.

    Attributes:
        model: the density, in any form of coordinates.
        latents: what is known of the latents before it.
        rng: makes all draws but those of the noise.
        noise: standard normal noise for bounds, its second half minus the first, (m, d).
    """

    model: CountedDensity
    latents: Latents
    rng: np.random.Generator
    noise: np.ndarray

    def with_own_draws(self) -> Search:
        """The same with other draws: those that follow do not depend on how many it makes."""
        return self._replace(rng=self.rng.spawn(1)[0])
