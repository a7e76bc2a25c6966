"""Checks of an ``SVI``, and of the arguments and the data that a model is called with."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI, init_to_uniform

from numpyro_kscore._model.dependencies import is_drawn, seeded, sources_of
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.subsampling import subsampled_plates, with_rows
from numpyro_kscore._model.target import Target
from numpyro_kscore._model.validation import check_observed

# Names that settings have elsewhere.
OTHER_NAMES = {
    "num_steps": "max_steps",
    "steps": "max_steps",
    "num_draws": "num_samples",
    "sample_shape": "num_samples",
    "seed": "rng_key",
    "key": "rng_key",
    "tolerance": "tol",
    "progress": "progress_bar",
}


def check_svi(svi: Any) -> None:
    """Raise ``TypeError`` unless ``svi`` is NumPyro's ``SVI``, of instances and not classes."""
    if not isinstance(svi, SVI):
        raise TypeError(
            f"svi: expected SVI(model, guide, optim, loss) of numpyro.infer; got a "
            f"{type(svi).__name__}"
        )
    for name, given, call in (("guide", svi.guide, "(model)"), ("loss", svi.loss, "()")):
        if isinstance(given, type):
            raise TypeError(
                f"{name}: expected an instance, {given.__name__}{call}; got the class itself"
            )


def call_error(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TypeError | None:
    """The error of a call with these arguments, as far as the signature of a function is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None


def check_data(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` or warn where a model has neither data nor factors at its arguments.

    An argument that is None is taken for data that were forgotten. Without one the prior may be
    meant, and a warning says that it is fitted.
    """
    drawn: list[str] = []
    crossed: list[ValueError] = []

    def run(key: jax.Array) -> None:
        trace = Target(model, args, kwargs, key=key).trace_by(init_to_uniform)
        seen = evaluate_observed(trace)
        try:
            check_observed(trace)
        except ValueError as error:
            crossed.append(error)
        if not seen:
            drawn.extend(name for name, site in trace.items() if is_drawn(site))

    try:
        bound = inspect.signature(model).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return
    try:
        jax.eval_shape(run, jax.random.key(0))
    except Exception as error:  # whatever it is, it comes again where it can be told better
        check_arguments(bound, error)
        return
    if crossed:
        raise crossed[0]
    if not drawn:
        return
    bound.apply_defaults()
    missing = [
        name
        for name, value in bound.arguments.items()
        if any(leaf is None for leaf in jax.tree.leaves(value, is_leaf=lambda x: x is None))
    ]
    got = f"nothing observed and no factor at these arguments, with {sorted(drawn)} all drawn"
    if missing:
        raise ValueError(
            f"model: expected data; got {got}, where {missing} is None. Pass the data, as in "
            f"fit(svi, key, {missing[0]}=...). To fit the prior itself, use a model without this "
            "argument: lambda: model(...)"
        )
    warnings.warn(
        f"model: expected data; got {got}: the fit is to the prior. If it has data, pass them as "
        "obs=... of a sample site",
        UserWarning,
        stacklevel=4,
    )


def misspelled(
    asker: str, settings: Iterable[str], model: Callable[..., Any], kwargs: dict[str, Any]
) -> TypeError | None:
    """The error of a keyword that is not the model's, and nearly a setting or an argument."""
    names = inspect.signature(model).parameters
    for name in (name for name in kwargs if name not in names):
        # Settings of one function need not be those of another.
        known = [known for known in (*settings, *names) if known != name]
        near = difflib.get_close_matches(OTHER_NAMES.get(name, name), known, 1)
        if near:
            return TypeError(
                f"{asker}: expected settings, and arguments of the model; got {name!r}, which is "
                f"neither. Did you mean {near[0]!r}?"
            )
    return None


def check_call(
    asker: str,
    settings: Iterable[str],
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise ``TypeError`` for arguments that are not those of a model.

    ``asker`` is a function with ``settings``, whose other arguments go to the model.
    """
    error = call_error(model, args, kwargs)
    if error is None:
        return
    raise misspelled(asker, settings, model, kwargs) or TypeError(
        f"{asker}: expected the arguments of the model, {inspect.signature(model)}; got "
        f"{len(args)} positional and {sorted(kwargs)} ({error}). Pass the data as to svi.run, "
        "containers of several arguments unpacked: *data or **data"
    ) from error


def evaluate_observed(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The observed sites of a trace; fails where their density does, as of words."""
    seen = [site for site in trace.values() if site.get("is_observed", False)]
    for site in seen:
        try:
            site["fn"].log_prob(site["value"])
        except (TypeError, ValueError) as error:
            expected, shape = site["fn"].shape(), np.shape(site["value"])
            try:
                np.broadcast_shapes(expected, shape)
            except ValueError:
                raise ValueError(
                    f"model: expected observed values of shape {expected} at site "
                    f"'{site['name']}', that of its distribution; got {shape}"
                ) from error
            raise
    return seen


def check_arguments(bound: inspect.BoundArguments, cause: Exception) -> None:
    """Raise ``TypeError`` from the failure of a model if its arguments have leaves of other kinds.

    Words, tables and lists may be meant, as long as the model runs.
    """
    reason = (str(cause).splitlines() or [""])[0].rstrip(".")
    given = _named(bound).items()
    found = [f"{name!r}: {kind}" for name, value in given if (kind := _kind(value))]
    if found:
        raise TypeError(
            f"model: expected arguments that are arrays of numbers, or what it can make them of; "
            f"got {'; '.join(found)}, with which it raises {type(cause).__name__}: {reason}. "
            "Convert them first, as by jnp.asarray(table['column'], float), and unpack containers "
            "(*data, **data) for a model that takes their parts one by one"
        ) from cause


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call by name, those of ``*args`` and ``**kwargs`` one by one."""
    given = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            given.update({f"{name}[{number}]": one for number, one in enumerate(value)})
        else:
            given[name] = value
    return given


def _kind(value: Any) -> str:
    """The kind of an argument, in words; empty for numbers and arrays of them."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OSU":
        return f"an array of {'objects' if value.dtype.kind == 'O' else 'words'}"
    if value is None or isinstance(value, bool | int | float | np.ndarray | np.generic | jax.Array):
        return ""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    of_type = f" of {dtype}" if dtype is not None else ""
    return "" if callable(value) else f"a {type(value).__name__}{of_type}"


def check_batch(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless a batch of a loader is, with the other arguments, all data of the model.

    ``TypeError`` says that they are no call of the model, and ``ValueError`` that the model looks
    up rows of the batch by the indices of a plate.
    """
    error = call_error(model, args, kwargs)
    if error is not None:
        raise TypeError(
            f"loader: expected items that are arguments of the model, with those of fit after "
            f"them; got {len(args)} arguments and the keywords {sorted(kwargs)} for "
            f"{inspect.signature(model)}: {error}. An item is a tuple of arguments, a dict of "
            "keyword arguments, or one argument"
        )
    plates = _plates_looked_up(model, args, kwargs)
    if plates:
        raise ValueError(
            f"loader: expected a model that takes a batch as it is; got one whose observations "
            f"depend on the indices of the plate {sorted(plates)}, which are rows of all data and "
            "not of the batch. Leave the indices out: numpyro.plate(name, num_rows, "
            "subsample_size=len(batch)), and obs=batch"
        )


def _plates_looked_up(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> frozenset[str]:
    """Names of the subsampled plates whose indices observations are computed from."""

    def trace_of(program: Callable[..., Any], key: jax.Array) -> dict[str, Any]:
        return handlers.trace(seeded(program, key, {})).get_trace(*args, **kwargs)

    def rows(key: jax.Array) -> dict[str, jax.Array]:
        plates = subsampled_plates(trace_of(model, key))
        return {name: site["value"] for name, site in plates.items()}

    def observations(given: dict[str, jax.Array]) -> list[Any]:
        trace = trace_of(with_rows(model, given), jax.random.key(0))
        observed = [site for site in trace.values() if site.get("is_observed")]
        return [[site["value"], *jax.tree.leaves(site["fn"])] for site in observed]

    with Hidden():
        shapes = jax.eval_shape(rows, jax.random.key(0))
        if not shapes:
            return frozenset()
        found = jax.tree.leaves(
            sources_of(observations, shapes), is_leaf=lambda x: isinstance(x, frozenset)
        )
    return frozenset[str]().union(*found) & shapes.keys()
