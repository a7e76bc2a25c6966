"""From what chains and ascents say to one verdict and its findings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numpyro_kscore.diagnostics._codes import Code, Finding, Verdict
from numpyro_kscore.diagnostics._modes import Modes
from numpyro_kscore.diagnostics._movement import Movement

__all__ = ["MEAN_LIMIT", "SD_LIMIT", "decide", "judge"]

# A fit is right if no mean is off by more, in standard deviations, and no ratio of standard
# deviations differs from 1 by more.
MEAN_LIMIT, SD_LIMIT = 0.15, 0.1
# Standard errors to the inside of the limits for "good", and to the outside for "bad": for that one
# of many coordinates is enough.
INSIDE, OUTSIDE = 2.5, 3.0
# Chains that remember more of where they started cannot say that a fit is good.
MOST_MEMORY = 0.5
# Standard errors from which on the later half of the chains differs from the earlier one.
TREND = 4.0
# A guide that is narrower has collapsed.
COLLAPSED = 0.4


def judge(movement: Movement) -> Verdict:
    """What the movement of means and standard deviations says alone."""
    if _are_outside(movement).any():
        return "bad"
    return "cannot tell" if _doubts(movement) else "good"


def decide(
    movement: Movement, modes: Modes, num_lost: int, names: Sequence[str]
) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict on a guide, and what it rests on.

    Args:
        movement: of means and standard deviations along chains.
        modes: what ascents found.
        num_lost: draws that were not finite.
        names: of the coordinates.
    """
    findings = [Finding("draws lost", num_lost)] if num_lost else []
    if modes.num_missed:
        findings.append(Finding("mode missed", modes.share))
    verdict = judge(movement)
    if verdict == "bad":
        findings += _outside(movement, names)
    elif modes.num_missed:
        verdict = "bad"
    elif verdict == "cannot tell":
        doubt, values = _doubts(movement)[0]
        worst = int(np.argmax(values))
        findings.append(Finding(doubt, float(values[worst]), 0.0, names[worst]))
    else:
        findings.append(Finding("nothing found", 0.0))
    return verdict, tuple(findings)


def _excess(movement: Movement, errors: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By how much shifts and ratios are outside the limits, with some standard errors on top."""
    shift = np.abs(movement.shift) + errors * movement.shift_error - MEAN_LIMIT
    margin = 1 + errors * movement.ratio_error
    narrow = (1 - SD_LIMIT) - movement.ratio / margin
    wide = movement.ratio * margin - (1 + SD_LIMIT)
    return shift, narrow, wide


def _are_outside(movement: Movement) -> np.ndarray:
    return np.stack(_excess(movement, -OUTSIDE)) > 0


def _outside(movement: Movement, names: Sequence[str]) -> list[Finding]:
    """The worst coordinate of each kind that is outside."""
    off, narrow, wide = _are_outside(movement)
    findings = []
    if off.any():
        worst = int(np.argmax(np.where(off, np.abs(movement.shift), 0.0)))
        value, error = movement.shift[worst], movement.shift_error[worst]
        findings.append(Finding("mean off", float(value), float(error), names[worst]))
    for are_off, sign in ((narrow, -1), (wide, 1)):
        if are_off.any():
            worst = int(np.argmax(np.where(are_off, sign * movement.ratio, -np.inf)))
            value = float(movement.ratio[worst])
            error = value * float(movement.ratio_error[worst])
            code: Code = "too wide" if sign > 0 else "too narrow"
            code = "collapsed" if value < COLLAPSED else code
            findings.append(Finding(code, value, error, names[worst]))
    return findings


def _doubts(movement: Movement) -> list[tuple[Code, np.ndarray]]:
    """Why the movement cannot say "good", the most important first, and where."""
    doubts: list[tuple[Code, np.ndarray]] = []
    if np.any(movement.memory > MOST_MEMORY):
        doubts.append(("chains slow", movement.memory))
    if np.any(movement.trend > TREND):
        doubts.append(("chains moving", movement.trend))
    # Chains that remember have gone only part of the way.
    way = 1 - np.clip(movement.memory, 0.0, 0.9)
    whole = movement._replace(
        shift=movement.shift / way,
        shift_error=movement.shift_error / way,
        ratio=np.exp(np.log(movement.ratio) / way),
        ratio_error=movement.ratio_error / way,
    )
    excess = np.max(_excess(whole, INSIDE), axis=0)
    if np.any(excess > 0):
        doubts.append(("errors large", excess))
    return doubts
