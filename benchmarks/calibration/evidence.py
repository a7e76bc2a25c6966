"""Evidence by importance weights of ``AutoImplicit``, against the truth or a bridge.

    python -m benchmarks.calibration.evidence [--seeds 10] [--parts conjugate other] [--csv FILE]
        [--cache FOLDER] [--quick]

*Conjugate* models have an evidence in closed form, here in float64: linear regression with known
noise in 1 to 100 dimensions, coins, Poisson rates, and a normal sample of unknown variance. For
each model and seed there is a data set. The share of data sets whose estimate is within two of its
standard errors of the truth must be about 95 %.

The *others* are compared with bridge sampling (Meng and Wong 1996) between the posterior and a
Student t distribution. Half of the draws of NUTS, from four chains, give the t its mean and
covariance; the other half are those of the bridge. The difference must be below 0.05 nats.
``--cache`` is a folder that keeps the draws of NUTS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer import SVI
from scipy.special import betaln, gammaln
from scipy.stats import multivariate_normal, multivariate_t

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.posteriors import make_posterior
from benchmarks.accuracy.references import QUICK, Sizes, load_reference
from benchmarks.accuracy.targets import Target
from benchmarks.calibration.fits import flat_model
from examples.common.tables import Row, fill, make_parser
from numpyro_kscore import AutoImplicit, ImplicitELBO, fit, log_evidence

COLUMNS = ("truth", "truth_error", "estimate", "error", "khat", "effective")
# Largest difference from a bridge, in nats.
LIMIT = 0.05
PRIOR, NOISE = 2.0, 0.5
DEGREES = 5.0  # of freedom of the bridge's t
NUM_ITERATIONS = 200


class Problem(NamedTuple):
    """A model with its data and its log evidence."""

    model: Callable[..., None]
    args: tuple[np.ndarray, ...]
    truth: float


# --- Conjugate models -----------------------------------------------------------------------------


def _linear(x: Array, y: Array) -> None:
    weights = numpyro.sample("weights", dist.Normal(0, PRIOR).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ weights, NOISE), obs=y)


def linear(rng: np.random.Generator, dim: int) -> Problem:
    """Linear regression: y is Gaussian with covariance of prior and noise."""
    n = max(20, 2 * dim)
    x = rng.normal(size=(n, dim)).astype(np.float32)
    y = (x @ rng.normal(size=dim) + NOISE * rng.normal(size=n)).astype(np.float32)
    wide = x.astype(float)
    covariance = PRIOR**2 * wide @ wide.T + NOISE**2 * np.eye(n)
    truth = multivariate_normal(np.zeros(n), covariance).logpdf(y.astype(float))
    return Problem(_linear, (x, y), float(truth))


def _coins(heads: Array) -> None:
    shares = numpyro.sample("shares", dist.Beta(1.0, 2.0).expand([len(heads)]).to_event(1))
    numpyro.sample("heads", dist.Bernoulli(shares[:, None]), obs=heads)


def coins(rng: np.random.Generator, dim: int) -> Problem:
    """Tosses of coins with a Beta prior."""
    heads = (rng.random((dim, 12)) < rng.beta(1, 2, (dim, 1))).astype(np.float32)
    count = heads.sum(1)
    truth = np.sum(betaln(1 + count, 2 + 12 - count) - betaln(1, 2))
    return Problem(_coins, (heads,), float(truth))


def _rates(counts: Array) -> None:
    rates = numpyro.sample("rates", dist.Gamma(1.5, 0.5).expand([len(counts)]).to_event(1))
    numpyro.sample("counts", dist.Poisson(rates[:, None]), obs=counts)


def rates(rng: np.random.Generator, dim: int) -> Problem:
    """Poisson counts with a Gamma prior of their rates."""
    counts = rng.poisson(rng.gamma(1.5, 2.0, (dim, 1)), (dim, 4)).astype(np.float32)
    total = counts.sum(1)
    truth = (
        np.sum(1.5 * np.log(0.5) - gammaln(1.5) + gammaln(1.5 + total))
        - np.sum((1.5 + total) * np.log(0.5 + 4))
        - np.sum(gammaln(counts + 1))
    )
    return Problem(_rates, (counts,), float(truth))


def _normal(y: Array) -> None:
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, jnp.sqrt(variance / 0.25)))
    numpyro.sample("y", dist.Normal(mean, jnp.sqrt(variance)), obs=y)


def normal(rng: np.random.Generator, dim: int) -> Problem:
    """A normal sample of unknown mean and variance."""
    n = 4 + dim
    y = (1.0 + rng.gamma(3.0, 0.5) * rng.normal(size=n)).astype(np.float32)
    wide = y.astype(float)
    rest = np.sum((wide - wide.mean()) ** 2) + n * 0.25 / (0.25 + n) * wide.mean() ** 2
    shape, rate = 3 + n / 2, 2 + rest / 2
    truth = gammaln(shape) - gammaln(3.0) + 3 * np.log(2.0) - shape * np.log(rate)
    truth += 0.5 * np.log(0.25 / (0.25 + n)) - n / 2 * np.log(2 * np.pi)
    return Problem(_normal, (y,), float(truth))


# Name: model and dimensions.
CONJUGATE: dict[str, tuple[Callable[[np.random.Generator, int], Problem], tuple[int, ...]]] = {
    "linear": (linear, (1, 2, 5, 10, 30, 100)),
    "coins": (coins, (3,)),
    "rates": (rates, (1, 6)),
    "normal": (normal, (2,)),
}


# --- Others ---------------------------------------------------------------------------------------


def _logistic() -> Target:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(30, 4)).astype(np.float32)
    y = (rng.random(30) < 1 / (1 + np.exp(-x @ [2.0, -1.5, 0.5, 0.0]))).astype(np.float32)

    def model(x: Array, y: Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 3).expand([4]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    return Target("evidence_logistic", model, (jnp.asarray(x), jnp.asarray(y)))


def _robust() -> Target:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(25, 2)).astype(np.float32)
    y = (1 + x @ [1.0, -0.5] + 0.4 * rng.standard_t(2, size=25)).astype(np.float32)

    def model(x: Array, y: Array) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0, 3))
        weights = numpyro.sample("weights", dist.Normal(0, 2).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        degrees = numpyro.sample("degrees", dist.Gamma(2, 0.1))
        numpyro.sample("y", dist.StudentT(degrees, intercept + x @ weights, scale), obs=y)

    return Target("evidence_robust", model, (jnp.asarray(x), jnp.asarray(y)))


def _growth() -> Target:
    rng = np.random.default_rng(3)
    t = np.linspace(0.5, 8, 12).astype(np.float32)
    y = (5 / (1 + np.exp(-(t - 4) / 1.2)) + 0.3 * rng.normal(size=12)).astype(np.float32)

    def model(t: Array, y: Array) -> None:
        height = numpyro.sample("height", dist.LogNormal(1.5, 0.7))
        middle = numpyro.sample("middle", dist.Normal(4, 2))
        width = numpyro.sample("width", dist.LogNormal(0, 0.7))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        numpyro.sample(
            "y", dist.Normal(height * jax.nn.sigmoid((t - middle) / width), noise), obs=y
        )

    return Target("evidence_growth", model, (jnp.asarray(t), jnp.asarray(y)))


def _process() -> Target:
    rng = np.random.default_rng(4)
    t = np.linspace(0, 1, 8).astype(np.float32)
    counts = rng.poisson(np.exp(1 + np.sin(5 * t))).astype(np.float32)

    def model(t: Array, counts: Array) -> None:
        height = numpyro.sample("height", dist.LogNormal(0, 0.5))
        length = numpyro.sample("length", dist.LogNormal(-1, 0.5))
        squares = ((t[:, None] - t) / length) ** 2
        factor = jnp.linalg.cholesky(jnp.exp(-0.5 * squares) + 1e-3 * jnp.eye(len(t)))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([len(t)]).to_event(1))
        numpyro.sample("counts", dist.Poisson(jnp.exp(1 + height * factor @ z)), obs=counts)

    return Target("evidence_process", model, (jnp.asarray(t), jnp.asarray(counts)))


def _shrinkage() -> Target:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(20, 4)).astype(np.float32)
    y = (x @ [1.5, 0.0, 0.0, -0.1] + 0.5 * rng.normal(size=20)).astype(np.float32)

    def model(x: Array, y: Array) -> None:
        whole = numpyro.sample("whole", dist.HalfNormal(1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([4]).to_event(1))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ (whole * local * z), 0.5), obs=y)

    return Target("evidence_shrinkage", model, (jnp.asarray(x), jnp.asarray(y)))


OTHERS: dict[str, Callable[[], Posterior]] = {
    "logistic": lambda: Posterior(_logistic()),
    "robust": lambda: Posterior(_robust()),
    "growth": lambda: Posterior(_growth()),
    "process": lambda: Posterior(_process()),
    "shrinkage": lambda: Posterior(_shrinkage()),
    **{
        name: lambda name=name: make_posterior(name)  # type: ignore[misc]
        for name in (
            *("eight_schools", "eight_schools_centered", "poisson_mixed", "negative_binomial"),
            *("ordinal", "autoregression"),
        )
    },
}


def bridge(
    log_density: Callable[[np.ndarray], np.ndarray],
    first: np.ndarray,
    second: np.ndarray,
    rng: np.random.Generator,
    efficiency: float = 1.0,
) -> tuple[float, float]:
    """Log normalizing constant of a density and its standard error, by a bridge to a t.

    Args:
        log_density: points (n, d) to log densities (n,), not normalized.
        first: draws that the t is fitted to, (m, d).
        second: draws that are bridged, (n, d).
        rng: random numbers of the t.
        efficiency: effective number of draws over their number.

    Source: Meng and Wong (1996); the error is that of Frühwirth-Schnatter (2004).
    """
    covariance = np.cov(first.T).reshape(first.shape[1], -1) * (DEGREES - 2) / DEGREES
    proposal = multivariate_t(first.mean(0), covariance, DEGREES)
    n = len(second)
    own = np.reshape(proposal.rvs(n, random_state=rng), second.shape)
    at_second, at_own = (log_density(x) - proposal.logpdf(x) for x in (second, own))
    at_own = np.where(np.isfinite(at_own), at_own, -np.inf)
    # Optimal shares count draws that are independent.
    share = n * efficiency / (n * efficiency + n)
    value = float(np.median(at_second))
    for _ in range(NUM_ITERATIONS):
        upper = at_own - value - _mixed(at_own - value, share)
        lower = -_mixed(at_second - value, share)
        change = np.logaddexp.reduce(upper) - np.logaddexp.reduce(lower)
        value += float(change)
        if abs(change) < 1e-8:
            break
    upper, lower = np.exp(upper), np.exp(lower)
    squares = np.var(upper) / np.mean(upper) ** 2 / n
    squares += np.var(lower) / np.mean(lower) ** 2 / (n * efficiency)
    return value, float(squares**0.5)


def _mixed(ratio: np.ndarray, share: float) -> np.ndarray:
    """Log density of both over the second's, from that of the first."""
    return np.logaddexp(np.log(share) + ratio, np.log(1 - share))


def other(name: str, seed: int, sizes: Sizes, folder: Path | None) -> tuple[Problem, float]:
    """A model that is not conjugate, its evidence by a bridge, and the error of that."""
    posterior = OTHERS[name]()
    reference = load_reference(posterior, sizes, folder)
    if not (reference.trusted or sizes == QUICK):
        print(f"{name}: R-hat of the reference is {reference.rhat:.3f}", flush=True)
    density, _ = flat_model(posterior.target)
    batch = jax.jit(jax.vmap(lambda x: density(x)[0]))
    first, second = (np.asarray(x, float) for x in (reference.truth, reference.other))
    value, error = bridge(
        lambda x: np.asarray(batch(jnp.asarray(x, jnp.float32)), float),
        first,
        second,
        np.random.default_rng(seed),
        min(1.0, reference.ess / (2 * len(second))),
    )
    return Problem(posterior.target.model, posterior.target.args, value), error


# --- The table ------------------------------------------------------------------------------------


def estimate(problem: Problem, seed: int, max_steps: int, num_samples: int) -> Row:
    """Fit and weigh."""
    svi = SVI(problem.model, AutoImplicit(problem.model), numpyro.optim.Adam(1e-2), ImplicitELBO())
    args = tuple(jnp.asarray(value) for value in problem.args)
    result = fit(svi, random.key(seed), *args, max_steps=max_steps, progress_bar=False)
    found = log_evidence(svi, result, *args, num_samples=num_samples)
    return {
        "estimate": round(found.value, 7),
        "error": found.error,
        "khat": round(found.khat, 3),
        "effective": round(found.num_effective),
    }


def conjugate_table(rows: Sequence[Row]) -> list[str]:
    """Coverage, and errors, by model and dimension."""
    lines = [f"{'':16}{'data sets':>10}{'within 2':>10}{'rms / error':>13}{'largest, nats':>15}"]
    cells = sorted({(str(row["case"]), int(row["dim"])) for row in rows})
    for case, dim in [*cells, ("all", 0)]:
        part = [row for row in rows if case == "all" or (row["case"], row["dim"]) == (case, dim)]
        apart = np.array([row["estimate"] - row["truth"] for row in part])
        relative = apart / np.array([row["error"] for row in part])
        lines.append(
            f"{f'{case} {dim or str()}':16}{len(part):10}{np.mean(np.abs(relative) <= 2):10.0%}"
            f"{np.mean(relative**2) ** 0.5:13.2f}{np.max(np.abs(apart)):15.6f}"
        )
    return lines


def other_table(rows: Sequence[Row]) -> list[str]:
    """Differences from bridges."""
    lines = [f"{'':24}{'bridge':>18}{'weights':>18}{'difference':>12}{'khat':>7}{'effective':>11}"]
    for row in rows:
        apart = row["estimate"] - row["truth"]
        lines.append(
            f"{row['case']:24}{row['truth']:10.3f} ± {row['truth_error']:.3f}"
            f"{row['estimate']:10.3f} ± {row['error']:.3f}{apart:12.3f}{row['khat']:7.2f}"
            f"{row['effective']:11}{'' if abs(apart) < LIMIT else '  beyond the limit'}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser((__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="data sets of each conjugate model")
    parser.add_argument("--parts", nargs="+", choices=("conjugate", "other"))
    parser.add_argument("--others", nargs="+", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--cache", type=Path, help="folder that keeps draws of NUTS")
    options = parser.parse_args(arguments)
    quick = options.quick
    parts = options.parts or ("conjugate", "other")
    max_steps, num_samples = (40, 1_000) if quick else (20_000, 10_000)

    def compute(case: str, dim: int, seed: int) -> Row:
        if case in CONJUGATE:
            problem, error = CONJUGATE[case][0](np.random.default_rng([seed, dim]), dim), 0.0
        else:
            problem, error = other(case, seed, QUICK if quick else Sizes(), options.cache)
        found = estimate(problem, seed, max_steps, num_samples)
        return {"truth": round(problem.truth, 7), "truth_error": round(error, 4)} | found

    cells: list[Row] = []
    if "conjugate" in parts:
        cells += [
            {"case": case, "dim": dim, "seed": options.seed + seed}
            for case, (_, dims) in CONJUGATE.items()
            for dim in (dims[:1] if quick else dims)
            for seed in range(1 if quick else options.seeds)
        ]
    if "other" in parts:
        names = options.others[:1] if quick else options.others
        cells += [{"case": name, "dim": 0, "seed": options.seed} for name in names]
    rows = fill(cells, compute, COLUMNS, options.csv)
    known = [row for row in rows if row["case"] in CONJUGATE]
    rest = [row for row in rows if row["case"] not in CONJUGATE]
    lines = [*(conjugate_table(known) if known else []), *(other_table(rest) if rest else [])]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
