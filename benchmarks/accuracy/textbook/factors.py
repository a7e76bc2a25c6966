"""Hidden numbers of every person or animal, most of what there is to infer."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Target
from benchmarks.accuracy.textbook.coordinates import (
    NONCENTERED,
    around,
    in_coordinates,
    ratio,
    to_arrays,
)

__all__ = ["capture", "factor_model"]

_TESTS = 8


def _loadings(diagonal: Array, below: Array) -> Array:
    """Loadings of tests on two factors, (..., 8, 2): the first test has none on the second."""
    first = jnp.concatenate([diagonal[..., :1], below[..., : _TESTS - 1]], axis=-1)
    zero = jnp.zeros_like(diagonal[..., :1])
    second = jnp.concatenate([zero, diagonal[..., 1:], below[..., _TESTS - 1 :]], axis=-1)
    return jnp.stack([first, second], axis=-1)


def _parameters() -> tuple[Array, Array, Array]:
    """Means, loadings and noises of the tests, from their priors."""
    means = numpyro.sample("means", dist.Normal(50.0, 20.0).expand([_TESTS]).to_event(1))
    # Positive, since factors have no sign.
    diagonal = numpyro.sample("diagonal", dist.HalfNormal(10.0).expand([2]).to_event(1))
    below = numpyro.sample("below", dist.Normal(0.0, 10.0).expand([2 * _TESTS - 3]).to_event(1))
    noises = numpyro.sample("noises", dist.HalfCauchy(5.0).expand([_TESTS]).to_event(1))
    return means, _loadings(diagonal, below), noises


def factor_model() -> Posterior:
    """Eight scores of 50 people by two factors, of triangular loadings, all hidden: d = 131."""
    rng = np.random.default_rng(1515)
    truth = np.array([[8, 0], [2, 7], [7, 1], [1.5, 6], [6, 3], [3, 5.5], [5, 0], [0.5, 4.0]])
    spreads = np.array([5, 5, 6, 5, 7, 6, 8, 7])
    common = 50 + rng.standard_normal((50, 2)) @ truth.T
    scores = np.round(common + rng.standard_normal((50, _TESTS)) * spreads)

    def model(scores: Array) -> None:
        means, loadings, noises = _parameters()
        with numpyro.plate("people", len(scores)):
            factors = numpyro.sample("factors", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            prior = dist.Normal(means + factors @ loadings.T, noises)
            numpyro.sample("scores", prior.to_event(1), obs=scores)

    def summed_out(scores: Array) -> None:
        means, loadings, noises = _parameters()
        covariance = loadings @ loadings.T + jnp.diag(noises**2)
        numpyro.sample("scores", dist.MultivariateNormal(means, covariance), obs=scores)

    coordinates = {
        "means": around(50.0, 2.0),
        "diagonal": ratio([6.0, 7.0], 0.3),
        "below": around(3.0, 2.0),
        "noises": ratio(6.0, 0.2),
    }

    def from_nuts(draws: Draws) -> Draws:
        kept = {site: draws[site] for site in coordinates}
        loadings = _loadings(kept["diagonal"], kept["below"])
        # Given the parameters, the two factors of a person are normal, of one precision for all.
        weighted = jnp.swapaxes(loadings / kept["noises"][..., None] ** 2, 1, 2)
        precision = jnp.eye(2) + weighted @ loadings
        shifts = weighted @ scores.T - weighted @ kept["means"][..., None]
        # The same numbers at every call, so that draws are the same.
        z = np.random.default_rng(5).normal(size=shifts.shape)
        upper = jnp.swapaxes(jnp.linalg.cholesky(precision), 1, 2)
        factors = jnp.linalg.solve(precision, shifts) + jnp.linalg.solve(upper, z)
        return kept | {"factors": jnp.swapaxes(factors, 1, 2)}

    target = Target(
        "factor_model", model, to_arrays(scores),
        nuts_model=handlers.reparam(summed_out, config=coordinates), from_nuts=from_nuts,
    )  # fmt: skip
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)


def capture() -> Posterior:
    """Animals caught on six days, unseen ones among 100, effects centered: d = 108."""
    rng = np.random.default_rng(505)
    chances = np.array([0.45, 0.3, 0.4, 0.25, 0.35, 0.5])
    logits = np.log(chances / (1 - chances)) + 0.9 * rng.standard_normal((72, 1))
    caught = rng.uniform(size=(72, 6)) < 1 / (1 + np.exp(-logits))
    seen = caught[caught.any(1)]
    histories = np.zeros((100, 6))
    histories[: len(seen)] = seen

    def model(histories: Array) -> None:
        animals, days = histories.shape
        present = numpyro.sample("present", dist.Uniform(0.0, 1.0))
        spread = numpyro.sample("spread", dist.Uniform(0.0, 5.0))
        with numpyro.plate("days", days):
            chances = numpyro.sample("chances", dist.Uniform(0.0, 1.0))
        with numpyro.plate("animals", animals):
            effects = numpyro.sample("effects", dist.Normal(0.0, spread))
        logits = jnp.log(chances) - jnp.log1p(-chances) + effects[:, None]
        history = dist.Bernoulli(logits=logits).log_prob(histories).sum(-1)
        log_density = jnp.log(present) + history
        # Whoever was never seen may not be there: the indicator is summed out.
        absent = jnp.logaddexp(log_density, jnp.log1p(-present))
        never = histories.sum(-1) == 0
        numpyro.factor("histories", jnp.where(never, absent, log_density).sum())

    target = in_coordinates("capture", model, to_arrays(histories), {"effects": NONCENTERED})
    return Posterior(target, accept=0.9, float64=True)
