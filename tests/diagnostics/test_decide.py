"""Verdicts of ``diagnose``: the codes, and their words."""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore.diagnostics import JumpTest, KhatEstimate, SteinTest
from numpyro_kscore.diagnostics._codes import Code, Doubt, Finding
from numpyro_kscore.diagnostics._decide import decide
from numpyro_kscore.diagnostics._messages import advise, describe, khat_reason


def a_khat(kind):
    verdict = "good" if kind == "equal" else kind
    values = {
        "good": (0.2, 0.1, 0.3),
        "bad": (1.0, 0.9, 1.1),
        "cannot tell": (0.7, 0.4, 0.9),
        "equal": (-np.inf, -np.inf, -np.inf),
    }
    nothing = np.zeros(4)
    missing = (np.nan, np.nan)
    return KhatEstimate(*values[kind], verdict, "why", nothing, nothing, "x", 0.1, {}, missing)


@pytest.mark.parametrize(
    ("khat_verdict", "stein_p", "jump_p", "num_modes", "spread", "verdict", "codes"),
    [
        ("good", 0.5, 0.5, 1, (0.95, 1.05), "good", ["nothing found"]),
        (
            "good", 0.001, 0.5, 1, (0.95, 1.4), "good",
            ["too wide", "shape differs", "correctable"],
        ),
        ("equal", 0.5, 0.5, 1, (0.95, 1.05), "good", ["nothing found"]),
        ("equal", 0.5, 0.5, 1, (0.7, 1.05), "cannot tell", ["too narrow", "correction unknown"]),
        ("good", 0.5, 0.001, 2, (0.95, 1.05), "bad", ["mode missed"]),
        ("good", 0.5, 0.001, 1, (0.95, 1.05), "bad", ["far draws missed"]),
        ("cannot tell", 0.001, 0.5, 1, (0.3, 0.9), "bad", ["collapsed", "shape differs"]),
        ("cannot tell", 0.5, 0.5, 1, (0.95, 1.05), "cannot tell", ["khat unknown"]),
        (
            "cannot tell", 0.001, 0.5, 1, (0.95, 1.05), "cannot tell",
            ["shape differs", "khat unknown"],
        ),
        (
            "bad", 0.001, 0.5, 1, (0.7, 0.9), "bad",
            ["too narrow", "shape differs", "not correctable"],
        ),
        (
            "bad", 0.001, 0.001, 1, (0.7, 0.9), "bad",
            ["far draws missed", "too narrow", "shape differs", "not correctable"],
        ),
    ],
)  # fmt: skip
def test_decisions(khat_verdict, stein_p, jump_p, num_modes, spread, verdict, codes):
    stein = SteinTest(jnp.asarray(0.1), jnp.asarray(0.1), jnp.asarray(0.01), jnp.asarray(stein_p))
    jumps = JumpTest(
        jnp.asarray(0.1), jnp.asarray(jump_p), jnp.asarray(0.5), jnp.asarray(num_modes)
    )
    found = decide(a_khat(khat_verdict), stein, jumps, spread, num_lost=0)
    assert found[0] == verdict
    assert [finding.code for finding in found[1]] == codes
    lost = decide(a_khat(khat_verdict), stein, jumps, spread, num_lost=7)
    assert lost == (verdict, (Finding("draws lost", 7), *found[1]))


def test_findings_in_words():
    findings = [Finding("draws lost", 7), Finding("too narrow", 0.678)]
    findings.append(Finding("khat unknown", 0.6))
    words = describe(findings, "a reason")
    assert words[0].startswith("7 draws were not finite")
    assert words[1] == "the guide is too narrow: sd down to 0.68 of the model's"
    assert words[2] == "whether k̂ is below 0.7 is not known: a reason"
    # Two findings may ask for the same.
    assert len(advise([*findings, Finding("far draws missed", 0.001)])) == 3
    # A wrong shape with nothing else wrong has advice of its own.
    alone = advise([Finding("shape differs", 0.2), Finding("khat unknown", 0.6)])
    assert alone[0].startswith("a more flexible guide")
    assert len(alone) == 2


def test_every_code_has_words():
    for code in get_args(Code):
        assert "{" not in "".join(describe([Finding(code, 0.5)], "why"))
        assert code in ("shape differs", "nothing found") or advise([Finding(code, 0.5)])
    for doubt in get_args(Doubt):
        assert "{" not in khat_reason(doubt, "Gaussian", 100, 20, 0.6)
