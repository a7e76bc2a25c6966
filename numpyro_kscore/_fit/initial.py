"""The state that a fit starts from."""

from __future__ import annotations

from typing import Any

import jax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._fit.svi import Given
from numpyro_kscore._model.package_guide import package_guide
from numpyro_kscore._model.supports import check_within_supports
from numpyro_kscore._starts.exact_draws import ExactDraws
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.checks import is_traced
from numpyro_kscore._util.compiling import quick_jit

__all__ = ["exact_draws", "initial_state"]


def exact_draws(svi: SVI, given: Given) -> ExactDraws | None:
    """Draws of the guide as it starts, if it is known to be close to the model of these data.

    Args:
        svi: model, guide, optimizer and loss.
        given: arguments and keyword arguments of model and guide.
    """
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
    """``svi.init``, in one compiled program for a guide that needs no values in it.

    NumPyro runs guide and model operation by operation, each of which is compiled by itself.

    Args:
        svi: model, guide, optimizer and loss; it learns the constraints of its parameters.
        rng_key: random key.
        args: arguments of model and guide.
        kwargs: keyword arguments of both.
        init_params: initial parameters, as for ``svi.init``.
        batches: those of a loader, if there is one; the arguments have the first of them.
        goes_on: whether the fit starts from a state that the user has: the data may be others.
    """

    def init(key: jax.Array) -> SVIState:
        return svi.init(key, *args, init_params=init_params, **kwargs)

    guide = package_guide(svi.guide)
    # Others may keep what they see at their first call, which must then be values.
    if guide is None:
        try:
            return init(rng_key)
        except ValueError as error:
            # NumPyro names the distribution that gets a value, not the latent that has it.
            kwargs = {**kwargs, **svi.static_kwargs}
            check_within_supports(svi.model, svi.guide, args, kwargs, init_params or {}, error)
            raise
    if not guide.is_set_up:
        # With the key that svi.init would give it.
        guide_key = jax.random.split(rng_key, 3)[2]
        if batches is None:
            guide.set_up(guide_key, *args, **kwargs, **svi.static_kwargs)
        else:
            guide.set_up_in_batches(guide_key, batches.with_kwargs(svi.static_kwargs))
    elif batches is None and init_params is None and not goes_on:
        guide.expect_data(*args, **kwargs, **svi.static_kwargs)
    state = quick_jit(init, runs_once=True)(rng_key)
    # The SVI holds transforms, which are partial's argument. One computed by the model, as from its
    # data, was traced and has no value.
    if is_traced(svi.constrain_fn.args):
        return init(rng_key)
    return state
