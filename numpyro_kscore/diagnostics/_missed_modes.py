"""Has the guide missed a mode? Ascents of the model from afar, and what they find.

Quasi-Newton paths start from a few draws of the guide, from points far from them, and from where
chains have got from hundreds of such points, first in a flatter density, if that is away from the
draws. The end of a path counts as a mode if it has arrived there: its curvature, from differences
of gradients, is that of a maximum, and a Newton step would gain next to nothing. Its *mass* is that
of the Gaussian with the same curvature (Laplace's method). A mode is missed if its mass is not
negligible against that of the guide's own, no draws are near it in the metric of its curvature, and
chains that start in it do not come to where the guide's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore._model.layout import Site
from numpyro_kscore._model.target import Density
from numpyro_kscore._starts.bfgs import Iterate, quasi_newton_paths
from numpyro_kscore._util.keys import host_generator, key_apart
from numpyro_kscore.diagnostics._budget import GRADIENTS_OF_A_LOOK, Clock, seconds_of
from numpyro_kscore.diagnostics._chains import DIAGNOSIS, ChainProgram, ChainState, fit_metric

# Paths from draws, from far points, and from the ends of chains from far points.
HOME, AFAR, STRAYED = 8, 24, 16
# Powers of the density that those chains have in their windows: flat enough at first to get from
# one mode to another.
ROAMING = (0.1, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 1.0, 1.0, 1.0)
# Chains have strayed if they are this much farther away than nearly all draws.
STRAY = 1.2
# Logarithms of the least and largest scale of far points relative to the draws.
LOG_SCALES = (0.4, 2.0)
MOST_EVALUATIONS = 400
# Numbers in one matrix of each path that is followed at the same time.
MOST_NUMBERS = 100_000
# Beyond, matrices of second derivatives cost more than the question is worth.
MOST_DIMENSIONS = 256
# A path has arrived where a Newton step gains less, in nats: rounding in single precision allows
# no less for sums over many data.
ARRIVED = 0.05
# A mode with less of the mass is negligible.
NEGLIGIBLE = 0.05
# Least distance of the means of separate groups of chains, in their pooled standard deviation.
SEPARATE = 4.0
# Powers for chains that start in a suspected mode, and the largest number of such modes.
STAYING, MOST_SUSPECTS = (1.0,) * 6, 4
# Chains where those that draws are of are at rest: enough for a covariance.
SEARCH_CHAINS, SEARCH_CHAINS_A_DIMENSION, MOST_SEARCH_CHAINS = 64, 4, 512
# Uniform far points lie within this distance of zero, as NumPyro's initial values do.
RADIUS = 2.0


class Modes(NamedTuple):
    """Modes of the model, as far as they were found.

    Attributes:
        num_missed: modes without draws of the guide, of the four largest.
        share: part of the mass of all modes that the missed ones have, by Laplace's method.
        num_paths: ascents.
        num_arrived: ascents that ended at a maximum.

    Example::

        from numpyro_kscore import diagnose

        diagnosis = diagnose(svi, result, y)
        diagnosis.modes.num_missed  # 0
        diagnosis.modes.num_arrived <= diagnosis.modes.num_paths  # True
    """

    num_missed: int
    share: float
    num_paths: int
    num_arrived: int

    def __str__(self) -> str:
        if self.num_paths == 0:
            return "modes were not searched for"
        if self.num_arrived == 0 and self.num_missed == 0:
            return (
                f"none of {self.num_paths} ascents arrived at a maximum: modes without draws would "
                "not have been seen"
            )
        return (
            f"{self.num_arrived} of {self.num_paths} ascents arrived at a maximum; "
            f"{self.num_missed} mode(s) missed"
        )


UNSEARCHED = Modes(0, 0.0, 0, 0)


class _Mode(NamedTuple):
    """A local maximum, (d,), in whitened coordinates, and minus the Hessian there, (d, d).

    The log mass is that of Laplace's Gaussian, up to (d/2) log 2π.
    """

    point: np.ndarray
    precision: np.ndarray
    log_mass: float

    def distances(self, points: np.ndarray) -> np.ndarray:
        """Squared distances of points (n, d), in the metric of the curvature."""
        offsets = points - self.point
        return np.sum((offsets @ self.precision) * offsets, axis=1)


def far_points(
    sites: Sequence[Site], samples: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Points far from draws (n, d), where another mode may be above: (count, d).

    Three kinds take turns: uniform points, draws scaled up around their mean, and draws in which
    the entries of all arrays of one length have been exchanged. If the model does not distinguish
    the labels 1 to k of components, a mode has k! copies.
    """
    n, dim = samples.shape
    points = samples[rng.integers(n, size=count)].astype(np.float64)
    points[0::3] = rng.uniform(-RADIUS, RADIUS, points[0::3].shape)
    mean = samples.mean(0)
    factors = np.exp(rng.uniform(*LOG_SCALES, (len(points[1::3]), 1)))
    points[1::3] = mean + factors * (points[1::3] - mean)
    lengths = sorted({size for site in sites for size in site.shape if size > 1})
    for i, row in enumerate(points[2::3]):
        if lengths:
            length = lengths[i % len(lengths)]
            first, second = rng.choice(length, 2, replace=False)
            order = np.arange(length)
            order[[first, second]] = second, first
            for site in (site for site in sites if length in site.shape):
                part = slice(site.start, site.start + site.size)
                value = row[part].reshape(site.shape)
                row[part] = np.take(value, order, axis=site.shape.index(length)).ravel()
    return points


def find_missed_modes(
    program: ChainProgram,
    samples: np.ndarray,
    values: np.ndarray,
    home: ChainState,
    sites: Sequence[Site],
    key: Array,
    exact: Callable[[Array], Array] | None = None,
    clock: Clock | None = None,
) -> Modes:
    """Ascend from draws and from afar, and compare where the paths end.

    Chains from afar are left out where there is no time for them, and paths end with the time.

    The chains are in coordinates whitened by the draws, (n, d), at some of which ``values`` are the
    log densities; those at ``home`` started from draws, and have walked. If their density is an
    approximation near the draws, ``exact`` is the log density itself, (n, d) to (n,).
    """
    if samples.shape[1] > MOST_DIMENSIONS:
        return UNSEARCHED
    num_chains, metric = home.point.shape[0], program.metric
    clock = clock or Clock()
    once = seconds_of(lambda: jax.block_until_ready(program.evaluate(home.point)))
    host = _Host(program, num_chains, clock, once)
    roams = GRADIENTS_OF_A_LOOK * once < clock.left
    rng = host_generator(key_apart(key, 0))
    z = metric.whiten(samples)
    far = metric.whiten(far_points(sites, samples, num_chains, rng))
    roamed = host.walk(far, home.log_step, ROAMING if roams else (), key_apart(key, 1))
    points = np.asarray(roamed.point, np.float64)
    distances, usual = (np.sum(p**2, axis=1) for p in (points, z))
    is_far = distances > STRAY**2 * np.quantile(usual, 0.99)
    strayed = points[is_far & np.isfinite(np.asarray(roamed.value))]
    strayed = strayed[rng.permutation(len(strayed))[:STRAYED]]
    ends = host.ascend(np.concatenate([z[:HOME], far[:AFAR], strayed]))
    own = _distinct([m for m in ends[:HOME] if m is not None])
    away = _distinct([m for m in ends[HOME:] if m is not None])
    # The Gaussian with the draws' covariance, in case no path from the draws arrives.
    mass = float(np.mean(values)) + 0.5 * z.shape[1]
    mass = max([mass, *(mode.log_mass for mode in own)])
    least = mass + np.log(NEGLIGIBLE / (1 - NEGLIGIBLE))
    suspects = [mode for mode in away if mode.log_mass > least and not _is_covered(mode, z, own)]
    if exact is not None and suspects:
        suspects = [mode for mode in host.corrected(suspects, exact) if mode.log_mass > least]
    suspects, num_arrived = suspects[:MOST_SUSPECTS], sum(mode is not None for mode in ends)
    if suspects and clock.left <= 0:
        # Nobody knows of them whether they are apart: nothing is claimed of any.
        suspects, num_arrived = [], 0
    missed = [m for m in suspects if _stays_apart(host, m, home, key_apart(key, 2))]
    total = np.logaddexp.reduce([0.0, *(m.log_mass - mass for m in missed)])
    return Modes(len(missed), float(-np.expm1(-total)), len(ends), num_arrived)


def find_modes_without_draws(
    density: Density,
    samples: np.ndarray,
    sites: Sequence[Site],
    key: Array,
    exact: Callable[[Array], Array] | None = None,
    clock: Clock | None = None,
) -> Modes:
    """:func:`find_missed_modes` for draws (n, d) that are right where they are."""
    count = max(
        SEARCH_CHAINS, min(SEARCH_CHAINS_A_DIMENSION * samples.shape[1], MOST_SEARCH_CHAINS)
    )
    if samples.shape[1] > MOST_DIMENSIONS:
        return UNSEARCHED
    chosen = host_generator(key_apart(key, 4)).permutation(len(samples))[:count]
    points = jnp.asarray(samples)
    program = ChainProgram(density, fit_metric(points))
    home = program.start(program.metric.whiten(points[chosen]))
    values = np.asarray(home.value)
    found = values[np.isfinite(values)]
    return find_missed_modes(program, samples, found, home, sites, key, exact, clock)


class _Host:
    """The model as a function of whitened points in double precision on the host.

    A gradient of all chains takes ``once`` seconds off the clock, without compilation.
    """

    def __init__(self, program: ChainProgram, num_chains: int, clock: Clock, once: float) -> None:
        self.program, self.metric, self.num_chains = program, program.metric, num_chains
        self.clock, self.once = clock, once

    def energies(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Minus log density (n,) and its gradient (n, d), by the program of the chains.

        When the time is over they are infinite and zero, which ends a path.
        """
        if self.clock.left <= 0:
            return np.full(len(z), np.inf), np.zeros_like(z)
        values, gradients = [], []
        size = self.num_chains
        for rows in np.split(z, range(size, len(z), size)):
            padded = np.concatenate([rows, np.repeat(rows[:1], size - len(rows), axis=0)])
            points = jnp.asarray(padded, self.metric.mean.dtype)
            value, gradient = jax.device_get(self.program.evaluate(points))
            self.clock.spend(self.once)
            values.append(np.asarray(value[: len(rows)], np.float64))
            gradients.append(np.asarray(gradient[: len(rows)], np.float64))
        return -np.concatenate(values), -np.concatenate(gradients)

    def corrected(self, modes: list[_Mode], exact: Callable[[Array], Array]) -> list[_Mode]:
        """Modes with the masses that they have by another density, the largest first."""
        z = np.stack([mode.point for mode in modes])
        points = jnp.asarray(self.metric.unwhiten(z), self.metric.mean.dtype)
        gains = np.asarray(exact(points), np.float64) + self.energies(z)[0]
        found = [
            mode._replace(log_mass=mode.log_mass + gain)
            for mode, gain in zip(modes, gains, strict=True)
            if np.isfinite(gain)
        ]
        return sorted(found, key=lambda mode: -mode.log_mass)

    def walk(
        self, z: np.ndarray, log_step: Array, coldness: Sequence[float], key: Array
    ) -> ChainState:
        """Chains from some points (n, d), after a window at each of some powers of the density."""
        state = self.program.start(z, log_step)
        for index, power in enumerate(coldness):
            step_key = jax.random.fold_in(key, index)
            state, window = self.program.advance(state, step_key, DIAGNOSIS, True, power)
            self.clock.spend(self.once * float(window.num_steps))
        return state

    def ascend(self, starts: np.ndarray) -> list[_Mode | None]:
        """The maxima that paths from some points (m, d) arrive at; None for those that do not."""
        ends: list[Iterate | None] = []
        # A group at a time: paths keep a matrix for each of their steps.
        size = max(8, min(len(starts), MOST_NUMBERS // starts.shape[1] ** 2))
        for group in np.split(starts, range(size, len(starts), size)):
            paths = quasi_newton_paths(self.energies, group, MOST_EVALUATIONS)
            ends += [path.iterates[-1] if path.iterates else None for path in paths]
        return [None if end is None else self._mode(end) for end in ends]

    def _mode(self, end: Iterate) -> _Mode | None:
        """The mode at the end of a path, or None if the path has not arrived at a maximum."""
        point, inverse = end.point, end.inverse_hessian
        dim = len(point)
        sizes = 0.1 * np.sqrt(np.clip(np.diag(inverse), 1e-6, 1e2))
        steps = np.diag(sizes)
        values, gradients = self.energies(np.concatenate([point + steps, point - steps]))
        if not np.all(np.isfinite(values)):
            return None
        hessian = (gradients[:dim] - gradients[dim:]) / (2 * sizes[:, None])
        hessian = 0.5 * (hessian + hessian.T)
        try:
            factor = np.linalg.cholesky(hessian)
        except np.linalg.LinAlgError:
            return None
        step = np.linalg.solve(factor, end.gradient)
        if not 0.5 * step @ step < ARRIVED:
            return None
        return _Mode(point, hessian, -end.energy - float(np.sum(np.log(np.diag(factor)))))


def _distinct(modes: list[_Mode]) -> list[_Mode]:
    """Modes without those that are near another, the highest first."""
    kept: list[_Mode] = []
    for mode in sorted(modes, key=lambda m: -m.log_mass):
        if not any(_are_near(mode, other) for other in kept):
            kept.append(mode)
    return kept


def _are_near(mode: _Mode, other: _Mode) -> bool:
    return bool(min(mode.distances(other.point[None]), other.distances(mode.point[None])) < 1.0)


def _is_covered(mode: _Mode, z: np.ndarray, own: list[_Mode]) -> bool:
    """Whether the guide has draws near a mode."""
    dim = z.shape[1]
    reach = dim + 3 * (2 * dim) ** 0.5
    near = np.mean(mode.distances(z) < reach)
    return bool(near > 0.02) or any(_are_near(mode, other) for other in own)


def _stays_apart(host: _Host, mode: _Mode, home: ChainState, key: Array) -> bool:
    """Whether chains from a mode stay apart from those that started at draws."""
    first, second = jax.random.split(key)
    noise = np.asarray(jax.random.normal(first, home.point.shape), np.float64)
    factor = np.linalg.cholesky(mode.precision)
    z = mode.point + np.linalg.solve(factor.T, noise.T).T
    state = host.walk(z, home.log_step, STAYING, second)
    here, there = (np.asarray(s.point, np.float64) for s in (state, home))
    pooled = 0.5 * (np.cov(here.T) + np.cov(there.T)).reshape(z.shape[1], -1)
    difference = here.mean(0) - there.mean(0)
    ridge = 1e-6 * np.trace(pooled) / len(difference) * np.eye(len(difference))
    return bool(difference @ np.linalg.solve(pooled + ridge, difference) > SEPARATE**2)
