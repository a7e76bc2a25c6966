"""Decisions of ``fit``, ``diagnose``, ``khat`` and ``refine``, in words: one wording a code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from numpyro_kscore._util.pareto import GOOD_KHAT
from numpyro_kscore.diagnostics._codes import Cause, Code, Doubt, Finding, KhatDoubt, Known

# Advice where a guide does not have the posterior's shape.
MORE_OF_ALL: dict[Known, str] = {
    "density": (
        "AutoImplicit(model) with ImplicitELBO(), which is not bound to one family of shapes; more "
        "steps, if the loss was still falling"
    ),
    "local density": (
        "more steps; then a wider network, such as AutoImplicit(model, hidden_dims=(128, 128))"
    ),
    "draws": "more steps; then a more flexible guide, such as AutoImplicit(model)",
}
SPREAD = (
    "more steps, ImplicitELBO's default base and debias; noise of at least the latents' dimension "
    "in a network of one's own"
)
COLLAPSED: dict[Known, str] = {
    "density": MORE_OF_ALL["density"],
    "local density": SPREAD,
    "draws": SPREAD,
}
ANOTHER_FORM = (
    "another parameterization of the model (numpyro.infer.reparam), or AutoImplicit, which finds "
    "hierarchical coordinates by itself"
)
# The sentence of each finding, and the advice, which may depend on the guide.
WORDS: dict[Code, tuple[str, str | dict[Known, str]]] = {
    "draws lost": (
        "{value:.0f} draws were left out: they, or the model's density at them, were not finite",
        "look for what the model does at extreme values",
    ),
    "mode missed": (
        "the draws cover only some of several modes: others, where there are none, hold about "
        "{value:.0%} of the posterior",
        "start several fits from other init_loc_fn values and compare their losses; widen "
        "init_scale. If the modes differ only in the labels of components, predictions do not "
        "depend on them; put the components in order to have one mode",
    ),
    "chains moving": (
        "Markov chains from the guide's draws are still on their way: the mean or the spread of "
        "{where} changed by {value:.0f} standard errors from their earlier to their later half",
        "a better fit, or refine with a larger max_gradients; " + ANOTHER_FORM,
    ),
    "mean off": (
        "a mean is off: that of {where} by {value:+.2f} ± {error:.2f} sd (limit 0.15)",
        MORE_OF_ALL,
    ),
    "collapsed": (
        "the guide has collapsed: its sd of {where} is {value:.2f} ± {error:.2f} of the model's",
        COLLAPSED,
    ),
    "too narrow": (
        "the guide is too narrow: its sd of {where} is {value:.2f} ± {error:.2f} of the model's "
        "(limit 0.9)",
        MORE_OF_ALL,
    ),
    "too wide": (
        "the guide is too wide: its sd of {where} is {value:.2f} ± {error:.2f} times the model's "
        "(limit 1.1)",
        "a smaller last step size (a cosine schedule, or fit), more particles",
    ),
    "chains slow": (
        "Markov chains from the guide's draws hardly forget where they start: {value:.0%} of the "
        "difference in {where} is left, so that they cannot say whether the guide is right",
        "compare with NUTS; " + ANOTHER_FORM,
    ),
    "errors large": (
        "the guide is so near the limits, 0.15 sd for a mean and 10 % for an sd, that the errors "
        "of {where} reach beyond them, by {value:.2f}",
        MORE_OF_ALL,
    ),
    "nothing found": (
        "all means are within 0.15 sd of the model's, all sds within 10 %, errors included",
        "",
    ),
    "tail": (
        "a tail of {where} has too few draws for importance weights: k̂ is {value:.2f} for its "
        "variance (limit 0.7)",
        MORE_OF_ALL,
    ),
    "budget": (
        "Markov chains would take about {value:.0f} seconds more than the budget",
        "diagnose with a larger budget, in seconds",
    ),
    "failed": (
        "a part of the diagnosis ended with an error, {where}",
        "look for what the model cannot do: run under vmap, or be differentiated in reverse; "
        "compare with NUTS",
    ),
    "settled": (
        "all means and standard deviations have settled: nested R-hat is at most {value:.3f}",
        "",
    ),
    "chains apart": (
        "chains have not forgotten where they started: nested R-hat of {where} is {value:.3f} at "
        "the limit of gradients. If the guide covers separate modes, their weights are the guide's",
        "a larger max_gradients; " + ANOTHER_FORM,
    ),
    "too few draws": (
        "the standard deviation of {where} has a Monte Carlo error of {value:.1%} at the limit of "
        "gradients",
        "a larger max_gradients, or a larger tol",
    ),
    "few far draws": (
        "the standard deviation of {where} changes by {value:.0%} without one group of chains at "
        "the limit of gradients: its tails are heavy, or a region far from the others has draws of "
        "few chains",
        "quantiles of it in place of its standard deviation; a larger max_gradients",
    ),
    "chains stuck": (
        "{value:.0%} of the chains hardly moved: they are where the posterior is far narrower than "
        "elsewhere",
        ANOTHER_FORM,
    ),
    "divergences": (
        "{value:.1%} of the transitions diverged: there are regions that chains do not enter",
        ANOTHER_FORM,
    ),
}
KHAT_DOUBTS: dict[KhatDoubt, str] = {
    "": "{evidence}",
    "interval": f"{{evidence}}; the interval holds {GOOD_KHAT}",
    "few draws": "{num_draws} draws in {dim} dimensions are too few for an energy",
    "flat draws": "the draws do not vary in some direction: such a guide has no density",
    "large error": (
        "the energy's error, {error:.2g} nats, is at least half the spread of the log weights"
    ),
}
# Why a fit stopped, and the advice unless it converged.
CAUSES: dict[Cause, tuple[str, str]] = {
    "interrupted": ("interrupted after {steps} steps", ""),
    "callback": ("ended by its callback after {steps} steps", ""),
    "time": (
        "not converged: out of time after {steps} steps",
        "Try a larger max_seconds, or a checkpoint to go on from (docs/resume)",
    ),
    "nan": (
        "after {steps} steps numbers were not finite, however often it was tried again",
        "Try double precision (docs/float64), a smaller step size, or priors that keep off such "
        "values",
    ),
    "runaway": (
        "ran away: by step {steps} the guide grew while the model's density at it fell",
        "The best state before is returned. Try more particles or a smaller step size",
    ),
    "budget": (
        "not converged: still improving when it had to end after {steps} steps",
        "Try a larger max_steps, or a larger tol if this is good enough",
    ),
    "plateau": ("no improvement any more, settled after {steps} steps", ""),
    "tol": (
        "converged after {steps} steps: means and sds agree with the model within {tol:g} sd",
        "",
    ),
}
# The reasons where no step was needed.
AT_ONCE = {
    "tol": "no step was needed: means and sds agree with the model within {tol:g} sd",
    "plateau": "no step was needed",
}
# The claim of both, and what is left of it in minibatches, where nothing is known of moments.
AGREEMENT = "means and sds agree with the model within"
DISTANCE = "the discrepancy from the model is below"
# Additions to the reason of a fit that converged, and the advice.
DOUBTS: dict[Doubt, tuple[str, str]] = {
    "": ("", ""),
    "far": (
        ", at a guide {distance:.2g} sd from the model",
        "Try a more flexible guide, more particles or other parameters",
    ),
    "moments": (
        ", at a guide whose means are off by up to {shift:.2g} sd and standard deviations by up to "
        "{width:.0%}",
        "Try more particles, more steps or other parameters",
    ),
    "tail": (
        ", at a guide with too few draws in a tail of the model: {effective:.0%} of them are "
        "effective by importance weights, with a k̂ of {khat:.2f} (limit 0.7)",
        "diagnose(svi, result, ...) says where; other parameters of the model may help",
    ),
    "noisy": (
        ", at a guide whose distance from the model is too noisy to tell",
        "A few draws lie where the model's density is steep: in wrong tails, or between modes. "
        "diagnose(svi, result, ...) tells more; other parameters of the model may help",
    ),
    "skipped": (
        ", but {skipped:.0%} of the steps were skipped, since loss or gradient was not finite",
        "Look for such values in the data: what batches with them say is missing",
    ),
    "recovered": (
        ", after numbers that were not finite {recoveries} time(s)",
        "Look for what the model does at extreme values",
    ),
}


def describe(findings: Sequence[Finding]) -> tuple[str, ...]:
    """A sentence for each finding."""
    return tuple(WORDS[finding.code][0].format(**finding._asdict()) for finding in findings)


def advise(findings: Sequence[Finding], known: Known = "draws") -> tuple[str, ...]:
    """The advice for some findings on a guide, without repetition."""
    advice = (WORDS[finding.code][1] for finding in findings)
    words = (text if isinstance(text, str) else text[known] for text in advice)
    return tuple(dict.fromkeys(filter(None, words)))


def verdict_lines(result: Any) -> list[str]:
    """Verdict, findings and advice of a diagnosis or a refinement, as they are printed."""
    return [
        f"verdict: {result.verdict}",
        *(f"  {finding}" for finding in result.findings),
        *(f"  try: {advice}" for advice in result.advice),
    ]


def khat_reason(doubt: KhatDoubt, energy: str, num_draws: int, dim: int, error: float) -> str:
    """Why a k̂ has its verdict."""
    evidence = "exact weights" if energy == "exact" else f"energy: {energy}"
    return KHAT_DOUBTS[doubt].format(evidence=evidence, num_draws=num_draws, dim=dim, error=error)


def fit_reason(cause: Cause, doubt: Doubt, numbers: Mapping[str, Any]) -> tuple[str, str]:
    """Why a fit stopped, and what to try; the second is empty if nothing is wrong.

    The numbers are those of ``_fit.progress.Ending``, by name.
    """
    reason, advice = CAUSES[cause]
    if not numbers["steps"] and cause in AT_ONCE:
        reason = AT_ONCE[cause]
    if math.isnan(numbers["shift"]):
        reason = reason.replace(AGREEMENT, DISTANCE)
    addition, remedy = DOUBTS[doubt]
    return (reason + addition).format(**numbers), advice or remedy
