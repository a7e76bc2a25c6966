"""Errors of a fit to a chain, whose draws resemble their neighbors.

    python -m benchmarks.accuracy.chains [--estimator density] [--samples 1000] [--seeds 4]
        [--quick]

Chains of a standard normal with a correlation from each draw to the next, and the same bent into a
banana. The automatic choice deals samples to two halves in blocks. The last column has the errors
where it deals them one by one: the same samples, in an order whose blocks are every other one.
Errors are means over seeds and dimensions of squares at the samples; the base is a Student t.
``--estimator density`` is for ``KernelDensity("auto", "debiased")``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from examples.common.tables import markdown_line
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import KernelDensity
from numpyro_kscore.estimators._base.copies import deal

CORRELATIONS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)


def bent(z: Array) -> Array:
    """A banana from a standard normal: (2,) -> (2,), of Jacobian determinant one."""
    return z.at[1].add(0.5 * (z[0] ** 2 - 1.0))


def unbent(x: Array) -> Array:
    """The inverse of :func:`bent`."""
    return x.at[1].add(-0.5 * (x[0] ** 2 - 1.0))


# From a normal, and the way back.
TARGETS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "normal": (lambda z: z, lambda x: x),
    "banana": (bent, unbent),
}


def chain(key: Array, rho: float, n: int) -> Array:
    """Draws (n, 2) of a standard normal, each with correlation ``rho`` to the last."""
    noise = random.normal(key, (n, 2))

    def step(z: Array, e: Array) -> tuple[Array, Array]:
        z = rho * z + (1.0 - rho**2) ** 0.5 * e
        return z, z

    return lax.scan(step, noise[0], noise)[1]


def one_by_one(n: int) -> np.ndarray:
    """An order of samples in which the halves are the even and the odd ones."""
    order = np.arange(n)
    order[np.concatenate(deal(np.arange(n))[:2])] = np.concatenate(
        [order[: n // 2 * 2 : 2], order[1::2]]
    )
    return order


# Scores at the samples, (n, d).
ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "kernel": jax.jit(lambda x: ScoreEstimator(base="student").at_samples(x).scores),
    "density": jax.jit(lambda x: KernelDensity("auto", "debiased").fit(x).at_samples),
}


def errors(name: str, target: str, rho: float, n: int, seeds: int) -> tuple[float, float]:
    """Mean errors in blocks, and one by one."""
    fit = ESTIMATORS[name]
    forth, back = TARGETS[target]
    score = jax.vmap(jax.grad(lambda x: -0.5 * jnp.sum(back(x) ** 2)))
    found = []
    for seed in range(seeds):
        x = jax.vmap(forth)(chain(random.key(seed), rho, n))
        orders = (np.arange(n), one_by_one(n))
        found.append([jnp.mean((fit(x[order]) - score(x[order])) ** 2) for order in orders])
    in_blocks, singly = np.mean(found, axis=0)
    return float(in_blocks), float(singly)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--estimator", choices=ESTIMATORS, default="kernel")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one correlation and seed")
    options = parser.parse_args(arguments)
    correlations: Sequence[float] = CORRELATIONS
    if options.quick:
        correlations, options.samples, options.seeds = (0.9,), 200, 1
    print(markdown_line(["target", "correlation", "in blocks", "one by one"]))
    print("|---" * 4 + "|")
    for target in TARGETS:
        for rho in correlations:
            found = errors(options.estimator, target, rho, options.samples, options.seeds)
            print(markdown_line([target, rho, *(f"{e:.3g}" for e in found)]), flush=True)


if __name__ == "__main__":
    main()
