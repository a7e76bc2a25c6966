"""Diagnostics of four guides of one posterior with two modes: one good guide and three bad ones.

    python examples/start/diagnostics.py [--figures FOLDER]

The guides are constructed, not fitted, so that their faults are known: none, too narrow, too wide,
one mode missing. ``--figures`` writes the pictures of ``docs/gallery``.
"""

import argparse
from collections import namedtuple
from pathlib import Path

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import Implicit, ImplicitELBO, diagnose, evaluate_guide, khat

DATA = jnp.array([2.0, 1.0])
NOISE, PRIOR = 0.5, 3.0
# Each mode is Gaussian except for the kink of |.| at 0, which is five sd away.
SD = (1 / NOISE**2 + 1 / PRIOR**2) ** -0.5
MEAN = DATA / NOISE**2 * SD**2

Result = namedtuple("Result", "params state losses")
State = namedtuple("State", "mutable_state")
# Name: scale of the guide relative to the posterior, and whether it has both modes.
GUIDES = {"good": (1.0, True), "narrow": (0.3, True), "wide": (1.6, True), "one mode": (1.0, False)}


def model(data):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(2), PRIOR).to_event(1))
    seen = jnp.array([jnp.abs(z[0]), z[1]])
    numpyro.sample("y", dist.Normal(seen, NOISE).to_event(1), obs=data)


def make_guide(scale, both):
    def guide(data):
        unit = dist.Normal(jnp.zeros(2), 1.0).to_event(1)
        noise = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
        coin = numpyro.sample("coin", dist.Uniform(0, 1), infer={"is_auxiliary": True})
        side = jnp.where(both & (coin < 0.5), -1.0, 1.0)
        z = MEAN + scale * SD * noise
        numpyro.sample("z", Implicit(z * jnp.array([side, 1.0]), event_dim=1))

    return guide


def make_fit(name):
    """An SVI object and a result as ``svi.run`` would return it."""
    svi = SVI(model, make_guide(*GUIDES[name]), optax.adam(1e-3), ImplicitELBO())
    return svi, Result({}, State(None), jnp.zeros(1))


def write_figures(folder):
    from numpyro_kscore.diagnostics import _plots as plots

    folder.mkdir(parents=True, exist_ok=True)
    draws = {name: evaluate_guide(*make_fit(name), DATA, num_samples=2_000) for name in GUIDES}
    good, narrow = draws["good"], draws["narrow"]
    figures = {
        "pairs": plots.plot_pairs(narrow.samples, ["z0", "z1"], reference=good.samples),
        "field": plots.plot_score_field(narrow.samples, narrow.scores, ["z0", "z1"]),
        "weights": plots.plot_weights(khat(narrow)),
    }
    for name, figure in figures.items():
        figure.savefig(folder / f"diagnostics_{name}.png", dpi=100)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figures", type=Path, help="folder for pictures")
    options = parser.parse_args(arguments)
    if options.figures is not None:
        write_figures(options.figures)
        return
    for name in GUIDES:
        print(f"--- {name}")
        print(diagnose(*make_fit(name), DATA, rng_key=random.key(1)))


if __name__ == "__main__":
    main()
