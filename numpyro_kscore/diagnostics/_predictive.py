"""Draws of a model before and after its data, and the data among its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import Predictive
from numpyro.primitives import Messenger

from numpyro_kscore._tracing.program import Program

__all__ = [
    "at_first",
    "draw_posterior_predictive",
    "draw_prior",
    "find_constant_data",
    "is_data",
    "sites_at_first",
]


def is_data(site: dict[str, Any]) -> bool:
    """Whether a site is observed and has a distribution to draw from, unlike a factor."""
    is_observed = site["type"] == "sample" and site["is_observed"]
    return bool(is_observed and not isinstance(site["fn"], dist.Unit))


class _Unobserved(Messenger):
    """Makes a model draw its observed sites."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Remove the value of an observed site; factors keep theirs, they have no draws."""
        if is_data(msg):
            msg["is_observed"], msg["value"] = False, None


def draw_prior(
    key: Array, model: Callable[..., Any], program: Program, num_samples: int
) -> dict[str, Any]:
    """Draws of all sites from the prior, leading axis ``num_samples``.

    Raises:
        ValueError: for a model with a site that cannot be drawn from.
    """
    predictive = Predictive(_Unobserved(model), num_samples=num_samples)
    try:
        return predictive(key, *program.args, **program.kwargs)
    except NotImplementedError as error:
        raise ValueError(
            "prior: expected a model whose sites can all be drawn from; got one that cannot, such "
            "as ImproperUniform. Leave prior out, or pass draws"
        ) from error


def at_first(model: Callable[..., Any], samples: dict[str, np.ndarray]) -> Callable[..., Any]:
    """The model at the first of the samples: at a draw of the prior it need not be valid."""
    # JAX arrays, because NumPyro's `scan` indexes substituted values by a traced integer.
    return substitute(model, data={name: jnp.asarray(v[0]) for name, v in samples.items()})


def sites_at_first(
    key: Array, model: Callable[..., Any], program: Program, samples: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The sites of the model at the first of the samples."""
    given = seed(at_first(model, samples), key)
    return trace(given).get_trace(*program.args, **program.kwargs)


def draw_posterior_predictive(
    key: Array, model: Callable[..., Any], program: Program, samples: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Draws of the observed sites, one for each of the samples."""
    sites = sites_at_first(key, model, program, samples)
    observed = [name for name, site in sites.items() if is_data(site)]
    predictive = Predictive(_Unobserved(model), samples, return_sites=observed)
    return predictive(key, *program.args, **program.kwargs)


def find_constant_data(
    model: Callable[..., Any], program: Program, samples: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Arrays among the model's arguments that are not observed values, by argument name."""
    sites = sites_at_first(jax.random.key(0), model, program, samples)
    observed = [
        np.asarray(site["value"])
        for site in sites.values()
        if site["type"] == "sample" and site["is_observed"]
    ]
    bound = inspect.signature(program.model).bind(*program.args, **program.kwargs).arguments
    arrays = {}
    for name, value in bound.items():
        if not isinstance(value, np.ndarray | jax.Array) or jnp.ndim(value) == 0:
            continue
        array = np.asarray(value)
        if not any(a.shape == array.shape and np.array_equal(a, array) for a in observed):
            arrays[name] = array
    return {name: value for name, value in arrays.items() if name not in sites}
