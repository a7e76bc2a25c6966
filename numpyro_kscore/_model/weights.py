"""Importance weights of a guide whose density is known at its draws, or given its noise."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore._model.defense import (
    EVERY,
    FIRST,
    MOST,
    choose_columns,
    log_shares,
    normal_noise,
    widen,
)
from numpyro_kscore._model.draws import WeightedDraws
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.mixtures import log_mixture_ratios
from numpyro_kscore._model.particles import (
    are_finite,
    at_source,
    check_mostly_finite,
    draw_local,
    draw_particle,
    draw_sources,
)
from numpyro_kscore._model.preimages import find_preimages
from numpyro_kscore._model.program import Program
from numpyro_kscore._model.target import Push
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore._util.pareto import are_reliable, pareto_smooth, weight_ess, weight_variation

# Numbers of draws: those that a verdict rests on, and those that are made at once. They are few, so
# that models of a second each are told apart soon.
NUM_DRAWS, BATCH = 10_000, 125


def has_density(layout: Layout) -> bool:
    """Whether the density of a guide opened for weights is known at draws, given noise at least."""
    return layout.implicit_parts == layout.local_parts and not layout.has_masked


def check_has_density(layout: Layout, asker: str) -> None:
    """Raise ``ValueError`` for a guide whose density is not known."""
    if not has_density(layout):
        raise ValueError(
            f"{asker}: expected a guide whose density is known at its draws; got one that can "
            "only be sampled. Draw latents from distributions given noise, or use "
            "AutoImplicit(model), without a network of one's own and with noise_dim of the "
            "latents' number"
        )


def warn_of_weights(draws: WeightedDraws, stacklevel: int) -> None:
    """Warn where draws are to be resampled by weights that cannot be trusted."""
    log_weights = draws.log_weights
    khat, variation = pareto_smooth(log_weights)[1], weight_variation(log_weights, draws.log_shares)
    if not are_reliable(khat, variation):
        warnings.warn(
            f"resample: k̂ of the weights is {khat:.2f} (limit 0.7), with "
            f"{weight_ess(log_weights):.0f} effective draws of {len(log_weights)}: a part of the "
            "posterior has too few draws",
            UserWarning,
            stacklevel=stacklevel,
        )


def draw_weighted(
    key: Array,
    program: Program,
    layout: Layout,
    num_samples: int,
    seconds: float = np.inf,
    tell: Callable[[float], None] = lambda share: None,
    is_defended: bool = True,
) -> WeightedDraws:
    """Draw from a guide whose density is known, in its coordinates, and weigh the draws.

    See :class:`Weigher`.
    """
    batch = min(BATCH, num_samples)
    return Weigher(key, program, layout, seconds, tell, is_defended, batch).draw(num_samples)


class Weigher:
    """A guide whose density is known, from which draws are taken and weighed.

    Batch after batch is drawn, until a number of seconds is over, compilation left out. ``tell`` is
    given the share that is done. If it is defended, and where the guide's noise allows it, a part
    of the draws after the first 1000 comes from farther out than the guide's own.
    """

    def __init__(
        self,
        key: Array,
        program: Program,
        layout: Layout,
        seconds: float = np.inf,
        tell: Callable[[float], None] = lambda share: None,
        is_defended: bool = True,
        batch: int = BATCH,
    ) -> None:
        self._key, self._program, self._layout, self._batch = key, program, layout, batch
        self._seconds, self._tell = seconds, tell
        self._noise = normal_noise(key, program, layout) if is_defended else ""
        self._run = _batch_program(program, layout, self._noise)
        self._columns = np.zeros(min(MOST, layout.size), int)
        self._found: list[Any] = []
        self._clock: list[float] = []

    def draw(self, num_samples: int) -> WeightedDraws:
        """So many draws; the first of them are those of the call before.

        Cost: ``num_samples`` values of the model; and 1000 densities each of a mixture over noise.
        """
        noise, layout, size = self._noise, self._layout, self._batch
        first = -(-FIRST // size) if noise else np.inf
        for number in range(len(self._found), -(-num_samples // size)):
            if number == first:
                self._columns = _columns(self._found, noise)
            is_wide = (np.arange(size) % EVERY == 0) & (number >= first)
            begin, key = time.perf_counter(), jax.random.fold_in(self._key, number)
            self._found.append(jax.device_get(self._run(key, is_wide, self._columns)))
            self._clock.append(time.perf_counter() - begin)
            self._tell(min(1.0, size * len(self._found) / num_samples))
            if sum(self._clock[1:]) > self._seconds:
                break
        (samples, log_density, log_q, is_behind), sources, valid = _joined(self._found, num_samples)
        place = np.arange(len(valid))
        is_own = (place % size % EVERY != 0) | (place // size < first)
        shares = np.zeros(len(samples))
        if not is_own.all():
            shares = log_shares(sources[noise], self._columns, 1 - is_own.mean())
        sources = {name: value[valid] for name, value in sources.items()}
        samples, log_density, log_q = samples[valid], log_density[valid], log_q[valid]
        shares, key = shares[valid], key_apart(self._key, 1)
        log_weights = log_density - log_q + shares
        searched = find_preimages(
            key, self._program, layout, sources, samples, log_q, is_behind[valid], log_weights
        )
        return WeightedDraws(
            samples,
            log_density,
            searched.log_density,
            # Far out, where the guide has no draws of its own, a density of zero is no loss.
            int((is_own & ~valid).sum()),
            searched.share,
            float(np.median(self._clock[1:] or self._clock)) / size,
            shares,
            is_own[valid],
        )


def _joined(found: list[Any], most: int) -> tuple[Any, dict[str, Any], np.ndarray]:
    """Draws and sources of batches, ``most`` of them, and which have finite numbers, (n,)."""
    draws, sources = jax.tree.map(lambda *parts: np.concatenate(parts)[:most], *found)
    valid = np.asarray(are_finite(*draws[:3]))
    check_mostly_finite(valid)
    return draws, sources, valid


def _columns(found: list[Any], noise: str) -> np.ndarray:
    """The columns of the noise to widen, by the first batches."""
    (_, log_density, log_q, _), sources, valid = _joined(found, FIRST)
    log_weights = log_density[valid].astype(float) - log_q[valid].astype(float)
    return choose_columns(sources[noise][valid], log_weights)


def unconstrained_draws(draws: WeightedDraws, push: Push | None) -> WeightedDraws:
    """The draws and the densities of unconstrained values, where these are finite; weights stay.

    ``push`` is that of the target, None if its coordinates are unconstrained values.
    """
    if push is None:
        return draws
    u, log_volume = push(draws.samples)
    finite = np.isfinite(u).all(axis=1) & np.isfinite(log_volume)
    check_mostly_finite(finite)
    return draws._replace(
        samples=u[finite],
        log_density=(draws.log_density - log_volume)[finite],
        log_q=(draws.log_q - log_volume)[finite],
        log_shares=np.broadcast_to(draws.log_shares, finite.shape)[finite],
        is_own=np.broadcast_to(draws.is_own, finite.shape)[finite],
        num_lost=draws.num_lost + int(len(finite) - finite.sum()),
    )


def _batch_program(program: Program, layout: Layout, noise: str) -> Callable[..., Any]:
    """Compile ``(key, whether widened (n,), columns) -> (draws with densities, sources)``."""

    @quick_jit
    def run(key: Array, is_wide: Array, columns: Array) -> Any:
        target = program.target(layout, key)

        def evaluate(source: Any) -> tuple[Array, ...]:
            found = at_source(draw_particle, key, program, layout)(source)
            log_q, is_behind = found.log_density, jnp.asarray(False)
            if layout.local_parts:
                local = at_source(draw_local, key, program, layout)(source)
                log_q = log_q + jnp.sum(local.log_density)
                # Scores are NaN where the map has changed its orientation.
                is_behind = jnp.any(jnp.isnan(local.scores))
            return found.flat, target.log_density(found.flat), log_q, is_behind

        sources = draw_sources(key, program, layout, is_wide.shape)
        if noise:
            wide = widen(key_apart(key, 3), sources[noise], columns)
            sources = {**sources, noise: jnp.where(is_wide[:, None], wide, sources[noise])}
        found = jax.vmap(evaluate)(sources)
        if layout.mixtures:
            more = log_mixture_ratios(key_apart(key, 2), program, layout, sources)
            found = (*found[:2], found[2] + more, found[3])
        # Keys are of no use afterwards.
        return found, sources if layout.noise_sites else {}

    return run
