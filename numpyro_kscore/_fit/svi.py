"""The ``SVI`` that is fitted: program, parameters, latents, first state, and batches as calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._model.dependencies import is_drawn, seeded, sources_of
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.package_guide import package_guide
from numpyro_kscore._model.program import (
    Program,
    inspect_program,
    objective_program,
    trace_both,
)
from numpyro_kscore._model.subsampling import with_rows
from numpyro_kscore._model.supports import check_within_supports
from numpyro_kscore._starts.start import ExactDraws
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.checks import is_traced
from numpyro_kscore._util.compiling import quick_jit

# Arguments and keyword arguments of model and guide, and a function from a batch to them.
Given = tuple[tuple[Any, ...], dict[str, Any]]
Arguments = Callable[[Any], Given]


def parameter_slots(svi: SVI, optim_state: Any) -> tuple[int, ...]:
    """Indices of the parameters, which must be leaves, in an optimizer's state."""
    # Tracing tells leaves apart where identity does not: they may share arrays at the start.
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
    """The layout of a particle of the guide, for which a discrepancy must exist."""
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


def exact_draws(svi: SVI, given: Given) -> ExactDraws | None:
    """Draws of the guide as it starts, if it is known to be close to the model of these data."""
    args, kwargs = given
    guide = package_guide(svi.guide)
    if guide is None or guide.model is not svi.model:
        return None
    return guide.exact_draws(*args, **kwargs, **svi.static_kwargs)


def initial_state(
    svi: SVI,
    rng_key: jax.Array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    init_params: dict[str, Any] | None,
    batches: Batches | None = None,
    goes_on: bool = False,
) -> SVIState:
    """Run ``svi.init``, in one compiled program for a guide of this package.

    NumPyro runs guide and model operation by operation, each of which is compiled by itself.
    With a loader, ``args`` and ``kwargs`` have the first of its batches. ``goes_on`` says that the
    fit starts from a state of the user, to which other data may belong.
    """

    def init(key: jax.Array) -> SVIState:
        return svi.init(key, *args, init_params=init_params, **kwargs)

    guide = package_guide(svi.guide)
    # Other guides may keep what they see at their first call, which must then be values.
    if guide is None:
        try:
            return init(rng_key)
        except ValueError as error:
            # NumPyro names the distribution that gets a value, not the latent that has it.
            kwargs = {**kwargs, **svi.static_kwargs}
            check_within_supports(svi.model, svi.guide, args, kwargs, init_params or {}, error)
            raise
    if not guide.is_set_up:
        guide_key = jax.random.split(rng_key, 3)[2]  # the key that svi.init would give it
        if batches is None:
            guide.set_up(guide_key, *args, **kwargs, **svi.static_kwargs)
        else:
            guide.set_up_in_batches(guide_key, batches.with_kwargs(svi.static_kwargs))
    elif batches is None and init_params is None and not goes_on:
        guide.expect_data(*args, **kwargs, **svi.static_kwargs)
    state = quick_jit(init, runs_once=True)(rng_key)
    # The SVI holds transforms, as arguments of a partial. A transform that the model computes, as
    # from its data, was traced and has no value.
    if is_traced(svi.constrain_fn.args):
        return init(rng_key)
    return state


def check_batch(svi: SVI, given: Given) -> None:
    """Raise unless a batch is, with the other arguments of the call, data of the model as a whole.

    ``TypeError`` says that they are no call of the model, and ``ValueError`` that the model looks
    up rows of the batch by the indices of a plate.
    """
    _check_signature(svi, given)
    plates = _read_plates(svi, given)
    if plates:
        raise ValueError(
            f"loader: expected a model that takes a batch as it is; got one whose observations "
            f"depend on the indices of the plate {sorted(plates)}, which are rows of all data and "
            "not of the batch. Leave the indices out: numpyro.plate(name, num_rows, "
            "subsample_size=len(batch)), and obs=batch"
        )


def _check_signature(svi: SVI, given: Given) -> None:
    """Raise ``TypeError`` unless a batch and what else is given are a call of the model."""
    try:
        signature = inspect.signature(svi.model)
    except (TypeError, ValueError):
        return
    args, kwargs = given
    try:
        signature.bind(*args, **kwargs, **svi.static_kwargs)
    except TypeError as error:
        raise TypeError(
            f"loader: expected items that are arguments of the model, with those of fit after "
            f"them; got {len(args)} arguments and the keywords {sorted(kwargs)} for "
            f"{signature}: {error}. An item is a tuple of arguments, a dict of keyword arguments, "
            "or one argument"
        ) from None


def _read_plates(svi: SVI, given: Given) -> set[str]:
    """Names of the subsampled plates whose indices observations are computed from."""
    args, kwargs = given
    kwargs = {**kwargs, **svi.static_kwargs}
    drawn: set[str] = set()

    def rows(key: jax.Array) -> dict[str, jax.Array]:
        trace = handlers.trace(seeded(svi.model, key, {})).get_trace(*args, **kwargs)
        plates = [site for site in trace.values() if site["type"] == "plate"]
        drawn.update(p["name"] for p in plates if p["args"][1] not in (None, p["args"][0]))
        return {site["name"]: site["value"] for site in plates if site["name"] in drawn}

    def observations(given: dict[str, jax.Array]) -> list[Any]:
        model = seeded(with_rows(svi.model, given), jax.random.key(0), {})
        trace = handlers.trace(model).get_trace(*args, **kwargs)
        observed = [site for site in trace.values() if site.get("is_observed")]
        return [[site["value"], *jax.tree.leaves(site["fn"])] for site in observed]

    with Hidden():
        shapes = jax.eval_shape(rows, jax.random.key(0))
        if not drawn:
            return set()
        found = jax.tree.leaves(
            sources_of(observations, shapes), is_leaf=lambda x: isinstance(x, frozenset)
        )
    return set(frozenset[str]().union(*found)) & drawn
