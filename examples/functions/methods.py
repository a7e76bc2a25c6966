"""Regression methods with one interface: data -> random functions and a noise level."""

import time
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

from examples.functions.baselines import automatic, gaussian_process, last_layer, point_networks
from examples.functions.data import Split
from examples.functions.fit import Fitted, Settings, functional_network, functional_pathwise
from examples.functions.gp import LEAST_NOISE, Hyperparameters, fit_hyperparameters
from numpyro_kscore import AutoImplicit, ImplicitELBO

# Factor on the number of steps: independent Gaussian weights converge later, in cheaper steps.
WEIGHT_STEPS = 3

METHODS: dict[str, Callable[..., Fitted]] = {
    "functional, pathwise": functional_pathwise,
    "functional, network": functional_network,
    "weights, AutoNormal": automatic(lambda: TraceMeanField_ELBO(8), AutoNormal, WEIGHT_STEPS),
    "weights, AutoImplicit": automatic(lambda: ImplicitELBO(64), AutoImplicit),
    "Gaussian process": gaussian_process,
    "deep ensemble": partial(point_networks, members=5, rate=0.0),
    "last layer": last_layer,
    "MC dropout": partial(point_networks, members=1, rate=0.05),
}


def hyperparameters(parts: Split) -> tuple[Hyperparameters, float]:
    """Hyperparameters for all methods of a split, and processor seconds of their fit."""
    start = time.process_time()
    least = max(LEAST_NOISE, parts.rounding)
    found = fit_hyperparameters(jnp.asarray(parts.x), jnp.asarray(parts.y), least)
    found.noise.block_until_ready()
    return found, time.process_time() - start


def fit(
    method: str,
    x: np.ndarray,
    y: np.ndarray,
    settings: Settings,
    seed: int,
    given: tuple[Hyperparameters, float],
) -> Fitted:
    """Fit one method; its seconds include the Gaussian process if the method needs that."""
    found, seconds = given
    fitted = METHODS[method](jnp.asarray(x), jnp.asarray(y), found, settings, random.key(seed))
    if method.startswith(("functional", "Gauss")):
        fitted = fitted._replace(seconds=fitted.seconds + seconds)
    return fitted
