"""Comparison of engines of Hamiltonian Monte Carlo: BlackJAX's, NumPyro's and the package's own.

    python -m benchmarks.speed.hmc_engines [--csv FILE] [--quick]

Every engine makes the same windows of ten transitions: eight leapfrog steps of all chains, a random
step size for each, and the same guard of values that are not finite. ``quick_jit`` compiles all.

* compile: seconds of the first call less those of the second, the median of three;
* gradient: microseconds for each gradient of one chain, the minimum of alternating calls;
* lines: lines of a transition, with what adapts it to a library.

NumPyro's kernel ``HMC`` is no candidate: every chain takes its own number of steps, the length over
the step size, so that chains wait for the one with the shortest steps, and lengths are fixed.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from benchmarks.speed.measuring import Row, minimum_seconds, run_table
from numpyro_kscore._util.compiling import forget_programs, quick_jit
from numpyro_kscore.diagnostics._chains import ChainState, Schedule, _transition

WINDOW, STEPS, CHAINS = 10, 8, (64, 512)
# As many steps for every engine: the path is longer than most_steps allow.
SCHEDULE = Schedule(STEPS, 1e9, 1e9, 1.0, 0.1, 0.8, 1.0, 0.0)
Evaluate = Callable[[Array], tuple[Array, Array]]


def step_sizes(state: ChainState, key: Array) -> Array:
    """Step sizes between a tenth of the longest and the longest, (n,)."""
    return jnp.exp(state.log_step) * 0.1 ** random.uniform(key, state.value.shape)


def own(evaluate: Evaluate, state: ChainState, key: Array) -> tuple[ChainState, Array]:
    """The package's transition, of all chains at once."""
    return _transition(jax.vmap(evaluate), state, key, SCHEDULE, jnp.ones(()))[:2]


def blackjax(evaluate: Evaluate, state: ChainState, key: Array) -> tuple[ChainState, Array]:
    """BlackJAX's kernel of one chain, mapped over chains."""
    from blackjax.mcmc import hmc

    kernel = hmc.build_kernel()
    size_key, key = random.split(key)

    def move(key: Array, chain: Any, step: Array) -> tuple[Any, Any]:
        mass = jnp.ones(chain.position.shape, chain.position.dtype)
        return kernel(key, chain, with_rule(evaluate), step, mass, STEPS)

    keys = random.split(key, len(state.value))
    found, info = jax.vmap(move)(keys, hmc.HMCState(*state[:3]), step_sizes(state, size_key))
    return ChainState(*found, state.log_step), info.acceptance_rate


def numpyro(evaluate: Evaluate, state: ChainState, key: Array) -> tuple[ChainState, Array]:
    """NumPyro's integrator of one chain, mapped over chains, with a Metropolis step."""
    from numpyro.infer.hmc_util import euclidean_kinetic_energy, velocity_verlet

    log_density = with_rule(evaluate)
    first, update = velocity_verlet(lambda z: -log_density(z), euclidean_kinetic_energy)
    size_key, key = random.split(key)

    def move(key: Array, chain: Any, step: Array) -> tuple[Any, Array]:
        point, value, gradient = chain
        momentum_key, accept_key = random.split(key)
        mass = jnp.ones(point.shape, point.dtype)
        momentum = random.normal(momentum_key, point.shape, point.dtype)
        start = first(point, momentum, -value, -gradient)
        end = lax.fori_loop(0, STEPS, lambda _, s: update(step, mass, s), start)
        before, after = (
            s.potential_energy + euclidean_kinetic_energy(mass, s.r) for s in (start, end)
        )
        gain = before - after
        probability = jnp.where(jnp.isnan(gain), 0.0, jnp.exp(jnp.minimum(gain, 0.0)))
        accept = random.uniform(accept_key, (), point.dtype) < probability
        moved = (end.z, -end.potential_energy, -end.z_grad)
        return jax.tree.map(partial(jnp.where, accept), moved, chain), probability

    keys = random.split(key, len(state.value))
    found, probability = jax.vmap(move)(keys, tuple(state[:3]), step_sizes(state, size_key))
    return ChainState(*found, state.log_step), probability


def with_rule(evaluate: Evaluate) -> Callable[[Array], Array]:
    """The log density alone, with the gradient that comes with it: libraries differentiate."""

    @jax.custom_vjp
    def value_at(z: Array) -> Array:
        return evaluate(z)[0]

    value_at.defvjp(evaluate, lambda gradient, g: (g * gradient,))
    return value_at


ENGINES = {"BlackJAX": blackjax, "NumPyro": numpyro, "own": own}


def num_lines(engine: str) -> int:
    """Lines of a transition, with the adapter."""
    parts = [_transition] if engine == "own" else [ENGINES[engine], with_rule]
    return sum(len(inspect.getsource(part).splitlines()) for part in parts)


def window(engine: Any, density: Evaluate, root: Array, z: Array, key: Array) -> Any:
    """Ten transitions from whitened points (n, d): where chains are, and their acceptance."""

    def evaluate(z: Array) -> tuple[Array, Array]:
        value, gradient = density(root @ z)
        gradient = gradient @ root
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
        return jnp.where(finite, value, -jnp.inf), jnp.where(finite, gradient, 0.0)

    def transition(state: ChainState, key: Array) -> tuple[ChainState, Array]:
        state, probability = engine(evaluate, state, key)
        change = 0.5 * (jnp.mean(probability) - 0.8)
        return state._replace(log_step=state.log_step + change), probability

    start = ChainState(z, *jax.vmap(evaluate)(z), jnp.asarray(-1.5, z.dtype))
    state, probability = lax.scan(transition, start, random.split(key, WINDOW))
    return state.point, jnp.mean(probability)


def targets() -> dict[str, tuple[Evaluate, np.ndarray]]:
    """Log densities with gradients, and roots of covariances, by name."""
    rng = np.random.default_rng(0)
    root = np.tril(rng.normal(size=(20, 20))) + 4 * np.eye(20)
    rows = rng.normal(size=(500, 20))
    signs = np.where(rng.uniform(size=500) < 1 / (1 + np.exp(-rows[:, 0])), 1.0, -1.0)

    def gaussian(x: Array) -> Array:
        return -0.5 * jnp.sum((jnp.asarray(np.linalg.inv(root), x.dtype) @ x) ** 2)

    def logistic(x: Array) -> Array:
        margins = jnp.asarray(signs[:, None] * rows, x.dtype) @ x
        return -jnp.sum(jnp.logaddexp(0.0, -margins)) - 0.5 * jnp.sum(x**2)

    def schools(x: Array) -> Array:
        mean, log_spread, effects = x[0], x[1], x[2:]
        spread = jnp.exp(log_spread)
        prior = -0.5 * (mean / 5) ** 2 - jnp.log1p((spread / 5) ** 2) + log_spread
        data = jnp.linspace(-3.0, 28.0, 8, dtype=x.dtype)
        likelihood = -0.5 * jnp.sum((data - mean - spread * effects) ** 2) / 150.0
        return prior - 0.5 * jnp.sum(effects**2) + likelihood

    return {
        "Gaussian, d = 20": (jax.value_and_grad(gaussian), root),
        "logistic regression, 500 rows, d = 20": (jax.value_and_grad(logistic), 0.15 * np.eye(20)),
        "eight schools, d = 10": (jax.value_and_grad(schools), np.eye(10)),
    }


def compare(density: Evaluate, root: np.ndarray, chains: int, quick: bool) -> Iterator[Row]:
    """Numbers of all engines for one target and number of chains."""
    dtype = jnp.result_type(float)
    z = random.normal(random.key(0), (chains, len(root)), dtype)
    args = (jnp.asarray(root, dtype), z, random.key(1))
    compiling: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    programs = {}
    # The first round also imports what engines need, and does not count.
    for _ in range(2 if quick else 4):
        for engine, fn in ENGINES.items():
            forget_programs()
            programs[engine] = quick_jit(partial(window, fn, density))
            times = []
            for _ in range(2):
                before = time.perf_counter()
                jax.block_until_ready(programs[engine](*args))
                times.append(time.perf_counter() - before)
            compiling[engine].append(times[0] - times[1])
    calls = {engine: partial(program, *args) for engine, program in programs.items()}
    seconds = minimum_seconds(calls, budget=0.2 if quick else 1.5)
    gradients = chains * (WINDOW * STEPS + 1)
    for engine, call in calls.items():
        yield {
            "engine": engine, "compile": statistics.median(compiling[engine][1:]),
            "gradient": 1e6 * seconds[engine] / gradients, "acceptance": float(call()[1]),
            "lines": num_lines(engine),
        }  # fmt: skip


def rows(quick: bool) -> Iterator[Row]:
    """All rows of the table."""
    for precision in ("float32",) if quick else ("float32", "float64"):
        with jax.enable_x64(precision == "float64"):
            for name, (density, root) in targets().items():
                for chains in CHAINS[:1] if quick else CHAINS:
                    for row in compare(density, root, chains, quick):
                        yield {"target": name, "chains": chains, "precision": precision} | row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    run_table(__doc__, rows, arguments)


if __name__ == "__main__":
    main()
