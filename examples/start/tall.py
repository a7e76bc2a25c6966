"""A tall data set: two million visits to twenty clinics, in minibatches.

A hierarchical logistic regression. Each gradient of NUTS reads all rows; a step of
``AutoImplicit`` reads the 500 of its batch, and what takes all rows is done once for many steps.
NUTS takes minutes, so 1000 draws of it, after 500 to adapt, are stored in ``tall_nuts.npz``.
"""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from examples.start.methods import Result

NUM_ROWS, NUM_CLINICS, NUM_FEATURES, BATCH_SIZE = 2_000_000, 20, 8, 500
STORED = Path(__file__).with_name("tall_nuts.npz")


class Visits(NamedTuple):
    """Simulated visits: features (n, 8), clinics (n,), and whether each was missed (n,)."""

    features: Array
    clinics: Array
    missed: Array


def simulate(num_rows: int = NUM_ROWS) -> Visits:
    """Clinics differ in size by orders of magnitude, and two features are nearly the same."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(num_rows, NUM_FEATURES))
    features[:, 1] = 0.95 * features[:, 0] + 0.3 * features[:, 1]
    sizes = rng.dirichlet(np.full(NUM_CLINICS, 0.5))
    clinics = rng.choice(NUM_CLINICS, size=num_rows, p=sizes)
    weights = 0.4 * rng.normal(size=NUM_FEATURES)
    effects = -3.0 + 0.5 * rng.standard_t(4, size=NUM_CLINICS)
    logits = effects[clinics] + features @ weights
    missed = rng.random(num_rows) < 1 / (1 + np.exp(-logits))
    return Visits(
        jnp.asarray(features, jnp.float32),
        jnp.asarray(clinics, jnp.int32),
        jnp.asarray(missed, jnp.int32),
    )


def model(visits: Visits, batch_size: int | None = None) -> None:
    """Logistic regression with an effect of each clinic."""
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    weights = numpyro.sample("weights", dist.StudentT(3, jnp.zeros(NUM_FEATURES), 1).to_event(1))
    with numpyro.plate("clinics", NUM_CLINICS):
        effects = numpyro.sample("effects", dist.Normal(mean, spread))
    with numpyro.plate("visits", len(visits.missed), subsample_size=batch_size) as rows:
        logits = effects[visits.clinics[rows]] + visits.features[rows] @ weights
        numpyro.sample("missed", dist.Bernoulli(logits=logits), obs=visits.missed[rows])


def flatten(draws: dict[str, Array]) -> Array:
    """Unconstrained coordinates, one row per draw."""
    return jnp.column_stack(
        [draws["mean"], jnp.log(draws["spread"]), draws["weights"], draws["effects"]]
    )


def store(found: Result) -> None:
    """Keep draws of NUTS beside this file."""
    np.savez_compressed(STORED, draws=np.asarray(found.draws, np.float32), cost=found[1:])


def stored() -> Result:
    """The draws that are kept."""
    with np.load(STORED) as file:
        return Result(jnp.asarray(file["draws"]), *file["cost"].tolist())
