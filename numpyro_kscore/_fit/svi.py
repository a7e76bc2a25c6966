"""What a fit needs to know of an ``SVI``: its program, its parameters, the size of its latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._model.dependencies import is_drawn
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.program import (
    Program,
    inspect_program,
    objective_program,
    trace_both,
)

__all__ = [
    "Arguments",
    "Given",
    "inspect_svi",
    "latent_size",
    "parameter_slots",
    "program_of",
    "strongly_typed",
    "with_parameters",
]

# Arguments and keyword arguments of model and guide, and what makes them of a batch.
Given = tuple[tuple[Any, ...], dict[str, Any]]
Arguments = Callable[[Any], Given]


def parameter_slots(svi: SVI, optim_state: Any) -> tuple[int, ...]:
    """Indices of the parameters among the leaves of an optimizer's state.

    Raises:
        TypeError: if the parameters are not leaves of the state.
    """
    # By tracing, not by identity: at the start other leaves may be the very same arrays.
    jaxpr = jax.make_jaxpr(svi.optim.get_params)(optim_state).jaxpr
    places = {id(var): k for k, var in enumerate(jaxpr.invars)}
    slots = tuple(places.get(id(var), -1) for var in jaxpr.outvars)
    if -1 in slots:
        raise TypeError(
            f"svi: expected an optimizer whose state holds the parameters, as those of optax and "
            f"numpyro.optim.Adam do; got {type(svi.optim).__name__}. Run it by svi.run"
        )
    return slots


def with_parameters(optim_state: Any, slots: tuple[int, ...], values: list[jax.Array]) -> Any:
    """The state of an optimizer with other parameters in these places."""
    leaves, structure = jax.tree.flatten(optim_state)
    for slot, value in zip(slots, values, strict=True):
        leaves[slot] = value
    return jax.tree.unflatten(structure, leaves)


def inspect_svi(svi: SVI, state: SVIState, given: Given) -> Layout:
    """The layout of a particle of the guide.

    Raises:
        ValueError: if no discrepancy can be computed for the guide.
    """
    try:
        return inspect_program(jax.random.key(0), program_of(svi, state, given))
    except ValueError as error:
        error.add_note(
            "fit looks at the guide by a kernel Stein discrepancy, which needs continuous, "
            "reparameterized latents; fit(..., criterion='loss') does without"
        )
        raise


def latent_size(svi: SVI, state: SVIState, given: Given) -> int:
    """Number of elements of all latent sites of the model, discrete ones included."""
    program, sizes = program_of(svi, state, given), []

    def run(key: jax.Array) -> None:
        trace = trace_both(key, program).model
        sizes.append(sum(jnp.size(site["value"]) for site in trace.values() if is_drawn(site)))

    jax.eval_shape(run, jax.random.key(0))
    return sizes[0]


def program_of(svi: SVI, state: SVIState, given: Given) -> Program:
    """Guide and model with the parameters of a state and arguments and keyword arguments."""
    args, kwargs = given
    params = {**svi.get_params(state), **(state.mutable_state or {})}
    return objective_program(params, svi.model, svi.guide, args, {**kwargs, **svi.static_kwargs})


def strongly_typed(state: Any) -> Any:
    """The state without weak types: the first step would change them, and compile once more."""

    def one(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(one, state)
