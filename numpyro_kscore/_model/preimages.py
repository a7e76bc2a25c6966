"""The density of a guide whose map from noise is not one-to-one.

The local log density of a draw is that of its own noise. Behind a fold, and from another component
of a guide that starts as a mixture, other noise is pushed to the same place, and densities add up.
Newton's method looks for it, from the noise of draws that are near but whose noise is far.

A map that is one-to-one far out and has folds has as many images of either orientation behind
them, but for one: without draws of negative orientation there is next to no mass behind folds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_kscore._model.handlers import announce, announced
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.particles import DRAWS_AT_ONCE, at_source, draw_local, draw_particle
from numpyro_kscore._model.program import Program, run_guide
from numpyro_kscore._transports.affine import fitted
from numpyro_kscore._util.checks import first_that_traces
from numpyro_kscore._util.compiling import quick_jit

KIND = "label"
# Numbers of draws: those that the search compares with, and those that it is for, all in few
# dimensions. In more these are the first ones and the heaviest: a density that misses other noise
# is too low, and so a weight too large.
POOL, FEW_DIMENSIONS, FEW_DRAWS, HEAVIEST = 1_000, 3, 500, 200
# Starts of Newton's method for a draw and a label, and its steps.
STARTS, STEPS = 3, 25
# Longest step, in standard deviations of the noise and a dimension.
LONGEST = 1.0
# A search has arrived within this distance, in standard deviations of the draws; it has found other
# noise if that is farther from the draw's own.
ARRIVED, APART = 1e-4, 1e-2
# Other noise counts if it adds this much to the log density.
COUNTS = 0.01


class Preimages(NamedTuple):
    """The log density of draws with all noise that was found to be pushed to them.

    Attributes:
        log_density: shape (n,).
        share: part of the draws for which other noise counts, in many dimensions of the first ones.
            For draws that are not searched the log density is that of their own noise.
    """

    log_density: np.ndarray
    share: float


class _Noise(NamedTuple):
    """The sites of the noise, and of the label if there is one, with the label's probabilities."""

    name: str
    label: str | None
    probabilities: np.ndarray

    def labels(self, sources: dict[str, Array]) -> np.ndarray:
        """The numbers of the labels of draws, (n,)."""
        count = len(sources[self.name])
        if self.label is None:
            return np.zeros(count, int)
        return np.searchsorted(self._ends[:-1], np.asarray(sources[self.label]).reshape(count))

    def source(self, noise: Array, where: Array) -> dict[str, Array]:
        """The source of a draw, from its noise and a number of its label's."""
        return {self.name: noise} if self.label is None else {self.name: noise, self.label: where}

    @property
    def middles(self) -> np.ndarray:
        """A number for each label."""
        return self._ends - 0.5 * self.probabilities

    @property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.probabilities)


def announce_label(prefix: str, site: str, probabilities: Any) -> None:
    """Tell that a noise site, uniform in (0, 1), chooses a label by its cumulative probability."""
    announce(KIND, f"_{prefix}_label", (site, probabilities))


def find_preimages(
    key: Array,
    program: Program,
    layout: Layout,
    sources: dict[str, Array],
    samples: np.ndarray,
    log_density: np.ndarray,
    is_behind: np.ndarray,
    log_weights: np.ndarray,
) -> Preimages:
    """Look for other noise that is pushed to draws (n, d), with local log densities (n,).

    ``sources`` are the draws' own noise, (n, ...) by site; ``is_behind`` says where the map has
    changed its orientation, (n,); ``log_weights`` are those by local densities, (n,). Where there
    is other noise than that of one map, such as that of the rows of a plate, nothing is searched.
    """
    labels = _labels(key, program) if layout.noise_sites else {}
    if not (is_behind.any() or labels):
        return Preimages(log_density, 0.0)
    others = [name for name in layout.noise_sites if name not in labels]
    parts = layout.parts
    if len(others) != 1 or len(labels) > 1 or len(parts) != 1 or not parts[0].has_local:
        return Preimages(log_density, float(np.mean(is_behind)))
    name, values = next(iter(labels.items()), (None, np.ones(1)))
    noise = _Noise(others[0], name, values / values.sum())
    own = np.asarray(sources[noise.name]).reshape(len(samples), -1)
    dim = samples.shape[1]
    count = len(samples) if dim <= FEW_DIMENSIONS else min(FEW_DRAWS, len(samples))
    rows = np.union1d(np.arange(count), np.argsort(-log_weights)[:HEAVIEST])
    labels_of = noise.labels(sources)
    starts, wanted = _starts(own, samples, labels_of, len(noise.probabilities), rows)
    solve = _solver(key, program, layout, noise)
    if solve is None:
        return Preimages(log_density, float(np.mean(is_behind)))
    points = samples[np.repeat(rows, wanted.size // len(rows))]
    sd = np.maximum(samples.std(0), np.finfo(samples.dtype).tiny)
    found, errors, densities = jax.device_get(
        solve(starts, jnp.asarray(noise.middles[wanted]), points, sd)
    )
    is_found = (errors < ARRIVED) & np.isfinite(densities)
    is_found &= _are_new(found, wanted, own[rows], labels_of[rows])
    added = np.where(is_found, densities, -np.inf).reshape(len(rows), -1)
    whole = log_density.copy()
    whole[rows] = np.logaddexp.reduce(np.column_stack([log_density[rows], added]), axis=1)
    share = float(np.mean((whole - log_density)[:count] > COUNTS))
    return Preimages(whole, share)


def _labels(key: Array, program: Program) -> dict[str, np.ndarray]:
    """Probabilities of labels, by the noise site that chooses them."""
    names: list[str] = []

    def probabilities(key: Array) -> list[Array]:
        names.clear()
        values = []
        for prefix, (site, value) in announced(KIND, run_guide(key, program)):
            names.append(prefix + site)
            values.append(value)
        return values

    jax.eval_shape(probabilities, key)
    if not names:
        return {}
    values = jax.device_get(quick_jit(probabilities, runs_once=True)(key))
    return {name: np.asarray(v, np.float64) for name, v in zip(names, values, strict=True)}


def _starts(
    noise: np.ndarray, samples: np.ndarray, labels: np.ndarray, num_labels: int, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Starts of searches for the draws of some rows (m,), (m * k, d), and their labels.

    For each label they are the noise of the draws that are nearest for the distance of their noise,
    from that of the draw and of the starts before: a map of little slope is no fold.
    """
    gaussian = fitted(samples)
    points = np.linalg.solve(gaussian.factor, (samples - gaussian.mean).T).T
    starts, wanted = [], []
    for label in range(num_labels):
        pool = np.flatnonzero(labels == label)[:POOL]
        if not len(pool):
            continue
        near = _squared_distances(points[rows], points[pool])
        far = np.where(
            labels[rows, None] == label, _squared_distances(noise[rows], noise[pool]), 1.0
        )
        # A draw is in its own pool.
        near[rows[:, None] == pool] = np.inf
        # Each start is far from those before it: there may be two other sheets.
        for _ in range(min(STARTS, len(pool))):
            chosen = noise[pool[np.argmin(near / np.maximum(far, 1e-6), axis=1)]]
            far = np.minimum(far, _squared_distances(chosen, noise[pool]))
            starts.append(chosen[:, None])
            wanted.append(np.full((len(rows), 1), label))
    dim = noise.shape[1]
    return np.concatenate(starts, axis=1).reshape(-1, dim), np.concatenate(wanted, axis=1).ravel()


def _squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    squares = np.sum(x**2, axis=1)[:, None] + np.sum(y**2, axis=1)
    return np.maximum(squares - 2 * x @ y.T, 0.0)


def _solver(
    key: Array, program: Program, layout: Layout, noise: _Noise
) -> Callable[..., Any] | None:
    """Compile ``(starts, numbers of labels, points, sd) -> (noise, errors, log densities)``.

    It is None where the map cannot be differentiated, such as one that looks up supports in a model
    with a loop of unknown length.
    """
    draw = at_source(draw_particle, key, program, layout)
    local = at_source(draw_local, key, program, layout)

    def push(x: Array, where: Array) -> tuple[Array, Array]:
        value = draw(noise.source(x, where)).flat
        return value, value

    point, number = (jax.ShapeDtypeStruct(s, jnp.result_type(float)) for s in ((layout.size,), ()))
    modes = [jax.jacfwd(push, has_aux=True), jax.jacrev(push, has_aux=True)]
    slopes_of = first_that_traces(modes, point, number)
    if slopes_of is None:
        return None

    def one(given: tuple[Array, Array, Array], sd: Array) -> tuple[Array, Array, Array]:
        start, where, point = given
        longest = LONGEST * start.shape[0] ** 0.5

        def step(x: Array, _: None) -> tuple[Array, None]:
            slopes, value = slopes_of(x, where)
            move = jnp.linalg.solve(slopes / sd[:, None], (point - value) / sd)
            length = jnp.sqrt(jnp.sum(move**2))
            return x + move * jnp.minimum(1.0, longest / jnp.maximum(length, 1e-30)), None

        x, _ = lax.scan(step, start, None, length=STEPS)
        error = jnp.max(jnp.abs(push(x, where)[0] - point) / sd)
        return x, error, jnp.sum(local(noise.source(x, where)).log_density)

    @quick_jit
    def run(starts: Array, where: Array, points: Array, sd: Array) -> Any:
        given = starts, where.astype(starts.dtype), points
        return lax.map(lambda one_given: one(one_given, sd), given, batch_size=DRAWS_AT_ONCE)

    return run


def _are_new(
    found: np.ndarray, wanted: np.ndarray, own: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Whether what searches ended at is neither the draw's own noise nor that of another search."""
    count, dim = own.shape
    found, wanted = found.reshape(count, -1, dim), wanted.reshape(count, -1)
    apart = APART**2 * dim
    is_new = (np.sum((found - own[:, None]) ** 2, axis=2) > apart) | (wanted != labels[:, None])
    for k in range(1, wanted.shape[1]):
        same = np.sum((found[:, :k] - found[:, k : k + 1]) ** 2, axis=2) <= apart
        same &= wanted[:, :k] == wanted[:, k : k + 1]
        is_new[:, k] &= ~same.any(axis=1)
    return is_new.ravel()
