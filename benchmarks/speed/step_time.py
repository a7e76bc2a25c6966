"""Time of one SVI step: ``ImplicitELBO`` against ``Trace_ELBO`` with a guide of the same shape.

    python -m benchmarks.speed.step_time [--dim 20] [--particles 64] [--repetitions 40]
        [--csv FILE] [--quick]

Both guides push the same noise through the same network, that of ``AutoImplicit`` or, with 1000
rows, one of a user's own; the explicit one adds Gaussian noise to its output, so that
``Trace_ELBO`` has a density to work with. Both steps are timed alternately in one process: as a
``lax.scan`` of 200 steps, which is what ``svi.run(..., progress_bar=False)`` runs, and as single
jitted calls of ``svi.update``.
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
from jax import Array, lax, random
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

from benchmarks.accuracy.own_guides import noise_network
from benchmarks.speed.measuring import make_parser, write_table
from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO

STEPS_PER_SCAN = 200


class ExplicitTwin(AutoImplicit):
    """``AutoImplicit``'s network followed by a Normal, so that q(z | noise) has a density.

    The noise stays an auxiliary site, so ``Trace_ELBO`` uses the joint density of noise and
    latents. That is all a comparison of step times needs.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Draw the model's latents, which must be one unconstrained vector site."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        loc = self._sample_latent(*args, **kwargs)
        scale = numpyro.param(
            "normal_scale", jnp.full(self.latent_dim, 0.1), constraint=constraints.softplus_positive
        )
        ((name, _),) = self._shapes
        return {name: numpyro.sample(name, dist.Normal(loc, scale).to_event(1))}


def gaussian(dim: int) -> None:
    """A model that costs almost nothing, so that the entropy dominates the time of a step."""
    numpyro.sample("z", dist.Normal(0, 1).expand([dim]).to_event(1))


def logistic_regression(features: Array, labels: Array) -> None:
    """A small model with data."""
    z = numpyro.sample("z", dist.Normal(0, 1).expand([features.shape[1]]).to_event(1))
    numpyro.sample("labels", dist.Bernoulli(logits=features @ z), obs=labels)


def automatic(model: Callable[..., None]) -> tuple[Any, Any]:
    """``AutoImplicit`` and its explicit twin."""
    return AutoImplicit(model), ExplicitTwin(model)


def network(dim: int) -> tuple[Any, Any]:
    """A network of 2 dim noises with two layers of 64 rectifiers, and its explicit twin."""
    output = noise_network(random.key(3), (2 * dim, 64, 64, dim))

    def implicit(*args: Any) -> None:
        del args
        numpyro.sample("z", Implicit(output(), event_dim=1))

    def explicit(*args: Any) -> None:
        del args
        numpyro.sample("z", dist.Normal(output(), 0.1).to_event(1))

    return implicit, explicit


def compare(
    model: Callable[..., None],
    args: tuple[Any, ...],
    num_particles: int,
    repetitions: int,
    guides: tuple[Any, Any] | None = None,
) -> dict[str, dict[str, np.ndarray]]:
    """Time both steps on one model.

    Args:
        model: a model with one unconstrained vector site.
        args: its arguments.
        num_particles: particles of both objectives.
        repetitions: timed scans; single calls are timed 20 times as often.
        guides: the implicit and the explicit guide; None is automatic ones.

    Returns:
        Seconds per step, ``times[mode][objective]``, one number per repetition.
    """
    implicit, explicit = guides or automatic(model)
    objectives = {
        "ImplicitELBO": (implicit, ImplicitELBO(num_particles)),
        "Trace_ELBO": (explicit, Trace_ELBO(num_particles)),
    }
    scans: dict[str, Callable[[], Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name, (guide, loss) in objectives.items():
        svi = SVI(model, guide, optax.adam(5e-3), loss)
        state = svi.init(random.key(0), *args)

        @jax.jit
        def scan(state: Any, svi: SVI = svi) -> Any:
            return lax.scan(lambda s, _: svi.update(s, *args), state, length=STEPS_PER_SCAN)

        update = jax.jit(lambda state, svi=svi: svi.update(state, *args))
        scans[name], calls[name] = partial(scan, state), partial(update, state)
    return {
        f"scan of {STEPS_PER_SCAN}": _alternate(scans, repetitions, STEPS_PER_SCAN),
        "jitted call": _alternate(calls, 20 * repetitions, 1),
    }


def _alternate(
    functions: dict[str, Callable[[], Any]], repetitions: int, steps: int
) -> dict[str, np.ndarray]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())  # compilation
    # Alternately, so that a change of the machine's speed or load affects both.
    for _ in range(repetitions):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append((time.perf_counter() - start) / steps)
    return {name: np.array(values) for name, values in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one line per model and mode."""
    parser = make_parser(__doc__)
    parser.add_argument("--dim", type=int, default=20, help="dimension of the latents")
    parser.add_argument("--particles", type=int, default=64, help="particles of both objectives")
    parser.add_argument("--repetitions", type=int, default=40, help="timed scans")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repetitions = 5

    features = random.normal(random.key(1), (1000, options.dim))
    labels = (random.uniform(random.key(2), (1000,)) < jax.nn.sigmoid(features[:, 0])).astype(int)
    few, own = (features[:200], labels[:200]), network(options.dim)
    models: dict[str, tuple[Callable[..., None], tuple[Any, ...], Any]] = {
        "Gaussian": (gaussian, (options.dim,), None),
        "logistic regression, 200 rows": (logistic_regression, few, None),
        "the same, 1000 rows, own network": (logistic_regression, (features, labels), own),
    }
    table = []
    for model_name, (model, args, guides) in models.items():
        counts = options.particles, options.repetitions
        for mode, times in compare(model, args, *counts, guides).items():
            implicit, explicit = times["ImplicitELBO"], times["Trace_ELBO"]
            table.append(
                {
                    "model": model_name,
                    "mode": mode,
                    "ImplicitELBO, µs": 1e6 * implicit.min(),
                    "Trace_ELBO, µs": 1e6 * explicit.min(),
                    "ratio": implicit.min() / explicit.min(),
                    "ratio of medians": float(np.median(implicit) / np.median(explicit)),
                }
            )
    write_table(options.csv, table)


if __name__ == "__main__":
    main()
