"""Deterministic ADVI with linear response, from the paper of Giordano, Ingram and Broderick (2024).

"Black Box Variational Inference with a Deterministic Objective: Faster, More Accurate, and Even
More Black Box", Journal of Machine Learning Research 25. A Gaussian with independent coordinates is
fitted to unconstrained latents by 30 draws of noise that stay the same, with a Newton method in a
trust region. Its standard deviations are too small. Those of functions follow from how their means
would move if the model were tilted by them: a product of the inverse Hessian for each, which
conjugate gradients take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.references import widened

__all__ = ["Fitted", "fit_linear_response"]

# The authors' number of draws. Settings of SciPy are its defaults, but for the steps.
NUM_DRAWS, MOST_STEPS = 30, 2_000
# Conjugate gradients end at this part of the right side, or after so many products.
CLOSE, MOST_PRODUCTS = 1e-6, 2_000


class Fitted(NamedTuple):
    """Moments of the summarized coordinates, (k,) each, and what they took.

    Attributes:
        mean: of the variational distribution.
        sd: by linear response; NaN where the equations were not solved.
        narrow_sd: of the variational distribution.
        steps: of the trust region.
        converged: whether the minimizer says so.
        cpu: seconds of CPU, compilation included.
    """

    mean: np.ndarray
    sd: np.ndarray
    narrow_sd: np.ndarray
    steps: int
    converged: bool
    cpu: float


def fit_linear_response(posterior: Posterior, seed: int) -> Fitted:
    """Fit the distribution, and get standard deviations by linear response; double precision."""
    begin = time.process_time()
    with jax.enable_x64(True):
        loss, summaries, dim = _functions(posterior, seed)
        value = jax.jit(jax.value_and_grad(loss))
        product = jax.jit(lambda x, v: jax.jvp(jax.grad(loss), (x,), (v,))[1])

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            found, gradient = value(x)
            return float(found), np.asarray(gradient)

        found = minimize(
            objective,
            np.concatenate([np.zeros(dim), np.full(dim, -1.0)]),
            jac=True,
            hessp=lambda x, v: np.asarray(product(x, v)),
            method="trust-ncg",
            options={"maxiter": MOST_STEPS},
        )
        draws = np.asarray(jax.jit(summaries)(found.x))
        slopes = np.asarray(jax.jit(jax.jacrev(lambda x: summaries(x).mean(0)))(found.x))
        # Conjugate gradients take few products where means are in units of their widths.
        units = np.exp(np.concatenate([found.x[dim:], np.zeros(dim)]))
        hessian = LinearOperator(
            (2 * dim, 2 * dim), lambda v: units * np.asarray(product(found.x, units * v.ravel()))
        )
        variances = []
        for slope in units * slopes:
            solved, failed = cg(hessian, slope, rtol=CLOSE, maxiter=MOST_PRODUCTS)
            variances.append(np.nan if failed else slope @ solved)
    sd = np.sqrt(np.maximum(variances, 0.0))
    cpu = time.process_time() - begin
    steps, converged = int(found.nit), bool(found.success)
    return Fitted(draws.mean(0), sd, draws.std(0), steps, converged, cpu)


def _functions(
    posterior: Posterior, seed: int
) -> tuple[Callable[[Any], Array], Callable[[Any], Array], int]:
    """The objective of means and log widths (2 d,), summaries of the draws there, (n, k), and d."""
    target = posterior.target
    args = tuple(widened(array) for array in target.args)
    transforms = {name: biject_to(support) for name, support in target.supports().items()}
    example = {name: transforms[name].inv(value) for name, value in target.example().items()}
    flat, unravel = ravel_pytree(jax.tree.map(lambda a: jnp.asarray(a, float), example))
    noise = random.normal(random.key(seed), (NUM_DRAWS, len(flat)))

    def points(x: Array) -> Array:
        mean, log_width = jnp.split(x, 2)
        return mean + jnp.exp(log_width) * noise

    def energy(point: Array) -> Array:
        return potential_energy(target.model, args, {}, unravel(point))

    def loss(x: Array) -> Array:
        return jnp.mean(jax.vmap(energy)(points(x))) - jnp.sum(x[len(flat) :])

    def summaries(x: Array) -> Array:
        unconstrained = jax.vmap(unravel)(points(x))
        values = {name: transforms[name](u) for name, u in unconstrained.items()}
        return posterior.summarize(values)

    return loss, summaries, len(flat)
