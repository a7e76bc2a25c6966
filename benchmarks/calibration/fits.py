"""Right and wrong fits that verdicts are tried on: draws of guides after few and many steps.

The draws are those of the unconstrained coordinates, kept in a folder, because fitting takes far
longer than judging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import SVI, Trace_ELBO, init_to_feasible
from numpyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import potential_energy

from benchmarks.accuracy.posteriors import SUITES, make_posterior
from benchmarks.accuracy.targets import Target
from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore._model.layout import Site

__all__ = ["NAMES", "QUICK", "FitSizes", "flat_model", "load_fits", "perturbed"]

# Latents of bnn and symmetric_mixture have equal modes, so that no draws of them are a reference;
# student and funnel have no standard deviations to compare; waveform needs a file.
LEFT_OUT = ("bnn", "symmetric_mixture", "student", "funnel", "waveform")
NAMES = tuple(name for name in SUITES["all"] + SUITES["tall"] if name not in LEFT_OUT)
_trace_elbo = partial(Trace_ELBO, num_particles=32)
# Guide, loss, and the parts of the fit after which draws are kept.
GUIDES: dict[str, tuple[Callable[..., Any], Callable[[], Any], tuple[float, ...]]] = {
    "AutoImplicit": (AutoImplicit, ImplicitELBO, (0.05, 0.2, 0.5, 1.0)),
    "AutoMultivariateNormal": (AutoMultivariateNormal, _trace_elbo, (0.2, 1.0)),
    "AutoIAFNormal": (AutoIAFNormal, _trace_elbo, (0.2, 1.0)),
    "AutoNormal": (AutoNormal, _trace_elbo, (1.0,)),
}
NUM_CHUNKS = 20


class FitSizes(NamedTuple):
    """Numbers of steps, a multiple of 20, and of draws."""

    num_steps: int = 5_000
    num_draws: int = 20_000


QUICK = FitSizes(20, 400)


def load_fits(name: str, sizes: FitSizes, folder: Path | None) -> dict[str, np.ndarray]:
    """Draws of every guide on one posterior, (n, d) each, from the folder or new fits."""
    target = make_posterior(name).target
    fits: dict[str, np.ndarray] = {}
    for kind in GUIDES:
        path = None if folder is None else folder / "fits" / f"{name}-{kind}.npz"
        if path is not None and path.exists():
            with np.load(path) as kept:
                found = dict(kept)
        else:
            found = dict(_fit(target, kind, sizes))
        if path is not None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **found)
        fits |= {f"{kind}, {steps} steps": draws for steps, draws in found.items()}
    return fits


def _fit(target: Target, kind: str, sizes: FitSizes) -> Iterator[tuple[str, np.ndarray]]:
    make_guide, make_loss, parts = GUIDES[kind]
    run_key, draw_key = random.split(random.key(1))
    guide = make_guide(target.model)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, sizes.num_steps))
    svi = SVI(target.model, guide, optimizer, make_loss())
    state = svi.init(run_key, *target.args)
    length = sizes.num_steps // NUM_CHUNKS

    @jax.jit
    def advance(state: Any) -> Any:
        return lax.scan(lambda s, _: svi.update(s, *target.args), state, length=length)[0]

    for chunk in range(1, NUM_CHUNKS + 1):
        state = advance(state)
        if chunk / NUM_CHUNKS in parts:
            draws = guide.sample_posterior(
                draw_key, svi.get_params(state), *target.args, sample_shape=(sizes.num_draws,)
            )
            yield str(chunk * length), np.asarray(target.unconstrained(draws))


def perturbed(draws: np.ndarray, key: Array) -> dict[str, np.ndarray]:
    """Draws (n, d) shrunk, widened and shifted: all of them, or in one coordinate."""
    center, sd = draws.mean(0), draws.std(0)
    one = np.zeros(draws.shape[1])
    one[int(random.randint(key, (), 0, draws.shape[1]))] = 1.0

    def scaled(factor: float, where: Any) -> np.ndarray:
        return center + (draws - center) * (1 + (factor - 1) * where)

    return {
        "as is": draws,
        "all x 0.96": scaled(0.96, 1.0),
        "all x 1.04": scaled(1.04, 1.0),
        "one + 0.07 sd": draws + 0.07 * sd * one,
        "all x 0.8": scaled(0.8, 1.0),
        "all x 1.25": scaled(1.25, 1.0),
        "one x 0.8": scaled(0.8, one),
        "one x 1.2": scaled(1.2, one),
        "one + 0.25 sd": draws + 0.25 * sd * one,
        "all + 0.25 sd": draws + 0.25 * sd,
    }


def flat_model(target: Target) -> tuple[Callable[[Array], tuple[Array, Array]], list[Site]]:
    """Log density and score at unconstrained points (d,), and the sites of the coordinates."""
    seeded = handlers.seed(target.model, random.key(0))
    feasible = handlers.substitute(seeded, substitute_fn=init_to_feasible())
    sites: list[Site] = []
    for name, site in handlers.trace(feasible).get_trace(*target.args).items():
        if site["type"] == "sample" and not site["is_observed"]:
            shape = biject_to(site["fn"].support).inverse_shape(jnp.shape(site["value"]))
            start = sites[-1].start + sites[-1].size if sites else 0
            sites.append(Site(name, tuple(shape), start, ()))

    def log_density(flat: Array) -> Array:
        latents = {s.name: flat[s.start : s.start + s.size].reshape(s.shape) for s in sites}
        return -potential_energy(seeded, target.args, {}, latents)

    return jax.value_and_grad(log_density), sites
