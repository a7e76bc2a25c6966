"""Decisions of diagnostics, as codes that a program can match on."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Code", "Doubt", "Finding", "Verdict"]

Verdict = Literal["good", "bad", "cannot tell"]
# Why a k̂ cannot be trusted; empty where it can.
Doubt = Literal["", "interval", "few draws", "flat draws", "large error"]
Code = Literal[
    "draws lost",
    "mode missed",
    "far draws missed",
    "collapsed",
    "too narrow",
    "too wide",
    "shape differs",
    "correctable",
    "not correctable",
    "correction unknown",
    "khat unknown",
    "nothing found",
]


class Finding(NamedTuple):
    """A finding of ``diagnose``, and the number it rests on.

    Attributes:
        code: what was found.
        value: a count of draws, a p-value, a ratio of standard deviations, a discrepancy in
            standard deviations, or k̂, as the code asks for.
    """

    code: Code
    value: float
