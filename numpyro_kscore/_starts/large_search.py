"""The start of a model with many latents: a Gaussian that changes with the model's scales.

No quasi-Newton path, and no whole covariance: modes are found at given values of the scales by the
structure of the Hessian (``sparsity``, ``laplace``), and the evidence says which values these have
(``scale_rounds``). It takes some thousand gradients and products of Hessians at any size.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np

from numpyro_kscore._starts.best_given import MOST_LEFT, best_given
from numpyro_kscore._starts.bfgs import Path
from numpyro_kscore._starts.compiled_density import ROWS_AT_ONCE
from numpyro_kscore._starts.interpolation import Found, Scales
from numpyro_kscore._starts.laplace import (
    NUM_POINTS,
    Given,
    Others,
    evidence_slopes,
    make_others,
    mode_at,
)
from numpyro_kscore._starts.many_scales import find_many
from numpyro_kscore._starts.pathfinder import QUANTILES
from numpyro_kscore._starts.scale_rounds import MOST_SCALES, find_scales
from numpyro_kscore._starts.search import (
    CountedDensity,
    Density,
    HeldInForms,
    Latents,
    ProductsInForms,
)
from numpyro_kscore._starts.sparsity import Products
from numpyro_kscore._starts.start import FAR_FOR_EACH, GaussianStart, draws_at
from numpyro_kscore._transports.affine import Affine, factor
from numpyro_kscore._transports.centering import of_degrees
from numpyro_kscore._transports.stretch import unstretched
from numpyro_kscore._transports.transport import Evaluate
from numpyro_kscore._util.deadline import seconds_left

# The first step of a scale, and the width of points that show what depends on what, in those of the
# prior.
FIRST_WIDTH, SPREAD = 0.3, 0.1
# Least and largest width of a scale after that.
WIDTHS = (0.003, 0.5)
# Latents of a core that may be held like scales.
MOST_IN_CORE = 100
# Most values of the scales on the way up, or three for each, and what a step must promise to go on,
# in nats.
CLIMB, NEAR_TOP = 60, 0.1
# Products by which time is told, Hessians of a search, and the longest that they may take.
TIMED, HESSIANS, MOST_SECONDS = 16, 100, 900.0
# Gradients of a search, and the seconds that they must take for another program, which computes
# what depends on scales alone once for many of them: few points take it longer.
GRADIENTS, SECONDS_WORTH = 1_000, 5.0
# Times are the shortest of so many: other work on the machine makes some longer.
REPEATED = 3
# Draws of the start, fewest of them, and the seconds that their gradients may take.
NUM_DRAWS, FEWEST_DRAWS, SECONDS_OF_DRAWS = 512, 128, 15.0


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def find_large(
    density: Density,
    products: ProductsInForms,
    held: HeldInForms,
    latents: Latents,
    rng: np.random.Generator,
) -> GaussianStart | None:
    """The Gaussian that changes with the scales; None where their distribution is not found.

    Cost: the structure takes a product of the Hessian for each latent; each of some hundred values
    of k scales some gradients, a hundred near the end, and as many products as the Hessian has
    colors.
    """
    model, dim = CountedDensity(density, products, held), len(latents.first)
    plain = of_degrees(np.ones(dim))
    evaluate, hessian = model.in_form(plain), model.products_in(plain)
    scales = latents.scales[:MOST_SCALES]
    rest = np.setdiff1d(np.arange(dim), scales)
    points = latents.first + SPREAD * latents.prior_widths * rng.normal(size=(NUM_POINTS, dim))
    seconds = _seconds_of_product(hessian, points)
    if _takes_too_long(seconds * NUM_POINTS * dim, dim):
        return None
    of_gradient = _seconds_of_gradient(evaluate, points)
    is_slow = GRADIENTS * (of_gradient - seconds) > SECONDS_WORTH
    at_scales = model.held_in(plain) if is_slow else None
    others = make_others(evaluate, hessian, points, rest, rng, at_scales)
    if _takes_too_long(seconds * HESSIANS * len(others.structure.seeds), dim):
        return None
    found = _from_quantiles(others, latents, scales, rng)
    if found is None:
        return None
    transport = found.transport
    num_draws = int(np.clip(SECONDS_OF_DRAWS / of_gradient, FEWEST_DRAWS, NUM_DRAWS))
    draws = draws_at(evaluate, transport, rng.standard_normal((num_draws, dim)))
    if not np.all(np.isfinite(draws.gaps)):
        return None
    # Scores of the scales are those of their own density, with the evidence beyond the bound.
    count = len(found.conditional.slopes)
    draws.scores[:, :count] += found.slopes_beyond(draws.points[:, :count])
    return GaussianStart(
        transport,
        plain,
        float(np.mean(draws.gaps)),
        model.count,
        transport.push(np.zeros((1, dim))),
        np.ones(1),
        exact_draws=draws._replace(is_final=True),
    )


def _seconds_of_product(products: Products, points: np.ndarray) -> float:
    """The time of a product of the Hessian, compiled before."""
    vectors = np.eye(min(TIMED, points.shape[1]), points.shape[1])
    products(points[:1], vectors[:1])
    return _shortest(lambda: products(points[:1], vectors)) / len(vectors)


def _seconds_of_gradient(evaluate: Evaluate, points: np.ndarray) -> float:
    """The time of a gradient in all latents, compiled before."""
    rows = np.repeat(points[:1], ROWS_AT_ONCE, axis=0)
    evaluate(rows)
    return _shortest(lambda: evaluate(rows)) / len(rows)


def _shortest(run: Callable[[], object]) -> float:
    """The seconds of a call, the shortest of some."""
    found = np.inf
    for _ in range(REPEATED):
        begin = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - begin)
    return found


def _takes_too_long(seconds: float, dim: int) -> bool:
    """Whether a search is not worth so many seconds, with a warning."""
    if seconds < min(MOST_SECONDS, seconds_left()):
        return False
    warnings.warn(
        f"numpyro_kscore: the structure of this model of {dim} latents is not used, "
        f"since it would take about {seconds / 60:.0f} minutes. It takes least where each latent "
        "depends on few others: write series and fields as Normal(mean of their neighbors, scale), "
        "and not as sums of standard normal latents",
        UserWarning,
        stacklevel=2,
    )
    return True


def is_close(start: GaussianStart) -> bool:
    """Whether what is left to the model is little for each latent.

    Few draws far out, where polynomials of scales are wild, do not count.
    """
    draws = start.exact_draws
    if draws is None:
        return False
    low, high = np.quantile(draws.gaps, [0.16, 0.84])
    return 0.5 * (0.5 * (high - low)) ** 2 < FAR_FOR_EACH * draws.points.shape[1]


def higher(large: GaussianStart | None, other: GaussianStart) -> GaussianStart:
    """The start with the higher bound."""
    return other if large is None or other.elbo >= large.elbo else large


def _from_quantiles(
    others: Others, latents: Latents, scales: np.ndarray, rng: np.random.Generator
) -> Found | None:
    """The distribution of scales from where, of some quantiles of the prior, evidence is highest.

    None is returned where no mode is found.
    """
    starts: list[tuple[float, np.ndarray, Given]] = []
    for at in _first_points(latents, scales):
        known = None
        if starts:
            # From the mode before, which is nearer.
            at[others.indices], known = starts[-1][2].mean, starts[-1][2].triangle
        mode = mode_at(others, at, known)
        if mode is not None and not starts:
            # Numbers that were nearly zero at first are not at a mode.
            others, mode = _checked(others, at, mode)
        if mode is not None:
            starts.append((mode.evidence, at, mode))
    if not starts:
        return None
    _, at, mode = max(starts, key=lambda start: start[0])
    count = len(scales)
    now = Scales(
        Affine(at[scales], FIRST_WIDTH * np.eye(count)),
        unstretched(count),
        mode.mean,
        np.zeros((count, len(mode.mean))),
        mode.triangle,
    )
    if count:
        now = _climbed(others, at, now, scales)
    at[scales], at[others.indices] = now.gaussian.mean, now.mode
    if _depends_on_core(others, at, now):
        others, now, scales = _with_core(others, at, now, scales, rng)
        now = _climbed(others, at, now, scales)
    if len(scales) > MOST_SCALES:
        return find_many(others, now, scales, count)
    return find_scales(others, now, scales, is_small=False)


def _depends_on_core(others: Others, at: np.ndarray, now: Scales) -> bool:
    """Whether the others are far from Gaussian, and most are leaves of a small core.

    Then much is left by the best density, or its evidence is far from that by the mode.
    """
    core, size = others.structure.core, len(others.indices)
    if not 0 < len(core) <= min(MOST_IN_CORE, size / 4):
        return False
    mode = mode_at(others, at, now.triangle)
    found = None if mode is None else best_given(others, at, mode, None)
    if mode is None or found is None:
        return True
    best, _ = found
    return max(best.variance, abs(best.evidence - mode.evidence)) > MOST_LEFT * size / 2


def _with_core(
    others: Others, at: np.ndarray, now: Scales, scales: np.ndarray, rng: np.random.Generator
) -> tuple[Others, Scales, np.ndarray]:
    """The leaves alone as the others, and the core among the scales.

    Discriminations of items times abilities of persons are no Gaussian, but abilities are, given
    all items.
    """
    core = others.structure.core
    given = np.concatenate([scales, others.indices[core]])
    rest = np.setdiff1d(np.arange(len(at)), given)
    points = np.concatenate([at[None], others.seen])
    leaves = make_others(others.evaluate, others.products, points, rest, rng, others.held)
    triangle = np.zeros((len(core), len(core))) if now.triangle is None else now.triangle.core
    widths = np.concatenate(
        [np.sqrt(np.sum(factor**2, axis=1)) for factor in (now.gaussian.factor, triangle)]
    )
    gaussian = Affine(at[given], np.diag(np.clip(widths, *WIDTHS)))
    count, mode = len(given), at[rest]
    return leaves, Scales(gaussian, unstretched(count), mode, np.zeros((count, len(rest)))), given


def _checked(others: Others, at: np.ndarray, mode: Given) -> tuple[Others, Given | None]:
    """The structure that the Hessian has at a mode too, and the mode by it."""
    point = at.copy()
    point[others.indices] = mode.mean
    checked = others.checked(point[None])
    return checked, mode if checked is others else mode_at(checked, point)


def _climbed(others: Others, at: np.ndarray, now: Scales, scales: np.ndarray) -> Scales:
    """The distribution of the scales where their evidence is highest, by a quasi-Newton path."""
    path = Path(at[scales], np.diag(now.gaussian.factor))
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
        path.receive(-found.evidence, -evidence_slopes(others, trial, found)[scales])
        if path.count > before:
            now = now._replace(mode=found.mean, triangle=found.triangle)
    if not path.iterates:
        return now
    last = path.iterates[-1]
    sizes = np.sqrt(np.diag(last.inverse_hessian))
    # A path that ended early may have learned little of them.
    units = np.clip(sizes, *WIDTHS) / sizes
    return now._replace(gaussian=Affine(last.point, units[:, None] * factor(last.inverse_hessian)))


def _decrement(path: Path) -> float:
    """How much the last step of a path promises, in nats."""
    last = path.iterates[-1]
    return float(last.gradient @ last.inverse_hessian @ last.gradient)


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
