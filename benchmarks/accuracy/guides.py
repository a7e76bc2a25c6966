"""The methods of the comparison: each fits one guide to one posterior, with its usual settings.

The last three are ``AutoImplicit`` with the score estimators of Li and Turner (2018), Shi, Sun and
Zhu (2018) and Zhou, Shi and Zhu (2020) as published, without this library's base score and bias
correction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro import handlers
from numpyro.contrib.einstein import RBFKernel, SteinVI
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.optim import Adagrad

from benchmarks.accuracy.posteriors import Posterior
from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore.estimators import nu_method, ssge, stein

__all__ = ["METHODS", "Fit"]

NUM_STEPS = 5_000
# The same for every guide: at 5e-3 the full-rank Gaussian does not converge on correlated
# posteriors.
STEP_SIZE = 1e-2
# The default of Trace_ELBO is one particle, which is noisy; the 128 and more of ImplicitELBO would
# make the flows slow.
TRACE_PARTICLES = 32


class Fit(NamedTuple):
    """The result of a fit.

    Attributes:
        draws: draws of the guide, as the posterior summarizes them, (n, k).
        seconds: elapsed seconds of fitting, compilation included.
        cpu_seconds: CPU seconds of the same on all cores, without other processes.
    """

    draws: Array
    seconds: float
    cpu_seconds: float


def _timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    start, cpu_start = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(run())
    return result, time.perf_counter() - start, time.process_time() - cpu_start


def _svi(
    make_guide: Callable[..., Any],
    make_loss: Callable[[], Any],
    posterior: Posterior,
    seed: int,
    num_steps: int,
    num_draws: int,
) -> Fit:
    target = posterior.target
    run_key, draw_key = random.split(random.key(seed))
    guide = make_guide(target.model)
    optimizer = optax.adam(optax.cosine_decay_schedule(STEP_SIZE, num_steps))
    svi = SVI(target.model, guide, optimizer, make_loss())
    result, *seconds = _timed(
        lambda: svi.run(run_key, num_steps, *target.args, progress_bar=False).params
    )
    draws = guide.sample_posterior(draw_key, result, *target.args, sample_shape=(num_draws,))
    return Fit(posterior.summarize(draws), *seconds)


def _origin_of_improper(site: dict[str, Any]) -> Array | None:
    improper = site["type"] == "sample" and isinstance(site["fn"], dist.ImproperUniform)
    return jnp.zeros(site["fn"].shape()) if improper else None


def _stein(posterior: Posterior, seed: int, num_steps: int, num_draws: int) -> Fit:
    """SteinVI: a mixture of ten mean-field Gaussians, with the settings of NumPyro's docs."""
    target = posterior.target
    run_key, draw_key = random.split(random.key(seed))
    # SteinVI draws from the model before its first step, which fails for an improper prior.
    model = handlers.substitute(target.model, substitute_fn=_origin_of_improper)
    guide = AutoNormal(target.model)
    stein = SteinVI(model, guide, Adagrad(0.05), RBFKernel())
    result, *seconds = _timed(
        lambda: stein.run(run_key, num_steps, *target.args, progress_bar=False).params
    )
    per_particle = -(-num_draws // stein.num_stein_particles)
    keys = random.split(draw_key, stein.num_stein_particles)
    draws = jax.vmap(
        lambda params, key: guide.sample_posterior(key, params, sample_shape=(per_particle,))
    )(result, keys)
    mixed = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws)
    order = random.permutation(draw_key, per_particle * stein.num_stein_particles)[:num_draws]
    return Fit(posterior.summarize(jax.tree.map(lambda x: x[order], mixed)), *seconds)


_trace_elbo = partial(Trace_ELBO, num_particles=TRACE_PARTICLES)
# Implicit inference as published: the guide's score without a base, shrunk toward zero.
_published = partial(ImplicitELBO, base=None, debias=None)

METHODS: dict[str, Callable[[Posterior, int, int, int], Fit]] = {
    "AutoImplicit": partial(_svi, AutoImplicit, ImplicitELBO),
    "AutoNormal": partial(_svi, AutoNormal, _trace_elbo),
    "AutoMultivariateNormal": partial(_svi, AutoMultivariateNormal, _trace_elbo),
    "AutoIAFNormal": partial(_svi, AutoIAFNormal, _trace_elbo),
    "AutoBNAFNormal": partial(_svi, AutoBNAFNormal, _trace_elbo),
    "SteinVI": _stein,
    "AutoImplicit, Stein": partial(_svi, AutoImplicit, lambda: _published(estimator=stein())),
    "AutoImplicit, SSGE": partial(_svi, AutoImplicit, lambda: _published(estimator=ssge())),
    "AutoImplicit, nu": partial(_svi, AutoImplicit, lambda: _published(estimator=nu_method())),
}
