"""The tiers of a diagnosis: weights first, and chains where they cannot decide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore._model.layout import Site, coordinate_names
from numpyro_kscore._model.particles import check_mostly_finite
from numpyro_kscore._model.tall_density import ModelDensity
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._budget import (
    GRADIENTS_OF_A_LOOK,
    NUM_CHAINS,
    Clock,
    Stages,
    seconds_of,
)
from numpyro_kscore.diagnostics._chains import ChainProgram, fit_metric
from numpyro_kscore.diagnostics._codes import Finding, Known
from numpyro_kscore.diagnostics._decide import decide, judge, relative_error
from numpyro_kscore.diagnostics._diagnosis import Diagnosis
from numpyro_kscore.diagnostics._messages import advise, describe
from numpyro_kscore.diagnostics._missed_modes import (
    UNSEARCHED,
    Modes,
    find_missed_modes,
    find_modes_without_draws,
)
from numpyro_kscore.diagnostics._movement import Movement, Walk
from numpyro_kscore.diagnostics._weighing import Weighing

# A part of a diagnosis, in words.
MODES = "the search for modes"
# The fields of a movement that each coordinate has.
OF_COORDINATES = ("shift", "shift_error", "ratio", "ratio_error", "memory", "trend")
# Windows of ten transitions after which the verdict is tried.
LOOKS = (12, 24, 48, 96)
# The time of a gradient is measured if that takes fewer seconds.
QUICK = 10.0
# Missed modes are searched for if the guide is not far from all of them.
NEAR_SHIFT, NEAR_RATIOS = 1.0, (0.4, 2.5)


def examine(
    samples: np.ndarray,
    density: ModelDensity,
    sites: Sequence[Site],
    key: Array,
    num_lost: int = 0,
    known: Known = "draws",
    weights: Weighing | None = None,
    clock: Clock | None = None,
    stages: Stages | None = None,
) -> Diagnosis:
    """:func:`diagnose` of independent, finite draws (n, d) in the coordinates of the density.

    Moments are those of unconstrained values. ``num_lost`` draws were left out; the advice depends
    on the known part of the guide's density.
    """
    clock, stages = clock or Clock(), stages or Stages(False)
    names, modes = coordinate_names(sites), UNSEARCHED
    findings: tuple[Finding, ...] = ()
    movement = None
    if weights is not None:
        movement = by_weights(weights)
        verdict = judge(movement, names)[0] if weights.knows_all else "cannot tell"
        if verdict == "good":
            stages.tell("searching for modes")
            given = density.evaluate, samples, sites, key_apart(key, 3), density.exact, clock
            modes = stages.attempt(MODES, partial(find_modes_without_draws, *given), modes)
        if verdict == "cannot tell":
            movement = None
    if movement is None:
        unknown = _Walked(_known_so_far(len(names), weights), modes, _tail(weights, names), 0)
        walk = partial(_walk, samples, density, sites, key, weights, clock, stages)
        movement, modes, findings, lost = stages.attempt("Markov chains", walk, unknown)
        num_lost += lost
    verdict, found = decide(movement, modes, num_lost, names)
    if verdict == "cannot tell":
        found = (*found, *findings)
    found = (*found, *stages.failed)
    return Diagnosis(
        verdict,
        tuple(finding.code for finding in found),
        describe(found),
        advise(found, known),
        movement,
        modes,
        names,
        len(samples),
        weights,
    )


def is_open(weights: Weighing, names: Sequence[str]) -> bool:
    """Whether errors of moments that weights tell are too large for a verdict.

    More draws do not tell the others.
    """
    zeros, ones = np.zeros(len(names)), np.ones(len(names))
    still = Movement(zeros, zeros, ones, zeros, zeros, zeros, 0, np.nan)
    known = _either(weights.is_known, by_weights(weights), still)
    return judge(known, names)[0] == "cannot tell"


def by_weights(weights: Weighing) -> Movement:
    """The movement of means and standard deviations from draws to weighted draws."""
    still = np.zeros(len(weights.shift))
    moved = weights.shift, weights.shift_error, weights.ratio, weights.ratio_error
    return Movement(*moved, still, still, 0, np.nan)


class _Walked(NamedTuple):
    """The answer of chains, what they could not say, and how many of them were lost at once."""

    movement: Movement
    modes: Modes
    findings: tuple[Finding, ...]
    num_lost: int


def _walk(
    samples: np.ndarray,
    density: ModelDensity,
    sites: Sequence[Site],
    key: Array,
    weights: Weighing | None,
    clock: Clock,
    stages: Stages,
) -> _Walked:
    """Ask chains from the draws, as long as they cannot tell and there is time."""
    names = coordinate_names(sites)
    points, modes = jnp.asarray(samples), UNSEARCHED
    program = ChainProgram(density.evaluate, fit_metric(points))
    stages.tell("compiling chains")
    # Weights tell the time of a value with the guide's density, which may be far longer.
    seconds = clock.gradient
    if seconds is None or NUM_CHAINS[0] * seconds < QUICK:
        seconds = _time_of_gradient(program, samples)
    num_chains = clock.affordable_chains(seconds)
    findings = _tail(weights, names)
    if num_chains == 0:
        needed = Finding("budget", NUM_CHAINS[-1] * GRADIENTS_OF_A_LOOK * seconds)
        return _Walked(_known_so_far(len(names), weights), modes, (*findings, needed), 0)
    walk = Walk(program, points, key_apart(key, 2), num_chains, density.push)
    values = np.asarray(walk.state.value)
    finite = np.isfinite(values)
    check_mostly_finite(finite)
    for num_windows in LOOKS:
        if not walk.prolong(num_windows, clock, stages):
            findings = (*findings, Finding("budget", walk.seconds_until(num_windows)))
            break
        movement = walk.movement()
        # The errors of an approximate density count, too.
        movement = movement._replace(
            shift_error=np.hypot(movement.shift_error, density.shift),
            ratio_error=np.hypot(movement.ratio_error, density.width),
        )
        movement = movement if weights is None else merged(movement, weights)
        if modes == UNSEARCHED and _is_near(movement):
            home, mode_key = values[finite], key_apart(key, 3)
            stages.tell("searching for modes")
            given = program, samples, home, walk.state, sites, mode_key, density.exact, clock
            modes = stages.attempt(MODES, partial(find_missed_modes, *given), modes)
        if modes.num_missed or judge(movement, names)[0] != "cannot tell":
            break
    return _Walked(movement, modes, findings, int(len(values) - finite.sum()))


def _time_of_gradient(program: ChainProgram, samples: np.ndarray) -> float:
    """The time of a gradient of one chain among many, in seconds."""
    z = jnp.asarray(program.metric.whiten(samples[: NUM_CHAINS[0]]), program.metric.mean.dtype)

    def run() -> None:
        jax.block_until_ready(program.evaluate(z))

    run()  # compiles it
    return seconds_of(run) / len(z)


def _tail(weights: Weighing | None, names: Sequence[str]) -> tuple[Finding, ...]:
    """The coordinate whose tail has too few draws, if weights show one."""
    if weights is None or not np.any(weights.is_thin):
        return ()
    worst = int(np.argmax(np.where(weights.is_thin, weights.shapes, -np.inf)))
    return (Finding("tail", float(weights.shapes[worst]), where=names[worst]),)


def _known_so_far(dim: int, weights: Weighing | None) -> Movement:
    """The movement by weights where they tell it; nothing is known of the rest."""
    zeros, ones, errors = np.zeros(dim), np.ones(dim), np.full(dim, np.inf)
    unknown = Movement(zeros, errors, ones, errors, zeros, zeros, 0, np.nan)
    return unknown if weights is None else merged(unknown, weights)


def merged(movement: Movement, weights: Weighing) -> Movement:
    """The movement of each coordinate by weights if they tell it, or by chains if these do better.

    Weights know no more of a tail with few draws, while chains go on.
    """
    told = by_weights(weights)
    is_better = relative_error(told) <= relative_error(movement)
    return _either(weights.is_known & is_better, told, movement)


def _either(is_first: np.ndarray, first: Movement, second: Movement) -> Movement:
    """One movement in some coordinates (d,), and another in the others."""
    found: dict[str, Any] = {
        name: np.where(is_first, getattr(first, name), getattr(second, name))
        for name in OF_COORDINATES
    }
    return second._replace(**found)


def _is_near(movement: Movement) -> bool:
    """Whether a guide is near enough to a mode to ask for others."""
    ratio, (low, high) = movement.ratio, NEAR_RATIOS
    return bool(
        np.all(np.abs(movement.shift) < NEAR_SHIFT) and np.all((low < ratio) & (ratio < high))
    )
