"""The start by a model's structure: a Gaussian that changes with the model's scales.

No quasi-Newton path, and no whole covariance: modes are found at given values of the scales by the
structure of the Hessian (``sparsity``, ``laplace``), and the evidence says which values these have
(``scale_rounds``). It takes some thousand gradients and products of Hessians at any size.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np

from numpyro_kscore._starts.best_given import MOST_LEFT, best_given
from numpyro_kscore._starts.compiled_density import ROWS_AT_ONCE
from numpyro_kscore._starts.far_draws import with_far_draws
from numpyro_kscore._starts.interpolation import Found, Scales
from numpyro_kscore._starts.laplace import NUM_POINTS, Others, make_others, mode_at
from numpyro_kscore._starts.many_scales import find_many
from numpyro_kscore._starts.scale_climb import WIDTHS, Top, climbed, find_top
from numpyro_kscore._starts.scale_distribution import moments_by
from numpyro_kscore._starts.scale_rounds import MOST_SCALES, find_scales
from numpyro_kscore._starts.search import (
    CountedDensity,
    Density,
    HeldInForms,
    Latents,
    ProductsInForms,
    TooManyGradients,
)
from numpyro_kscore._starts.sparsity import Products
from numpyro_kscore._starts.start import (
    FAR_FOR_EACH,
    NUM_DRAWS,
    GaussianStart,
    draws_at,
)
from numpyro_kscore._starts.structure_form import InForm, in_suitable_form
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.centering import Centering, of_degrees
from numpyro_kscore._transports.stretch import unstretched
from numpyro_kscore._transports.transport import Chain, Evaluate
from numpyro_kscore._util.deadline import seconds_left
from numpyro_kscore._util.pareto import are_reliable, pareto_smooth, weight_ess, weight_variation

# Width of points that show what depends on what, in those of the prior.
SPREAD = 0.1
# Latents of a core that may be held like scales.
MOST_IN_CORE = 100
# Products by which time is told, Hessians of a search, and the longest that they may take; that of
# a small model, which has another search.
TIMED, HESSIANS, MOST_SECONDS, MOST_OF_SMALL = 16, 100, 900.0, 10.0
# Hessians that are enough for a start, if there is no time for more. Floating-point operations of a
# factor in a second, about.
FEW_HESSIANS, SPEED = 20, 5e9
# Gradients of a search, and the seconds that they must take for another program, which computes
# what depends on scales alone once for many of them: few points take it longer.
GRADIENTS, SECONDS_WORTH = 1_000, 5.0
# Times are the shortest of so many: other work on the machine makes some longer.
REPEATED = 3
# Draws of the start, fewest of them, and the seconds that their gradients may take.
MANY_DRAWS, FEWEST_DRAWS, SECONDS_OF_DRAWS = 512, 128, 15.0
# Most gradients of a search for a small model. Least share of draws of its start that is effective
# by weights, and the variance of their logarithms that the others alone may leave: with more of it
# fewer are.
MOST_GRADIENTS, LEAST_SHARE, MOST_LEFT_IN_ALL = 60_000, 0.5, 0.7
# Share of draws of a small model's start that is effective, from which on its scales stay. A second
# move brought nothing (benchmarks/results/2026-12-01-scales-by-weights.md).
ENOUGH = 0.95


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def find_by_structure(
    density: Density,
    products: ProductsInForms,
    held: HeldInForms,
    latents: Latents,
    rng: np.random.Generator,
    is_small: bool,
) -> GaussianStart | None:
    """The Gaussian that changes with the scales; None where their distribution is not found.

    That of a small model, which has another search, is given only if its draws need hardly any
    weights, and if there is no other mode.

    Cost: the structure takes a product of the Hessian for each latent; each of some hundred values
    of k scales some gradients, a hundred near the end, and as many products as the Hessian has
    colors. Of a small model no more than 60 000 gradients are taken.
    """
    most = MOST_GRADIENTS if is_small else np.inf
    try:
        return _find(CountedDensity(density, products, held, most), latents, rng, is_small)
    except TooManyGradients:
        return None


def _find(
    model: CountedDensity, latents: Latents, rng: np.random.Generator, is_small: bool
) -> GaussianStart | None:
    """The start by a model's structure, if there is one."""
    dim = len(latents.first)
    plain = of_degrees(np.ones(dim))
    evaluate, hessian = model.in_form(plain), model.products_in(plain)
    scales = latents.held
    rest = np.setdiff1d(np.arange(dim), scales)
    points = latents.first + SPREAD * latents.prior_widths * rng.normal(size=(NUM_POINTS, dim))
    seconds = _seconds_of_product(hessian, points)
    if _takes_too_long(seconds * NUM_POINTS * dim, dim, is_small):
        return None
    of_gradient = _seconds_of_gradient(evaluate, points)
    is_slow = GRADIENTS * (of_gradient - seconds) > SECONDS_WORTH
    given = InForm(model, plain, is_slow)
    others = given.others_at(points, rest, rng)
    each = seconds * len(others.structure.seeds) + others.structure.operations / SPEED
    if _takes_too_long(each * HESSIANS, dim, is_small, each * FEW_HESSIANS):
        return None
    in_form = _find_scales(given, others, latents, scales, rng, is_small)
    if in_form is None:
        return None
    num_draws = NUM_DRAWS if is_small else MANY_DRAWS
    num_draws = int(np.clip(SECONDS_OF_DRAWS / of_gradient, FEWEST_DRAWS, num_draws))
    form, found = in_form
    gaussian = found.gaussian if is_small else None
    transport = found.transport if gaussian is None else Chain((gaussian,))
    points = rng.standard_normal((num_draws, dim))
    start = _start(model, form, found, transport, points)
    if num_draws == NUM_DRAWS:
        start = _moved_by_weights(model, form, found, start, points)
    draws = start.exact_draws
    if draws is None or not is_small:
        return None if draws is None else start
    if not _are_good(draws.gaps, dim):
        return None
    draws = with_far_draws(draws, model.in_form(form), start.transports, rng)
    return start._replace(exact_draws=draws, num_gradients=model.count)


def _start(
    model: CountedDensity, form: Centering, found: Found, transport: Chain, points: np.ndarray
) -> GaussianStart:
    """The start, with its draws at points (n, d) if their densities are finite."""
    draws = draws_at(model.in_form(form), transport, points)
    # Scores of the scales are those of their own density, with the evidence beyond the bound.
    count = len(found.conditional.scales.slopes)
    draws.scores[:, :count] += found.slopes_beyond(draws.points[:, :count])
    return GaussianStart(
        transport,
        form,
        float(np.mean(draws.gaps)),
        model.count,
        transport.push(np.zeros((1, points.shape[1]))),
        np.ones(1),
        exact_draws=draws._replace(is_final=True) if np.all(np.isfinite(draws.gaps)) else None,
    )


def _moved_by_weights(
    model: CountedDensity,
    form: Centering,
    found: Found,
    start: GaussianStart,
    points: np.ndarray,
) -> GaussianStart:
    """The start with its scales moved to where weights of its draws have them, if that helps.

    Errors of Laplace's evidence at given scales add up over the others, and weights know them.
    """
    count, draws = len(found.conditional.scales.slopes), start.exact_draws
    if not count or draws is None or weight_ess(draws.gaps) > ENOUGH * len(points):
        return start
    affine = moments_by(pareto_smooth(draws.gaps)[0], points[:, :count])
    if affine is None:
        return start
    found = found.moved_before(affine)
    try:
        moved = _start(model, form, found, found.transport, points)
    except TooManyGradients:
        return start
    after = moved.exact_draws
    if after is None or weight_ess(after.gaps) < weight_ess(draws.gaps):
        return start
    return moved


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


def _takes_too_long(seconds: float, dim: int, is_small: bool, least: float = 0.0) -> bool:
    """Whether a search is not worth so many seconds, with a warning if there is no other.

    Where there is a limit of time, a search ends early that has the least that it needs.
    """
    most = MOST_OF_SMALL if is_small else MOST_SECONDS
    if seconds < most and (least or seconds) < seconds_left():
        return False
    if is_small:
        return True
    warnings.warn(
        f"numpyro_kscore: the structure of this model of {dim} latents is not used, "
        f"since it would take about {seconds / 60:.0f} minutes. It takes least where each latent "
        "depends on few others: write series and fields as Normal(mean of their neighbors, scale), "
        "and not as sums of standard normal latents",
        UserWarning,
        stacklevel=2,
    )
    return True


def _are_good(gaps: np.ndarray, dim: int) -> bool:
    """Whether most draws are effective by these log weights, whose tail is short.

    If each latent leaves as much to the model the logarithm of the share falls with their number.
    """
    least = max(LEAST_SHARE, np.exp(-FAR_FOR_EACH * dim))
    is_near = weight_ess(gaps) >= least * len(gaps)
    return bool(is_near and are_reliable(pareto_smooth(gaps)[1], weight_variation(gaps)))


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


def _find_scales(
    given: InForm,
    others: Others,
    latents: Latents,
    scales: np.ndarray,
    rng: np.random.Generator,
    is_small: bool,
) -> tuple[Centering, Found] | None:
    """The Gaussian that changes with the scales, in a form that suits it; None if there is none.

    The core of a small model is not held: there is none if its others are far from Gaussian.
    """
    top = find_top(others, latents, scales, only_one=is_small)
    if top is None:
        return None
    given, top = in_suitable_form(given, top, latents.is_hierarchical, rng)
    indices = scales
    if is_small and _left_at(top) > MOST_LEFT_IN_ALL:
        return None
    if not is_small and _depends_on_core(top):
        top, indices = _with_core(top, scales, rng)
        top = climbed(top, indices)
    found: Found | None
    if len(indices) > MOST_SCALES:
        found = find_many(top.others, top.now, indices, len(scales))
    else:
        found = find_scales(top.others, top.now, indices, is_small)
    return None if found is None else (given.centering, found)


def _depends_on_core(top: Top) -> bool:
    """Whether the others are far from Gaussian, and most are leaves of a small core.

    Then much is left by the best density, or its evidence is far from that by the mode.
    """
    core, size = top.others.structure.core, len(top.others.indices)
    if not 0 < len(core) <= min(MOST_IN_CORE, size / 4):
        return False
    return _left_at(top, with_evidence=True) > MOST_LEFT * size / 2


def _left_at(top: Top, with_evidence: bool = False) -> float:
    """The variance of log weights that the best density of the others leaves; infinity if unknown.

    Or how far its evidence is from that by the mode, if that is more.
    """
    mode = mode_at(top.others, top.at, top.now.triangle)
    found = None if mode is None else best_given(top.others, top.at, mode, None)
    if mode is None or found is None:
        return np.inf
    best, _ = found
    return max(best.variance, abs(best.evidence - mode.evidence) if with_evidence else 0.0)


def _with_core(top: Top, scales: np.ndarray, rng: np.random.Generator) -> tuple[Top, np.ndarray]:
    """The leaves alone as the others, and the core among the scales.

    Discriminations of items times abilities of persons are no Gaussian, but abilities are, given
    all items.
    """
    others, at, now, _ = top
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
    now = Scales(gaussian, unstretched(count), mode, np.zeros((count, len(rest))))
    return top._replace(others=leaves, now=now), given
