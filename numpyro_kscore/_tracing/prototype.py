"""A model seen once: its sites, and values of its latents at which its density is finite.

NumPyro's search for such values runs operation by operation, each of which is compiled by itself.
Here all of it is one compiled program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from numpyro import handlers
from numpyro.infer.util import initialize_model

from numpyro_kscore._tracing.dependencies import is_drawn
from numpyro_kscore._util.checks import is_concrete
from numpyro_kscore._util.compiling import quick_jit

__all__ = ["Prototype", "find_prototype"]


class Prototype(NamedTuple):
    """A model seen once.

    Attributes:
        trace: its sites.
        latents: unconstrained values of its latents with finite density and gradient, by name, in
            the order of the model.
    """

    trace: dict[str, dict[str, Any]]
    latents: dict[str, Array]


def find_prototype(
    rng_key: Array,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    init_loc_fn: Callable[..., Any],
    forward_mode: bool,
) -> Prototype:
    """Run NumPyro's ``initialize_model`` in one compiled program.

    Args:
        rng_key: random key; values are the same as NumPyro's for it, but for rounding.
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        init_loc_fn: one of NumPyro's initialization strategies.
        forward_mode: differentiate in forward mode.

    Raises:
        RuntimeError: if no density is finite in 100 attempts, by NumPyro, which says why.
    """

    def initialize(key: Array) -> Any:
        with handlers.block():
            return initialize_model(
                key,
                model,
                init_strategy=init_loc_fn,
                dynamic_args=True,
                model_args=args,
                model_kwargs=kwargs,
                forward_mode_differentiation=forward_mode,
            )

    seen: list[Any] = []

    def run(key: Array) -> tuple[Any, Any, list[Array]]:
        info = initialize(key)
        found = info.param_info
        # Distributions, plates and names: what is computed is returned, the rest stays as it is.
        seen[:] = jax.tree.flatten(info.model_trace)
        numbers = [found.potential_energy, *jax.tree.leaves(found.z_grad)]
        valid = jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in numbers]))
        return found.z, valid, [leaf for leaf in seen[0] if isinstance(leaf, Tracer)]

    latents, valid, computed = quick_jit(run)(rng_key)
    values = iter(computed)
    leaves = [next(values) if isinstance(leaf, Tracer) else leaf for leaf in seen[0]]
    trace = jax.tree.unflatten(seen[1], leaves)
    if is_concrete(valid) and not (valid and _have_supports(trace)):
        # NumPyro names the sites whose values are not valid.
        info = initialize(rng_key)
        trace, latents = info.model_trace, info.param_info.z
    # A compiled program returns a dict in alphabetical order; that of the model counts.
    return Prototype(trace, {name: latents[name] for name in trace if name in latents})


def _have_supports(trace: dict[str, Any]) -> bool:
    """Whether supports survived: NumPyro's classes do, some of a user's forget what they hold."""
    try:
        _ = [site["fn"].support for site in trace.values() if is_drawn(site)]
    except AttributeError:
        return False
    return True
