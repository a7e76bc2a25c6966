"""Draws of a model before and after its data, its data, discrete latents, and likelihoods."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import Predictive
from numpyro.primitives import Messenger
from numpyro.util import find_stack_level

from numpyro_kscore._model.dependencies import is_enumerated, layers
from numpyro_kscore._model.enumeration import PREVIOUS, Factors, enumerated_factors
from numpyro_kscore._model.program import Program
from numpyro_kscore._util.compiling import quick_jit

# Draws evaluated at once.
BATCH = 64


def _is_data(site: dict[str, Any]) -> bool:
    """Whether a site is observed and has a distribution to draw from, unlike a factor."""
    return bool(site["type"] == "sample" and site["is_observed"] and not _is_factor(site))


def _is_factor(site: dict[str, Any]) -> bool:
    """Whether a site is a ``numpyro.factor``, whatever masks and plates it is in."""
    return site["type"] == "sample" and isinstance(layers(site["fn"])[-1], dist.Unit)


def without_factors(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model without its factors, for whoever takes them for data."""
    return block(model, hide_fn=_is_factor)


class _Unobserved(Messenger):
    """Makes a model draw its observed sites."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Remove the value of an observed site; factors keep theirs, they have no draws."""
        if _is_data(msg):
            msg["is_observed"], msg["value"] = False, None


def draw_prior(key: Array, program: Program, num_samples: int) -> dict[str, Any]:
    """Draws of all sites from the prior, leading axis ``num_samples``."""
    model = without_factors(_Unobserved(program.model))
    predictive = Predictive(model, num_samples=num_samples)
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


def _sites_at_first(program: Program, samples: dict[str, np.ndarray]) -> dict[str, Any]:
    """The sites of the model at the first of the samples."""
    given = seed(at_first(program.model, samples), jax.random.key(0))
    return trace(given).get_trace(*program.args, **program.kwargs)


def draw_posterior_predictive(
    key: Array, program: Program, samples: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Draws of the observed sites, one for each of the samples."""
    sites = _sites_at_first(program, samples)
    observed = [name for name, site in sites.items() if _is_data(site)]
    if not observed:
        return {}
    predictive = Predictive(_Unobserved(program.model), samples, return_sites=observed)
    return predictive(key, *program.args, **program.kwargs)


def find_constant_data(program: Program, samples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays among the model's arguments that are not observed values, by argument name."""
    sites = _sites_at_first(program, samples)
    observed = [np.asarray(site["value"]) for site in sites.values() if _is_data(site)]
    bound = inspect.signature(program.model).bind(*program.args, **program.kwargs).arguments
    arrays = {
        name: np.asarray(value)
        for name, value in bound.items()
        if isinstance(value, np.ndarray | jax.Array) and jnp.ndim(value) and name not in sites
    }
    return {n: a for n, a in arrays.items() if not any(np.array_equal(a, b) for b in observed)}


def warn_of_factors(program: Program, samples: dict[str, np.ndarray]) -> None:
    """Warn of factors in the rows of the data: the likelihood of a row may be a part of them."""
    sites = _sites_at_first(program, samples).values()
    plates = {frame.name for s in sites if _is_data(s) for frame in s["cond_indep_stack"]}
    factors = [
        site["name"]
        for site in sites
        if _is_factor(site) and plates & {frame.name for frame in site["cond_indep_stack"]}
    ]
    if factors:
        warnings.warn(
            f"log_likelihood: expected observed sites to have all of the likelihood of a row; got "
            f"factors {factors} in plates of the data, which are left out. If they are a part of "
            "it, as of censored rows, observe these by a distribution, such as "
            "dist.RightCensoredDistribution, before you compare models",
            stacklevel=find_stack_level(),
        )


def has_discrete(program: Program, samples: dict[str, np.ndarray]) -> bool:
    """Whether the model has discrete latents, which are summed out."""
    sites = _sites_at_first(program, samples)
    return any(is_enumerated(site) for site in sites.values())


def draw_discrete(key: Array, program: Program, samples: dict[str, Any]) -> dict[str, Any]:
    """Discrete latents given data and continuous ones, one draw for each of the samples.

    Deterministic sites that are computed from discrete ones are returned, too. The model has its
    parameters substituted.

    Source: numpyro.contrib.funsor.infer_discrete; in loops over ``markov`` it filters forward and
    samples backward.
    """
    sites = _sites_at_first(program, samples)
    discrete = [name for name, site in sites.items() if is_enumerated(site)]
    if not discrete:
        raise ValueError("infer_discrete: expected a model with discrete latents; got none")
    in_scan = [name for name in discrete if sites[name].get("_control_flow_done", False)]
    if in_scan:
        raise ValueError(
            f"infer_discrete: expected discrete latents outside of scan; got {in_scan}, whose "
            "posterior NumPyro cannot draw. Write the chain as a loop over "
            "numpyro.contrib.funsor.markov"
        )
    samples = {name: jnp.asarray(value) for name, value in samples.items()}
    infer = Predictive(program.model, samples, infer_discrete=True, return_sites=discrete)
    with warnings.catch_warnings():
        # funsor asks for double precision, whatever the model's.
        warnings.filterwarnings("ignore", "Explicitly requested dtype float64", UserWarning)
        drawn = infer(key, *program.args, **program.kwargs)
    computed = [
        name
        for name, site in sites.items()
        if site["type"] == "deterministic" and name not in samples
    ]
    if not computed:
        return drawn
    both = Predictive(program.model, {**samples, **drawn}, return_sites=computed)
    return drawn | both(key, *program.args, **program.kwargs)


def log_likelihoods(program: Program, samples: dict[str, np.ndarray]) -> dict[str, Any]:
    """Log likelihoods of single observations, with their own discrete latents summed out.

    They are given by observed site, (n,) + its batch shape, for n samples. Observations that share
    a discrete latent, as those of a Markov chain do, raise ``ValueError``: one has no likelihood
    that the others do not enter.
    """
    args, kwargs = program.args, program.kwargs

    def one(values: dict[str, Array]) -> dict[str, Array]:
        given = seed(substitute(program.model, data=values), jax.random.key(0))
        sites = trace(given).get_trace(*args, **kwargs)
        factors = enumerated_factors(given, args, kwargs, sites)
        return {n: _log_likelihood(n, sites, factors) for n, s in sites.items() if _is_data(s)}

    values = {name: jnp.asarray(value) for name, value in samples.items()}
    return quick_jit(partial(lax.map, one, batch_size=BATCH))(values)


def _log_likelihood(name: str, sites: dict[str, Any], factors: Factors) -> Array:
    """Log likelihoods of the elements of one observed site, of its batch shape."""
    import funsor

    site, frames = sites[name], sites[name]["cond_indep_stack"]
    members, values = _connected(name, factors)
    if f"{PREVIOUS}{name}" in factors.by_site:
        _refuse(name, "is in a scan with others")
    if not values:
        return site["fn"].log_prob(site["value"])
    own = {frame.name for frame in frames}
    for other in members:
        is_other = other != name and sites[other]["is_observed"]
        if is_other or {frame.name for frame in sites[other]["cond_indep_stack"]} != own:
            _refuse(name, f"shares {sorted(values)} with others by '{other}'")

    def summed(names: list[str]) -> Any:
        with funsor.interpretations.lazy:
            found = funsor.sum_product.sum_product(
                funsor.ops.logaddexp,
                funsor.ops.add,
                [factors.by_site[n] for n in names],
                eliminate=values,
            )
        return funsor.optimizer.apply_optimizer(found)

    # Given continuous latents that depend on the same values, whose densities are in both.
    ratio = summed(members) - summed([n for n in members if n != name])
    array = funsor.to_data(ratio, name_to_dim={frame.name: frame.dim for frame in frames})
    return jnp.broadcast_to(array, site["fn"].batch_shape)


def _refuse(name: str, reason: str) -> NoReturn:
    raise ValueError(
        f"log_likelihood: expected observations with discrete latents of their own; got '{name}', "
        f"which {reason}. One observation then has no likelihood that the others do not enter: "
        "leave log_likelihood out, or compare whole units, such as series, by hand"
    )


def _connected(name: str, factors: Factors) -> tuple[list[str], frozenset[str]]:
    """The factors that are connected with one by discrete latents, and those latents."""
    members, values = [name], frozenset[str]()
    while True:
        inputs = (factors.by_site[n].inputs for n in members if n in factors.by_site)
        found = factors.summed & frozenset[str]().union(*inputs)
        if found == values:
            return members, values
        values = found
        members = [n for n, f in factors.by_site.items() if values & frozenset(f.inputs)]
