"""Regression methods with one interface: data -> random functions and a noise level."""

import time
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
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

# (inputs, targets, hyperparameters of the Gaussian process, settings, key) -> fit
OF_PROCESS: dict[str, Callable[..., Fitted]] = {
    "functional, pathwise": functional_pathwise,
    "functional, Gaussian noise": partial(functional_pathwise, log_df=None),
    "functional, network": functional_network,
    "Gaussian process": gaussian_process,
}
# (inputs, targets, settings, key) -> fit
OF_NETWORKS: dict[str, Callable[..., Fitted]] = {
    "weights, AutoNormal": automatic(lambda: TraceMeanField_ELBO(8), AutoNormal, WEIGHT_STEPS),
    "weights, AutoImplicit": automatic(lambda: ImplicitELBO(64), AutoImplicit),
    "deep ensemble": partial(point_networks, members=5, rate=0.0),
    "last layer": last_layer,
    "MC dropout": partial(point_networks, members=1, rate=0.05),
}
METHODS = (*OF_PROCESS, *OF_NETWORKS)
# Methods that answer what is lost where, or that take minutes, run on request only.
DEFAULT_METHODS = tuple(
    name for name in METHODS if name not in ("functional, Gaussian noise", "weights, AutoImplicit")
)

# Hyperparameters of a Gaussian process, and processor seconds of their fit.
Process = tuple[Hyperparameters, float]


def hyperparameters(parts: Split) -> Process:
    """Hyperparameters for the methods of a split that need them."""
    start = time.process_time()
    least = max(LEAST_NOISE, parts.rounding)
    found = fit_hyperparameters(jnp.asarray(parts.x), jnp.asarray(parts.y), least)
    return found, time.process_time() - start


def fit(
    method: str, parts: Split, settings: Settings, seed: int, process: Callable[[], Process]
) -> Fitted:
    """Fit one method; its seconds include the hyperparameters if the method needs them."""
    x, y, key = jnp.asarray(parts.x), jnp.asarray(parts.y), random.key(seed)
    if method in OF_NETWORKS:
        return OF_NETWORKS[method](x, y, settings, key)
    found, seconds = process()
    fitted = OF_PROCESS[method](x, y, found, settings, key)
    return fitted._replace(seconds=fitted.seconds + seconds)
