"""The start of a fit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.exact_draws import ExactDraws
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.transport import Chain


class GaussianStart(NamedTuple):
    """A Gaussian near the posterior, and how it was found.

    Standard normal points go through ``transports`` to the coordinates of the guide, from these
    through ``sizes`` to others, which have the degrees of ``centering``.

    Attributes:
        transports: an affine map, and perhaps one that changes with scales.
        centering: degrees of centering, arrays (d,); a degree of 1 is the unconstrained value.
        elbo: the evidence lower bound, in nats.
        num_gradients: how many gradients of the model it took.
        modes: the distinct modes whose probability counts, (k, d), in the guide's coordinates.
        weights: fractions of probability by their Gaussian approximations, (k,).
        parts: the Gaussians at the modes, with these weights, if they hardly overlap; otherwise
            empty.
        sizes: how the sizes of latents vary with others; None if they do not.
        exact_draws: draws of the start, if it is close to the model.
    """

    transports: Chain
    centering: Centering
    elbo: float
    num_gradients: int
    modes: np.ndarray
    weights: np.ndarray
    parts: tuple[Affine, ...] = ()
    sizes: Sizes | None = None
    exact_draws: ExactDraws | None = None

    @property
    def gaussian(self) -> Affine:
        """The first of the transports: the start itself if there is no other."""
        return self.transports.steps[0]
