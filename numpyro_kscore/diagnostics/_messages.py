"""Decisions of diagnostics, in words."""

from __future__ import annotations

from collections.abc import Sequence

from numpyro_kscore.diagnostics._codes import Code, Doubt, Finding
from numpyro_kscore.diagnostics._pareto import GOOD_KHAT

__all__ = ["advise", "describe", "khat_reason"]

MORE_OF_ALL = "more steps, then more particles or a wider network"
MORE_SAMPLES = "a larger num_samples; if that does not help, compare with NUTS on part of the data"
# The sentence of each finding, and the advice.
WORDS: dict[Code, tuple[str, str]] = {
    "draws lost": (
        "{value:.0f} draws were not finite and are left out of all this",
        "look for what the model does at extreme values",
    ),
    "mode missed": (
        "draws moved by long jumps end up elsewhere: the guide misses a mode of the model, or "
        "weights the modes wrongly, which k̂ cannot see",
        "start several fits from other init_loc_fn values and compare their losses; widen "
        "init_scale; more particles",
    ),
    "far draws missed": (
        "draws moved by long steps end up elsewhere: the guide has too few draws far out, though "
        "no second mode was found",
        MORE_OF_ALL,
    ),
    "collapsed": (
        "the guide has collapsed: in one direction its sd is {value:.2f} of the model's",
        "more steps, ImplicitELBO's default base and debias; noise of at least the latents' "
        "dimension in a network of one's own",
    ),
    "too narrow": ("the guide is too narrow: sd down to {value:.2f} of the model's", MORE_OF_ALL),
    "too wide": (
        "the guide is too wide: sd up to {value:.2f} times the model's",
        "a smaller last step size (a cosine schedule, or fit), more particles",
    ),
    "shape differs": ("the local shape differs from the model's, by {value:.2g} sd", ""),
    "correctable": (
        "importance weights can correct that",
        "importance_resample(key, draws, khat.log_weights)",
    ),
    "not correctable": (
        "importance weights cannot correct the guide: k̂ is too large",
        "a more flexible guide, more particles, another parameterization; or NUTS",
    ),
    "correction unknown": (
        "whether importance weights can correct that is not known: their estimates are all equal",
        MORE_SAMPLES,
    ),
    "khat unknown": (f"whether k̂ is below {GOOD_KHAT} is not known: {{reason}}", MORE_SAMPLES),
    "nothing found": ("nothing speaks against the guide", ""),
}
DOUBTS: dict[Doubt, str] = {
    "": "{evidence}",
    "interval": f"{{evidence}}; the interval holds {GOOD_KHAT}",
    "few draws": "{num_draws} draws in {dim} dimensions are too few for an energy",
    "flat draws": "the draws do not vary in some direction: such a guide has no density",
    "large error": (
        "the energy's error, {error:.2g} nats, is at least half the spread of the log weights"
    ),
}


def describe(findings: Sequence[Finding], reason: str) -> tuple[str, ...]:
    """A sentence for each finding; ``reason`` is that of k̂."""
    return tuple(WORDS[code][0].format(value=value, reason=reason) for code, value in findings)


def advise(findings: Sequence[Finding]) -> tuple[str, ...]:
    """The advice for some findings, without repetition."""
    advice = [WORDS[code][1] for code, _ in findings]
    if [code for code, _ in findings] == ["shape differs", "khat unknown"]:
        # Otherwise the advice of other findings comes first.
        advice.insert(0, "a more flexible guide, more particles or more steps")
    return tuple(dict.fromkeys(filter(None, advice)))


def khat_reason(doubt: Doubt, energy: str, num_draws: int, dim: int, error: float) -> str:
    """Why a k̂ has its verdict."""
    evidence = "exact weights" if energy == "exact" else f"energy: {energy}"
    return DOUBTS[doubt].format(evidence=evidence, num_draws=num_draws, dim=dim, error=error)
