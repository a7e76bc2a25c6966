"""Are these draws from that model? Two tests that need no draws of the model.

:func:`~numpyro_kscore.diagnostics.ksd` tests the local shape: the kernel Stein discrepancy of draws
from the model's score, with a p-value by wild bootstrap. It is blind to regions without draws: a
mode that the guide has dropped changes the score at its draws by next to nothing.

:func:`~numpyro_kscore.diagnostics.mode_jump_test` explores those regions. It moves every draw by a
Metropolis step that leaves the model invariant and whose proposals are long: wide random steps, and
jumps between modes that were found by ascending the model from afar. If the draws are from the
model, a draw and its new place are exchangeable; then any statistic of the difference is as likely
with the opposite sign, which makes the p-value exact. A dropped mode shows at once: draws leave for
it and none come back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_kscore._util.checks import as_points, as_scored, check_count
from numpyro_kscore.diagnostics._discrepancy import stein_kernel
from numpyro_kscore.estimators._coordinates import whiten_samples
from numpyro_kscore.kernels._median import median_distance
from numpyro_kscore.kernels._pairwise import cancels, squared_distances
from numpyro_kscore.kernels._profiles import IMQ

__all__ = ["JumpTest", "SteinTest", "compute_jump_test", "compute_ksd", "ksd", "mode_jump_test"]

NUM_BOOTSTRAP = 1_000
# Scales of wide proposals, in standard deviations of the draws.
JUMP_SCALES = (1.0, 2.0, 4.0, 8.0)
# Number of starting points of ascents, which are as far from the draws as the widest proposals.
MODE_STARTS = 64
ASCENT_STEPS = 200


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
        TypeError: if draws or scores are not floating point.
        ValueError: if the shapes differ, there are too few draws, or some are not finite.

    Cost: O(n² (d + num_bootstrap)) time, O(n (n + num_bootstrap)) memory.
    """
    x, s = as_scored(samples, scores, minimum=10)
    check_count("num_bootstrap", num_bootstrap, minimum=19)
    key = jax.random.key(0) if rng_key is None else rng_key
    return compute_ksd(x, s, key, num_bootstrap)


@partial(jax.jit, static_argnames="num_bootstrap")
def compute_ksd(x: Array, s: Array, key: Array, num_bootstrap: int = NUM_BOOTSTRAP) -> SteinTest:
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


class JumpTest(NamedTuple):
    """A test of draws by long Metropolis steps.

    Attributes:
        statistic: squared distance of the kernel means of the draws before and after, unbiased.
        p_value: under the hypothesis that the draws are from the model.
        moved: fraction of draws whose step was accepted.
        num_modes: number of modes that were found and jumped between.
    """

    statistic: Array
    p_value: Array
    moved: Array
    num_modes: Array


def mode_jump_test(
    log_density: Callable[[Array], Array],
    samples: ArrayLike,
    *,
    rng_key: Array | None = None,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> JumpTest:
    """Test whether a guide has dropped a mode of its model.

    Every draw takes one Metropolis step with a symmetric proposal: for half of the draws a Gaussian
    step of 1, 2, 4 or 8 standard deviations of the draws, for the others a jump along the line
    between two modes, in either direction. Modes are the ends of gradient ascents from 64 points
    spread as widely. The statistic is the squared maximum mean discrepancy of draws before and
    after; its p-value is from random signs of the pairs. A quarter of the draws gives the scales
    and is not tested.

    A missed mode must be found first: in more than ten dimensions or so wide random proposals find
    nothing, and all depends on the ascents. A large p-value says only that none was found.

    Args:
        log_density: the model's log density at one point, (d,) -> (), up to a constant.
        samples: independent draws, (n, d), n at least 10.
        rng_key: random key; by default ``jax.random.key(0)``.
        num_bootstrap: number of replicates, at least 19.

    Returns:
        The p-value, and how many modes were found.

    Raises:
        TypeError: if the draws are not floating point.
        ValueError: for fewer than 10 draws, or draws that are not finite.

    Cost: 2 n values of the log density and 12864 gradients; O(n² num_bootstrap) time.
    """
    x = as_points("samples", samples, minimum=10)
    check_count("num_bootstrap", num_bootstrap, minimum=19)
    key = jax.random.key(0) if rng_key is None else rng_key
    return compute_jump_test(log_density, x, key, num_bootstrap)


@partial(jax.jit, static_argnames=("log_density", "num_bootstrap"))
def compute_jump_test(
    log_density: Callable[[Array], Array],
    x: Array,
    key: Array,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> JumpTest:
    """:func:`mode_jump_test` of draws that have been checked."""
    # Scales of proposals from draws that are not tested: with scales from the tested ones a draw
    # and its new place are not quite exchangeable, and 7 % were rejected at a level of 5 %.
    untested = max(x.shape[0] // 4, 2)
    coordinates = whiten_samples(x[:untested])
    root = coordinates.root()
    z = coordinates.to_kernel(x[untested:])
    n, dim = z.shape

    def target(point: Array) -> Array:
        value = log_density(coordinates.mean + root @ point)
        return jnp.where(jnp.isfinite(value), value, -jnp.inf)

    keys = jax.random.split(key, 6)
    modes, is_mode = _modes(target, dim, keys[0], x.dtype)
    pick = jax.random.categorical(keys[1], jnp.where(is_mode, 0.0, -jnp.inf), shape=(2, n))
    jump = modes[pick[0]] - modes[pick[1]]
    scales = jnp.asarray(JUMP_SCALES, x.dtype)[
        jax.random.randint(keys[2], (n,), 0, len(JUMP_SCALES))
    ]
    step = scales[:, None] * jax.random.normal(keys[3], (n, dim), x.dtype)
    is_jump = (jnp.arange(n) % 2 == 0) & (jnp.sum(is_mode) > 1)
    proposal = z + jnp.where(is_jump[:, None], jump, step)
    # One call: every copy of the model takes as long to compile as to run.
    before, after = jax.vmap(target)(jnp.concatenate([z, proposal])).reshape(2, n)
    gain = after - before
    accept = jnp.log(jax.random.uniform(keys[4], (n,), x.dtype)) < gain
    moved = jnp.where(accept[:, None], proposal, z)

    pooled = jnp.concatenate([z, moved])
    squared = squared_distances(pooled, pooled, cancels(pooled))
    phi = IMQ()(squared / median_distance(squared) ** 2)
    # ⟨k(z'_i) - k(z_i), k(z'_j) - k(z_j)⟩: turning the sign of i is swapping z_i and z'_i.
    paired = phi[n:, n:] + phi[:n, :n] - phi[n:, :n] - phi[:n, n:]
    paired = paired * (1.0 - jnp.eye(n, dtype=x.dtype))
    return JumpTest(
        jnp.sum(paired) / (n * (n - 1)),
        _wild_bootstrap(keys[5], paired, num_bootstrap),
        jnp.mean(accept),
        jnp.sum(is_mode),
    )


class _Place(NamedTuple):
    """A point of an ascent, (d,), the model's log density there and its gradient."""

    point: Array
    height: Array
    gradient: Array


def _modes(
    target: Callable[[Array], Array], dim: int, key: Array, dtype: Any
) -> tuple[Array, Array]:
    """Ends of ascents, (m, d), and whether each is a mode of its own, (m,)."""
    first, second = jax.random.split(key)
    radius = jnp.geomspace(1.0, JUMP_SCALES[-1], MODE_STARTS).astype(dtype)
    start = radius[:, None] * jax.random.normal(first, (MODE_STARTS, dim), dtype)

    def ascend(point: Array) -> tuple[Array, Array]:
        # Steps of fixed, falling lengths along the gradient: coordinates are whitened, so that they
        # need no other scale, and modes need to be found, not polished.
        def one(best: _Place, size: Array) -> tuple[_Place, None]:
            length = jnp.linalg.norm(best.gradient)
            unit = best.gradient / jnp.where(length > 0, length, 1.0)
            proposal = best.point + size * jnp.where(jnp.isfinite(unit), unit, 0.0)
            place = _Place(proposal, *jax.value_and_grad(target)(proposal))
            is_higher = place.height > best.height
            return jax.tree.map(lambda a, b: jnp.where(is_higher, a, b), place, best), None

        sizes = jnp.geomspace(2.0, 1e-2, ASCENT_STEPS // 4).astype(dtype)
        # The first step has length 0: it evaluates the model where the ascent starts.
        low = _Place(point, jnp.asarray(-jnp.inf, dtype), jnp.zeros_like(point))
        end = lax.scan(one, low, jnp.append(0.0, jnp.tile(sizes, 4)).astype(dtype))[0]
        return end.point, end.height

    ends, heights = jax.vmap(ascend)(start)
    order = jnp.argsort(-heights)
    ends, heights = ends[order], heights[order]
    apart = squared_distances(ends, ends, jnp.asarray(True)) > 0.5 * dim**0.5
    # Keep the highest of ends near each other; drop those more than 10 nats below the best.
    earlier = jnp.tril(jnp.ones((MODE_STARTS, MODE_STARTS), bool), -1)
    is_mode = jnp.all(apart | ~earlier, axis=1) & (heights > heights[0] - 10.0)
    return ends, is_mode
