"""The coordinates of a model in which its Gaussian hardly bends with the scales.

Where a scale is small its effects stay near their location: in their own values the factor of their
covariance has to be right to a part of that scale, and interpolated factors are not. In
non-centered coordinates nothing is left to interpolate there. Where data decide, values are best;
between them, degrees of centering (``_transports.centering``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.fit_centering import fit_centering
from numpyro_kscore._starts.laplace import Others, make_others, mode_at, pushed_at
from numpyro_kscore._starts.scale_climb import Top
from numpyro_kscore._starts.search import CountedDensity
from numpyro_kscore._transports.affine import antithetic
from numpyro_kscore._transports.centering import Centering, of_degrees

# Draws of the others that tell degrees of centering, and the least of these by which values are as
# good: where data decide more than the prior.
NUM_DRAWS, NEARLY_CENTERED = 256, 0.5


class InForm(NamedTuple):
    """A model in one form of coordinates.

    Attributes:
        model: in all forms.
        centering: the form.
        holds: whether a program of its own evaluates points that share their scales.
    """

    model: CountedDensity
    centering: Centering
    holds: bool

    def others_at(self, points: np.ndarray, rest: np.ndarray, rng: np.random.Generator) -> Others:
        """The model as a function of the rest (r,), whose Hessians are seen at points (n, d)."""
        form = self.centering
        held = self.model.held_in(form) if self.holds else None
        evaluate, products = self.model.in_form(form), self.model.products_in(form)
        return make_others(evaluate, products, points, rest, rng, held)

    def moved(self, points: np.ndarray, other: Centering) -> np.ndarray:
        """Points (n, d) in another form."""
        return self.model.at(points, self.centering, other).moved


def in_suitable_form(
    given: InForm, top: Top, is_hierarchical: np.ndarray, rng: np.random.Generator
) -> tuple[InForm, Top]:
    """The same in coordinates that suit draws of the others at the best scales.

    Scales keep their coordinates. What is given is returned where no other form suits better, or
    where it has no mode.

    Cost: that of the structure and of a mode.
    """
    others, at, now, _ = top
    free = np.zeros(len(at), bool)
    free[others.indices] = is_hierarchical[others.indices]
    if now.triangle is None or not np.any(free):
        return given, top
    noise = antithetic(rng, NUM_DRAWS, len(others.indices))
    draws = pushed_at(others, at, now.mode, now.triangle, noise)
    apart = of_degrees(np.where(free, 0.0, 1.0))
    seen = given.model.at(draws, given.centering, apart)
    form = fit_centering(seen.moved, seen.values, seen.locs, seen.log_scales, free)
    if form is None or np.min(form.degrees) >= NEARLY_CENTERED:
        return given, top
    suited = given._replace(centering=form)
    points = given.moved(np.concatenate([at[None], others.seen]), form)
    if not np.all(np.isfinite(points)):
        return given, top
    moved = suited.others_at(points[1:], others.indices, rng)
    mode = mode_at(moved, points[0])
    if mode is None:
        return given, top
    point, moves = points[0], np.zeros_like(now.moves)
    point[others.indices] = mode.mean
    now = now._replace(mode=mode.mean, moves=moves, triangle=mode.triangle)
    return suited, Top(moved, point, now, mode.evidence)
