"""Volatility of ten years, and a trend that wanders with seasons."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random

from benchmarks.accuracy.large.compared import LargePosterior
from benchmarks.accuracy.targets import Draws, Target
from benchmarks.accuracy.textbook.coordinates import to_arrays

__all__ = ["trend", "volatility"]


def volatility() -> LargePosterior:
    """2500 daily returns whose log volatility is an autoregression, non-centered: d = 2503."""
    rng = np.random.default_rng(531)
    days = 2_500
    path = np.zeros(days)
    path[0] = rng.normal(0, 0.2 / np.sqrt(1 - 0.97**2))
    for t in range(1, days):
        path[t] = 0.97 * path[t - 1] + 0.2 * rng.normal()
    returns = np.round(np.exp((-0.2 + path) / 2) * rng.normal(size=days), 4)

    def priors() -> tuple[Array, Array, Array, Array]:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        share = numpyro.sample("share", dist.Beta(20, 1.5))
        scale = numpyro.sample("scale", dist.HalfNormal(0.5))
        with numpyro.plate("days", days):
            z = numpyro.sample("z", dist.Normal(0, 1))
        return mean, 2 * share - 1, scale, z

    def moves(lag: Array, scale: Array, z: Array) -> Array:
        first = scale / jnp.sqrt(1 - lag**2)
        return jnp.concatenate([first[..., None] * z[..., :1], scale[..., None] * z[..., 1:]], -1)

    def path_of(lag: Array, scale: Array, z: Array) -> Array:
        def step(last: Array, move: Array) -> tuple[Array, Array]:
            here = lag * last + move
            return here, here

        return lax.scan(step, jnp.zeros_like(lag), moves(lag, scale, z).T)[1].T

    def model(returns: Array) -> None:
        mean, lag, scale, z = priors()
        path = path_of(lag, scale, z)
        with numpyro.plate("returns_of_days", days):
            numpyro.sample("returns", dist.Normal(0, jnp.exp((mean + path) / 2)), obs=returns)

    def effects(draws: Draws) -> Array:
        path = path_of(2 * draws["share"] - 1, draws["scale"], draws["z"])
        return draws["mean"][:, None] + path

    return LargePosterior(
        Target("volatility_2500", model, to_arrays(returns)),
        scales=("mean", "share", "scale"),
        effects=effects,
        rival_warmup=200,
    )


def trend(days: int = 1_500) -> LargePosterior:
    """1500 days around a level whose slope wanders, with weekdays and seasons: d = 3018.

    NUTS sums out level and slope by Kalman's filter; they are drawn given the rest.
    """
    rng = np.random.default_rng(532)
    slopes = 0.02 + np.cumsum(rng.normal(0, 0.004, days - 1))
    level = 20 + np.concatenate([[0.0], np.cumsum(slopes + rng.normal(0, 0.3, days - 1))])
    day = np.arange(days)
    angles = 2 * np.pi * day[:, None] * np.arange(1, 4) / 365.25
    waves = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
    weekday = rng.normal(0, 0.8, 7)
    y = level + weekday[day % 7] + waves @ [2.0, 0.5, 0.0, -1.0, 0.3, 0.2]
    y = np.round(y + rng.normal(0, 1.0, days), 2)

    def priors() -> Draws:
        normals = {"first_level": (20, 20), "first_slope": (0, 0.1)}
        found = {name: numpyro.sample(name, dist.Normal(*prior)) for name, prior in normals.items()}
        found |= {
            name: numpyro.sample(name, dist.HalfNormal(scale))
            for name, scale in _TREND_SCALES.items()
        }
        found["wave"] = numpyro.sample("wave", dist.Normal(0, 3).expand([6]).to_event(1))
        with numpyro.plate("weekdays", 7):
            found["weekday"] = numpyro.sample("weekday", dist.Normal(0, found["weekday_scale"]))
        return found

    def seasons(found: Draws, waves: Array) -> Array:
        return found["weekday"][..., day % 7] + found["wave"] @ waves.T

    def path(found: Draws) -> tuple[Array, Array]:
        """Levels (..., 1500) and slopes (..., 1499)."""
        slopes = found["first_slope"][..., None] + jnp.cumsum(
            found["slope_scale"][..., None] * found["slope_z"], -1
        )
        moves = slopes + found["level_scale"][..., None] * found["level_z"]
        first = found["first_level"][..., None]
        moves = jnp.concatenate([jnp.zeros_like(first), jnp.cumsum(moves, -1)], -1)
        return first + moves, slopes

    def model(waves: Array, y: Array) -> None:
        found = priors()
        with numpyro.plate("moves", days - 1):
            found["level_z"] = numpyro.sample("level_z", dist.Normal(0, 1))
            found["slope_z"] = numpyro.sample("slope_z", dist.Normal(0, 1))
        mean = path(found)[0] + seasons(found, waves)
        with numpyro.plate("days", days):
            numpyro.sample("y", dist.Normal(mean, found["noise"]), obs=y)

    def filtered(found: Draws, rest: Array) -> tuple[Array, tuple[Array, Array]]:
        """The log density of ``rest``; means (1500, 2) and covariances of states given the past.

        A state is a level and the slope from the day before to it, of which the first is not used.
        """
        noise, sizes = found["noise"] ** 2, (found["level_scale"], found["slope_scale"])

        def step(state: tuple[Array, Array], value: Array) -> tuple[tuple[Array, Array], Any]:
            mean, cov = state
            return see(_GO @ mean, _GO @ cov @ _GO.T + _innovations(*sizes), value)

        def see(mean: Array, cov: Array, value: Array) -> tuple[tuple[Array, Array], Any]:
            total = cov[0, 0] + noise
            error = value - mean[0]
            gain = cov[:, 0] / total
            state = (mean + gain * error, cov - jnp.outer(gain, cov[0]))
            return state, (-0.5 * (error**2 / total + jnp.log(2 * jnp.pi * total)), *state)

        start = jnp.stack([found["first_level"], found["first_slope"]])
        state, first = see(start, jnp.zeros((2, 2)), rest[0])
        _, later = lax.scan(step, state, rest[1:])
        logs, means, covs = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
        return logs.sum(), (means, covs)

    def nuts_model(waves: Array, y: Array) -> None:
        found = priors()
        numpyro.factor("y", filtered(found, y - seasons(found, waves))[0])

    def from_nuts(draws: Draws) -> Draws:
        """Draws of the states, backward in time, and the moves between them."""
        wide = jnp.asarray(waves, draws["noise"].dtype)

        def one(found: Draws, key: Array) -> Draws:
            sizes = (found["level_scale"], found["slope_scale"])
            rest = jnp.asarray(np.float32(y), wide.dtype) - seasons(found, wide)
            means, covs = filtered(found, rest)[1]
            noise = random.normal(key, (days, 2), wide.dtype)

            def back(after: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
                mean, cov, z = now
                ahead = _GO @ cov @ _GO.T + _innovations(*sizes)
                gain = jnp.linalg.solve(ahead, _GO @ cov).T
                mean = mean + gain @ (after - _GO @ mean)
                state = mean + _root(cov - gain @ ahead @ gain.T) @ z
                return state, state

            last = means[-1] + _root(covs[-1]) @ noise[-1]
            # The first state is a parameter.
            _, states = lax.scan(back, last, (means[1:-1], covs[1:-1], noise[1:-1]), reverse=True)
            first = jnp.stack([found["first_level"], found["first_slope"]])
            states = jnp.concatenate([first[None], states, last[None]])
            slope_moves = jnp.diff(states[:, 1]) / sizes[1]
            level_moves = (jnp.diff(states[:, 0]) - states[1:, 1]) / sizes[0]
            return found | {"level_z": level_moves, "slope_z": slope_moves}

        keys = random.split(random.key(7), len(draws["noise"]))
        return lax.map(lambda both: one(*both), (draws, keys), batch_size=250)

    scales = ("first_level", "first_slope", *_TREND_SCALES, "wave")
    return LargePosterior(
        Target(
            "trend", model, to_arrays(waves, y), nuts_model=nuts_model, from_nuts=from_nuts
        ),
        scales=scales,
        effects=lambda draws: jnp.concatenate([draws["weekday"], *path(draws)], 1),
        near={"level_scale": 0.3, "slope_scale": 0.004, "noise": 1.0, "weekday_scale": 0.8},
        others=("first_level", "first_slope", "wave", "weekday"),
        # The loop over days costs as much for all chains as for one.
        chain_method="vectorized",
        rival_warmup=50,
    )  # fmt: skip


_TREND_SCALES = {"level_scale": 1.0, "slope_scale": 0.02, "noise": 3.0, "weekday_scale": 2.0}
_GO: Any = np.array(
    [[1.0, 1.0], [0.0, 1.0]]
)  # a state to that of the next day, without innovations


def _innovations(level_scale: Array, slope_scale: Array) -> Array:
    """Covariance of a day's innovations: that of the slope moves the level too."""
    return slope_scale**2 * jnp.ones((2, 2)) + level_scale**2 * jnp.diag(jnp.array([1.0, 0.0]))


def _root(covariance: Array) -> Array:
    """The Cholesky factor of a matrix (2, 2)."""
    a = jnp.sqrt(covariance[0, 0])
    b = covariance[1, 0] / a
    c = jnp.sqrt(jnp.maximum(covariance[1, 1] - b**2, 0.0))
    return jnp.array([[a, 0.0], [b, c]])
