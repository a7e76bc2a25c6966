"""Coordinates for NUTS in which a posterior of thousands of latents is nearly standard normal.

Given scales near the truth, the precision of the latents at their mode is that of an arrow: a
diagonal for *local* latents, which are independent given the others, and a border of few others.
So its inverse factor is cheap, to compute and at every gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import log_density
from scipy.linalg import solve_triangular
from scipy.optimize import minimize

from benchmarks.accuracy.references import widened
from benchmarks.accuracy.targets import Draws, Target, flat_prior

__all__ = ["NEAR", "whitened"]

WHITE, NEAR = "white", "near"  # the sites of NUTS
_SPREAD = 0.3  # of the unconstrained values of scales, for starts within two of zero


def whitened(
    target: Target, local: Sequence[str], others: Sequence[str], near: Mapping[str, Any]
) -> Target:
    """The same posterior, in other coordinates for NUTS.

    Args:
        target: its latents that are whitened are real numbers.
        local: names of sites that are independent given all others, in ``nuts_model`` if there is
            one. The last axis of a site with two may be of dependent numbers.
        others: names of further sites to whiten.
        near: values of all other sites, such as scales, near the posterior. Their unconstrained
            values stay coordinates; the mode of the others moves with them, to first order.
    """
    model = target.nuts_model or target.model
    args = tuple(widened(array) for array in target.args)
    fixed = {name: jnp.asarray(value, float) for name, value in near.items()}
    seeded = handlers.seed(handlers.substitute(model, data=fixed), random.key(0))
    trace = handlers.trace(seeded).get_trace(*args)
    names = (*local, *others)
    zeros = [jnp.zeros_like(trace[name]["value"], float) for name in names]
    start, unravel = ravel_pytree(zeros)
    maps = {name: biject_to(trace[name]["fn"].support) for name in near}
    origin, unravel_near = ravel_pytree([maps[name].inv(fixed[name]) for name in near])

    def to_near(t: Array) -> tuple[Draws, Array]:
        """Values of the sites, and the log determinant of their Jacobian."""
        free = dict(zip(near, unravel_near(origin + _SPREAD * t), strict=True))
        sites = {name: maps[name](x) for name, x in free.items()}
        logs = [maps[n].log_abs_det_jacobian(x, sites[n]).sum() for n, x in free.items()]
        return sites, sum(logs, jnp.zeros(()))

    def to_sites(u: Array) -> Draws:
        return dict(zip(names, unravel(u), strict=True))

    def energy(u: Array, t: Array) -> Array:
        return -log_density(model, args, {}, to_near(t)[0] | to_sites(u))[0]

    here = jnp.zeros_like(origin)
    rise = jax.jit(jax.value_and_grad(energy))

    def evaluate(u: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = rise(u, here)
        return float(value), np.array(slope)  # a copy, since the search writes to it

    # Not at zero, where NumPyro's Bernoulli(logits) has another gradient than nearby.
    start = start + 0.1 * np.random.default_rng(0).normal(size=len(start))
    found = minimize(
        evaluate, start, jac=True, method="L-BFGS-B", options={"maxiter": 1_000, "maxfun": 2_000}
    )
    center = jnp.asarray(found.x)
    gradient = jax.grad(energy)
    product = jax.jit(lambda v: jax.jvp(lambda u: gradient(u, here), (center,), (v,))[1])
    widths = [zero.shape[-1] if zero.ndim > 1 else 1 for zero in zeros[: len(local)]]
    sizes = [zero.size for zero in zeros[: len(local)]]
    slopes, shift, border = _arrow(product, len(center), sizes, widths)
    count = len(slopes)

    def whiten(w: Array) -> Array:
        return jnp.concatenate([slopes * w[:count] - shift @ w[count:], border @ w[count:]])

    # The precision's inverse is the product of the factor and its transpose.
    across = jax.jit(jax.jacfwd(lambda t: gradient(center, t)))(here)
    _, transpose = jax.vjp(whiten, center)
    moves = -jax.vmap(lambda column: whiten(transpose(column)[0]), 1, 1)(across)

    def to_all(w: Array, t: Array) -> tuple[Draws, Array]:
        sites, logs = to_near(t)
        return sites | to_sites(center + moves @ t + whiten(w)), logs

    def nuts_model(*args: Array) -> None:
        w = numpyro.sample(WHITE, flat_prior(len(center)))
        t = numpyro.sample(NEAR, flat_prior(len(origin)))
        sites, logs = to_all(w, t)
        numpyro.factor("jacobian", logs)
        handlers.condition(model, data=sites)(*args)

    def from_nuts(draws: Draws) -> Draws:
        sites, _ = jax.vmap(to_all)(draws[WHITE], draws[NEAR])
        # With what the model computes.
        return target.from_nuts({n: x for n, x in draws.items() if n not in (WHITE, NEAR)} | sites)

    return replace(target, nuts_model=nuts_model, from_nuts=from_nuts)


def _arrow(
    product: Any, dim: int, sizes: Sequence[int], widths: Sequence[int]
) -> tuple[Array, Array, Array]:
    """The inverse factor of a precision: of the diagonal, from the border to it, of the border."""
    count = sum(sizes)
    diagonal, begin = np.zeros(count), 0
    for size, width in zip(sizes, widths, strict=True):
        for k in range(width):
            probe = np.zeros(dim)
            here = slice(begin + k, begin + size, width)
            probe[here] = 1
            diagonal[here] = np.asarray(product(probe))[here]
        begin += size
    columns = np.zeros((dim, dim - count))
    for k in range(dim - count):
        probe = np.zeros(dim)
        probe[count + k] = 1
        columns[:, k] = product(probe)
    across, corner = columns[:count], columns[count:]
    corner = corner - across.T @ (across / diagonal[:, None])
    factor = np.linalg.cholesky((corner + corner.T) / 2)
    border = solve_triangular(factor, np.eye(dim - count), lower=True).T
    shift = (across / diagonal[:, None]) @ border
    return jnp.asarray(diagonal**-0.5), jnp.asarray(shift), jnp.asarray(border)
