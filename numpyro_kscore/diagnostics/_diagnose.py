"""Can this fit be trusted? ``diagnose`` answers in words.

Do means and standard deviations of the guide's draws move, if they are weighted by the densities of
model and guide (:mod:`numpyro_kscore.diagnostics._weighing`)? Where weights cannot tell, or there
are none: do they move, if Markov chains that leave the model invariant start from the draws
(:mod:`numpyro_kscore.diagnostics._movement`)? Do ascents from afar find modes where the guide has
no draws (:mod:`numpyro_kscore.diagnostics._missed_modes`)? Others have functions of their own:
:func:`~numpyro_kscore.khat` (can importance weights correct the guide?),
:func:`~numpyro_kscore.diagnostics.ksd` (is the local shape right?),
:func:`~numpyro_kscore.diagnostics.spread_ratios` and
:func:`~numpyro_kscore.diagnostics.fisher_divergence` (how far is the guide from the model?).
NumPyro's ``vsbc_diagnostic`` asks whether the *procedure* is calibrated over data sets, by fitting
many; :func:`~numpyro_kscore.diagnostics.vsbc` calls it for an ``SVI``, whatever its objective.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro.infer import SVI

from numpyro_kscore._model.draws import WeightedDraws
from numpyro_kscore._model.layout import Layout, coordinate_names, element_names
from numpyro_kscore._model.particles import draw_finite
from numpyro_kscore._model.weights import (
    BATCH,
    NUM_DRAWS,
    Weigher,
    has_density,
    unconstrained_draws,
)
from numpyro_kscore._util.checks import check_count, check_positive
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore._util.pareto import GOOD_KHAT
from numpyro_kscore.diagnostics._budget import Clock, Stages
from numpyro_kscore.diagnostics._codes import Known
from numpyro_kscore.diagnostics._diagnosis import Diagnosis, Values
from numpyro_kscore.diagnostics._examine import examine, is_open
from numpyro_kscore.diagnostics._fitted import FittedGuide, fitted_guide, model_density
from numpyro_kscore.diagnostics._weighing import Weighing, weigh, weigh_closely

# The seconds of a diagnosis: a multiple of those of the fit, at least so many; or if they are
# unknown.
BUDGET_SHARE, LEAST_BUDGET, UNKNOWN_BUDGET = 1.5, 10.0, 60.0
# The part of them that weights may take: the search for modes needs some, too.
WEIGHTS_SHARE = 0.5
# Fewer draws have no tail that tells.
LEAST_WEIGHTS = 500
# Bounded latents of which moments are shown: those of thousands of rows tell nothing.
MOST_VALUES = 1_000
# Standard deviations, in units of the values, that are rounding.
SAME = 1e-5
# Time of a gradient, in that of a value with the guide's density.
GRADIENT_COST = 3.0


def diagnose(
    svi: SVI,
    result: Any,
    *args: Any,
    num_samples: int = NUM_DRAWS,
    budget: float | None = None,
    rng_key: Array | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Diagnosis:
    """Say whether a fit can be trusted, why, and what to try.

    A fit is *good* if every mean of the unconstrained coordinates is within 0.15 standard
    deviations of the model's, and every standard deviation within 10 %, standard errors included,
    and no mode is missed. It is *bad* if something is significantly outside these limits.

    Where the guide's density is known at its draws, importance weights answer first (docs/weights).
    Markov chains from the draws follow where weights cannot decide: where there are none, where a
    tail of the model has too few draws, and near the limits.

    Args:
        svi: model, guide and loss.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of the model, as in the fit.
        num_samples: fresh draws of the guide, at least 100. Chains start from up to 512 of them.
        budget: seconds that weights, search for modes and chains may take, without compilation; by
            default 1.5 times those of the fit, at least 10, or 60 if they are not known. What does
            not fit in is left out, and the diagnosis says how long it would take.
        rng_key: random key; by default ``jax.random.key(0)``.
        progress_bar: whether to show what is going on, if tqdm is installed.
        **kwargs: keyword arguments of the model.

    Returns:
        Verdict, findings, advice, and the numbers they rest on.

    Raises:
        TypeError: see :func:`~numpyro_kscore.evaluate_guide`.
        ValueError: see there; for fewer than 100 draws, and a budget that is not positive.
        FloatingPointError: if fewer than half of the draws are finite.

    Cost: ``num_samples`` values of the model, or up to sixteen times as many where these leave the
    verdict open and there is time; 64 chains or more of 100 transitions from afar, and
    up to 48 ascents. If chains are needed, up to 512 of 120 to 960 transitions with up to 24
    gradients each, as few as decide.

    Example::

        from numpyro_kscore import diagnose

        diagnosis = diagnose(svi, result, y)
        print(diagnosis)
        diagnosis.verdict  # "good"
    """
    check_count("num_samples", num_samples, minimum=100)
    if budget is not None:
        check_positive("budget", budget)
    key = jax.random.key(0) if rng_key is None else rng_key
    with Stages(progress_bar) as stages:
        stages.tell("compiling")
        fitted = fitted_guide(svi, result, args, kwargs, key)
        layout, draw_key = fitted.layout, key_apart(key, 1)
        clock = Clock(_budget(result) if budget is None else float(budget))
        found = None
        if has_density(layout):
            found = _weighed(fitted, draw_key, num_samples, WEIGHTS_SHARE * clock.left, stages)
        weights = None
        if found is not None:
            draws = found[0]
            samples, num_lost = draws.samples[draws.is_own], draws.num_lost
            clock.spend(draws.seconds * len(draws.samples))
            clock.gradient = GRADIENT_COST * draws.seconds
            if len(samples) >= LEAST_WEIGHTS:
                weights = found[1]
        else:
            samples, num_lost = draw_finite(draw_key, fitted.program, layout, num_samples)
        whole = fitted._replace(tall=None)
        density = stages.attempt(
            "rows that stand for all",
            lambda: model_density(fitted, key),
            model_density(whole, key),
        )
        density = density._replace(push=fitted.push)
        values = None
        if weights is not None and weights.evidence.is_reliable:
            values = stages.attempt("bounded latents", lambda: _of_values(fitted, draws), None)
        diagnosis = examine(
            samples,
            density,
            layout.sites,
            key,
            num_lost,
            _known(layout),
            weights,
            clock,
            stages,
        )
    return diagnosis if values is None else diagnosis._replace(values=values)


def _weighed(
    fitted: FittedGuide, key: Array, num_samples: int, seconds: float, stages: Stages
) -> tuple[WeightedDraws, Weighing] | None:
    """Draws of the guide by their weights; None if these end with an error."""

    def weighed() -> tuple[WeightedDraws, Weighing]:
        batch = min(BATCH, num_samples)
        given = key, fitted.program, fitted.layout, seconds, stages.weights
        weigher, push = Weigher(*given, batch=batch), fitted.target.push()
        names = coordinate_names(fitted.layout.sites)
        return weigh_closely(
            weigher.draw,
            lambda draws: unconstrained_draws(draws, push),
            num_samples,
            seconds,
            lambda weights: is_open(weights, names),
        )

    return stages.attempt("importance weights", weighed, None)


def _of_values(fitted: FittedGuide, draws: WeightedDraws) -> Values | None:
    """Bounded latents themselves by weights; None if the model has none, or too many of them.

    Numbers that do not vary are left out, such as the diagonal of a correlation matrix, and those
    with a tail so heavy that draws do not tell their variance: it may be infinite.
    """
    draws = draws.first(NUM_DRAWS)
    values = {n: np.asarray(v) for n, v in fitted.target.bounded(draws.samples).items()}
    if not 0 < sum(math.prod(value.shape[1:]) for value in values.values()) <= MOST_VALUES:
        return None
    names = [n for name, value in values.items() for n in element_names(name, value.shape[1:])]
    flat = np.concatenate([np.reshape(v, (len(v), -1)) for v in values.values()], axis=1)
    varies = np.std(flat, axis=0) > SAME * np.mean(np.abs(flat), axis=0)
    shapes = weigh(draws._replace(samples=flat)).shapes
    kept = np.flatnonzero(varies & (shapes < GOOD_KHAT))
    if not len(kept):
        return None
    return Values(tuple(names[k] for k in kept), weigh(draws._replace(samples=flat[:, kept])))


def _known(layout: Layout) -> Known:
    """The known part of a guide's density."""
    if layout.mixtures or not has_density(layout):
        return "draws"
    return "local density" if layout.implicit_parts else "density"


def _budget(result: Any) -> float:
    """The seconds of a diagnosis by those of the fit."""
    seconds = getattr(result, "seconds", np.nan)
    return UNKNOWN_BUDGET if np.isnan(seconds) else max(LEAST_BUDGET, BUDGET_SHARE * seconds)
