"""Many posteriors at once: whole fits of ``AutoImplicit``, one for each data set, by one ``vmap``.

    python -m benchmarks.speed.many_posteriors [--number 1000] [--steps 2000] [--particles 64]
        [--alone 8] [--csv FILE] [--quick]

Data sets are like those of eight schools, simulated from the model. All guides start from the
Gaussian found for the first of them. The first few data sets are also fitted alone, each from a
Gaussian of its own, with as many steps. Errors are those of 2000 draws of each guide: of means, in
standard deviations of the posterior, over the quantities μ, log τ and θ, and the ratio of standard
deviations. The reference is exact, by quadrature over τ. Seconds are those of the second run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro.infer import SVI

from benchmarks.speed.measuring import Row, device_name, make_parser, write_table
from numpyro_kscore import AutoImplicit, ImplicitELBO

NUMBER, STEPS, PARTICLES, ALONE = 1000, 2000, 64, 8
QUICK = {"number": 3, "steps": 20, "particles": 16, "alone": 1}
DRAWS = 2000
# Standard errors of the eight schools, and the scales of the priors of μ and τ.
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], np.float32)
PRIOR_SCALE = 5.0
# Quadrature over log τ: the prior has 1e-4 of its mass outside.
LOG_TAU = np.linspace(np.log(5e-4), np.log(5e4), 4000)


def model(effects: Array | None = None) -> None:
    """Eight schools, centered as it is written; the guide finds better coordinates."""
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SCALE))
    tau = numpyro.sample("tau", dist.HalfCauchy(PRIOR_SCALE))
    with numpyro.plate("schools", len(ERRORS)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effects", dist.Normal(theta, ERRORS), obs=effects)


def simulate(number: int) -> Array:
    """Data sets from the model, (number, 8)."""
    return jax.vmap(lambda key: numpyro.handlers.seed(run_model, key)())(
        random.split(random.key(1), number)
    )


def run_model() -> Array:
    """One data set."""
    trace = numpyro.handlers.trace(model).get_trace()
    return trace["effects"]["value"]


def make_svi(num_steps: int, num_particles: int, effects: Array) -> SVI:
    """A guide that has seen a data set and found a Gaussian for it."""
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))
    svi = SVI(model, AutoImplicit(model), optimizer, ImplicitELBO(num_particles))
    svi.init(random.key(0), effects)
    return svi


def posterior(svi: SVI, num_steps: int, key: Array, effects: Array) -> dict[str, Array]:
    """A whole fit, from initial parameters to draws, as a function to be mapped."""
    fit_key, draw_key = random.split(key)
    result = svi.run(fit_key, num_steps, effects, progress_bar=False)
    return svi.guide.sample_posterior(draw_key, result.params, sample_shape=(DRAWS,))


def exact_moments(effects: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of μ, log τ and θ given one data set, (10,) each."""
    tau2 = np.exp(2 * LOG_TAU)[:, None]
    y, error2 = np.asarray(effects, float), ERRORS.astype(float) ** 2
    v = tau2 + error2
    precision = 1 / PRIOR_SCALE**2 + np.sum(1 / v, axis=1)
    mu = np.sum(y / v, axis=1) / precision
    log_weight = -0.5 * np.sum(np.log(v) + y**2 / v, axis=1) - 0.5 * np.log(precision)
    log_weight += 0.5 * precision * mu**2 - np.log1p(tau2[:, 0] / PRIOR_SCALE**2) + LOG_TAU
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    # Given τ and μ, θ is Normal with mean (τ² y + σ² μ) / v and variance τ² σ² / v.
    slope = error2 / v
    means = np.column_stack([mu, LOG_TAU, (tau2 * y) / v + slope * mu[:, None]])
    variances = np.column_stack(
        [1 / precision, np.zeros_like(mu), tau2 * slope + slope**2 / precision[:, None]]
    )
    mean = weight @ means
    return mean, np.sqrt(weight @ (variances + (means - mean) ** 2))


def errors(draws: dict[str, Array], data: Array) -> Row:
    """Errors of the draws for each data set, over all data sets and quantities."""
    mean, sd = (np.array(part) for part in zip(*map(exact_moments, np.asarray(data)), strict=True))
    x = np.concatenate(
        [draws["mu"][..., None], np.log(draws["tau"])[..., None], draws["theta"]], axis=-1
    )
    shift = np.abs(x.mean(axis=1) - mean) / sd
    ratio = x.std(axis=1) / sd
    return {
        "error of means, median": float(np.median(shift)),
        "99 %": float(np.quantile(shift, 0.99)),
        "sd ratio, median": float(np.median(ratio)),
        "1 %": float(np.quantile(ratio, 0.01)),
        "99 % of ratios": float(np.quantile(ratio, 0.99)),
    }


def timed(run: Callable[..., Any], *arguments: Any) -> tuple[Any, float, float]:
    """The result of a program, its seconds to compile, and those of a second run."""
    start = time.perf_counter()
    compiled = jax.jit(run).lower(*arguments).compile()
    compilation = time.perf_counter() - start
    jax.block_until_ready(compiled(*arguments))
    start = time.perf_counter()
    result = jax.block_until_ready(compiled(*arguments))
    return result, compilation, time.perf_counter() - start


def rows(number: int, num_steps: int, num_particles: int, alone: int) -> list[Row]:
    """All data sets in one program, and the first ``alone`` of them one after another."""
    data, keys = simulate(number), random.split(random.key(2), number)
    shared = {"device": device_name(), "steps": num_steps, "particles": num_particles}
    svi = make_svi(num_steps, num_particles, data[0])
    draws, compilation, seconds = timed(jax.vmap(partial(posterior, svi, num_steps)), keys, data)
    found = [("one program", number, compilation, seconds, draws)]
    if alone:
        parts, compilation, seconds = [], 0.0, 0.0
        for key, effects in zip(keys[:alone], data, strict=False):
            own = make_svi(num_steps, num_particles, effects)
            part, first, second = timed(partial(posterior, own, num_steps), key, effects)
            parts.append(part)
            compilation, seconds = compilation + first, seconds + second
        together = jax.tree.map(lambda *a: jnp.stack(a), *parts)
        few = jax.tree.map(lambda a: a[:alone], draws)
        found += [
            ("the first of them", alone, float("nan"), float("nan"), few),
            ("these alone", alone, compilation, seconds, together),
        ]
    return [
        {"what": what, "posteriors": count, **shared, "compile, s": compilation, "run, s": seconds,
         "µs a step": 1e6 * seconds / (count * num_steps), **errors(draws, data[:count])}
        for what, count, compilation, seconds, draws in found
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--number", type=int, default=NUMBER, help="data sets")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each fit")
    parser.add_argument("--particles", type=int, default=PARTICLES, help="particles of a step")
    parser.add_argument("--alone", type=int, default=ALONE, help="data sets also fitted alone")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    table = rows(options.number, options.steps, options.particles, options.alone)
    write_table(options.csv, table)


if __name__ == "__main__":
    main()
