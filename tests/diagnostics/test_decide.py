"""Verdicts of ``diagnose``: the codes, and their words."""

from typing import get_args

import numpy as np
import pytest

from numpyro_kscore.diagnostics import Modes, Movement
from numpyro_kscore.diagnostics._codes import Code, Finding, KhatDoubt, Known
from numpyro_kscore.diagnostics._decide import decide, judge
from numpyro_kscore.diagnostics._messages import advise, describe, khat_reason

NAMES = ("mu", "tau")
ONE_MODE, TWO_MODES = Modes(0, 0.0, 32, 30), Modes(1, 0.5, 32, 32)


def a_movement(shift=0.0, ratio=1.0, error=0.01, memory=0.0, trend=1.0):
    """A movement of two coordinates, the first of which is right."""
    values = np.array([0.0, shift]), np.array([1.0, ratio])
    errors = np.array([0.01, error])
    others = np.array([0.0, memory]), np.array([1.0, trend])
    return Movement(values[0], errors, values[1], errors, *others, 60, 0.8)


@pytest.mark.parametrize(
    ("movement", "modes", "verdict", "codes"),
    [
        (a_movement(), ONE_MODE, "good", ["nothing found"]),
        (a_movement(shift=0.12, ratio=0.95), ONE_MODE, "good", ["nothing found"]),
        (a_movement(shift=-0.2), ONE_MODE, "bad", ["mean off"]),
        (a_movement(ratio=0.8), ONE_MODE, "bad", ["too narrow"]),
        (a_movement(ratio=0.3), ONE_MODE, "bad", ["collapsed"]),
        (a_movement(shift=0.2, ratio=1.2), ONE_MODE, "bad", ["mean off", "too wide"]),
        # Errors reach over the limit, on either side of it.
        (a_movement(shift=0.14), ONE_MODE, "cannot tell", ["errors large"]),
        (a_movement(ratio=0.89), ONE_MODE, "cannot tell", ["errors large"]),
        (a_movement(error=0.1), ONE_MODE, "cannot tell", ["errors large"]),
        # Half of the way is twice the shift.
        (a_movement(shift=0.1, memory=0.4), ONE_MODE, "cannot tell", ["errors large"]),
        (a_movement(memory=0.8), ONE_MODE, "cannot tell", ["chains slow"]),
        (a_movement(trend=6.0), ONE_MODE, "cannot tell", ["chains moving"]),
        # What is outside already is bad, however slow the chains.
        (a_movement(ratio=0.8, memory=0.8, trend=6.0), ONE_MODE, "bad", ["too narrow"]),
        (a_movement(), TWO_MODES, "bad", ["mode missed"]),
        (a_movement(error=0.1), TWO_MODES, "bad", ["mode missed"]),
        (a_movement(shift=0.5), TWO_MODES, "bad", ["mode missed", "mean off"]),
    ],
)
def test_decisions(movement, modes, verdict, codes):
    found = decide(movement, modes, 0, NAMES)
    assert found[0] == verdict
    assert [finding.code for finding in found[1]] == codes
    assert all(finding.where in ("", "tau") for finding in found[1])
    assert modes.num_missed or judge(movement, NAMES)[0] == verdict
    lost = decide(movement, modes, 7, NAMES)
    assert lost == (verdict, (Finding("draws lost", 7), *found[1]))


def test_findings_in_words():
    findings = decide(a_movement(shift=-0.2, ratio=0.678), ONE_MODE, 7, NAMES)[1]
    words = describe(findings)
    assert words[0].startswith("7 draws were left out")
    assert words[1] == "a mean is off: that of tau by -0.20 ± 0.01 sd (limit 0.15)"
    assert words[2] == (
        "the guide is too narrow: its sd of tau is 0.68 ± 0.01 of the model's (limit 0.9)"
    )
    # Two findings ask for the same.
    assert len(advise(findings)) == 2


@pytest.mark.parametrize("code", ["mean off", "too narrow", "collapsed"])
def test_advice_depends_on_the_guide(code):
    """A guide with a density has a family of shapes, which more steps or noise cannot widen."""
    advice = {known: advise([Finding(code, 0.5)], known)[0] for known in get_args(Known)}
    assert advice["density"].startswith("AutoImplicit(model) with ImplicitELBO()")
    assert "AutoImplicit(model) " not in advice["local density"]


def test_every_code_has_words():
    for code in get_args(Code):
        assert "{" not in "".join(describe([Finding(code, 0.5)]))
        for known in get_args(Known):
            assert code in ("nothing found", "settled") or advise([Finding(code, 0.5)], known)
    for doubt in get_args(KhatDoubt):
        assert "{" not in khat_reason(doubt, "Gaussian", 100, 20, 0.6)
