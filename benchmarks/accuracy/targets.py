"""Posteriors to measure guides on: NumPyro models with exact draws or a NUTS reference.

All draws are compared in *unconstrained* coordinates, one row per draw, in the order in which the
model samples its latents. ``reference`` caches NUTS draws in the user's cache folder
(``$XDG_CACHE_HOME/numpyro_kscore``), so that only the first run of a benchmark waits for them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.distributions import biject_to, constraints
from numpyro.infer import MCMC, NUTS
from scipy.io import loadmat

__all__ = [
    "DATA_VARIABLE",
    "TARGETS",
    "Target",
    "flat_prior",
    "make_target",
    "reference",
    "ring_log_density",
]

DATA_VARIABLE = "NUMPYRO_KSCORE_DATA"
_CACHE_VERSION = "1"  # raise it when a model or a sampler below changes

Model = Callable[..., None]
Draws = dict[str, Array]


@dataclass(frozen=True)
class Target:
    """A posterior and a way to draw from it.

    Attributes:
        name: name on the command line.
        model: a NumPyro model.
        args: arguments of the model (its data).
        exact: ``(key, num_draws) -> (num_draws, dim)`` unconstrained draws; ``None`` where only
            NUTS is available.
        nuts_model: the model NUTS runs on when ``exact`` is ``None``: the same posterior as that of
            ``model``, with a geometry that suits NUTS.
        from_nuts: maps draws of the sites of ``nuts_model`` to those of ``model``.
    """

    name: str
    model: Model
    args: tuple[Array, ...] = ()
    exact: Callable[[Array, int], Array] | None = None
    nuts_model: Model | None = None
    from_nuts: Callable[[Draws], Draws] = lambda draws: draws

    def unconstrained(self, draws: Draws, sites: Sequence[str] | None = None) -> Array:
        """Unconstrained coordinates, (n, dim), of constrained draws of all sites, (n, ...) each.

        With ``sites`` only of these, in their order.
        """
        columns, supports = [], self.supports()
        for name in supports if sites is None else sites:
            values = biject_to(supports[name]).inv(draws[name])
            columns.append(values.reshape(values.shape[0], -1))
        return jnp.concatenate(columns, axis=1)

    def supports(self) -> dict[str, constraints.Constraint]:
        """The model's latent sites, in sampling order, with their supports."""
        return {name: site["fn"].support for name, site in self._latents().items()}

    def example(self) -> Draws:
        """Admissible values of the model's latent sites, in sampling order."""
        return {name: site["value"] for name, site in self._latents().items()}

    def _latents(self) -> dict[str, Any]:
        """The model's latent sites as they are traced."""
        seeded = numpyro.handlers.seed(self.model, random.key(0))
        # ImproperUniform sites cannot be sampled, so every site gets an admissible value.
        seeded = numpyro.handlers.substitute(seeded, substitute_fn=numpyro.infer.init_to_feasible())
        trace = numpyro.handlers.trace(seeded).get_trace(*self.args)
        return {
            name: site
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"]
        }


def flat_prior(size: int) -> dist.Distribution:
    """The improper prior of vectors (size,) that is the same everywhere."""
    return dist.ImproperUniform(constraints.real_vector, (), (size,))


# --- Two-dimensional densities with exact draws ---------------------------------------------------


def _banana() -> Target:
    """(x1, x1² + x2 + 1) is Gaussian with unit variances and correlation 0.9."""
    correlation = 0.9
    residual_sd = (1 - correlation**2) ** 0.5

    def model() -> None:
        x1 = numpyro.sample("x1", dist.Normal(0, 1))
        numpyro.sample("x2", dist.Normal(correlation * x1 - x1**2 - 1, residual_sd))

    def exact(key: Array, num_draws: int) -> Array:
        x1, noise = random.normal(key, (2, num_draws))
        return jnp.stack([x1, correlation * x1 - x1**2 - 1 + residual_sd * noise], axis=1)

    return Target("banana", model, exact=exact)


def _from_distribution(name: str, distribution: dist.Distribution) -> Target:
    """A target with one site ``x`` of event dimension 1."""

    def model() -> None:
        numpyro.sample("x", distribution)

    def exact(key: Array, num_draws: int) -> Array:
        return distribution.sample(key, (num_draws,))

    return Target(name, model, exact=exact)


def _gaussian_mixture(means: np.ndarray, covariances: np.ndarray) -> dist.Distribution:
    weights = jnp.full(len(means), 1 / len(means))
    components = dist.MultivariateNormal(jnp.asarray(means), jnp.asarray(covariances))
    return dist.MixtureSameFamily(dist.Categorical(weights), components)


def _multimodal() -> Target:
    """Two unit Gaussians at (-2, 0) and (2, 0)."""
    means = np.array([[-2.0, 0.0], [2.0, 0.0]])
    return _from_distribution("multimodal", _gaussian_mixture(means, np.stack([np.eye(2)] * 2)))


def _x_shape() -> Target:
    """Two centered Gaussians with variances 2 and covariances ±1.8."""
    covariances = np.array([[[2, 1.8], [1.8, 2]], [[2, -1.8], [-1.8, 2]]])
    return _from_distribution("x_shape", _gaussian_mixture(np.zeros((2, 2)), covariances))


def _student() -> Target:
    """A linear image of two independent Student t(2), whose variances are infinite."""
    # The literature does not specify the mixing matrix; this one gives a moderate slant.
    mixing = jnp.array([[1.0, 0.0], [0.8, 0.6]])
    independent = dist.StudentT(2.0).expand([2]).to_event(1)
    transform = dist.transforms.LowerCholeskyAffine(jnp.zeros(2), mixing)
    return _from_distribution("student", dist.TransformedDistribution(independent, transform))


RADIUS, WIDTH = 2.0, 0.25


def ring_log_density(x: Array) -> Array:
    """Up to a constant, that of a ring with a normal profile, (..., 2) -> (...)."""
    # 1e-12 keeps the derivative of the norm finite at the origin.
    norm = jnp.sqrt((x**2).sum(-1) + 1e-12)
    return -0.5 * ((norm - RADIUS) / WIDTH) ** 2


def _ring() -> Target:
    """A ring: density proportional to exp(-(|x| - 2)² / (2·0.25²))."""

    def model() -> None:
        x = numpyro.sample("x", flat_prior(2))
        numpyro.factor("ring", ring_log_density(x))

    def exact(key: Array, num_draws: int) -> Array:
        radius_key, angle_key = random.split(key)
        # The area element makes the density of the radius r·exp(...); its distribution function is
        # inverted numerically.
        grid = np.linspace(0, RADIUS + 8 * WIDTH, 20_001)
        density = grid * np.exp(-0.5 * ((grid - RADIUS) / WIDTH) ** 2)
        cumulative = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
        levels = random.uniform(radius_key, (num_draws,))
        norm = jnp.interp(levels, jnp.asarray(cumulative / cumulative[-1]), jnp.asarray(grid))
        angle = random.uniform(angle_key, (num_draws,), maxval=2 * jnp.pi)
        return norm[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)

    return Target("ring", model, exact=exact)


# --- Correlated Gaussians -------------------------------------------------------------------------


def _correlated_gaussian(dim: int, condition: float = 1e4) -> Target:
    """Zero mean; covariance eigenvalues log-spaced around 1, eigenvectors uniformly random."""
    generator = np.random.default_rng(dim)
    rotation, _ = np.linalg.qr(generator.normal(size=(dim, dim)))
    eigenvalues = np.geomspace(condition**-0.5, condition**0.5, dim)
    # Factorized in float64, because rounding would dominate the smallest eigenvalues in float32.
    scale_tril = np.linalg.cholesky(rotation * eigenvalues @ rotation.T)
    gaussian = dist.MultivariateNormal(jnp.zeros(dim), scale_tril=jnp.asarray(scale_tril))
    return _from_distribution(f"gaussian{dim}", gaussian)


# --- Posteriors with data -------------------------------------------------------------------------


def _logistic_regression(features: Array, labels: Array) -> None:
    weights = numpyro.sample("weights", dist.Normal(0, 10).expand([features.shape[1]]).to_event(1))
    numpyro.sample("labels", dist.Bernoulli(logits=features @ weights), obs=labels)


def _waveform(data: Path | None) -> Target:
    """Bayesian logistic regression on the waveform data: 400 rows, 21 features and an intercept."""
    path = data or (Path(os.environ[DATA_VARIABLE]) if DATA_VARIABLE in os.environ else None)
    if path is None:
        raise ValueError(
            f"expected the path of waveform.mat in --data or ${DATA_VARIABLE}; got none"
        )
    if path.is_dir():
        path = path / "waveform.mat"
    if not path.is_file():
        raise ValueError(f"expected a MATLAB v5 file with the waveform data; got {path}")
    contents = loadmat(path)
    features = jnp.asarray(contents["X_train"], jnp.float32)
    labels = jnp.asarray(contents["y_train"].ravel(), jnp.int32)
    if features.shape != (400, 22) or labels.shape != (400,):
        raise ValueError(
            "expected X_train of shape (400, 22) and 400 labels in y_train; "
            f"got {features.shape} and {labels.shape}"
        )
    return Target("waveform", _logistic_regression, (features, labels))


# Effects of coaching in eight schools and their standard errors: Rubin (1981).
_EFFECTS = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
_STANDARD_ERRORS = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def _eight_schools_centered() -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effects", dist.Normal(theta, _STANDARD_ERRORS), obs=_EFFECTS)


def _eight_schools_non_centered() -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        eta = numpyro.sample("eta", dist.Normal(0, 1))
        numpyro.sample("effects", dist.Normal(mu + tau * eta, _STANDARD_ERRORS), obs=_EFFECTS)


def _center(draws: Draws) -> Draws:
    theta = draws["mu"][:, None] + draws["tau"][:, None] * draws["eta"]
    return {"mu": draws["mu"], "tau": draws["tau"], "theta": theta}


_FACTORIES: dict[str, Callable[[], Target]] = {
    "banana": _banana,
    "multimodal": _multimodal,
    "x_shape": _x_shape,
    "student": _student,
    "ring": _ring,
    "gaussian30": lambda: _correlated_gaussian(30),
    "gaussian100": lambda: _correlated_gaussian(100),
    "eight_schools": lambda: Target("eight_schools", _eight_schools_non_centered),
    # NUTS misses the neck of the centered funnel, so its reference uses the non-centered form.
    "eight_schools_centered": lambda: Target(
        "eight_schools_centered",
        _eight_schools_centered,
        nuts_model=_eight_schools_non_centered,
        from_nuts=_center,
    ),
}
TARGETS = (*_FACTORIES, "waveform")


def make_target(name: str, data: Path | None = None) -> Target:
    """Build a target by name.

    Args:
        name: one of ``TARGETS``.
        data: path of ``waveform.mat`` or of the folder that holds it; without it the environment
            variable ``NUMPYRO_KSCORE_DATA`` is read. Other targets need no data.

    Returns:
        The target.

    Raises:
        ValueError: if the name is unknown, or the waveform data are missing or have wrong shapes.
    """
    if name == "waveform":
        return _waveform(data)
    if name not in _FACTORIES:
        raise ValueError(f"expected a target among {', '.join(TARGETS)}; got {name!r}")
    return _FACTORIES[name]()


# --- Reference draws ------------------------------------------------------------------------------


def reference(target: Target, key: Array, num_draws: int) -> Array:
    """Draws from the true posterior: exact where a sampler exists, otherwise from thinned NUTS.

    Args:
        target: the posterior.
        key: random key; the same key and number give the same draws, from the cache if possible.
        num_draws: number of draws.

    Returns:
        Unconstrained draws in random order, shape (num_draws, dim), so that disjoint slices are
        independent samples of the posterior.

    Raises:
        RuntimeError: if NUTS did not converge (split R̂ above 1.01 in any coordinate).
    """
    if target.exact is not None:
        return target.exact(key, num_draws)
    path = _cache_folder() / f"{target.name}-{_fingerprint(target, key, num_draws)}.npy"
    if not path.exists():
        draws = np.asarray(_nuts(target, key, num_draws))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name and renamed, so that no half-written file is left.
        partial = path.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, draws)
        partial.replace(path)
    return jnp.asarray(np.load(path))


def _nuts(
    target: Target, key: Array, num_draws: int, num_chains: int = 4, thinning: int = 4
) -> Array:
    run_key, order_key = random.split(key)
    per_chain = -(-num_draws // num_chains)
    kernel = NUTS(target.nuts_model or target.model, target_accept_prob=0.95)
    mcmc = MCMC(
        kernel,
        num_warmup=2_000,
        num_samples=per_chain * thinning,
        thinning=thinning,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(run_key, *target.args)
    draws = target.unconstrained(target.from_nuts(mcmc.get_samples()))
    chains = np.asarray(draws).reshape(num_chains, per_chain, -1)
    worst = float(np.max(split_gelman_rubin(chains)))
    if not worst < 1.01:
        smallest = float(np.min(effective_sample_size(chains)))
        raise RuntimeError(
            f"NUTS on {target.name}: expected split R-hat < 1.01; got {worst:.3f} "
            f"(smallest effective sample size {smallest:.0f} of {num_draws})"
        )
    return random.permutation(order_key, draws)[:num_draws]


@lru_cache
def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "numpyro_kscore" / "references"


def _fingerprint(target: Target, key: Array, num_draws: int) -> str:
    digest = hashlib.sha256(f"{_CACHE_VERSION} {jax.__version__} {num_draws}".encode())
    for array in (random.key_data(key), *target.args):
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()[:16]
