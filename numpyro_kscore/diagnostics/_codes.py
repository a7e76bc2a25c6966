"""Decisions of diagnostics, as codes that a program can match on."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Code", "Doubt", "Finding", "Known", "Verdict"]

Verdict = Literal["good", "bad", "cannot tell"]
# Why a k̂ cannot be trusted; empty where it can.
Doubt = Literal["", "interval", "few draws", "flat draws", "large error"]
# What is known of a guide's density: all, the local density of each draw, or nothing.
Known = Literal["density", "local density", "draws"]
Code = Literal[
    "draws lost",
    "mode missed",
    "mean off",
    "collapsed",
    "too narrow",
    "too wide",
    "chains slow",
    "chains moving",
    "errors large",
    "nothing found",
]


class Finding(NamedTuple):
    """A finding of ``diagnose``, and the number it rests on.

    Attributes:
        code: what was found.
        value: a count of draws, a share of the posterior's mass, a shift in standard deviations, a
            ratio of standard deviations, or a slope, as the code asks for.
        error: the standard error of the value, in the same units; 0 for a count.
        where: the coordinate it was found in, such as ``"theta[3]"``; empty if in none.
    """

    code: Code
    value: float
    error: float = 0.0
    where: str = ""
