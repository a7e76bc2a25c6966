"""What ``refine`` returns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpyro import handlers

from numpyro_kscore._tracing.program import Program
from numpyro_kscore.diagnostics._codes import Verdict
from numpyro_kscore.diagnostics._converters import ConvertedFit, make_converter
from numpyro_kscore.diagnostics._modes import UNSEARCHED, Modes
from numpyro_kscore.samplers._findings import Code

__all__ = ["Refinement"]


@dataclass(frozen=True, eq=False)
class Refinement:
    """Draws of Markov chains that started from a guide, and whether they have settled.

    Arrays of shape (d,) are about the unconstrained values of the latents, see ``names``.

    Attributes:
        verdict: ``"good"`` if everything has settled and nothing speaks against the draws,
            ``"bad"`` if modes are missed, otherwise ``"cannot tell"``.
        codes: what was found, to match on: some of ``"settled"``, ``"mode missed"``,
            ``"chains apart"``, ``"chains moving"``, ``"too few draws"``, ``"chains stuck"``,
            ``"divergences"`` and ``"draws lost"``.
        findings: the same in words, a sentence for each code.
        advice: what to try next, in words.
        converged: whether all means and standard deviations have settled within the limit of
            gradients.
        samples: latent and deterministic sites by name, (chain, draw, ...).
        names: of the unconstrained values, such as ``"theta[3]"``.
        rhat: nested R-hat of the value or its squared deviation, whichever is larger, (d,).
        mean: means, (d,).
        sd: standard deviations, (d,). Like the means they are of values that are cut off ten
            half-ranges from the median, so that heavy tails have them.
        mean_error: Monte Carlo errors of the means, in standard deviations, (d,).
        sd_error: the same of the standard deviations, relative to them, (d,).
        mean_change: means less those of the guide, in standard deviations, (d,).
        sd_change: standard deviations over those of the guide, (d,).
        acceptance: mean probability of acceptance of each chain, (chain,).
        superchain: which superchain a chain is of, (chain,): its chains have a common start.
        num_gradients: gradients of the model in all chains, those included that found the metric;
            without those of the search for modes.
        num_transitions: transitions of each chain, the same.
        modes: what the search for modes found.

    Example::

        from numpyro_kscore import refine

        refined = refine(svi, result, y, verbose=False)
        refined.verdict  # "good"
        refined.names  # ("loc", "scale")
        refined.rhat  # (2,)
        dict(zip(refined.names, refined.mean_change, strict=True))  # of the guide's means, in sd
    """

    verdict: Verdict
    codes: tuple[Code, ...]
    findings: tuple[str, ...]
    advice: tuple[str, ...]
    converged: bool
    samples: dict[str, np.ndarray] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    rhat: np.ndarray = field(repr=False)
    mean: np.ndarray = field(repr=False)
    sd: np.ndarray = field(repr=False)
    mean_error: np.ndarray = field(repr=False)
    sd_error: np.ndarray = field(repr=False)
    mean_change: np.ndarray = field(repr=False)
    sd_change: np.ndarray = field(repr=False)
    acceptance: np.ndarray = field(repr=False)
    superchain: np.ndarray = field(repr=False)
    num_gradients: int
    num_transitions: int
    modes: Modes
    _program: Program = field(repr=False)

    def __str__(self) -> str:
        chains, draws = next(iter(self.samples.values())).shape[:2]
        far, wide = int(np.argmax(np.abs(self.mean_change))), int(self._widest())
        lines = [
            f"verdict: {self.verdict}",
            *(f"  {finding}" for finding in self.findings),
            *(f"  try: {advice}" for advice in self.advice),
            f"{chains} chains of {draws} draws, {self.num_gradients} gradients; "
            f"{np.mean(self.acceptance):.0%} of the transitions accepted",
            f"largest nested R-hat: {np.max(self.rhat):.3f} "
            f"({self.names[int(np.argmax(self.rhat))]})",
            f"largest error: {np.max(self.mean_error):.3f} sd of a mean, "
            f"{np.max(self.sd_error):.1%} of an sd",
            f"largest change of a mean of the guide: {self.mean_change[far]:+.2f} sd "
            f"({self.names[far]})",
            f"largest change of an sd of the guide: by {self.sd_change[wide]:.2f} "
            f"({self.names[wide]})",
            "modes were not searched for"
            if self.modes == UNSEARCHED
            else f"{self.modes.num_missed} mode(s) missed",
        ]
        return "\n".join(lines)

    def _widest(self) -> Any:
        return np.argmax(np.abs(np.log(self.sd_change)))

    def to_arviz(self, log_likelihood: bool = False, **groups: Any) -> Any:
        """The chains as a ``DataTree`` (ArviZ 1.x) or ``InferenceData`` (ArviZ 0.2x).

        ``sample_stats`` has the superchain of every chain, for nested R-hat; ArviZ's own R-hat is
        meant for few long chains, and is too large for these.

        Args:
            log_likelihood: whether to evaluate that of every observation, which ``loo`` needs.
            **groups: of ArviZ's ``from_numpyro``: ``prior``, ``posterior_predictive``,
                ``predictions``, ``constant_data``, ``coords``, ``dims`` and others.

        Returns:
            The posterior, observed data, and what else was asked for.

        Raises:
            ImportError: without ArviZ.
        """
        convert: Callable[..., Any] = make_converter()
        program = self._program
        model = handlers.substitute(program.model, data=dict(program.params))
        draws = next(iter(self.samples.values())).shape[1]
        stats = {"superchain": np.repeat(self.superchain[:, None], draws, axis=1)}
        fit = ConvertedFit(model, program, self.samples, stats)
        with warnings.catch_warnings():
            # They are many and short on purpose.
            warnings.filterwarnings("ignore", message="More chains")
            tree = convert(fit, {"prior": None, "log_likelihood": log_likelihood, **groups})
        tree["sample_stats"].attrs.update(
            nested_rhat=float(np.max(self.rhat)),
            converged=int(self.converged),
            verdict=self.verdict,
            num_gradients=self.num_gradients,
        )
        return tree
