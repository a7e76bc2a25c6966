"""Models with discrete latents, which are summed out of the density as in NumPyro's NUTS.

funsor finds the order of sums over values and products over plates and time. NumPyro's own density
multiplies the logarithm of every factor by the scale of its subsampled plates, before values are
summed over; here the sum over a row's values is scaled, as that of the marginal model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp
from numpyro.distributions.util import is_identically_one

from numpyro_kscore._model.dependencies import is_enumerated
from numpyro_kscore._model.handlers import FactorsInScans
from numpyro_kscore._model.site_density import unscaled_log_prob

INSTALL = 'Run: pip install "numpyro-kscore[enum]"'
# Prefixes of names that NumPyro's scan gives: the axis of its steps, and sites of the step before.
TIME, PREVIOUS = "_time_", "_PREV_"
SUM_OUT = "Sum it out of the model by hand (logsumexp in a numpyro.factor)"


def check_enumerable(trace: dict[str, Any], asker: str) -> None:
    """Raise unless funsor is there and every discrete latent of a model can be summed out."""
    discrete = [name for name, site in trace.items() if is_enumerated(site)]
    if not discrete:
        return
    for name in discrete:
        if not trace[name]["fn"].has_enumerate_support:
            raise ValueError(
                f"{asker}: expected discrete latents with finitely many values, which are summed "
                f"out; got '{name}' from {type(trace[name]['fn']).__name__}. If it is data, pass "
                f"its values, since obs=None makes it a latent. {SUM_OUT}"
            )
        if trace[name]["fn"].event_dim:
            raise ValueError(
                f"{asker}: expected discrete latents that are single numbers, in plates; got "
                f"'{name}', whose event has the shape {tuple(trace[name]['fn'].event_shape)}. "
                "Write it in numpyro.plate, without to_event"
            )
        strategy = trace[name]["infer"].get("enumerate", "parallel")
        if strategy != "parallel":
            raise ValueError(
                f"{asker}: expected infer={{'enumerate': 'parallel'}} at '{name}'; got "
                f"{strategy!r}. Leave the setting out"
            )
    _check_plates(trace, discrete, asker)
    try:
        import funsor  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{asker}: expected funsor, which sums discrete latents out of a model, for "
            f"{discrete}; got none installed. {INSTALL}"
        ) from error


def _check_plates(trace: dict[str, Any], discrete: list[str], asker: str) -> None:
    """Raise for axes outside of plates: a sum over them would be one of independent models."""
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        value_shape, fn = jnp.shape(site["value"]), site["fn"]
        batch_shape = value_shape[: len(value_shape) - len(fn.event_shape)]
        batch_shape = lax.broadcast_shapes(tuple(fn.batch_shape), batch_shape)
        if site.get("_control_flow_done", False):
            batch_shape = batch_shape[1:]
        known = {frame.dim for frame in site["cond_indep_stack"]}
        for dim in range(-len(batch_shape), 0):
            if batch_shape[dim] > 1 and dim not in known:
                vector = "" if name in discrete else ", or .to_event(1) for one vector"
                raise ValueError(
                    f"{asker}: expected plates for all batch dimensions of a model whose discrete "
                    f"latents {discrete} are summed out; got none for dimension {dim} of '{name}', "
                    f"of size {batch_shape[dim]}. Write it in numpyro.plate{vector}"
                )


class Factors(NamedTuple):
    """The factors of a density, as funsors of what they depend on.

    Attributes:
        by_site: factors by the names of the sites; those in a scan are one factor, by the name of
            its time.
        summed: names of what is summed over.
        plates: names of the plates, and of time where its steps are independent.
        scales: numbers of rows that each drawn one stands for, by subsampled plate.
    """

    by_site: dict[str, Any]
    summed: frozenset[str]
    plates: frozenset[str]
    scales: dict[str, float]


def enumerated_log_density(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trace: dict[str, Any],
) -> jax.Array:
    """The log joint density with discrete latents summed out, at continuous latents.

    Cost: the product of the numbers of values of sites that are dependent, for each row; the time
    of a chain of T steps is O(log T) on parallel hardware.
    """
    import funsor

    factors = enumerated_factors(model, args, kwargs, trace)
    _check_subsampling(factors)
    try:
        with funsor.interpretations.lazy:
            found = funsor.sum_product.sum_product(
                funsor.ops.logaddexp,
                funsor.ops.add,
                list(factors.by_site.values()),
                eliminate=factors.summed | factors.plates,
                plates=factors.plates,
                plate_to_scale=factors.scales,
            )
        result = funsor.optimizer.apply_optimizer(found)
    except (NotImplementedError, ValueError) as error:
        raise _not_summable(factors.summed, str(error)) from error
    if result.inputs:
        raise _not_summable(factors.summed, f"{sorted(result.inputs)} are left")
    return result.data


def _not_summable(summed: frozenset[str], reason: str) -> ValueError:
    return ValueError(
        "model: expected discrete latents that funsor can sum out; got "
        f"{sorted(summed)} ({reason}). A site must not depend on sites of a plate outside of it, "
        f"nor one step of a chain on more than the last. {SUM_OUT}"
    )


def enumerated_factors(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trace: dict[str, Any],
) -> Factors:
    """The factors of :func:`enumerated_log_density`."""
    import funsor.optimizer  # noqa: F401
    from numpyro.contrib import funsor as enumeration
    from numpyro.contrib.funsor.infer_util import plate_to_enum_plate

    sites = [site for site in trace.values() if site["type"] == "sample"]
    dims = [f.dim for site in sites for f in site["cond_indep_stack"] if f.dim is not None]
    summing = enumeration.enum(enumeration.config_enumerate(model), min(dims, default=0) - 1)
    try:
        with plate_to_enum_plate(), FactorsInScans():
            packed = enumeration.trace(summing).get_trace(*args, **kwargs)
    except Exception as error:
        names = [name for name, site in trace.items() if is_enumerated(site)]
        error.add_note(
            f"while the model ran with all values of its discrete latents {names} at once, as "
            "numpyro.contrib.funsor runs it: their axes are left of all plates"
        )
        raise
    return _collected({name: s for name, s in packed.items() if s["type"] == "sample"})


def _collected(sites: dict[str, dict[str, Any]]) -> Factors:
    """The factors of the sites of a packed trace; chains in time are multiplied out."""
    by_site: dict[str, Any] = {}
    in_time: dict[str, dict[str, Any]] = {}
    summed = frozenset(name for name, site in sites.items() if is_enumerated(site))
    plates = frozenset(
        f.name for site in sites.values() for f in site["cond_indep_stack"] if f.dim is not None
    )
    scales: dict[str, float] = {}
    for name, site in sites.items():
        scales |= _plate_scales(site)
        factor = _factor(site, summed)
        time = next((v for v in factor.inputs if v.startswith(TIME)), None)
        (by_site if time is None else in_time.setdefault(time, {}))[name] = factor
    known = frozenset[str]().union(*(factor.inputs for factor in by_site.values()))
    for time, of_steps in in_time.items():
        inputs = frozenset[str]().union(*(factor.inputs for factor in of_steps.values()))
        if any(name.startswith(PREVIOUS) for name in inputs):
            by_site[time] = _chain(of_steps, time, summed & inputs, plates & inputs, known)
        else:
            by_site |= of_steps
            plates |= {time}
    return Factors(by_site, summed, plates, scales)


def _factor(site: dict[str, Any], summed: frozenset[str]) -> Any:
    """The log probability of a site as a funsor, without the scales of the plates it depends on."""
    import funsor

    log_prob = unscaled_log_prob(site)
    names = site["infer"]["dim_to_name"]
    if not names and all(size == 1 for size in jnp.shape(log_prob)):
        log_prob = jnp.squeeze(log_prob)
    factor = funsor.to_funsor(log_prob, output=funsor.Real, dim_to_name=names)
    scale, of_plates = site["scale"], _plate_scales(site)
    # One row has no axis, so that nothing is left that its plate could scale.
    lone = [plate for plate in of_plates if plate not in factor.inputs]
    if lone and summed & frozenset(factor.inputs):
        raise ValueError(
            f"model: expected at least two rows of subsampled plates with discrete latents; got "
            f"one of {lone} at '{site['name']}'"
        )
    rest = 1.0 if scale is None else scale
    rest = rest / math.prod(s for plate, s in of_plates.items() if plate not in lone)
    if is_identically_one(rest):
        return factor
    return funsor.to_funsor(log_prob * rest, output=funsor.Real, dim_to_name=names)


def _plate_scales(site: dict[str, Any]) -> dict[str, float]:
    """Scales by subsampled plate; that of ``handlers.scale``, under None, is no plate's."""
    return {k: v for k, v in site.get("plate_to_scale", {}).items() if k is not None}


def _chain(
    factors: dict[str, Any],
    time: str,
    summed: frozenset[str],
    plates: frozenset[str],
    known: frozenset[str],
) -> Any:
    """The factor of all steps of a scan, a function of its first and its last state.

    The factors are those of one step, by site, with the input ``time``. ``summed`` and ``plates``
    name discrete sites and plates among their inputs, ``known`` inputs of factors outside of the
    scan.
    """
    import funsor

    previous = {v for factor in factors.values() for v in factor.inputs if v.startswith(PREVIOUS)}
    states = {name.replace(PREVIOUS, "") for name in previous}
    handed_on = frozenset(previous | states)
    in_states = frozenset(v for name in states & set(factors) for v in factors[name].inputs)
    # Inside are inputs that neither the next step nor factors outside of the scan have.
    inside = (summed - handed_on - known) | (plates - in_states)
    with funsor.interpretations.lazy:
        step = funsor.sum_product.sum_product(
            funsor.ops.logaddexp,
            funsor.ops.add,
            list(factors.values()),
            eliminate=inside,
            plates=plates,
        )
    step = funsor.optimizer.apply_optimizer(step)
    along = funsor.Variable(time, step.inputs[time])
    ops = funsor.ops.logaddexp, funsor.ops.add
    if any(name.startswith(2 * PREVIOUS) for name in previous):
        others = frozenset(step.inputs) - handed_on - {time}
        return funsor.sum_product.sarkka_bilmes_product(*ops, step, along, others)
    order = {name: name.removeprefix(PREVIOUS) for name in sorted(previous)}
    if states & known:
        return funsor.sum_product.sequential_sum_product(*ops, step, along, order)
    return _backward(step, time, order)


def _backward(step: Any, time: str, order: dict[str, str]) -> Any:
    """The sum over all states after the first, by steps backward: vectors, not matrices."""
    import funsor

    others = [name for name in step.inputs if name not in {time, *order, *order.values()}]
    names = (time, *others, *order, *order.values())
    steps = step.align(names).data
    axes = tuple(range(-len(order), 0))
    middle = tuple(range(len(others), len(others) + len(order)))

    def back(later: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
        return logsumexp(now + jnp.expand_dims(later, middle), axis=axes), None

    first, _ = lax.scan(back, logsumexp(steps[-1], axis=axes), steps[:-1], reverse=True)
    inputs = {name: step.inputs[name] for name in (*others, *order)}
    return funsor.Tensor(first, inputs)


def _check_subsampling(factors: Factors) -> None:
    """Raise where a sum over values is outside of a subsampled plate that it depends on."""
    homes: dict[str, frozenset[str]] = {}
    drawn = frozenset(factors.scales)
    for factor in factors.by_site.values():
        here = drawn & frozenset(factor.inputs)
        for name in factors.summed & frozenset(factor.inputs):
            homes[name] = homes.get(name, here) & here
    for site, factor in factors.by_site.items():
        here = drawn & frozenset(factor.inputs)
        for name in sorted(factors.summed & frozenset(factor.inputs)):
            if outside := sorted(here - homes[name]):
                raise ValueError(
                    f"model: expected discrete latents inside the subsampled plates whose rows "
                    f"depend on them; got '{name}' outside of {outside}, where '{site}' depends on "
                    "it. The sum over its values needs all rows: drop subsample_size, or sum it "
                    "out of the model"
                )
