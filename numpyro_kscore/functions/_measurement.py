"""Inference over functions: their values at measurement points are an ordinary latent site.

A random function has no density, but its values at m points do, and two random functions have the
same distribution if their values do at all finite sets of points. So the latent of a model is the
vector f of values at a *measurement set*, drawn anew at every step: rows of the data, which have a
likelihood, and other points, which have only the prior. The guide is any network with noise,
evaluated there; the prior is any distribution of f, such as a Gaussian process, or a sampler. The
objective is that of Sun, Zhang, Shi and Grosse (2019); docs/functions has an example, and says
where it is a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro

from numpyro_kscore._util.checks import check_count, check_positive
from numpyro_kscore.estimators._density.exponential_family import KernelExponentialFamily
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.functions._learned_prior import as_inputs, draw_functions

# Names of the plate that draws points of the pool.
POOL = "{}_pool"


class Measurement(NamedTuple):
    """A measurement set.

    Attributes:
        points: inputs at which functions are evaluated, (B + M, ...): rows of the data first.
        rows: indices of those rows in the data, (B,).
        data: the plate of those rows; observations in it count N/B times.

    Example::

        from numpyro_kscore.functions import measure

        x, pool = jnp.linspace(0.0, 1.0, 50), jnp.linspace(-1.0, 2.0, 200)
        with numpyro.handlers.seed(rng_seed=0):
            at = measure(x, 20, pool, 10)
        at.points  # (30,)
        at.of_data(jnp.sin(at.points))  # (20,)
    """

    points: jax.Array
    rows: jax.Array
    data: Any

    def of_data(self, values: jax.Array) -> jax.Array:
        """The part of values (B + M, ...) at the rows of the data, (B, ...)."""
        return values[: self.rows.shape[0]]


def measure(
    x: Any,
    batch_size: int | None = None,
    pool: Any = None,
    num_points: int | None = None,
    *,
    name: str = "data",
) -> Measurement:
    """Draw a measurement set: a minibatch of the data, and points of a pool.

    Call it first in model and guide, with the same arguments. Both then see the same set, and so do
    all particles of a step of :class:`~numpyro_kscore.ImplicitELBO`; each step sees a new set. It
    is made of two subsampled plates, which are plain NumPyro.

    Args:
        x: inputs of the data, (N, ...).
        batch_size: B, rows of the data in a set; all by default.
        pool: further inputs, (K, ...), such as many draws from the region where functions matter,
            or a test set's inputs; none by default.
        num_points: M, points of the pool in a set; all by default.
        name: name of the plate of the data. The plate of the pool is ``name_pool``.

    Returns:
        The points, (B + M, ...), rows of the data first, and the plate of those rows.

    Raises:
        TypeError: for counts that are not integers.
        ValueError: for counts above the number of inputs, or inputs of different shapes.

    Example::

        from numpyro_kscore.functions import measure


        def curve(x, values, pool):
            at = measure(x, 20, pool, 10)
            f = numpyro.sample("f", dist.Normal(0, 1).expand(at.points.shape).to_event(1))
            with at.data:
                numpyro.sample("y", dist.Normal(at.of_data(f), 0.1), obs=values[at.rows])


        x, pool = jnp.linspace(0.0, 1.0, 50), jnp.linspace(-1.0, 2.0, 200)
        seeded = numpyro.handlers.seed(curve, 0)
        trace = numpyro.handlers.trace(seeded).get_trace(x, jnp.sin(x), pool)
        trace["f"]["value"]  # (30,)
    """
    x = as_inputs("x", x)
    batch_size = _count("batch_size", batch_size, x.shape[0])
    data = numpyro.plate(name, x.shape[0], subsample_size=batch_size)
    with data as rows:
        points = x[rows]
    if pool is None:
        if num_points is not None:
            raise ValueError(
                f"num_points: expected none without a pool; got {num_points}. Give the pool that "
                "they are drawn from"
            )
        return Measurement(points, rows, data)
    pool = as_inputs("pool", pool)
    if pool.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"pool: expected inputs of shape {x.shape[1:]}, as those of the data; got "
            f"{pool.shape[1:]}"
        )
    num_points = _count("num_points", num_points, pool.shape[0])
    with numpyro.plate(POOL.format(name), pool.shape[0], subsample_size=num_points) as picked:
        points = jnp.concatenate([points, pool[picked].astype(points.dtype)])
    return Measurement(points, rows, data)


def sampled_prior(
    sampler: Callable[[jax.Array, jax.Array], jax.Array],
    points: jax.Array,
    num_draws: int = 500,
    *,
    jitter: Any,
    estimator: ScoreEstimator | None = None,
) -> KernelExponentialFamily:
    """A prior for nearly Gaussian functions that can only be drawn, by their values at some points.

    The draws are new at every step and the same for all particles of it; they are not
    differentiated. The points may change from step to step. Functions may have no density even at
    finitely many points, so white noise is added, which the guide needs too:
    ``dist.Normal(network(points), jitter)``.

    A few hundred draws give the covariance and little more: for piecewise-constant functions the
    estimate acted like the Gaussian of the same covariance. For functions far from Gaussian, at
    points that stay the same, use :func:`~numpyro_kscore.functions.learn_prior`.

    Args:
        sampler: ``(key, points (m, ...)) -> values (m,)`` of one random function.
        points: inputs, (m, ...).
        num_draws: number of functions the estimate is made from, several times m.
        jitter: standard deviation of the noise, in units of the values.
        estimator: a :class:`~numpyro_kscore.ScoreEstimator` with a Gaussian base; the default
            departs from the Gaussian only as far as held-out functions support.

    Returns:
        A distribution of the values, event shape (m,), known up to a constant.

    Raises:
        TypeError: for a count that is not an integer.
        ValueError: for values of another shape than (m,), or a jitter that is not positive.

    Cost: O(num_draws²) a solver step and O(num_draws) a particle.

    Example::

        from numpyro_kscore.functions import sampled_prior


        def wave(key, x):
            return jnp.sin(6.0 * (x + random.uniform(key)))


        def model(x):
            return numpyro.sample("f", sampled_prior(wave, x, 200, jitter=0.1))


        f = numpyro.handlers.seed(model, 0)(jnp.linspace(0.0, 1.0, 8))
        f  # (8,)
    """
    check_count("num_draws", num_draws, minimum=2)
    check_positive("jitter", jitter)
    key, noise_key = jax.random.split(numpyro.prng_key())
    values = draw_functions(sampler, key, points, num_draws)
    values = values + jitter * jax.random.normal(noise_key, values.shape, values.dtype)
    return KernelExponentialFamily(values, estimator)


def _count(name: str, count: int | None, size: int) -> int:
    if count is None:
        return size
    check_count(name, count)
    if count > size:
        raise ValueError(f"{name}: expected at most the number of inputs, {size}; got {count}")
    return int(count)
