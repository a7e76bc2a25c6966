"""The verdict of ``diagnose`` with its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore.diagnostics._codes import Code, Verdict
from numpyro_kscore.diagnostics._messages import verdict_lines
from numpyro_kscore.diagnostics._missed_modes import Modes
from numpyro_kscore.diagnostics._movement import Movement
from numpyro_kscore.diagnostics._weighing import Weighing


class Values(NamedTuple):
    """Bounded latents themselves, such as scales, whose logarithms the verdict is about.

    Attributes:
        names: of those k of their numbers that vary and have a variance, such as ``"tau[3]"``.
        weights: what importance weights say of them, arrays (k,).

    Example::

        from numpyro_kscore import diagnose

        values = diagnose(svi, result, y).values
        values.names  # ("scale",)
        values.weights.ratio  # (1,)
    """

    names: tuple[str, ...]
    weights: Weighing


class Diagnosis(NamedTuple):
    """A verdict on a fit, with its reasons.

    Attributes:
        verdict: ``"good"``, ``"bad"`` or ``"cannot tell"``.
        codes: findings to match on: some of ``"draws lost"``, ``"mode missed"``,
            ``"mean off"``, ``"collapsed"``, ``"too narrow"``, ``"too wide"``; of a fit that is not
            bad one of ``"nothing found"``, ``"chains slow"``, ``"chains moving"`` and
            ``"errors large"``; with the latter perhaps ``"tail"`` and ``"budget"``;
            and ``"failed"`` if a part of it ended with an error, whose verdict is ``"cannot tell"``
            if nothing else decides.
        findings: a sentence for each code.
        advice: suggestions of what to try next.
        movement: changes of means and standard deviations under weights, or along chains from the
            guide's draws.
        modes: result of the search for modes.
        names: unconstrained coordinates that ``movement`` is about, such as ``"theta[3]"``.
        num_draws: number of draws.
        weights: what importance weights say, if the guide's density is known at its draws.
        values: what they say of bounded latents themselves, such as scales, which a summary of the
            posterior shows: ``names`` and ``weights``. None if weights are not to be trusted, and
            of models without bounded latents.

    Example::

        from numpyro_kscore import diagnose

        diagnosis = diagnose(svi, result, y)
        diagnosis.verdict  # "good"
        diagnosis.codes  # ("nothing found",)
        print(diagnosis)  # with what was found, in words
    """

    verdict: Verdict
    codes: tuple[Code, ...]
    findings: tuple[str, ...]
    advice: tuple[str, ...]
    movement: Movement
    modes: Modes
    names: tuple[str, ...]
    num_draws: int
    weights: Weighing | None = None
    values: Values | None = None

    def __str__(self) -> str:
        move, modes = self.movement, self.modes
        shift = int(np.argmax(np.abs(move.shift)))

        lines = [
            *verdict_lines(self),
            f"largest shift of a mean: {move.shift[shift]:+.2f} ± {move.shift_error[shift]:.2f} sd "
            f"({self.names[shift]})",
            f"guide's sd over the model's: {_range(self.names, move.ratio, move.ratio_error)}",
        ]
        if self.values is not None:
            names, told = self.values
            ratios = _range(names, told.ratio, told.ratio_error)
            lines.append(f"the same of bounded latents themselves, such as scales: {ratios}")
        if self.weights is not None:
            lines.append(str(self.weights))
        if move.num_transitions:
            accepted = f"{move.acceptance:.0%} accepted"
            lines.append(f"{move.num_transitions} transitions of each chain, {accepted}")
        return "\n".join([*lines, str(modes)])


def _range(names: Sequence[str], ratios: np.ndarray, errors: np.ndarray) -> str:
    """The smallest and the largest ratio with their standard errors, which are relative."""
    ends = [int(np.argmin(ratios)), int(np.argmax(ratios))]
    told = [f"{ratios[k]:.2f} ± {ratios[k] * errors[k]:.2f} ({names[k]})" for k in ends]
    return " to ".join(told if len(names) > 1 else told[:1])
