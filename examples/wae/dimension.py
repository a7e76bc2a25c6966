"""Strength of the outward push on codes by scores estimated from one batch, over the dimension.

    python -m examples.wae.dimension [--csv FILE] [--figure FILE] [--quick]

Codes are draws of N(0, I/4), half as wide as their prior, with score ``-4 x``. The score is
estimated at the 64 codes of a batch from these codes. The *push* of an estimate ŝ is
``-E[ŝᵀx] / E[4 xᵀx]``: the outward force in an autoencoder's objective relative to the right one,
so 1 is right. A published estimator gets the member with the smallest error of the grid searched in
Zhou, Shi and Zhu (2020), which is possible because the truth is known. The default is given the
prior's score ``-x``, as in training, which is a quarter of the truth.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import Array, random

from examples.common.tables import Row, fill, make_parser
from examples.wae.objectives import ESTIMATORS, make_objective

BATCH = 64
WIDTH = 0.5  # sd of the codes
LAMBDAS = tuple(10.0**-k for k in range(2, 8))
GRIDS = {
    "default": (0.0,),
    "whitened-nu": (45.0,),
    "nu": (50.0, 90.0, 130.0),
    "kef-cg": LAMBDAS,
    "ssge": (0.99, 0.97, 0.95, 0.93, 0.91, 0.89, 0.87),
    "stein": LAMBDAS,
}
COLUMNS = ("push", "error", "value")
STYLES = {
    "default": "ko-",
    "whitened-nu": "C2d-",
    "nu": "C0s-",
    "kef-cg": "C1^-",
    "ssge": "C3v--",
    "stein": "C4x--",
}
# φ and -2 φ' h² at the median distance h of the inverse multiquadric (1 + r²/h²)^(-1/2).
AT_MEDIAN, SLOPE_AT_MEDIAN = 2**-0.5, 2**-1.5


def figures(name: str, value: Any, samples: Array) -> Array:
    """Relative squared error and push of estimates from one batch, (2,)."""
    objective = make_objective(name, value, samples.shape[1])
    settings = objective.settings
    base = -samples if settings.base == "model" else None
    found = objective.estimator.at_samples(samples, base, debias=settings.debias).scores
    truth = -samples / WIDTH**2
    square = jnp.sum(truth**2)
    return jnp.array([jnp.sum((found - truth) ** 2), jnp.sum(found * truth)]) / square


def compute(estimator: str, dim: int, repeats: int, seed: int) -> Row:
    """One row: means over the batches, for the best member of the grid."""
    keys = random.split(random.fold_in(random.key(seed), dim), repeats)
    batches = jax.vmap(lambda key: WIDTH * random.normal(key, (BATCH, dim)))(keys)
    best: tuple[float, ...] = (np.inf, np.inf, np.inf)

    def run(value: Any) -> Array:
        return jnp.mean(jax.lax.map(partial(figures, estimator, value), batches), axis=0)

    # Numbers of steps are compile-time constants; λ and fractions are not.
    compiled = run if estimator in ("default", "whitened-nu", "nu") else jax.jit(run)
    for value in GRIDS[estimator]:
        error, push = (float(a) for a in compiled(value))
        best = min(best, (error, push, value))
    jax.clear_caches()
    return {"push": round(best[1], 4), "error": round(best[0], 4), "value": best[2]}


def diagonal_limit(dim: Array | np.ndarray) -> np.ndarray:
    """The push with a diagonal kernel and λ = 0, if all pairs of draws have the same distance.

    Then all off-diagonal entries of K are φ(h²), so every mean-free vector is an eigenvector of K/n
    with eigenvalue (1 - φ(h²))/n, and ζ is ``-2 φ'(h²) x`` with h² = 2 d.
    """
    return BATCH * SLOPE_AT_MEDIAN / (1 - AT_MEDIAN) / (2 * np.asarray(dim))


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table, print it and draw the figure."""
    parser = make_parser((__doc__ or "").split("\n\n")[0])
    options = parser.parse_args(arguments)
    dims, repeats = ((2, 16), 2) if options.quick else ((2, 8, 32, 64, 128, 256), 8)
    cells = [
        {"estimator": name, "dim": dim, "repeats": repeats, "seed": options.seed}
        for name in GRIDS
        for dim in dims
    ]
    rows = fill(cells, compute, COLUMNS, options.csv)
    print(f"{'':10}" + "".join(f"{dim:>16}" for dim in dims))
    for name in GRIDS:
        mine = [row for row in rows if row["estimator"] == name]
        print(f"{name:10}" + "".join(f"{r['push']:9.2f} ({r['error']:.2f})" for r in mine))
    print("\npush, and relative squared error in brackets; 1 and 0 are right")
    if options.figure:
        plot(options.figure, rows, dims)


def plot(path: object, rows: Sequence[Row], dims: Sequence[int]) -> None:
    """Plot pushes over the dimension."""
    figure, panel = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for name, style in STYLES.items():
        mine = [row for row in rows if row["estimator"] == name]
        label = name if not ESTIMATORS[name][1] else f"{name} (best {ESTIMATORS[name][1]})"
        panel.plot(dims, [row["push"] for row in mine], style, label=label)
    far = np.array([dim for dim in dims if dim >= BATCH] or dims)
    panel.plot(far, diagonal_limit(far), "k:", label="diagonal kernel, equal distances, λ = 0")
    panel.axhline(1, color="0.7", zorder=0)
    panel.set(
        xscale="log", xlabel="dimension of the codes", ylim=(0, 1.5),
        ylabel="outward push, 1 is right",
        title=f"estimates from {BATCH} codes of standard deviation {WIDTH:g}",
    )  # fmt: skip
    panel.set_xticks(dims, [str(dim) for dim in dims])
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
