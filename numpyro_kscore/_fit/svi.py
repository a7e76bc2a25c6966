"""The ``SVI`` that is fitted, with its first state and its data, as all parts of a fit see it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.package_guide import package_guide
from numpyro_kscore._model.program import (
    Program,
    inspect_program,
    latent_size,
    objective_program,
)
from numpyro_kscore._model.supports import check_guide_sites, check_within_supports
from numpyro_kscore._starts.start import ExactDraws
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.checks import is_traced
from numpyro_kscore._util.compiling import quick_jit

# Arguments and keyword arguments of model and guide.
Given = tuple[tuple[Any, ...], dict[str, Any]]


class Inference(NamedTuple):
    """An ``SVI`` with its first state and its data.

    Attributes:
        svi: model, guide, optimizer and loss.
        state: the state that a fit starts from.
        given: arguments and keyword arguments of the call, those of the first batch with a loader.
        batches: all batches of a loader, or None.
        slots: indices of the parameters, which must be leaves, in the state of the optimizer.
        program: guide and model as the objective sees them, in the first state.
        layout: layout of a particle of the guide; None if the fit looks at nothing but losses.
        dim: number of elements of all latent sites of the model.
        exact_draws: draws of the guide in the first state, if it is close to the model.
    """

    svi: SVI
    state: SVIState
    given: Given
    batches: Batches | None
    slots: tuple[int, ...]
    program: Program
    layout: Layout | None
    dim: int
    exact_draws: ExactDraws | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether the bound of the guide is known with little noise."""
        return self.layout is not None and self.layout.is_quiet and self.batches is None

    @property
    def settling(self) -> Any:
        """The objective with which a fit settles, if that is another one."""
        loss = self.svi.loss
        if self.layout is None or self.batches is not None or not hasattr(loss, "settling"):
            return None
        finer = loss.settling(self.layout)
        return None if finer is loss else finer

    @property
    def can_be_exact(self) -> bool:
        """Whether a guide can arrive at the model, which has no parameters of its own then."""
        return self.layout is not None and not self.layout.model_params

    @property
    def is_final(self) -> bool:
        """Whether the guide stays as it starts."""
        return self.exact_draws is not None and self.exact_draws.is_final

    def arguments(self, batch: Any) -> Given:
        """Arguments and keyword arguments of the call with a batch, which is None without any."""
        return self.given if self.batches is None else self.batches.arguments(batch)

    def program_at(self, state: SVIState, batch: Any = None) -> Program:
        """Guide and model in another state, and with another batch."""
        args, kwargs = self.arguments(batch)
        params, kwargs = _parameters(self.svi, state), {**kwargs, **self.svi.static_kwargs}
        return self.program._replace(params=params, args=args, kwargs=kwargs)


def _parameters(svi: SVI, state: SVIState) -> dict[str, Any]:
    return {**svi.get_params(state), **(state.mutable_state or {})}


def open_svi(
    svi: SVI,
    rng_key: jax.Array,
    given: Given,
    batches: Batches | None,
    criterion: str,
    init_state: Any,
    init_params: dict[str, Any] | None,
) -> Inference:
    """Initialize an ``SVI``, and inspect it; with a loader ``given`` has the first of its batches.

    ``svi.init`` also tells the SVI what constraints its parameters have, and is called even if
    there is a state already.
    """
    state, draws = initial_state(svi, rng_key, given, batches, init_params, init_state is not None)
    state = strongly_typed(state if init_state is None else init_state)
    inference = inspect_svi(svi, state, given, batches, criterion)
    if not inference.slots:
        raise ValueError(
            "svi: expected parameters to fit, in guide or model; got none. Make what shapes the "
            "draws a numpyro.param, or a network's by flax_module"
        )
    return inference._replace(exact_draws=draws)


def initial_state(
    svi: SVI,
    rng_key: jax.Array,
    given: Given,
    batches: Batches | None = None,
    init_params: dict[str, Any] | None = None,
    goes_on: bool = False,
) -> tuple[SVIState, ExactDraws | None]:
    """Run ``svi.init``, in one compiled program for a guide of this package.

    NumPyro runs guide and model operation by operation, each of which is compiled by itself.
    ``goes_on`` says that the fit starts from a state of the user. With the state come draws of the
    guide there, if it is known to be close to the model.
    """
    args, kwargs = given
    whole = {**kwargs, **svi.static_kwargs}

    def init(key: jax.Array) -> SVIState:
        return svi.init(key, *args, init_params=init_params, **kwargs)

    guide = package_guide(svi.guide)
    if guide is not None:
        draws = guide.prepare(
            jax.random.split(rng_key, 3)[2],  # the key that svi.init would give it
            args,
            whole,
            None if batches is None else batches.with_kwargs(svi.static_kwargs),
            is_start=init_params is None and not goes_on,
        )
        state = quick_jit(init, runs_once=True)(rng_key)
        # The SVI holds transforms, as arguments of a partial. A transform that the model computes,
        # as from its data, was traced and has no value.
        if is_traced(svi.constrain_fn.args):
            state = init(rng_key)
        return state, draws if guide.model is svi.model else None
    # Other guides may keep what they see at their first call, which must then be values.
    try:
        return init(rng_key), None
    except (RuntimeError, ValueError) as error:
        # NumPyro names neither what a guide has in place of a sample site, nor the latent with a
        # value that a distribution refuses.
        check_guide_sites(svi.model, svi.guide, args, whole, error)
        check_within_supports(svi.model, svi.guide, args, whole, init_params or {}, error)
        raise


def inspect_svi(
    svi: SVI,
    state: SVIState,
    given: Given,
    batches: Batches | None = None,
    criterion: str = "stein",
) -> Inference:
    """The ``SVI`` in a state, whose parameters can be told, and whose discrepancy must exist."""
    slots = parameter_slots(svi, state.optim_state)
    args, kwargs = given
    program = objective_program(
        _parameters(svi, state), svi.model, svi.guide, args, {**kwargs, **svi.static_kwargs}
    )
    layout = None
    if criterion == "stein":
        try:
            layout = inspect_program(jax.random.key(0), program)
        except ValueError as error:
            error.add_note(
                "fit looks at the guide by a kernel Stein discrepancy, which needs continuous, "
                "reparameterized latents; fit(..., criterion='loss') does without"
            )
            raise
    dim = latent_size(program) if layout is None else layout.size
    return Inference(svi, state, given, batches, slots, program, layout, dim)


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


def strongly_typed(state: Any) -> Any:
    """The state without weak types: the first step would change them, and compile once more."""

    def one(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(one, state)
