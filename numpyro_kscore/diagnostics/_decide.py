"""The verdict on a guide by its movement and its modes, with the findings that it rests on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numpyro_kscore.diagnostics._codes import MEAN_LIMIT, SD_LIMIT, Code, Finding, Verdict
from numpyro_kscore.diagnostics._missed_modes import Modes
from numpyro_kscore.diagnostics._movement import Movement

# Standard errors to the inside of the limits for "good", and to the outside for "bad": for that one
# of many coordinates is enough.
INSIDE, OUTSIDE = 2.5, 3.0
# Chains that remember more of where they started cannot say that a fit is good.
MOST_MEMORY = 0.5
# Standard errors from which on the later half of the chains differs from the earlier one.
TREND = 4.0
# A guide that is narrower has collapsed.
COLLAPSED = 0.4


def decide(
    movement: Movement, modes: Modes, num_lost: int, names: Sequence[str]
) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict on a guide, and what it rests on; ``num_lost`` draws were not finite."""
    verdict, moved = judge(movement, names)
    findings = [Finding("draws lost", num_lost)] if num_lost else []
    if modes.num_missed:
        findings.append(Finding("mode missed", modes.share))
        # Doubts about the movement do not matter then.
        verdict, moved = "bad", moved if verdict == "bad" else []
    return verdict, (*findings, *moved)


def judge(movement: Movement, names: Sequence[str]) -> tuple[Verdict, list[Finding]]:
    """The verdict by means and standard deviations alone, and what it rests on."""
    off, narrow, wide = np.stack(_excess(movement, -OUTSIDE)) > 0
    shift, ratio = movement.shift, movement.ratio
    ratio_error = ratio * movement.ratio_error
    limits: tuple[tuple[Code, np.ndarray, np.ndarray, np.ndarray, np.ndarray], ...] = (
        ("mean off", off, np.abs(shift), shift, movement.shift_error),
        ("too narrow", narrow, -ratio, ratio, ratio_error),
        ("too wide", wide, ratio, ratio, ratio_error),
    )
    # The worst coordinate of each kind that is outside.
    findings = []
    for code, is_outside, size, value, error in limits:
        if is_outside.any():
            worst = int(np.argmax(np.where(is_outside, size, -np.inf)))
            is_collapsed = code == "too narrow" and value[worst] < COLLAPSED
            numbers = float(value[worst]), float(error[worst])
            findings.append(Finding("collapsed" if is_collapsed else code, *numbers, names[worst]))
    if findings:
        return "bad", findings
    way = _way(movement)
    whole = movement._replace(
        shift=shift / way,
        shift_error=movement.shift_error / way,
        ratio=np.exp(np.log(ratio) / way),
        ratio_error=movement.ratio_error / way,
    )
    # Why the movement cannot say "good", the most important first.
    doubts: tuple[tuple[Code, np.ndarray, float], ...] = (
        ("chains slow", movement.memory, MOST_MEMORY),
        ("chains moving", movement.trend, TREND),
        ("errors large", np.max(_excess(whole, INSIDE), axis=0), 0.0),
    )
    for code, values, limit in doubts:
        worst = int(np.argmax(values))
        if np.isposinf(values[worst]):
            # Nothing is known of it, which another finding says.
            return "cannot tell", []
        if values[worst] > limit:
            return "cannot tell", [Finding(code, float(values[worst]), where=names[worst])]
    return "good", [Finding("nothing found", 0.0)]


def relative_error(movement: Movement) -> np.ndarray:
    """The larger error of mean and standard deviation of each coordinate, in their limits, (d,).

    It is infinite where chains remember their start, or move on.
    """
    error = np.maximum(movement.shift_error / MEAN_LIMIT, movement.ratio_error / SD_LIMIT)
    is_usable = (movement.memory <= MOST_MEMORY) & (movement.trend <= TREND)
    return np.where(is_usable, error / _way(movement), np.inf)


def _way(movement: Movement) -> np.ndarray:
    """The part of the way to the model that chains have gone, (d,)."""
    return 1 - np.clip(movement.memory, 0.0, 0.9)


def _excess(movement: Movement, errors: float) -> tuple[np.ndarray, ...]:
    """Distances of shifts and ratios beyond the limits, with some standard errors added."""
    # A movement that is not known is neither outside of the limits nor inside.
    largest = np.sign(errors) * np.inf
    is_known = np.isfinite(movement.shift_error) & np.isfinite(movement.ratio_error)
    shift_error, ratio_error = (
        np.where(is_known, e, 0.0) for e in (movement.shift_error, movement.ratio_error)
    )
    shift = np.abs(movement.shift) + errors * shift_error - MEAN_LIMIT
    margin = 1 + errors * ratio_error
    narrow = (1 - SD_LIMIT) - movement.ratio / margin
    wide = movement.ratio * margin - (1 + SD_LIMIT)
    excess = (np.where(is_known, e, largest) for e in (shift, narrow, wide))
    return tuple(excess)
