"""Implicit variational inference by the published kernel estimators of the guide's score.

SSGE is the spectral Stein gradient estimator of Shi, Sun and Zhu (2018, equation 14), Stein the
Stein gradient estimator of Li and Turner (2018, equation 8), both with a Gaussian kernel at the
median distance, by themselves: neither a base score nor a correction of bias is added.

Settings: the network of noise that :mod:`benchmarks.accuracy.own_guides` fits, 128 draws a step,
40 000 steps of Adam along a cosine from 3e-3; SSGE keeps eigenvalues that hold .95 of the trace,
and Stein takes λ = 1e-3 on the eigenvalues of K/n.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import Array, random
from numpyro.infer import SVI

from benchmarks.accuracy.own_guides import network_guide
from benchmarks.accuracy.rivals.ours import drawn_by_guide
from benchmarks.accuracy.rivals.problem import Outcome, Problem
from numpyro_kscore import ImplicitELBO
from numpyro_kscore.estimators import ssge, stein
from numpyro_kscore.kernels import Gaussian

PARTICLES, STEPS, WIDTH = 128, 40_000, 64


def fit(estimator: Any, problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a network that is fitted with an estimator as it was published."""
    steps = max(int(round(share * STEPS)), 1)
    target = problem.posterior.target
    run_key, network_key = random.split(key)
    guide = network_guide(target, network_key, WIDTH)
    loss = ImplicitELBO(PARTICLES, estimator=estimator, base=None, debias=None, local_share=0.0)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    svi = SVI(target.model, guide, optimizer, loss)
    result = svi.run(run_key, steps, *target.args, progress_bar=False)
    draw = drawn_by_guide(problem, guide, jax.block_until_ready(result.params))
    return Outcome(draw, steps, steps * PARTICLES)


def fit_ssge(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a network that follows the spectral estimate."""
    return fit(ssge(profile=Gaussian()), problem, key, share)


def fit_stein(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a network that follows the Stein estimate."""
    return fit(stein(profile=Gaussian()), problem, key, share)
