"""How a fit ended, in words."""

from __future__ import annotations

import math

from numpyro_kscore._fit.progress import Cause, Doubt, Ending

__all__ = ["describe"]

# The reason why a fit stopped, and the advice unless it converged.
CAUSES: dict[Cause, tuple[str, str]] = {
    "interrupted": ("interrupted after {steps} steps", ""),
    "callback": ("ended by its callback after {steps} steps", ""),
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
        "discrepancy and moments within {tol:g} sd where the guide's draws are, settled after "
        "{steps} steps",
        "",
    ),
}
# The reason where no step was needed.
AT_ONCE = "the guide starts within {tol:g} sd of the model, where its draws are"
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


def describe(ending: Ending) -> tuple[str, str]:
    """Why a fit stopped, and what to try; the second is empty if nothing is wrong."""
    reason, advice = CAUSES[ending.cause]
    if ending.cause == "tol" and not ending.steps:
        reason = AT_ONCE
    if math.isnan(ending.shift):
        # In minibatches nothing is known of moments.
        reason = reason.replace("discrepancy and moments", "discrepancy")
    addition, remedy = DOUBTS[ending.doubt]
    return (reason + addition).format(**ending._asdict()), advice or remedy
