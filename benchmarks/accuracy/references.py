"""Reference draws of the posteriors, with their convergence diagnostics."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from benchmarks.accuracy.posteriors import Posterior

__all__ = ["QUICK", "Reference", "Sizes", "load_reference"]

_CACHE_VERSION = 1  # raise it when a model or a sampler changes
_SEED = 20_200_519
_NUM_CHAINS = 8  # half of them for the truth, half for the floor
_LARGEST_RHAT = 1.01
_SMALLEST_ESS = 1_000


class Sizes(NamedTuple):
    """Numbers of draws.

    Attributes:
        num_draws: draws in each of the two sets of a distance.
        num_pairs: pairs of sets that a distance is averaged over.
        num_warmup: warm-up steps of NUTS.
    """

    num_draws: int = 2_000
    num_pairs: int = 5
    num_warmup: int = 1_000


QUICK = Sizes(num_draws=200, num_pairs=1, num_warmup=100)


@dataclass(frozen=True)
class Reference:
    """Draws from the true posterior, as the posterior summarizes them.

    Attributes:
        truth: draws that guides are compared with, (num_pairs · num_draws, k).
        other: as many independent draws from other chains, for the sampling floor.
        rhat: largest split R̂ over the coordinates; 1 for exact draws.
        ess: smallest effective sample size; the number of draws for exact ones.
        seconds: elapsed seconds of the sampling.
    """

    truth: Array
    other: Array
    rhat: float
    ess: float
    seconds: float

    @property
    def trusted(self) -> bool:
        """Whether the chains agree and there are enough independent draws."""
        return self.rhat < _LARGEST_RHAT and self.ess >= _SMALLEST_ESS


def load_reference(posterior: Posterior, sizes: Sizes, folder: Path | None) -> Reference:
    """Reference draws, loaded from the folder or computed.

    Args:
        posterior: posterior to draw from.
        sizes: numbers of draws.
        folder: folder that keeps draws, one ``.npz`` for each posterior; None keeps nothing.

    Returns:
        The reference; check ``trusted`` before use.
    """
    path = None
    if folder is not None:
        path = folder / f"{posterior.target.name}-{_fingerprint(posterior, sizes)}.npz"
        if path.exists():
            with np.load(path) as kept:
                values = {name: kept[name] for name in kept.files}
            scalars = {name: float(values[name]) for name in ("rhat", "ess", "seconds")}
            return Reference(jnp.asarray(values["truth"]), jnp.asarray(values["other"]), **scalars)
    start = time.perf_counter()
    truth, other, rhat, ess = _draw(posterior, sizes)
    seconds = round(time.perf_counter() - start, 1)
    reference = Reference(truth, other, rhat, ess, seconds)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name and renamed, so that no half-written file is left.
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, **vars(reference))
        partial.replace(path)
    return reference


def _draw(posterior: Posterior, sizes: Sizes) -> tuple[Array, Array, float, float]:
    target = posterior.target
    total = 2 * sizes.num_pairs * sizes.num_draws
    key = random.key(_SEED)
    if target.exact is not None:
        if posterior.summary is not None:
            raise ValueError(f"{target.name}: expected NUTS for a summary; got exact draws")
        truth, other = jnp.split(target.exact(key, total), 2)
        return truth, other, 1.0, float(total)
    run_key, truth_key, other_key = random.split(key, 3)
    mcmc = MCMC(
        NUTS(target.nuts_model or target.model, target_accept_prob=0.95),
        num_warmup=sizes.num_warmup,
        num_samples=total // _NUM_CHAINS * posterior.thinning,
        thinning=posterior.thinning,
        num_chains=_NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(run_key, *target.args)
    draws = posterior.summarize(target.from_nuts(mcmc.get_samples()))
    chains = np.asarray(draws, np.float64).reshape(_NUM_CHAINS, total // _NUM_CHAINS, -1)
    rhat = float(np.max(split_gelman_rubin(chains)))
    ess = float(np.min(effective_sample_size(chains)))
    truth, other = jnp.split(draws, 2)  # by chains, so that the floor includes their differences
    return random.permutation(truth_key, truth), random.permutation(other_key, other), rhat, ess


def _fingerprint(posterior: Posterior, sizes: Sizes) -> str:
    settings = (_CACHE_VERSION, jax.__version__, *sizes, posterior.thinning)
    digest = hashlib.sha256(repr(settings).encode())
    for array in posterior.target.args:
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()[:12]
