"""Entropy and Kullback-Leibler divergence from samples, by cross-fitted log densities."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_kscore._util.checks import as_points, check_count
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import check_key, host_generator
from numpyro_kscore.estimators._base.copies import effective_number, find_copies
from numpyro_kscore.estimators._base.standardization import whiten_samples
from numpyro_kscore.estimators._density.normalization import Normalization
from numpyro_kscore.estimators._density.stacking import log_densities, stacked, stacking_weights

# Parts that the samples are dealt into: fits to all but one, and to halves, from which the error
# of a fit to all is extrapolated.
FOLDS = 4
FEWEST = 16


class InformationEstimate(NamedTuple):
    """An entropy or a divergence in nats.

    Attributes:
        value: the estimate.
        standard_error: of the averages over samples, the extrapolation and the normalizing
            constants, combined.
        extrapolation: what the value gained by extrapolating from fits to parts of the samples: a
            measure of the remaining bias, which decreases with n at an unknown rate.
        effective_sample_size: the least among the importance samples behind the constants; below a
            hundred the value is in doubt.

    Example::

        from numpyro_kscore.estimators import entropy

        estimate = entropy(samples)
        estimate.value  # 2.8
        estimate.standard_error < 0.1  # True
    """

    value: jax.Array
    standard_error: jax.Array
    extrapolation: jax.Array
    effective_sample_size: jax.Array


class _Fitted(NamedTuple):
    """Log densities of one distribution from fits to three quarters and to halves of its samples.

    They are those held out, (2, n), and means over the fits at other points, (2, m), with the
    variance of the mean over these points between fits, and that of the extrapolated logarithm of
    the normalizing constants. The last number is that of distinct samples.
    """

    held_out: jax.Array
    elsewhere: jax.Array
    fit_variance: jax.Array
    constant_variance: jax.Array
    effective: jax.Array
    distinct: jax.Array


def entropy(samples: Any, *, key: Any = None, num_draws: int = 4096) -> InformationEstimate:
    """The differential entropy ``-E log p`` of the distribution of some samples, in nats.

    Samples are dealt into four parts. The log density at each is that of a mixture of estimates
    fitted to the other parts: a normalized kernel exponential family, kernel density estimates and
    Student t distributions, with the weights of greatest held-out likelihood. Minus its mean
    exceeds the entropy by the divergence of the fit; from fits to three quarters and to halves of
    the samples the excess is extrapolated to zero as 1/n, which is its rate where a smooth
    parametric fit is good, and removes a part of it otherwise. What remains is not in the standard
    error: for a few hundred draws of a distribution far from Gaussian in ten dimensions the value
    was too large by two to three of them (docs/accuracy).

    Args:
        samples: i.i.d. draws, shape (n, d), n ≥ 16, in any units; of a Markov chain, thinned until
            they are nearly independent. A discrete or collapsed distribution has no entropy: the
            value is then low, and means nothing.
        key: random key of the order of the samples and of the normalizing constants; by default
            a fixed one.
        num_draws: number of draws for each normalizing constant.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: for a wrong shape, too few samples, or samples that are not finite.
        TypeError: for integer samples, or a key that is not a random key.

    Cost: six fits of a ``KernelExponentialFamily``, O(n² d) each. Not for use under ``jit``.

    Example::

        from numpyro_kscore.estimators import entropy

        estimate = entropy(samples)
        estimate.value  # 2.8
    """
    x, key = _checked("samples", samples, key, num_draws)
    fitted = _cross_fit(x, x[:0], key, num_draws)
    each, gain = _extrapolated(fitted.held_out)
    return _estimate(-each, (-gain,), fitted.constant_variance, fitted.effective, fitted.distinct)


def kl_divergence(
    samples_p: Any, samples_q: Any, *, key: Any = None, num_draws: int = 4096
) -> InformationEstimate:
    """The Kullback-Leibler divergence ``E_p log(p/q)`` between the distributions of two samples.

    ``E_p log p`` is minus the :func:`entropy`. For ``E_p log q`` densities are fitted to three
    quarters of the samples of q and evaluated at those of p; how much the fits differ gives its
    error. Where p has draws that q has none near, the estimate rests on the fitted tails of q,
    and is too small for any method. The value may be negative by its error.

    Args:
        samples_p: i.i.d. draws, shape (n, d), n ≥ 16.
        samples_q: i.i.d. draws, shape (m, d), m ≥ 16, in the same units.
        key: random key, see :func:`entropy`, as for errors.
        num_draws: number of draws for each normalizing constant.

    Returns:
        The estimate with its standard error.

    Cost: twelve fits, O((n² + m² + n m) d).

    Example::

        from numpyro_kscore.estimators import kl_divergence

        estimate = kl_divergence(samples[:100], samples[100:] + 1.0)
        abs(estimate.value - 1.0) < 3 * estimate.standard_error  # True
    """
    p, key = _checked("samples_p", samples_p, key, num_draws)
    q, _ = _checked("samples_q", samples_q, key, num_draws, dim=p.shape[1])
    q = q.astype(p.dtype)
    first, second = random.split(key)
    of_p = _cross_fit(p, p[:0], first, num_draws)
    of_q = _cross_fit(q, p, second, num_draws)
    each_p, gain_p = _extrapolated(of_p.held_out)
    each_q, gain_q = _extrapolated(of_q.elsewhere)
    return _estimate(
        each_p - each_q,
        (gain_p, -gain_q),
        of_p.constant_variance + of_q.constant_variance + of_q.fit_variance,
        jnp.minimum(of_p.effective, of_q.effective),
        of_p.distinct,
    )


def _checked(
    name: str, samples: Any, key: Any, num_draws: int, dim: int | None = None
) -> tuple[jax.Array, jax.Array]:
    check_count("num_draws", num_draws, minimum=4)
    key = random.key(0) if key is None else key
    check_key("key", key)
    return as_points(name, samples, dim=dim, minimum=FEWEST), key


def _cross_fit(x: jax.Array, elsewhere: jax.Array, key: jax.Array, num_draws: int) -> _Fitted:
    """Fits to three quarters and to halves, their log densities at the other samples and others."""
    order_key, *keys = random.split(key, 1 + FOLDS + 2)
    # Random parts: draws may come in an order. Copies stay together.
    order = host_generator(order_key).permutation(x.shape[0])
    own = np.asarray(_copies(x))
    order = order[np.argsort(np.argsort(order)[own][order], kind="stable")]
    shuffled, others = np.asarray(x)[order], np.asarray(elsewhere)
    parts = [
        _fit_folds(shuffled, others, fold_keys, num_draws)
        for fold_keys in (keys[:FOLDS], keys[FOLDS:])
    ]
    return _fitted(parts, np.argsort(order), jnp.asarray(own))


@quick_jit
def _copies(x: jax.Array) -> jax.Array:
    return find_copies(whiten_samples(x).to_kernel(x))


def _fit_folds(
    x: np.ndarray, elsewhere: np.ndarray, keys: list[jax.Array], num_draws: int
) -> tuple[tuple[jax.Array, ...], tuple[Normalization, ...]]:
    """Fits to all but each of as many parts as keys: values at that part, and elsewhere."""
    n, count = x.shape[0], len(keys)
    size = -(-n // count)
    found = []
    for own, key in zip(np.array_split(np.arange(n), count), keys, strict=True):
        # Equal sizes make all fits one program; where count does not divide n, some
        # fits do without one more sample, and values at copies are dropped.
        train = np.setdiff1d(np.arange(n), own)[: n - size]
        points = np.concatenate([x[np.resize(own, size)], elsewhere])
        both = jnp.asarray(x[train]), jnp.asarray(points)
        found.append(log_densities(*both, key, num_draws=num_draws))
    values, constants = zip(*found, strict=True)
    return values, constants


@jax.jit
def _fitted(
    parts: list[tuple[tuple[jax.Array, ...], tuple[Normalization, ...]]],
    inverse: jax.Array,
    own: jax.Array,
) -> _Fitted:
    """The results of :func:`_fit_folds` for two numbers of parts, in the first order."""
    n = inverse.shape[0]
    held_out, away, fit_variance, constant_variance, effective = zip(
        *(_mixed(n, *found) for found in parts), strict=True
    )
    return _Fitted(
        jnp.stack(held_out)[:, inverse],
        jnp.stack(away),
        fit_variance[0],
        # The variance of three times the first less two times the second: see _extrapolated.
        9.0 * constant_variance[0] + 4.0 * constant_variance[1],
        jnp.minimum(*effective),
        effective_number(own),
    )


def _mixed(
    n: int, fits: tuple[jax.Array, ...], constants: tuple[Normalization, ...]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    count = len(fits)
    size = -(-n // count)
    rows = np.array_split(np.arange(n), count)
    together = jnp.concatenate(
        [values[: own.shape[0]] for values, own in zip(fits, rows, strict=True)]
    )
    log_weights = stacking_weights(together)
    others = jnp.stack([stacked(values[size:], log_weights) for values in fits])
    means = jnp.mean(others, axis=1) if others.shape[1] else jnp.zeros(count)
    # The jackknife over parts.
    fit_variance = (count - 1) * jnp.var(means)
    # One of the estimates in the mixture has such a constant.
    share = jnp.mean(jax.nn.softmax(together + log_weights, axis=1)[:, 0])
    errors = jnp.stack([constant.standard_error for constant in constants])
    return (
        stacked(together, log_weights),
        jnp.mean(others, axis=0),
        fit_variance,
        jnp.square(share) * jnp.mean(jnp.square(errors)) / count,
        jnp.min(jnp.stack([constant.effective_sample_size for constant in constants])),
    )


@jax.jit
def _extrapolated(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values at each point extrapolated from two sizes of fits, (2, n) -> (n,), and their gain.

    With an error c/m of a fit to m samples it is 4c/(3n) and 2c/n: twice the difference is the
    first of them.
    """
    each = 3.0 * pair[0] - 2.0 * pair[1]
    return each, jnp.mean(each) - jnp.mean(pair[0])


@jax.jit
def _estimate(
    each: jax.Array,
    gains: tuple[jax.Array, ...],
    variance: jax.Array,
    effective: jax.Array,
    distinct: jax.Array,
) -> InformationEstimate:
    """The mean, with the variance of the samples, of fits, and half of what was extrapolated."""
    variance = variance + jnp.var(each, ddof=1) / distinct
    for gain in gains:
        variance = variance + jnp.square(0.5 * gain)
    total = sum(gains[1:], gains[0])
    return InformationEstimate(jnp.mean(each), jnp.sqrt(variance), total, effective)
