"""Is the procedure calibrated? NumPyro's simulation-based calibration for an ``SVI``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer import SVI
from numpyro.infer.calibration import vsbc_diagnostic

from numpyro_kscore._model.call_checks import check_svi
from numpyro_kscore._model.package_guide import package_guide
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import check_key


def vsbc(svi: SVI, rng_key: Array, *args: Any, **kwargs: Any) -> Any:
    """NumPyro's simulation-based calibration of a whole fit: ``numpyro.infer.vsbc_diagnostic``.

    Draws parameters from the prior and data from the model, fits the guide anew to each, and ranks
    the parameters among the guide's draws. This tests the procedure, not one fit, and costs one fit
    for each simulation.

    A guide that looks for a start, such as :class:`~numpyro_kscore.AutoImplicit`, looks for one in
    each of the data sets. What it has seen before, such as the data of a fit, is not used, and the
    guide itself does not change.

    Args:
        svi: model, guide, optimizer and loss.
        rng_key: random key.
        *args: arguments of the model; None for observed values, or left out.
        **kwargs: keyword arguments of ``vsbc_diagnostic`` and of the model; a guide that looks for
            starts takes no ``chain_method``, since it sees one data set after another. Name the
            observed sites, ``observed_sites=["y"]``: NumPyro cannot tell them where nothing is
            observed. ``num_simulations`` is 100 by default, ``num_svi_steps`` 1000,
            ``num_samples`` 1000.

    Returns:
        NumPyro's ``VSBCResult``.

    Raises:
        TypeError: for anything but an ``SVI`` and a random key.
        ValueError: by NumPyro, for observed sites that it does not find, and discrete latents; for
            a ``chain_method`` with a guide that looks for starts.

    Cost: ``num_simulations`` fits in one compiled program, and as many searches for a start.

    Example::

        from numpyro_kscore.diagnostics import vsbc

        few = {"num_simulations": 5, "num_svi_steps": 100}  # 100 and 2000 in earnest
        calibration = vsbc(svi, random.key(0), observed_sites=["y"], **few)
        calibration.probabilities["loc"]  # (5,): symmetric about 0.5 where calibrated
    """
    check_svi(svi)
    check_key("rng_key", rng_key, "the data")
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        # NumPyro 0.22 reshapes the words of a key, which a typed key does not show.
        rng_key = jax.random.key_data(rng_key)
    model, guide = svi.model, svi.guide
    kwargs = {**svi.static_kwargs, **kwargs}
    if package_guide(guide) is not None:
        guide = copy.copy(guide)
        guide.forget()
        if guide.warm_start:
            if "chain_method" in kwargs:
                raise ValueError(
                    "chain_method: expected none with a guide that looks for a start in each data "
                    f"set; got {kwargs['chain_method']!r}. Leave it out, or give the guide "
                    "warm_start=False"
                )
            model, kwargs["chain_method"] = _with_own_starts(model, guide)
    return vsbc_diagnostic(rng_key, model, guide, svi.optim, svi.loss, *args, **kwargs)


class _SetUpError(Exception):
    """Ends the first call of a simulation, when the guide has seen its data."""


def _with_own_starts(model: Callable[..., Any], guide: Any) -> tuple[Callable[..., Any], Any]:
    """The model, and how NumPyro is to run its simulations, for a guide that looks for starts.

    The search needs values, which the loop that NumPyro compiles does not have. So each simulation
    is called twice: with values, as far as the model, before which ``SVI.init`` calls the guide;
    and compiled, where the start is part of the input, and one program serves all simulations.
    """
    only_sets_up = False

    @wraps(model)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if only_sets_up:
            raise _SetUpError
        return model(*args, **kwargs)

    def one_by_one(simulate: Callable[..., Any]) -> Callable[..., Any]:
        def run(rows: Any) -> Any:
            nonlocal only_sets_up
            found = []
            for k in range(len(jax.tree.leaves(rows)[0])):
                row = jax.tree.map(lambda leaf, k=k: leaf[k], rows)
                guide.forget()
                only_sets_up = True
                with suppress(_SetUpError):
                    simulate(row)
                only_sets_up = False
                found.append(quick_jit(simulate)(row))
            return jax.tree.map(lambda *ranks: jnp.stack(ranks), *found)

        return run

    return interrupted, one_by_one
