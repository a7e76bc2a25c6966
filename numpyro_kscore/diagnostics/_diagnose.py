"""Can this fit be trusted? ``diagnose`` answers in words.

It asks two questions that a guide need not have a density for. Do means and standard deviations
move, if Markov chains that leave the model invariant start from the guide's draws
(:mod:`numpyro_kscore.diagnostics._movement`)? Do ascents from afar find modes where the guide has
no draws (:mod:`numpyro_kscore.diagnostics._missed_modes`)? Others have functions of their own:
:func:`~numpyro_kscore.khat` (can importance weights correct the guide?),
:func:`~numpyro_kscore.diagnostics.ksd` (is the local shape right?),
:func:`~numpyro_kscore.diagnostics.spread_ratios` and
:func:`~numpyro_kscore.diagnostics.fisher_divergence` (how far is the guide from the model?).
NumPyro's ``vsbc_diagnostic`` asks whether the *procedure* is calibrated over data sets, by fitting
many; :func:`~numpyro_kscore.diagnostics.vsbc` calls it for an ``SVI``, whatever its objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import SVI

from numpyro_kscore._model.layout import Site, coordinate_names
from numpyro_kscore._model.particles import check_mostly_finite, draw_finite
from numpyro_kscore._model.tall_density import ModelDensity
from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._chains import ChainProgram, fit_metric
from numpyro_kscore.diagnostics._codes import (
    MEAN_LIMIT,
    SD_LIMIT,
    Code,
    Finding,
    Known,
    Verdict,
)
from numpyro_kscore.diagnostics._fitted import fitted_guide, model_density
from numpyro_kscore.diagnostics._messages import advise, describe, verdict_lines
from numpyro_kscore.diagnostics._missed_modes import UNSEARCHED, Modes, find_missed_modes
from numpyro_kscore.diagnostics._movement import Movement, Walk

# Windows of ten transitions after which the verdict is tried.
LOOKS = (12, 24, 48, 96)
# Missed modes are searched for if the guide is not far from all of them.
NEAR_SHIFT, NEAR_RATIOS = 1.0, (0.4, 2.5)
# Standard errors to the inside of the limits for "good", and to the outside for "bad": for that one
# of many coordinates is enough.
INSIDE, OUTSIDE = 2.5, 3.0
# Chains that remember more of where they started cannot say that a fit is good.
MOST_MEMORY = 0.5
# Standard errors from which on the later half of the chains differs from the earlier one.
TREND = 4.0
# A guide that is narrower has collapsed.
COLLAPSED = 0.4


class Diagnosis(NamedTuple):
    """A verdict on a fit, with its reasons.

    Attributes:
        verdict: ``"good"``, ``"bad"`` or ``"cannot tell"``.
        codes: findings to match on: some of ``"draws lost"``, ``"mode missed"``,
            ``"mean off"``, ``"collapsed"``, ``"too narrow"``, ``"too wide"``; of a fit that is not
            bad one of ``"nothing found"``, ``"chains slow"``, ``"chains moving"`` and
            ``"errors large"``.
        findings: a sentence for each code.
        advice: suggestions of what to try next.
        movement: changes of means and standard deviations along chains from the guide's draws.
        modes: result of the search for modes.
        names: unconstrained coordinates that ``movement`` is about, such as ``"theta[3]"``.
        num_draws: number of draws.

    Example::

        from numpyro_kscore import diagnose

        diagnosis = diagnose(svi, result, y, verbose=False)
        diagnosis.verdict  # "good"
        diagnosis.codes  # ("nothing found",)
        print(diagnosis)  # with what was found, in words
    """

    verdict: Verdict
    codes: tuple[Code, ...]
    findings: tuple[str, ...]
    advice: tuple[str, ...]
    movement: Movement
    modes: Modes
    names: tuple[str, ...]
    num_draws: int

    def __str__(self) -> str:
        move, modes = self.movement, self.modes
        shift = int(np.argmax(np.abs(move.shift)))
        low, high = int(np.argmin(move.ratio)), int(np.argmax(move.ratio))

        def ratio(k: int) -> str:
            error = move.ratio[k] * move.ratio_error[k]
            return f"{move.ratio[k]:.2f} ± {error:.2f} ({self.names[k]})"

        lines = [
            *verdict_lines(self),
            f"largest shift of a mean: {move.shift[shift]:+.2f} ± {move.shift_error[shift]:.2f} sd "
            f"({self.names[shift]})",
            f"guide's sd over the model's: {ratio(low)} to {ratio(high)}",
            f"{move.num_transitions} transitions of each chain, {move.acceptance:.0%} accepted",
            str(modes),
        ]
        return "\n".join(lines)


def diagnose(
    svi: SVI,
    result: Any,
    *args: Any,
    num_samples: int = 20_000,
    rng_key: Array | None = None,
    verbose: bool = True,
    **kwargs: Any,
) -> Diagnosis:
    """Say whether a fit can be trusted, why, and what to try.

    A fit is *good* if every mean of the unconstrained coordinates is within 0.15 standard
    deviations of the model's, and every standard deviation within 10 %, standard errors included,
    and no mode is missed. It is *bad* if something is significantly outside these limits.

    Args:
        svi: model, guide and loss.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of the model, as in the fit.
        num_samples: fresh draws of the guide, at least 100. Chains start from 512 of them.
        rng_key: random key; by default ``jax.random.key(0)``.
        verbose: whether to print the diagnosis.
        **kwargs: keyword arguments of the model.

    Returns:
        Verdict, findings, advice, and the numbers they rest on.

    Raises:
        TypeError: see :func:`~numpyro_kscore.evaluate_guide`.
        ValueError: see there; and for fewer than 100 draws.
        FloatingPointError: if fewer than half of the draws are finite.

    Cost: three compiled programs. 512 chains of 120 to 960 transitions with up to 24 gradients of
    the model each, as few as decide; as many of 100 from afar, and up to 48 ascents.

    Example::

        from numpyro_kscore import diagnose

        diagnosis = diagnose(svi, result, y)  # prints it
        diagnosis.verdict  # "good"
    """
    check_count("num_samples", num_samples, minimum=100)
    key = jax.random.key(0) if rng_key is None else rng_key
    fitted = fitted_guide(svi, result, args, kwargs, key)
    layout = fitted.layout
    samples, num_lost = draw_finite(key_apart(key, 1), fitted.program, layout, num_samples)
    density = model_density(fitted, key)
    known: Known = "local density" if layout.implicit_parts == layout.local_parts else "draws"
    if not layout.implicit_parts:
        known = "density"
    diagnosis = examine(samples, density, layout.sites, key, num_lost, known)
    if verbose:
        print(diagnosis)
    return diagnosis


def examine(
    samples: np.ndarray,
    density: ModelDensity,
    sites: Sequence[Site],
    key: Array,
    num_lost: int = 0,
    known: Known = "draws",
) -> Diagnosis:
    """:func:`diagnose` of independent, finite draws (n, d) in unconstrained coordinates.

    ``num_lost`` draws were left out; the advice depends on the known part of the guide's density.
    """
    points, names = jnp.asarray(samples), coordinate_names(sites)
    program = ChainProgram(density.evaluate, fit_metric(points))
    walk, modes = Walk(program, points, key_apart(key, 2)), UNSEARCHED
    values = np.asarray(walk.state.value)
    finite = np.isfinite(values)
    check_mostly_finite(finite)
    for num_windows in LOOKS:
        walk.prolong(num_windows)
        movement = walk.movement()
        # The errors of an approximate density count, too.
        movement = movement._replace(
            shift_error=np.hypot(movement.shift_error, density.shift),
            ratio_error=np.hypot(movement.ratio_error, density.width),
        )
        if modes == UNSEARCHED and _is_near(movement):
            home, mode_key = values[finite], key_apart(key, 3)
            modes = find_missed_modes(
                program, samples, home, walk.state, sites, mode_key, density.exact
            )
        if modes.num_missed or judge(movement, names)[0] != "cannot tell":
            break
    num_lost += int(len(values) - finite.sum())
    verdict, findings = decide(movement, modes, num_lost, names)
    return Diagnosis(
        verdict,
        tuple(finding.code for finding in findings),
        describe(findings),
        advise(findings, known),
        movement,
        modes,
        names,
        len(samples),
    )


def _is_near(movement: Movement) -> bool:
    """Whether a guide is near enough to a mode to ask for others."""
    ratio, (low, high) = movement.ratio, NEAR_RATIOS
    return bool(
        np.all(np.abs(movement.shift) < NEAR_SHIFT) and np.all((low < ratio) & (ratio < high))
    )


def decide(
    movement: Movement, modes: Modes, num_lost: int, names: Sequence[str]
) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict on a guide, and what it rests on; ``num_lost`` draws were not finite."""
    verdict, moved = judge(movement, names)
    findings = [Finding("draws lost", num_lost)] if num_lost else []
    if modes.num_missed:
        findings.append(Finding("mode missed", modes.share))
        # Doubts about the movement do not matter then.
        verdict, moved = "bad", moved if verdict == "bad" else []
    return verdict, (*findings, *moved)


def judge(movement: Movement, names: Sequence[str]) -> tuple[Verdict, list[Finding]]:
    """The verdict by means and standard deviations alone, and what it rests on."""
    off, narrow, wide = np.stack(_excess(movement, -OUTSIDE)) > 0
    shift, ratio = movement.shift, movement.ratio
    ratio_error = ratio * movement.ratio_error
    limits: tuple[tuple[Code, np.ndarray, np.ndarray, np.ndarray, np.ndarray], ...] = (
        ("mean off", off, np.abs(shift), shift, movement.shift_error),
        ("too narrow", narrow, -ratio, ratio, ratio_error),
        ("too wide", wide, ratio, ratio, ratio_error),
    )
    # The worst coordinate of each kind that is outside.
    findings = []
    for code, is_outside, size, value, error in limits:
        if is_outside.any():
            worst = int(np.argmax(np.where(is_outside, size, -np.inf)))
            is_collapsed = code == "too narrow" and value[worst] < COLLAPSED
            numbers = float(value[worst]), float(error[worst])
            findings.append(Finding("collapsed" if is_collapsed else code, *numbers, names[worst]))
    if findings:
        return "bad", findings
    # Chains that remember have gone only part of the way.
    way = 1 - np.clip(movement.memory, 0.0, 0.9)
    whole = movement._replace(
        shift=shift / way,
        shift_error=movement.shift_error / way,
        ratio=np.exp(np.log(ratio) / way),
        ratio_error=movement.ratio_error / way,
    )
    # Why the movement cannot say "good", the most important first.
    doubts: tuple[tuple[Code, np.ndarray, float], ...] = (
        ("chains slow", movement.memory, MOST_MEMORY),
        ("chains moving", movement.trend, TREND),
        ("errors large", np.max(_excess(whole, INSIDE), axis=0), 0.0),
    )
    for code, values, limit in doubts:
        worst = int(np.argmax(values))
        if values[worst] > limit:
            return "cannot tell", [Finding(code, float(values[worst]), where=names[worst])]
    return "good", [Finding("nothing found", 0.0)]


def _excess(movement: Movement, errors: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distances of shifts and ratios beyond the limits, with some standard errors added."""
    shift = np.abs(movement.shift) + errors * movement.shift_error - MEAN_LIMIT
    margin = 1 + errors * movement.ratio_error
    narrow = (1 - SD_LIMIT) - movement.ratio / margin
    wide = movement.ratio * margin - (1 + SD_LIMIT)
    return shift, narrow, wide
