"""Decisions of ``fit``, ``diagnose``, ``khat`` and ``refine``, as codes that a program matches on.

:mod:`numpyro_kscore.diagnostics._messages` has the words for them, one wording a code.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# A fit is right if no mean is off by more, in standard deviations, and no ratio of standard
# deviations differs from 1 by more.
MEAN_LIMIT, SD_LIMIT = 0.15, 0.1

Verdict = Literal["good", "bad", "cannot tell"]
# The known part of a guide's density: all, the local density of each draw, or nothing.
Known = Literal["density", "local density", "draws"]
# Findings of `diagnose` and `refine`: those of both, of the first, and of the second.
Code = Literal[
    "draws lost",
    "mode missed",
    "chains moving",
    "mean off",
    "collapsed",
    "too narrow",
    "too wide",
    "chains slow",
    "errors large",
    "nothing found",
    "tail",
    "budget",
    "failed",
    "settled",
    "chains apart",
    "too few draws",
    "few far draws",
    "chains stuck",
    "divergences",
]
# Why a k̂ cannot be trusted; empty where it can.
KhatDoubt = Literal["", "interval", "few draws", "flat draws", "large error"]
# Why a fit stopped.
Cause = Literal["", "plateau", "tol", "budget", "runaway", "nan", "interrupted", "callback", "time"]
# The fault of a fit that converged; empty if there is none.
Doubt = Literal["", "far", "moments", "tail", "noisy", "skipped", "recovered"]


class Finding(NamedTuple):
    """A finding, and the number it rests on.

    Attributes:
        code: the kind of finding.
        value: a count of draws, a share, a shift in standard deviations, a ratio of standard
            deviations, a slope, R-hat or a number of standard errors, as the code asks for.
        error: the standard error of the value, in the same units; 0 for a count.
        where: the coordinate it was found in, such as ``"theta[3]"``, or the part of a diagnosis
            that failed, with the error; empty if in none.
    """

    code: Code
    value: float
    error: float = 0.0
    where: str = ""
