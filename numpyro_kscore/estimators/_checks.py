"""The base score of a fit, from what the user gave."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.tree_util import Partial
from numpyro.distributions import Distribution

from numpyro_kscore._util.checks import as_points, with_jax_leaves
from numpyro_kscore.estimators._base import (
    Base,
    DistributionBase,
    FunctionBase,
    GaussianBase,
    ValuesBase,
    ZeroBase,
)
from numpyro_kscore.estimators._gaussian import fit_gaussian

__all__ = ["make_base"]


def make_base(base: Any, samples: jax.Array, base_scores: Any) -> Base:
    """The base of a fit from what the user gave: see :class:`ScoreEstimator`.

    Raises:
        ValueError: for base scores that do not match the samples, or an unknown name.
        TypeError: for something that is no base.
    """
    if base_scores is not None:
        values = as_points("base_scores", base_scores, dim=samples.shape[1])
        if values.shape != samples.shape:
            raise ValueError(
                f"base_scores: expected shape {samples.shape}, one row a sample; got {values.shape}"
            )
        return ValuesBase(values.astype(samples.dtype))
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
        fitted = DistributionBase(distribution=with_jax_leaves(base))
    elif isinstance(base, str) and base == "gaussian":
        gaussian = fit_gaussian(samples)
        fitted = GaussianBase(held_out=gaussian.held_out, coordinates=gaussian.coordinates)
    elif callable(base):
        # What is no pytree is told from others by identity: its own equality may compare arrays.
        is_leaf = jax.tree_util.all_leaves([base])
        fitted = FunctionBase(function=Partial(base.__call__) if is_leaf else with_jax_leaves(base))
    else:
        raise TypeError(
            "base: expected None, 'gaussian', a score function or a NumPyro distribution; "
            f"got {base!r}"
        )
    return dataclasses.replace(fitted, at_samples=fitted.score(samples).astype(samples.dtype))
