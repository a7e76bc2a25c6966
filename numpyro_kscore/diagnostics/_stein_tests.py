"""Are these draws from that model? A test of the local shape that needs no draws of the model.

The kernel Stein discrepancy of draws from the model's score has a p-value by wild bootstrap. It is
blind to regions without draws: a mode that the guide has dropped changes the score at its draws by
next to nothing.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_kscore._util.checks import as_scored, check_count
from numpyro_kscore._util.keys import check_key
from numpyro_kscore.diagnostics._discrepancy import stein_kernel

__all__ = ["SteinTest", "ksd"]

NUM_BOOTSTRAP = 1_000


class SteinTest(NamedTuple):
    """A kernel Stein discrepancy and its test.

    Attributes:
        u_statistic: unbiased, in the units of
            :func:`~numpyro_kscore.diagnostics.stein_discrepancy`: may be negative where draws and
            model agree.
        v_statistic: the mean over all pairs, a draw's with itself included: never negative, but
            biased by 1/n.
        standard_error: of the U-statistic.
        p_value: of the U-statistic, under the hypothesis that the draws are independent draws of
            the model.

    Example::

        from numpyro_kscore.diagnostics import ksd

        test = ksd(samples, -2 * samples)  # of draws that are too wide for the model
        test.p_value < 0.05  # True
        test.u_statistic, test.standard_error
    """

    u_statistic: Array
    v_statistic: Array
    standard_error: Array
    p_value: Array


def ksd(
    samples: ArrayLike,
    scores: ArrayLike,
    *,
    rng_key: Array | None = None,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> SteinTest:
    """Kernel Stein discrepancy of draws from a model, with a p-value.

    Kernel, coordinates and units are those of
    :func:`~numpyro_kscore.diagnostics.stein_discrepancy`. If the draws are from the model the
    U-statistic is degenerate, and ``Σ_{i≠j} ε_i ε_j u_ij`` with random signs ε has its distribution
    (Liu, Lee and Jordan 2016; Chwialkowski, Strathmann and Gretton 2016).

    Args:
        samples: independent draws, (n, d), n at least 10.
        scores: the model's score at them, (n, d).
        rng_key: random key for the signs; by default ``jax.random.key(0)``.
        num_bootstrap: number of replicates B, at least 19; the p-value is a multiple of 1/(B + 1).

    Returns:
        The squared discrepancy, in standard deviations squared, its standard error and p-value.

    Raises:
        TypeError: if draws or scores are not floating point, or the key is not a random key.
        ValueError: if the shapes differ, there are too few draws, or some are not finite.

    Cost: O(n² (d + num_bootstrap)) time, O(n (n + num_bootstrap)) memory.

    Example::

        from numpyro_kscore.diagnostics import ksd

        ksd(samples, -samples).p_value > 0.05  # True: the model is right
        ksd(samples, 0.5 - samples).p_value < 0.05  # True: its mean is 0.5 and not 0
    """
    x, s = as_scored(samples, scores, minimum=10)
    check_count("num_bootstrap", num_bootstrap, minimum=19)
    key = jax.random.key(0) if rng_key is None else rng_key
    check_key("rng_key", key)
    return _ksd(x, s, key, num_bootstrap)


@partial(jax.jit, static_argnames="num_bootstrap")
def _ksd(x: Array, s: Array, key: Array, num_bootstrap: int = NUM_BOOTSTRAP) -> SteinTest:
    """:func:`ksd` of draws that have been checked."""
    n = x.shape[0]
    kernel, unit, discrepancy = stein_kernel(x, s, jnp.ones(n, bool))
    apart = kernel * (1.0 - jnp.eye(n, dtype=x.dtype))
    return SteinTest(
        discrepancy.value,
        jnp.mean(kernel) / unit,
        discrepancy.standard_error,
        _wild_bootstrap(key, apart, num_bootstrap),
    )


def _wild_bootstrap(key: Array, pairs: Array, num_bootstrap: int) -> Array:
    """P-value of the sum of a matrix (n, n) with zero diagonal, by random signs of its rows."""
    signs = jax.random.rademacher(key, (num_bootstrap, pairs.shape[0]), pairs.dtype)
    replicates = jnp.sum((signs @ pairs) * signs, axis=1)
    exceeding = jnp.sum(replicates >= jnp.sum(pairs))
    return (1 + exceeding) / (1 + num_bootstrap)
