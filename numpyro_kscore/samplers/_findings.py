"""What chains from a guide came to, in codes and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from numpyro_kscore.diagnostics._codes import Verdict
from numpyro_kscore.diagnostics._modes import Modes
from numpyro_kscore.samplers._outcome import LARGEST_INFLUENCE, MOST_DIVERGENT, TREND, Chains

__all__ = ["Code", "Finding", "advise", "describe", "find"]

Code = Literal[
    "settled",
    "mode missed",
    "chains apart",
    "chains moving",
    "too few draws",
    "few far draws",
    "chains stuck",
    "divergences",
    "draws lost",
]
# A chain that accepts less is stuck.
STUCK = 0.05

ANOTHER_FORM = (
    "another parameterization of the model (numpyro.infer.reparam), or AutoImplicit, which finds "
    "hierarchical coordinates by itself"
)
# The sentence of each finding, and the advice.
WORDS: dict[Code, tuple[str, str]] = {
    "settled": (
        "all means and standard deviations have settled: nested R-hat is at most {value:.3f}",
        "",
    ),
    "mode missed": (
        "chains cannot reach all modes: others, where they have no draws, hold about {value:.0%} "
        "of the posterior",
        "start fits from several init_loc_fn values. If the modes differ only in the labels of "
        "components, put the components in order",
    ),
    "chains apart": (
        "chains have not forgotten where they started: nested R-hat of {where} is {value:.3f} at "
        "the limit of gradients. If the guide covers separate modes, their weights are the guide's",
        "a larger max_gradients; " + ANOTHER_FORM,
    ),
    "chains moving": (
        "chains are still on their way: the mean or the spread of {where} changed by {value:.0f} "
        "standard errors from the earlier to the later draws",
        "a larger max_gradients; a better fit; " + ANOTHER_FORM,
    ),
    "too few draws": (
        "the standard deviation of {where} has a Monte Carlo error of {value:.1%} at the limit of "
        "gradients",
        "a larger max_gradients, or a larger tol",
    ),
    "few far draws": (
        "the standard deviation of {where} changes by {value:.0%} without one group of chains at "
        "the limit of gradients: its tails are heavy, or a region far from the others has draws of "
        "few chains",
        "quantiles of it in place of its standard deviation; a larger max_gradients",
    ),
    "chains stuck": (
        "{value:.0%} of the chains hardly moved: they are where the posterior is far narrower than "
        "elsewhere",
        ANOTHER_FORM,
    ),
    "divergences": (
        "{value:.1%} of the transitions diverged: there are regions that chains do not enter",
        ANOTHER_FORM,
    ),
    "draws lost": (
        "{value:.0f} of the guide's draws were left out: they were not finite",
        "look for what the model does at extreme values",
    ),
}


class Finding(NamedTuple):
    """A finding of ``refine``, and the number it rests on.

    Attributes:
        code: what was found.
        value: R-hat, standard errors, a share, or a count, as the code asks for.
        where: the coordinate it was found in; empty if in none.
    """

    code: Code
    value: float
    where: str = ""


def find(
    chains: Chains, modes: Modes, num_lost: int, names: Sequence[str], tol: float
) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict on chains that were to have a nested R-hat of ``1 + tol``, and its reasons."""
    moments = chains.moments
    findings = [Finding("draws lost", num_lost)] if num_lost else []
    troubles = [Finding("mode missed", modes.share)] if modes.num_missed else []
    stuck = float(np.mean(chains.acceptance < STUCK))
    if stuck > 0:
        troubles.append(Finding("chains stuck", stuck))
    divergent = chains.num_divergent / chains.draws[..., 0].size
    if divergent > MOST_DIVERGENT:
        troubles.append(Finding("divergences", divergent))
    worst = int(np.argmax(moments.rhat))
    if chains.has_settled:
        verdict: Verdict = "bad" if modes.num_missed else "cannot tell" if troubles else "good"
        settled = [] if troubles else [Finding("settled", float(moments.rhat[worst]))]
        return verdict, (*findings, *troubles, *settled)
    moving = int(np.argmax(moments.trend))
    if moments.trend[moving] > TREND:
        findings.append(Finding("chains moving", float(moments.trend[moving]), names[moving]))
    elif moments.rhat[worst] >= 1 + tol:
        findings.append(Finding("chains apart", float(moments.rhat[worst]), names[worst]))
    elif np.max(moments.influence) > LARGEST_INFLUENCE:
        far = int(np.argmax(moments.influence))
        findings.append(Finding("few far draws", float(moments.influence[far]), names[far]))
    else:
        unsure = int(np.argmax(moments.sd_error))
        findings.append(Finding("too few draws", float(moments.sd_error[unsure]), names[unsure]))
    return "bad" if modes.num_missed else "cannot tell", (*findings, *troubles)


def describe(findings: Sequence[Finding]) -> tuple[str, ...]:
    """A sentence for each finding."""
    return tuple(WORDS[finding.code][0].format(**finding._asdict()) for finding in findings)


def advise(findings: Sequence[Finding]) -> tuple[str, ...]:
    """The advice for some findings, without repetition."""
    return tuple(dict.fromkeys(filter(None, (WORDS[finding.code][1] for finding in findings))))
