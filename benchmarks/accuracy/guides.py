"""The methods of the comparison: each fits or samples one posterior, with its usual settings.

``AutoImplicit`` is fitted by ``numpyro_kscore.fit``, as the README tells users to, and by as many
steps of ``svi.run`` as all other guides. The last three are ``AutoImplicit`` with the score
estimators of Li and Turner (2018), Shi, Sun and Zhu (2018) and Zhou, Shi and Zhu (2020) as
published, without this library's base score and bias correction.
"""

from __future__ import annotations

import warnings
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
from numpyro.infer import SVI, Trace_ELBO, init_to_uniform
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.optim import Adagrad

from benchmarks.accuracy.fits import Fit, timed
from benchmarks.accuracy.pathfinder import pathfinder
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.samplers import mams, nuts
from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from numpyro_kscore._fit.progress import EVALUATION_DRAWS
from numpyro_kscore._model.program import Program, inspect_program
from numpyro_kscore.diagnostics import diagnose
from numpyro_kscore.estimators import nu_method, ssge, stein

__all__ = [
    "METHODS",
    "NUM_STEPS",
    "PEERS",
    "Fitted",
    "fit_by_steps",
    "fit_implicit",
    "num_particles",
]

NUM_STEPS = 5_000
# The same for every guide: at 5e-3 the full-rank Gaussian does not converge on correlated
# posteriors.
STEP_SIZE = 1e-2
# The default of Trace_ELBO is one particle, which is noisy; the 128 and more of ImplicitELBO would
# make the flows slow.
TRACE_PARTICLES = 32
STEIN_PARTICLES = 10  # the default of SteinVI


class Fitted(NamedTuple):
    """A guide fitted by ``fit``.

    Attributes:
        svi: model, guide and loss.
        result: what ``fit`` returned.
        clocks: elapsed seconds and CPU seconds.
        gradients: of the model's density, the search for a start and all looks included.
    """

    svi: SVI
    result: Any
    clocks: tuple[float, float]
    gradients: float


def fit_implicit(posterior: Posterior, key: Array, num_steps: int, **options: Any) -> Fitted:
    """``AutoImplicit`` by ``fit``, at most ``num_steps`` steps, as in the README.

    Args:
        posterior: the posterior.
        key: random key.
        num_steps: most steps.
        **options: of the guide.
    """
    target, args = posterior.target, posterior.fit_args
    guide = AutoImplicit(target.model, **options)
    svi = SVI(target.model, guide, optax.adam(STEP_SIZE), ImplicitELBO())
    with warnings.catch_warnings():
        # What it warns of is in the column that says how the fit ended.
        warnings.filterwarnings("ignore", message="fit: ", category=UserWarning)
        result, *clocks = timed(
            lambda: fit(svi, key, *args, max_steps=num_steps, progress_bar=False)
        )
    info = result.info
    searched = 0 if guide.start is None else guide.start.num_gradients
    if posterior.batch_size is not None:
        # All rows are expanded before the first chunk and after 1, 2, 4, … of them: value, score
        # and Hessian, and 17 values of the rows, of which three take as long as a gradient.
        num_expansions = 1 + (len(info.trace) - 1).bit_length()
        searched += num_expansions * (1 + 2 * guide.latent_dim + 6)
    particles = num_particles(svi, result.params, args)
    drawn = EVALUATION_DRAWS * len(info.trace) + particles * info.steps
    gradients = searched + drawn * posterior.batch_share
    return Fitted(svi, result, (clocks[0], clocks[1]), gradients)


def _fit(posterior: Posterior, seed: int, num_steps: int, num_draws: int, **options: Any) -> Fit:
    run_key, draw_key = random.split(random.key(seed))
    fitted = fit_implicit(posterior, run_key, num_steps, **options)
    info = fitted.result.info
    ending = ", ".join(filter(None, (info.cause, info.doubt)))
    return _with_draws(fitted, posterior, draw_key, num_draws, info.steps, ending)


def _with_draws(
    fitted: Fitted, posterior: Posterior, key: Array, num_draws: int, steps: int, ending: str = ""
) -> Fit:
    """A fitted guide by its draws."""
    args, (svi, result, clocks, gradients) = posterior.fit_args, fitted
    draws = svi.guide.sample_posterior(key, result.params, *args, sample_shape=(num_draws,))
    return Fit(
        posterior.summarize(draws), *clocks, steps, gradients,
        ending=ending,
        diagnose=lambda: diagnose(svi, result, *args).verdict,
    )  # fmt: skip


def num_particles(svi: SVI, params: dict[str, Any], args: tuple[Any, ...]) -> int:
    """The number of particles of a step of :class:`ImplicitELBO`."""
    program = Program(params, svi.model, svi.guide, args, {}, {})
    return inspect_program(random.key(0), program).default_num_particles


def fit_by_steps(
    make_guide: Callable[..., Any],
    make_loss: Callable[[], Any],
    posterior: Posterior,
    key: Array,
    num_steps: int,
) -> Fitted:
    """A guide by ``svi.run``, with a step size that falls to zero.

    Args:
        make_guide: from a model to a guide.
        make_loss: makes the loss.
        posterior: the posterior.
        key: random key.
        num_steps: number of steps.
    """
    target, args = posterior.target, posterior.fit_args
    optimizer = optax.adam(optax.cosine_decay_schedule(STEP_SIZE, num_steps))
    svi = SVI(target.model, make_guide(target.model), optimizer, make_loss())
    result, *clocks = timed(lambda: svi.run(key, num_steps, *args, progress_bar=False))
    particles = TRACE_PARTICLES
    if isinstance(svi.loss, ImplicitELBO):
        particles = num_particles(svi, result.params, args)
    gradients = num_steps * particles * posterior.batch_share
    return Fitted(svi, result, (clocks[0], clocks[1]), gradients)


def _svi(
    make_guide: Callable[..., Any],
    make_loss: Callable[[], Any],
    posterior: Posterior,
    seed: int,
    num_steps: int,
    num_draws: int,
) -> Fit:
    run_key, draw_key = random.split(random.key(seed))
    fitted = fit_by_steps(make_guide, make_loss, posterior, run_key, num_steps)
    return _with_draws(fitted, posterior, draw_key, num_draws, num_steps)


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
    stein = SteinVI(model, guide, Adagrad(0.05), RBFKernel(), num_elbo_particles=STEIN_PARTICLES)
    result, *seconds = timed(
        lambda: stein.run(run_key, num_steps, *target.args, progress_bar=False).params
    )
    per_particle = -(-num_draws // stein.num_stein_particles)
    keys = random.split(draw_key, stein.num_stein_particles)
    draws = jax.vmap(
        lambda params, key: guide.sample_posterior(key, params, sample_shape=(per_particle,))
    )(result, keys)
    mixed = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws)
    order = random.permutation(draw_key, per_particle * stein.num_stein_particles)[:num_draws]
    draws = posterior.summarize(jax.tree.map(lambda x: x[order], mixed))
    gradients = num_steps * stein.num_stein_particles * STEIN_PARTICLES
    return Fit(draws, *seconds, num_steps, gradients)


_trace_elbo = partial(Trace_ELBO, num_particles=TRACE_PARTICLES)
_OF_NUMPYRO = (AutoNormal, AutoMultivariateNormal, AutoIAFNormal, AutoBNAFNormal)
# Guides whose densities are known.
PEERS: dict[str, Callable[[Posterior, Array, int], Fitted]] = {
    make.__name__: partial(fit_by_steps, make, _trace_elbo) for make in _OF_NUMPYRO
}
# Implicit inference as published: the guide's score without a base, shrunk toward zero.
_published = partial(ImplicitELBO, base=None, debias=None, local_share=0.0)

METHODS: dict[str, Callable[[Posterior, int, int, int], Fit]] = {
    "AutoImplicit": _fit,
    "AutoImplicit, far start": partial(_fit, init_loc_fn=partial(init_to_uniform, radius=10)),
    "AutoImplicit, svi.run": partial(_svi, AutoImplicit, ImplicitELBO),
    **{make.__name__: partial(_svi, make, _trace_elbo) for make in _OF_NUMPYRO},
    "SteinVI": _stein,
    "multi-Pathfinder": pathfinder,
    "NUTS": nuts,
    "MAMS": mams,
    "AutoImplicit, Stein": partial(_svi, AutoImplicit, lambda: _published(estimator=stein())),
    "AutoImplicit, SSGE": partial(_svi, AutoImplicit, lambda: _published(estimator=ssge())),
    "AutoImplicit, nu": partial(_svi, AutoImplicit, lambda: _published(estimator=nu_method())),
}
