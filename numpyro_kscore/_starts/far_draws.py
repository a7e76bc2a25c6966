"""Draws of a start with widened noise, by which weights see tails that it has no draws for."""

from __future__ import annotations

import numpy as np

from numpyro_kscore._model.defense import FARTHEST, FIRST, WIDTH, choose_columns, log_shares
from numpyro_kscore._model.draws import WeightedDraws
from numpyro_kscore._starts.start import ExactDraws, draws_at
from numpyro_kscore._transports.transport import Chain, Evaluate

# Draws from farther out for each of the start's own.
TIMES = 2


def with_far_draws(
    own: ExactDraws, evaluate: Evaluate, transport: Chain, rng: np.random.Generator
) -> ExactDraws:
    """The draws of a start, weighed together with twice as many that have one coordinate widened.

    The coordinates that take turns are those on which the first weights depend most, as for other
    guides (``_model.defense``). ``evaluate`` gives the energies and gradients that the draws are
    by. Cost: a gradient for each draw.
    """
    columns = choose_columns(own.points[:FIRST], own.gaps[:FIRST])
    shape = TIMES * len(own.points), own.points.shape[1]
    points = np.concatenate([own.points, _widened(rng, shape, columns)])
    far = draws_at(evaluate, transport, points[len(own.points) :])
    log_density, gaps, samples = (
        np.concatenate(pair)
        for pair in (
            (own.log_density, far.log_density),
            (own.gaps, far.gaps),
            (own.samples, far.samples),
        )
    )
    finite = np.isfinite(gaps) & np.all(np.isfinite(samples), axis=1)
    is_own = np.arange(len(points)) < len(own.points)
    shares = log_shares(points, columns, TIMES / (1 + TIMES))
    weighted = WeightedDraws(
        samples[finite],
        log_density[finite],
        (log_density - gaps)[finite],
        int(np.sum(~finite)),
        0.0,
        log_shares=shares[finite],
        is_own=is_own[finite],
    )
    return own._replace(weighted=weighted)


def _widened(rng: np.random.Generator, shape: tuple[int, ...], columns: np.ndarray) -> np.ndarray:
    """Standard normal noise (n, d), each row with one of the columns drawn from farther out."""
    noise = rng.standard_normal(shape)
    wide = WIDTH * rng.standard_normal(shape[0])
    while np.any(np.abs(wide) > FARTHEST):
        again = WIDTH * rng.standard_normal(len(wide))
        wide = np.where(np.abs(wide) > FARTHEST, again, wide)
    noise[np.arange(len(noise)), rng.choice(columns, len(noise))] = wide
    return noise
