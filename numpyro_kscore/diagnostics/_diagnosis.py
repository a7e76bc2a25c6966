"""The verdict of ``diagnose`` with its reasons."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore.diagnostics._codes import Code, Verdict
from numpyro_kscore.diagnostics._messages import verdict_lines
from numpyro_kscore.diagnostics._missed_modes import Modes
from numpyro_kscore.diagnostics._movement import Movement
from numpyro_kscore.diagnostics._weighing import Weighing


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

    def __str__(self) -> str:
        move, modes = self.movement, self.modes
        shift = int(np.argmax(np.abs(move.shift)))
        low, high = int(np.argmin(move.ratio)), int(np.argmax(move.ratio))

        def ratio(k: int) -> str:
            error = move.ratio[k] * move.ratio_error[k]
            return f"{move.ratio[k]:.2f} ± {error:.2f} ({self.names[k]})"

        lines = [
            *verdict_lines(self),
            f"largest shift of a mean: {move.shift[shift]:+.2f} ± {move.shift_error[shift]:.2f} sd "
            f"({self.names[shift]})",
            f"guide's sd over the model's: {ratio(low)} to {ratio(high)}",
        ]
        if self.weights is not None:
            lines.append(str(self.weights))
        if move.num_transitions:
            accepted = f"{move.acceptance:.0%} accepted"
            lines.append(f"{move.num_transitions} transitions of each chain, {accepted}")
        return "\n".join([*lines, str(modes)])
