"""Draws with widened noise, by which weights see tails that a guide itself has no draws for.

A guide's own draws tell nothing of what lies beyond them. So a part of the draws that are weighed
has one coordinate of its normal noise drawn from a wider distribution: a defensive mixture, whose
density is known wherever the guide's is (Hesterberg 1995). Which coordinates take turns is told by
the first draws: those whose noise says most about how far a weight is from the others.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_kscore._model.dependencies import layers
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.program import Program, run_guide
from numpyro_kscore._util.compiling import quick_jit

# One of so many draws is widened, after so many first ones; the standard deviation of the widened
# noise, and where it ends: farther out models lose their precision before their mass.
EVERY, FIRST, WIDTH, FARTHEST = 4, 1_000, 2.0, 6.0
# Most coordinates that take turns. Among more, each had too few draws to tell.
MOST = 4
# Log weights beyond these quantiles count as at them, when coordinates are chosen.
QUANTILES = (0.005, 0.995)
# Distributions around another one that leave its density as it is.
SHAPED = (dist.Independent, dist.ExpandedDistribution)


def normal_noise(key: Array, program: Program, layout: Layout) -> str:
    """The name of a noise site of standard normal coordinates, (d,), or an empty string."""

    def look(key: Array) -> dict[str, Array]:
        trace = run_guide(key, program)
        found = {}
        for name in layout.noise_sites:
            *outer, inner = layers(trace[name]["fn"])
            is_plain = all(isinstance(layer, SHAPED) for layer in outer)
            if is_plain and isinstance(inner, dist.Normal) and jnp.ndim(trace[name]["value"]) == 1:
                found[name] = jnp.all((inner.loc == 0) & (inner.scale == 1))
        return found

    if not layout.noise_sites or layout.mixtures:
        return ""
    standard = jax.device_get(quick_jit(look, runs_once=True)(key))
    return next((name for name, is_standard in standard.items() if is_standard), "")


def widen(key: Array, noise: Array, columns: Array) -> Array:
    """Noise (n, d), each row with one of some columns (k,) drawn from farther out."""
    first, second = jax.random.split(key)
    count, far = len(noise), FARTHEST / WIDTH
    wide = WIDTH * jax.random.truncated_normal(first, -far, far, (count,), noise.dtype)
    return noise.at[jnp.arange(count), jax.random.choice(second, columns, (count,))].set(wide)


def log_shares(noise: np.ndarray, columns: np.ndarray, share: float) -> np.ndarray:
    """The log density of noise (n, d) less that of the mixture in which a share is widened, (n,).

    The share counts all draws, also those before any were widened (balance heuristic).
    """
    z = np.asarray(noise[:, columns], float)
    inside = math.erf(FARTHEST / WIDTH / 2**0.5)
    ratios = np.exp(0.5 * z**2 * (1 - WIDTH**-2)) / WIDTH / inside
    ratios = np.where(np.abs(z) <= FARTHEST, ratios, 0.0).mean(axis=1)
    return np.asarray(-np.log((1 - share) + share * ratios))


def choose_columns(noise: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    """The columns of noise (n, d) on which distances of log weights (n,) depend most, (k,)."""
    bounded = np.clip(log_weights, *np.quantile(log_weights, QUANTILES))
    apart = np.abs(bounded - bounded.mean())
    apart = (apart - apart.mean()) / max(float(apart.std()), np.finfo(float).tiny)
    z = np.asarray(noise, float)
    # Hermite polynomials are uncorrelated under the normal distribution.
    terms: tuple[Any, ...] = (z, (z**2 - 1) / 2**0.5, (z**3 - 3 * z) / 6**0.5)
    explained = sum(np.mean(term * apart[:, None], axis=0) ** 2 for term in terms)
    return np.argsort(-np.asarray(explained))[:MOST]
