"""The start of a fit, and draws of it by which a fit can tell that it needs no step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._model.draws import WeightedDraws
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.stretch import Marginals
from numpyro_kscore._transports.transport import Chain, Evaluate, pulled_back

# Draws that are kept, and those that tell whether they are worth it.
NUM_DRAWS, FEW_DRAWS = 4096, 64
# Numbers of points that are pushed at a time.
PIECE = 500_000
# Farther from the model, in nats, a start cannot be all that a fit asks for; nor can one of many
# latents in nats for each.
FARTHEST, FAR_FOR_EACH = 0.1, 0.01


class ExactDraws(NamedTuple):
    """Draws of a start whose density is known, at the points that it pushes.

    Attributes:
        points: standard normal points, (n, d).
        scores: the model's score in the coordinates of the points, (n, d).
        log_density: log density of the model, in the coordinates of the guide, (n,).
        gaps: log density of the model less the start's, (n,).
        divergence: that of the start from the model by these gaps, in nats.
        samples: the points pushed to the coordinates of the guide, (n, d).
        weighted: these draws with others from farther out, by their weights; None if there are
            none.
        is_final: whether a fit leaves the start as it is, since there are too many latents for
            steps to bring it nearer.
    """

    points: np.ndarray
    scores: np.ndarray
    log_density: np.ndarray
    gaps: np.ndarray
    divergence: float
    samples: np.ndarray
    is_final: bool = False
    weighted: WeightedDraws | None = None

    def as_weighted(self) -> WeightedDraws:
        """The draws with their weights, those from farther out too if there are some."""
        if self.weighted is not None:
            return self.weighted
        return WeightedDraws(self.samples, self.log_density, self.log_density - self.gaps, 0, 0.0)


class GaussianStart(NamedTuple):
    """A Gaussian near the posterior, and how it was found.

    Standard normal points go through ``transports`` to the coordinates of the guide, from these
    through ``sizes`` and ``marginals`` to others, which have the degrees of ``centering``.

    Attributes:
        transports: an affine map, one that changes with scales, or both.
        centering: degrees of centering, arrays (d,); a degree of 1 is the unconstrained value.
        elbo: the evidence lower bound, in nats.
        num_gradients: how many gradients of the model it took.
        modes: the distinct modes whose probability counts, (k, d), in the guide's coordinates.
        weights: fractions of probability by their Gaussian approximations, (k,).
        parts: the Gaussians at the modes, with these weights, if they hardly overlap; otherwise
            empty.
        sizes: how the sizes of latents vary with others; None if they do not.
        exact_draws: draws of the start, if it is close to the model.
        marginals: functions of coordinates that are normal under the prior; None if there are none.
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
    marginals: Marginals | None = None

    @property
    def gaussian(self) -> Affine:
        """The first of the transports: the start itself if there is no other."""
        return self.transports.steps[0]

    @property
    def is_by_structure(self) -> bool:
        """Whether it is from the structure of the model, and has no covariance of all latents."""
        return not isinstance(self.gaussian, Affine)


def draw_exactly(
    evaluate: Evaluate, transport: Chain, rng: np.random.Generator
) -> ExactDraws | None:
    """Draws of a start; None if they show that it is not close to the model.

    Cost: 64 gradients of the model, and 4096 if it is close.
    """
    dim = len(transport.steps[0].mean)
    for count in (FEW_DRAWS, NUM_DRAWS):
        found = draws_at(evaluate, transport, rng.standard_normal((count, dim)))
        if not found.divergence <= FARTHEST:
            return None
    return found


def draws_at(evaluate: Evaluate, transport: Chain, points: np.ndarray) -> ExactDraws:
    """Draws of a start at standard normal points (n, d)."""

    def at(rows: np.ndarray) -> tuple[np.ndarray, ...]:
        energies, gradients = pulled_back(evaluate, transport)(rows)
        gaps = -energies + 0.5 * np.sum(rows**2 + np.log(2 * np.pi), axis=1)
        log_density = -energies - transport.log_volume(rows)
        return -gradients, log_density, gaps, np.asarray(transport.push(rows))

    # Shapes take thirty copies of points, which are gigabytes where there are many latents.
    pieces = np.array_split(points, -(-points.size // PIECE))
    found = zip(*map(at, pieces), strict=True)
    scores, log_density, gaps, samples = (np.concatenate(part) for part in found)
    return ExactDraws(points, scores, log_density, gaps, divergence_of(gaps), samples)


def divergence_of(gaps: np.ndarray) -> float:
    """The divergence from a start to the model, in nats, by importance sampling; NaN if unknown."""
    return float(np.log(np.mean(np.exp(gaps - np.max(gaps)))) + np.max(gaps) - np.mean(gaps))
