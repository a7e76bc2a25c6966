"""Decisions of diagnostics, in words."""

from __future__ import annotations

from collections.abc import Sequence

from numpyro_kscore.diagnostics._codes import Code, Doubt, Finding, Known
from numpyro_kscore.diagnostics._pareto import GOOD_KHAT

__all__ = ["advise", "describe", "khat_reason"]

# What to try where a guide has not the posterior's shape.
MORE_OF_ALL: dict[Known, str] = {
    "density": (
        "AutoImplicit(model) with ImplicitELBO(), which is not bound to one family of shapes; more "
        "steps, if the loss was still falling"
    ),
    "local density": (
        "more steps; then a wider network, such as AutoImplicit(model, hidden_dims=(128, 128))"
    ),
    "draws": "more steps; then a more flexible guide, such as AutoImplicit(model)",
}
SPREAD = (
    "more steps, ImplicitELBO's default base and debias; noise of at least the latents' dimension "
    "in a network of one's own"
)
COLLAPSED: dict[Known, str] = {
    "density": MORE_OF_ALL["density"],
    "local density": SPREAD,
    "draws": SPREAD,
}
# The sentence of each finding, and the advice, which may depend on the guide.
WORDS: dict[Code, tuple[str, str | dict[Known, str]]] = {
    "draws lost": (
        "{value:.0f} draws were left out: they, or the model's density at them, were not finite",
        "look for what the model does at extreme values",
    ),
    "mode missed": (
        "the guide covers only some of several modes: others, where it has no draws, hold about "
        "{value:.0%} of the posterior",
        "start several fits from other init_loc_fn values and compare their losses; widen "
        "init_scale. If the modes differ only in the labels of components, predictions do not "
        "depend on them; put the components in order to have one mode",
    ),
    "mean off": (
        "a mean is off: that of {where} by {value:+.2f} ± {error:.2f} sd (limit 0.15)",
        MORE_OF_ALL,
    ),
    "collapsed": (
        "the guide has collapsed: its sd of {where} is {value:.2f} ± {error:.2f} of the model's",
        COLLAPSED,
    ),
    "too narrow": (
        "the guide is too narrow: its sd of {where} is {value:.2f} ± {error:.2f} of the model's "
        "(limit 0.9)",
        MORE_OF_ALL,
    ),
    "too wide": (
        "the guide is too wide: its sd of {where} is {value:.2f} ± {error:.2f} times the model's "
        "(limit 1.1)",
        "a smaller last step size (a cosine schedule, or fit), more particles",
    ),
    "chains slow": (
        "Markov chains from the guide's draws hardly forget where they start: {value:.0%} of the "
        "difference in {where} is left, so that they cannot say whether the guide is right",
        "compare with NUTS; a parameterization with an easier posterior (numpyro.infer.reparam)",
    ),
    "chains moving": (
        "Markov chains from the guide's draws have not come to rest: {where} still moves, by "
        "{value:.0f} standard errors",
        "compare with NUTS; a parameterization with an easier posterior (numpyro.infer.reparam)",
    ),
    "errors large": (
        "the guide is so near the limits, 0.15 sd for a mean and 10 % for an sd, that the errors "
        "of {where} reach beyond them, by {value:.2f}",
        MORE_OF_ALL,
    ),
    "nothing found": (
        "all means are within 0.15 sd of the model's, all sds within 10 %, errors included",
        "",
    ),
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


def describe(findings: Sequence[Finding]) -> tuple[str, ...]:
    """A sentence for each finding."""
    return tuple(WORDS[finding.code][0].format(**finding._asdict()) for finding in findings)


def advise(findings: Sequence[Finding], known: Known = "draws") -> tuple[str, ...]:
    """The advice for some findings on a guide, without repetition."""
    advice = (WORDS[finding.code][1] for finding in findings)
    words = (text if isinstance(text, str) else text[known] for text in advice)
    return tuple(dict.fromkeys(filter(None, words)))


def khat_reason(doubt: Doubt, energy: str, num_draws: int, dim: int, error: float) -> str:
    """Why a k̂ has its verdict."""
    evidence = "exact weights" if energy == "exact" else f"energy: {energy}"
    return DOUBTS[doubt].format(evidence=evidence, num_draws=num_draws, dim=dim, error=error)
