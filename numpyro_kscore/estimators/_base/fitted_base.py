"""The base score of a fit, from what the user gave and the samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.tree_util import Partial
from numpyro.distributions import Distribution

from numpyro_kscore._util.checks import as_scores, is_concrete, with_jax_leaves
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._base.base_scores import (
    Base,
    DistributionBase,
    EllipticalBase,
    FunctionBase,
    ValuesBase,
    ZeroBase,
)
from numpyro_kscore.estimators._base.copies import distinct_share
from numpyro_kscore.estimators._base.gaussian import fit_gaussian
from numpyro_kscore.estimators._base.groups import (
    MOST_GROUPS,
    Groups,
    are_enough_for_groups,
    find_groups,
)
from numpyro_kscore.estimators._base.mixture import MixtureBase
from numpyro_kscore.estimators._base.student import fit_student


def make_base(base: Any, samples: jax.Array, base_scores: Any) -> Base:
    """The base of a fit from what the user gave: see :class:`ScoreEstimator`."""
    if base_scores is not None:
        return ValuesBase(at_samples=as_scores("base_scores", base_scores, samples))
    if base is None:
        return ZeroBase()
    fitted: Base
    if isinstance(base, Distribution):
        if base.batch_shape != () or base.event_shape != (samples.shape[1],):
            raise ValueError(
                f"base: expected a distribution with batch shape () and event shape "
                f"({samples.shape[1]},); got {base.batch_shape} and {base.event_shape}. "
                "Use .to_event(1) on a batch of scalars"
            )
        fitted = DistributionBase(with_jax_leaves(base))
    elif isinstance(base, str) and base == "gaussian":
        gaussian = fit_gaussian(samples, None, distinct_share(samples))
        # An array in the samples' precision: a number would become one in JAX's own.
        nothing = jnp.zeros((), samples.dtype)
        fitted = EllipticalBase(gaussian.coordinates, nothing, held_out=gaussian.held_out)
    elif isinstance(base, str) and base == "student":
        fitted = fit_student(samples, None, distinct_share(samples))
    elif isinstance(base, str) and base == "auto":
        fitted = _base_of_groups(samples)
    elif callable(base):
        # JAX compares a bound method by identity of its object, whose own equality may compare
        # arrays.
        is_leaf = jax.tree_util.all_leaves([base])
        fitted = FunctionBase(Partial(base.__call__) if is_leaf else with_jax_leaves(base))
    else:
        raise TypeError(
            "base: expected 'auto', 'student', 'gaussian', None, a score function or a NumPyro "
            f"distribution; got {base!r}"
        )
    return _with_values(fitted, samples)


@quick_jit
def _with_values(base: Base, samples: jax.Array) -> Base:
    """A base that knows its values at the samples."""
    return dataclasses.replace(base, at_samples=base.score(samples).astype(samples.dtype))


def _base_of_groups(samples: jax.Array) -> Base:
    """A Student t distribution, or a mixture of them if samples (n, d) fall into groups.

    A mixture with one component is that component. Its programs are twice as long, so it is made
    only where the number of groups is not known, inside of ``jit``.
    """
    share = distinct_share(samples)
    if not are_enough_for_groups(*samples.shape):
        return fit_student(samples, None, share)
    groups = find_groups(samples, share)
    if is_concrete(groups.number) and int(groups.number) == 1:
        return fit_student(samples, None, share)
    return fit_mixture(samples, groups, share)


@quick_jit
@full_precision
def fit_mixture(samples: jax.Array, groups: Groups, share: jax.Array | float = 1.0) -> MixtureBase:
    """The mixture of samples (n, d) in groups: with one component where they are one group.

    Cost: that of :func:`fit_student`, and twice as much and again for each of several groups.
    """
    used = jnp.arange(MOST_GROUPS) < groups.number

    def fit(members: jax.Array) -> EllipticalBase:
        return fit_student(samples, members, share)

    def step(previous: Any, each: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        # Components that are not in use repeat another, so that all their values are finite.
        fitted = lax.cond(each[1], fit, lambda _: previous, each[0])
        return fitted, fitted

    def mixture_of(labels: jax.Array) -> MixtureBase:
        members = (labels == jnp.arange(MOST_GROUPS)[:, None]).astype(samples.dtype)
        sets = jnp.concatenate([jnp.ones_like(members[:1]), members])
        start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fit, sets[0]))
        # The fit to all samples is that of a single group.
        is_new = jnp.concatenate([jnp.ones(1, bool), used & (groups.number > 1)])
        fits = lax.scan(step, start, (sets, is_new))[1]
        whole, components = (jax.tree.map(lambda a, k=k: a[k], fits) for k in (0, slice(1, None)))
        return MixtureBase(
            held_out=jnp.sum(members * components.held_out, axis=0),
            whole=dataclasses.replace(whole, held_out=None),
            components=dataclasses.replace(components, held_out=None),
            log_weights=jnp.log(jnp.mean(members, axis=1)),
            labels=labels,
        )

    # The density of those that are nearest to a group ends at a boundary, of which score matching
    # knows nothing: it would make any field that points inward there. Labels drawn from their
    # probabilities give every group the tails of its component.
    def again(count: jax.Array, mixture: MixtureBase) -> MixtureBase:
        logits = lax.stop_gradient(mixture.joint(samples))
        drawn = random.categorical(random.key(0), logits, axis=1)
        labels = jnp.where(count == 0, groups.own, drawn)
        # One group is known after the first round. Their number is no bound of the loop, whose
        # length must be known to differentiate it.
        is_over = (count > 0) & (groups.number == 1)
        return lax.cond(is_over, lambda _: mixture, mixture_of, labels)

    none = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(mixture_of, groups.own)
    )
    return lax.fori_loop(0, 2, again, none)
