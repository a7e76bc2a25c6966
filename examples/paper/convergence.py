"""Rates of convergence and saturation of regularizers: Theorem 4.1 of the paper.

Zhou, Shi and Zhu (2020): if the score is ``L^r f`` with f in the kernel's space H and the filter
has qualification q, then with ``λ = M^(-1/(2r+2))`` the error after M samples is

    O(M^(-r/(2r+2))) in H for r ≤ q,    O(M^(-(2r+1)/(4r+4))) in L²(p) for r ≤ q - 1/2.

For larger r a filter *saturates*: a smoother score does not give a better rate. q is 1 for
Tikhonov, ν for the ν-method (λ = t⁻²) and infinite for the spectral cut-off.

The target is built so that r is known. p is the standard normal on the line, the eigenfunctions of
L are computed by quadrature, f is barely in H, and ``L^r f`` is what an estimate has to add to its
base score. Two tables are printed: the part of the error that does not depend on samples,
``|(1 - g(L) L) L^r f|``, over λ, and the error of estimates over M:

    python -m examples.paper.convergence [--repeats 16] [--csv convergence.csv]
                                   [--figure convergence.png] [--quick]
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import Array, lax, random

from examples.common.tables import Row, fill, make_parser
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import CurlFree, Matern
from numpyro_kscore.regularizers import NuMethod, Regularizer, SpectralCutoff, Tikhonov
from numpyro_kscore.solvers import Dense, Krylov

# Eigenvalues of a rough kernel decay like a power. A small kernel makes λ small, and the step
# counts of the ν-method so large that rounding them to integers is negligible.
BANDWIDTH = 0.5
SIZE = 1e-2
KERNEL = CurlFree(SIZE * BANDWIDTH**2 * 0.6 * Matern(2.5))  # K(x, x) is SIZE at this bandwidth
# λ = LAMBDA M^(-1/(2r+2)), small enough to be in the range of the power law.
LAMBDA = 0.02 * SIZE
# Amplitude of f, large so that the approximation error dominates the noise.
AMPLITUDE = 1_000.0
TARGETS = (0.5, 1.5)
SAMPLES = (64, 128, 256, 512, 1024, 2048)
BIAS_LAMBDAS = tuple(SIZE * 10.0 ** (-k / 4) for k in range(8, 21))
COLUMNS = ("l2", "l2_error", "h", "h_error")


class Method(NamedTuple):
    """A family of filters: λ -> regularizer, with the solver and the qualification."""

    make: Callable[[float], Regularizer]
    solver: Dense | Krylov
    qualification: float


def _steps(lam: float) -> int:
    return max(1, round(lam**-0.5))


METHODS = {
    "Tikhonov": Method(Tikhonov, Krylov(32), 1.0),
    "ν-method, ν = 1": Method(lambda lam: NuMethod(_steps(lam), 1.0), Krylov(32), 1.0),
    "ν-method, ν = 2": Method(lambda lam: NuMethod(_steps(lam), 2.0), Krylov(32), 2.0),
    "spectral cut-off": Method(lambda lam: SpectralCutoff(lam=lam), Dense(), np.inf),
}


class Problem(NamedTuple):
    """A target ``L^r f`` for p = N(0, 1), by quadrature.

    Attributes:
        nodes: quadrature nodes, (k, 1).
        weights: quadrature weights times the density, (k,).
        sigma: eigenvalues of L in descending order, (k,).
        functions: eigenfunctions at the nodes, orthonormal in L²(p), (k, k).
        coefficients: coefficients of the target in the eigenfunctions, (k,).
        expansion: b such that the target is ``Σ_j K(x, x_j) b_j``, (k,).
    """

    nodes: Array
    weights: Array
    sigma: Array
    functions: Array
    coefficients: Array
    expansion: Array

    def target(self, x: Array) -> Array:
        """``L^r f`` at points (m, 1) -> (m, 1)."""
        return (kernel_matrix(x, self.nodes) @ self.expansion)[:, None]

    def norms(self, values: Array) -> Array:
        """Norms in L²(p) and in H of a function given at the nodes, (k,) -> (2,)."""
        coefficients = (self.weights * values) @ self.functions
        squares = jnp.array([self.weights @ values**2, jnp.sum(coefficients**2 / self.sigma)])
        return jnp.sqrt(squares)


@jax.jit
def kernel_matrix(x: Array, y: Array) -> Array:
    """K of all pairs, (m, 1), (k, 1) -> (m, k)."""
    one = lambda a, b: KERNEL(a / BANDWIDTH, b / BANDWIDTH)[0, 0] / BANDWIDTH**2  # noqa: E731
    return jax.vmap(lambda a: jax.vmap(lambda b: one(a, b))(y))(x)


@lru_cache
def make_problem(r: float) -> Problem:
    """The target of a given smoothness."""
    nodes = np.linspace(-6, 6, 601)
    weights = np.exp(-0.5 * nodes**2) / np.sqrt(2 * np.pi) * (nodes[1] - nodes[0])
    matrix = np.asarray(kernel_matrix(jnp.asarray(nodes)[:, None], jnp.asarray(nodes)[:, None]))
    sigma, vectors = np.linalg.eigh(np.sqrt(np.outer(weights, weights)) * matrix)
    # Smaller eigenvalues are rounding errors; the target has no component there.
    keep = np.flatnonzero(sigma > 1e-12 * sigma[-1])[::-1]
    sigma, functions = sigma[keep], vectors[:, keep] / np.sqrt(weights)[:, None]
    # f has coefficients a_k sqrt(σ_k), and its norm in H is that of a, whose squares are barely
    # summable.
    a = AMPLITUDE * np.arange(1.0, len(sigma) + 1) ** -0.6 * (sigma / sigma[0]) ** r
    coefficients = a * np.sqrt(sigma / SIZE)
    expansion = weights * (functions @ (coefficients / sigma))
    return Problem(
        *(jnp.asarray(x) for x in (nodes[:, None], weights, sigma, functions)),
        jnp.asarray(coefficients),
        jnp.asarray(expansion),
    )


@partial(jax.jit, static_argnames="num_samples")
def errors(estimator: ScoreEstimator, problem: Problem, num_samples: int, keys: Array) -> Array:
    """Errors in L²(p) and H of fits to fresh samples: (repeats, 2)."""
    truth = problem.target(problem.nodes)

    def repeat(key: Array) -> Array:
        samples = random.normal(key, (num_samples, 1), problem.nodes.dtype)
        # The score is -x, so with this base the residual is the target.
        score = estimator.fit(samples, base_scores=-samples - problem.target(samples))
        return problem.norms((score.residual(problem.nodes) - truth)[:, 0])

    return lax.map(repeat, keys)


def schedule(r: float, num_samples: int) -> float:
    """λ of the theorem."""
    return LAMBDA * num_samples ** (-1 / (2 * r + 2))


def compute(method: str, r: float, num_samples: int, repeats: int, seed: int) -> Row:
    """Mean logarithms of the two errors, with standard errors."""
    make, solver, _ = METHODS[method]
    estimator = ScoreEstimator(
        KERNEL, make(schedule(r, num_samples)), solver, BANDWIDTH,
        standardize="none", base=None, normalize=False,
    )  # fmt: skip
    keys = random.split(random.fold_in(random.key(seed), num_samples), repeats)
    logs = np.log(np.asarray(errors(estimator, make_problem(r), num_samples, keys)))
    spread = logs.std(0) / max(1, repeats - 1) ** 0.5
    values = (logs.mean(0)[0], spread[0], logs.mean(0)[1], spread[1])
    return dict(zip(COLUMNS, map(float, values), strict=True))


@lru_cache
def filters(method: str) -> np.ndarray:
    """g at the eigenvalues of L for all of BIAS_LAMBDAS: (lambdas, k)."""
    sigma = make_problem(TARGETS[0]).sigma
    return np.array([METHODS[method].make(lam).evaluate(sigma).g for lam in BIAS_LAMBDAS])


def bias(method: str, r: float) -> np.ndarray:
    """``|(1 - g(L) L) L^r f|`` in L²(p) and H for all of BIAS_LAMBDAS: (lambdas, 2)."""
    sigma, coefficients = (np.asarray(x) for x in make_problem(r)[2:5:2])
    squares = np.square((1 - sigma * filters(method)) * coefficients)
    return np.sqrt(np.stack([squares.sum(1), (squares / sigma).sum(1)], axis=1))


def slope(x: np.ndarray, y: np.ndarray, errors: np.ndarray | None = None) -> tuple[float, float]:
    """Least-squares slope and its standard error, from those of the points or from the scatter."""
    centered = x - x.mean()
    weights = centered / (centered @ centered)
    if errors is not None:
        return float(weights @ y), float(np.sqrt(weights**2 @ errors**2))
    rest = y - y.mean() - centered * (weights @ y)
    return float(weights @ y), float(np.sqrt(rest @ rest / (len(x) - 2) / (centered @ centered)))


def expected(method: str, r: float) -> tuple[float, float]:
    """Exponents of λ in the theorem, with saturation, in L²(p) and in H."""
    q = METHODS[method].qualification
    return min(r + 0.5, q), min(r, q)


def bias_table() -> list[str]:
    lines = [f"{'exponent of λ':26}{'L²(p)':>16}{'theory':>8}{'H':>18}{'theory':>8}"]
    for r in TARGETS:
        for method in METHODS:
            x, y = np.log(BIAS_LAMBDAS), np.log(bias(method, r))
            lines.append(f"r = {r:<4g}{method:20}" + _cells(expected(method, r), x, y, None))
    return lines


def rate_table(found: dict[tuple, list[Row]]) -> list[str]:
    lines = [f"{'exponent of M':26}{'L²(p)':>16}{'theory':>8}{'H':>18}{'theory':>8}"]
    for (method, r), rows in found.items():
        theory = [-value / (2 * r + 2) for value in expected(method, r)]
        x = np.log([row["num_samples"] for row in rows])
        y = np.array([[row["l2"], row["h"]] for row in rows])
        own = np.array([[row["l2_error"], row["h_error"]] for row in rows])
        lines.append(f"r = {r:<4g}{method:20}" + _cells(theory, x, y, own))
    return lines


def _cells(theory: Sequence[float], x: np.ndarray, y: np.ndarray, own: np.ndarray | None) -> str:
    text = ""
    for column, value in enumerate(theory):
        measured = slope(x, y[:, column], None if own is None else own[:, column])
        text += f"{measured[0]:10.3f} ±{measured[1]:.3f}{value:8.3f}  "
    return text


def plot(path: Path, found: dict[tuple, list[Row]]) -> None:
    """Plot bias over λ above and error over M below, with the slopes of the theorem."""
    relative = np.array(BIAS_LAMBDAS) / SIZE
    figure, axes = plt.subplots(2, len(TARGETS), figsize=(10, 8), layout="constrained")
    for (above, below), r in zip(axes.T, TARGETS, strict=True):
        for k, method in enumerate(METHODS):
            values, rows = bias(method, r)[:, 0], found[method, r]
            above.loglog(relative, values, f"C{k}", label=method)
            below.errorbar(
                [row["num_samples"] for row in rows],
                np.exp([row["l2"] for row in rows]),
                [2 * row["l2_error"] * np.exp(row["l2"]) for row in rows],
                fmt=f"C{k}o-", ms=4, capsize=2, label=method,
            )  # fmt: skip
        top = bias("Tikhonov", r)[0, 0]
        first = max(np.exp(found[method, r][0]["l2"]) for method in METHODS)
        sizes = [row["num_samples"] for row in found["Tikhonov", r]]
        for power, style in ((r + 0.5, "k--"), (1.0, "k:")):
            line = top * (relative / relative[0]) ** power
            above.plot(relative, line, style, lw=1, label=f"slope {power:g}")
            rate = power / (2 * r + 2)
            line = 1.5 * first * (np.array(sizes) / sizes[0]) ** -rate
            below.plot(sizes, line, style, lw=1, label=f"slope -{rate:.2g}")
            if r == 0.5:
                break
        above.set(title=f"r = {r:g}: approximation", xlabel="λ / K(x, x)", ylabel="error in L²(p)")
        below.set(title=f"r = {r:g}: estimate", xlabel="M", ylabel="error in L²(p)")
        below.set(xscale="log", yscale="log")
        above.legend(fontsize="small")
        below.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table, print it with the exponents of the theorem and draw the figure."""
    parser = make_parser("rates of convergence against Theorem 4.1")
    parser.add_argument("--repeats", type=int, default=16, help="fits to fresh samples")
    options = parser.parse_args(arguments)
    samples = SAMPLES
    if options.quick:
        options.repeats, samples = 2, (16, 32)

    # The norm in H of a smooth function needs more than single precision.
    with jax.enable_x64(True):
        cells = [
            {"method": method, "r": r, "num_samples": m}
            | {"repeats": options.repeats, "seed": options.seed}
            for r in TARGETS
            for method in METHODS
            for m in samples
        ]
        rows = fill(cells, compute, COLUMNS, options.csv)
        found: dict[tuple, list[Row]] = {}
        for row in rows:
            found.setdefault((row["method"], row["r"]), []).append(row)
        print(*bias_table(), "", *rate_table(found), sep="\n")
        print(
            f"\nAbove: approximation error over λ from {BIAS_LAMBDAS[-1] / SIZE:.0e} to "
            f"{BIAS_LAMBDAS[0] / SIZE:.0e} of K(x, x), without samples; ± from the scatter\naround "
            f"the line. Below: estimates, λ = {LAMBDA / SIZE:g} M^(-1/(2r+2)) of K(x, x), "
            f"M = {samples[0]} … {samples[-1]}, {options.repeats} repeats;\n± from the repeats. "
            "The theorem bounds errors from above, so a steeper exponent does not contradict it."
        )
        if options.figure:
            plot(options.figure, found)


if __name__ == "__main__":
    main()
