"""The way up of a model's scales to where their evidence is highest, and other ends of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.bfgs import Path
from numpyro_kscore._starts.evidence_slopes import evidence_slopes
from numpyro_kscore._starts.interpolation import Scales
from numpyro_kscore._starts.laplace import Given, Others, mode_at
from numpyro_kscore._starts.search import QUANTILES, Latents
from numpyro_kscore._transports.affine import Affine, factor
from numpyro_kscore._transports.stretch import unstretched
from numpyro_kscore._util.deadline import seconds_left

# The first step of a scale, in units of its prior, and least and largest width of it after that.
FIRST_WIDTH, WIDTHS = 0.3, (0.003, 0.5)
# Most values of the scales on the way up, or three for each, and what a step must promise to go on,
# in nats.
CLIMB, NEAR_TOP = 60, 0.1
# Draws of the prior from which other modes are looked for; nats below the highest evidence from
# which on an end hardly counts; the depth of a valley between two ends, in nats; and the squared
# distance, in standard deviations, of two modes.
OTHER_STARTS, FARTHEST, VALLEY, APART = 12, 5.0, 1.0, 16.0


class Top(NamedTuple):
    """Where the evidence of the scales is highest.

    Attributes:
        others: the model as a function of its others, with the structure that it has there.
        at: a point (d,), with the scales and the mode of the others.
        now: the distribution of the scales, and the others at its mean.
        evidence: that of the scales there, in nats.
    """

    others: Others
    at: np.ndarray
    now: Scales
    evidence: float


def find_top(
    others: Others, latents: Latents, scales: np.ndarray, only_one: bool = False
) -> Top | None:
    """The top that is reached from where, of some quantiles of the prior, evidence is highest.

    None is returned where no mode is found, and, if there may be ``only_one``, where another end is
    found that counts: of the scales from the other quantiles, or of the others from elsewhere.
    """
    others, starts = _starts(others, latents, scales)
    if not starts:
        return None
    starts.sort(key=lambda start: -start[1].evidence)
    shaped = None if latents.marginals is None else np.asarray(latents.marginals.vary)[scales]
    first = starts if only_one else starts[:1]
    tops = [_top_from(others, at, mode, scales, shaped) for at, mode in first]
    top = max(tops, key=lambda one: one.evidence)
    if only_one:
        draws = latents.from_prior[:OTHER_STARTS]
        # And their mirror images: some draws may all be on one side.
        mirrored = 2 * np.median(latents.from_prior, axis=0) - draws if len(draws) else draws
        starts_of_others = [*(one.at for one in tops if one is not top), *draws, *mirrored]
        if any(_is_another(top, one, scales) for one in tops) or _has_other_mode(
            top, starts_of_others
        ):
            return None
    return top


def _starts(
    others: Others, latents: Latents, scales: np.ndarray
) -> tuple[Others, list[tuple[np.ndarray, Given]]]:
    """Points (d,) and their modes, with scales at quantiles of the prior."""
    starts: list[tuple[np.ndarray, Given]] = []
    for at in _first_points(latents, scales):
        known = None
        if starts:
            # From the mode before, which is nearer.
            at[others.indices], known = starts[-1][1].mean, starts[-1][1].triangle
        mode = mode_at(others, at, known)
        if mode is not None and not starts:
            # Numbers that were nearly zero at first are not at a mode.
            others, mode = _checked(others, at, mode)
        if mode is not None:
            starts.append((at, mode))
    return others, starts


def _first_points(latents: Latents, scales: np.ndarray) -> Iterator[np.ndarray]:
    """Points (d,) with scales at quantiles of the prior, if it has draws."""
    if not len(latents.from_prior):
        yield latents.first.copy()
        return
    # Where effects are what the prior expects, and not at random places, curvatures are positive.
    middle = np.median(latents.from_prior, axis=0)
    for values in np.quantile(latents.from_prior[:, scales], QUANTILES, axis=0):
        at = middle.copy()
        at[scales] = values
        yield at
        if not len(scales):
            return


def _checked(others: Others, at: np.ndarray, mode: Given) -> tuple[Others, Given | None]:
    """The structure that the Hessian has at a mode too, and the mode by it."""
    point = at.copy()
    point[others.indices] = mode.mean
    checked = others.checked(point[None])
    return checked, mode if checked is others else mode_at(checked, point)


def _top_from(
    others: Others, at: np.ndarray, mode: Given, scales: np.ndarray, is_shaped: np.ndarray | None
) -> Top:
    """The top that is reached from a point (d,) with a mode."""
    count = len(scales)
    now = Scales(
        Affine(at[scales], FIRST_WIDTH * np.eye(count)),
        unstretched(count),
        mode.mean,
        np.zeros((count, len(mode.mean))),
        mode.triangle,
        is_shaped,
    )
    return climbed(Top(others, at, now, mode.evidence), scales)


def climbed(top: Top, scales: np.ndarray) -> Top:
    """The top that a quasi-Newton path reaches in the scales."""
    others, at, now, evidence = top
    if not len(scales):
        at = at.copy()
        at[others.indices] = now.mode
        return top._replace(at=at)
    path, bends = Path(at[scales], np.diag(now.gaussian.factor)), None
    for _ in range(max(CLIMB, 3 * len(scales))):
        is_near = path.count > len(scales) and _decrement(path) < NEAR_TOP
        if path.is_done or is_near or seconds_left() <= 0:
            break
        trial = at.copy()
        trial[scales], trial[others.indices] = path.trial, now.mode
        found = mode_at(others, trial, now.triangle)
        if found is None:
            path.receive(np.inf, np.zeros(len(scales)))
            continue
        before = path.count
        slopes, bends = evidence_slopes(others, trial, found, bends)
        path.receive(-found.evidence, -slopes[scales])
        if path.count > before:
            now = now._replace(mode=found.mean, triangle=found.triangle)
            evidence = found.evidence
    if path.iterates:
        last = path.iterates[-1]
        sizes = np.sqrt(np.diag(last.inverse_hessian))
        # A path that ended early may have learned little of them.
        units = np.clip(sizes, *WIDTHS) / sizes
        factors = units[:, None] * factor(last.inverse_hessian)
        now = now._replace(gaussian=Affine(last.point, factors))
    at = at.copy()
    at[scales], at[others.indices] = now.gaussian.mean, now.mode
    return Top(others, at, now, evidence)


def _decrement(path: Path) -> float:
    """How much the last step of a path promises, in nats."""
    last = path.iterates[-1]
    return float(last.gradient @ last.inverse_hessian @ last.gradient)


def _is_another(top: Top, other: Top, scales: np.ndarray) -> bool:
    """Whether another end counts: there is a valley of the evidence between its scales and these.

    Distances say little, since a short path knows little of widths.
    """
    if other is top or other.evidence < top.evidence - FARTHEST:
        return False
    middle = top.at.copy()
    middle[scales] = 0.5 * (top.at[scales] + other.at[scales])
    found = mode_at(top.others, middle, top.now.triangle)
    return found is None or found.evidence < min(top.evidence, other.evidence) - VALLEY


def _has_other_mode(top: Top, starts: Iterable[np.ndarray]) -> bool:
    """Whether the others have another mode that counts at the same scales, from starts (d,)."""
    others, at, now, evidence = top
    if now.triangle is None:
        return False
    for start in starts:
        point = at.copy()
        point[others.indices] = start[others.indices]
        mode = mode_at(others, point)
        if mode is None or mode.evidence < evidence - FARTHEST:
            continue
        move = now.triangle.solve((mode.mean - now.mode)[None])[0]
        if float(move @ move) > APART:
            return True
    return False
