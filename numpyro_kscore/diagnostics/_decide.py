"""From the numbers of all diagnostics to one verdict and its findings."""

from __future__ import annotations

import numpy as np

from numpyro_kscore.diagnostics._codes import Code, Finding, Verdict
from numpyro_kscore.diagnostics._estimate import KhatEstimate
from numpyro_kscore.diagnostics._stein_tests import JumpTest, SteinTest

__all__ = ["decide"]

# Level of both tests.
LEVEL = 0.01
# Ratios of standard deviations that are called out, in the guide's worst directions.
NARROW, WIDE, COLLAPSED = 0.8, 1.25, 0.4
# Smaller effects are negligible, even where they are significant: squared, in sd.
SMALL_DISCREPANCY = 0.1**2


def decide(
    khat: KhatEstimate,
    stein: SteinTest,
    jumps: JumpTest,
    spread: tuple[float, float],
    num_lost: int,
) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict on a guide, and what it rests on.

    Args:
        khat: k̂ of the draws.
        stein: test of the local shape.
        jumps: test for missed modes.
        spread: least and largest ratio of the guide's standard deviations to the model's.
        num_lost: draws that were not finite.
    """
    verdict = khat.verdict
    findings = [Finding("draws lost", num_lost)] if num_lost else []
    jump_p_value = float(jumps.p_value)
    if jump_p_value < LEVEL:
        verdict = "bad"
        # With one mode there is nowhere to jump to: the long steps were random ones.
        code: Code = "mode missed" if int(jumps.num_modes) > 1 else "far draws missed"
        findings.append(Finding(code, jump_p_value))
    if spread[0] < COLLAPSED:
        verdict = "bad"
        findings.append(Finding("collapsed", spread[0]))
    elif spread[0] < NARROW:
        findings.append(Finding("too narrow", spread[0]))
    if spread[1] > WIDE:
        findings.append(Finding("too wide", spread[1]))
    is_rejected = float(stein.p_value) < LEVEL and float(stein.u_statistic) > SMALL_DISCREPANCY
    if is_rejected:
        findings.append(Finding("shape differs", float(stein.u_statistic) ** 0.5))
    is_off = is_rejected or spread[0] < NARROW or spread[1] > WIDE
    if verdict == "good" and is_off and khat.value == -np.inf:
        # The weights are all equal, where they should correct something.
        verdict = "cannot tell"
        findings.append(Finding("correction unknown", khat.value))
    elif verdict == "good":
        findings.append(Finding("correctable" if is_off else "nothing found", khat.value))
    elif verdict == "cannot tell":
        findings.append(Finding("khat unknown", khat.value))
    elif khat.verdict == "bad":
        findings.append(Finding("not correctable", khat.value))
    return verdict, tuple(findings)
