"""Checks of a fit's input, which run before the compiled fit, where concrete values are known."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_kscore._util.checks import as_points, with_jax_leaves
from numpyro_kscore._util.keys import check_key
from numpyro_kscore._util.sharding import divides, num_shards
from numpyro_kscore.estimators._fit.settings import AutoBandwidth, FitSettings
from numpyro_kscore.estimators._operators.operator_options import Landmarks, RandomFeatures, Subset
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._gram import is_cached
from numpyro_kscore.kernels._matrix import CurlFree
from numpyro_kscore.kernels._profiles import RadialProfile
from numpyro_kscore.kernels._spectral import check_spectral
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._solvers import Krylov
from numpyro_kscore.solvers._spectrum import Solver

# Dimension of the Krylov space where none is given: products with a matrix of features are cheap,
# and very many samples allow for weak regularization, which needs a large space.
KRYLOV_STEPS_OF_FEATURES = 128
PARTS = (
    ("kernel", Kernel, "kernel: expected a kernel such as CurlFree(IMQ()) or Diagonal(Gaussian())"),
    ("regularizer", Regularizer, "regularizer: expected a filter such as NuMethod('auto')"),
    ("solver", Solver, "solver: expected a solver such as Krylov() or Dense()"),
)


def check_settings(settings: FitSettings, num_samples: int) -> FitSettings:
    """The settings as they are compiled for so many samples."""
    _check_parts(settings)
    _check_numbers(settings)
    settings.kernel.check()
    _check_rows(settings, num_samples)
    _check_features(settings)
    if settings.landmarks is not None:
        settings = dataclasses.replace(settings, regularizer=settings.regularizer.on_range())
    if settings.features is not None and settings.solver == Krylov():
        settings = dataclasses.replace(settings, solver=Krylov(KRYLOV_STEPS_OF_FEATURES))
    settings.solver.check(settings.regularizer)
    if settings.is_auto:
        check_solver_of_auto(settings.solver)
    return with_jax_leaves(settings)


def check_solver_of_auto(solver: Any) -> None:
    """Raise ``TypeError`` unless the solver suits an automatic strength or bandwidth."""
    if not isinstance(solver, Krylov):
        raise TypeError(
            "solver: expected Krylov() with an automatic strength or bandwidth, which reads all "
            f"candidates off one Krylov space; got {type(solver).__name__}(). Use Krylov(), or "
            "give both as numbers"
        )


def _check_parts(settings: FitSettings) -> None:
    """Raise ``TypeError`` for a part of another class, or a class JAX does not know."""
    for leaf in jax.tree.leaves(settings):
        if isinstance(leaf, Kernel | RadialProfile | Regularizer | Solver):
            raise TypeError(
                f"{type(leaf).__name__}: expected a pytree; got a class JAX does not know. "
                "Decorate it with @numpyro_kscore.pytree"
            )
    for name, cls, expected in PARTS:
        if not isinstance(getattr(settings, name), cls):
            raise TypeError(f"{expected}; got {getattr(settings, name)!r}")


def _check_numbers(settings: FitSettings) -> None:
    """Raise ``ValueError`` for arrays where one number belongs."""
    numbers = {"bandwidth": getattr(settings.bandwidth, "factor", settings.bandwidth)}
    if not settings.regularizer.is_auto:
        numbers["regularizer"] = settings.regularizer.strength()
    for name, number in numbers.items():
        if not isinstance(number, AutoBandwidth) and jnp.ndim(number):
            raise ValueError(
                f"{name}: expected one number; got shape {jnp.shape(number)}. Several fits are "
                "one jax.vmap; the best of several bandwidths is AutoBandwidth(factors)"
            )


def _check_rows(settings: FitSettings, num_samples: int) -> None:
    """Raise for landmarks or a subset that do not suit the samples or each other."""
    landmarks, subset, sharding = settings.landmarks, settings.subset, settings.sharding
    for rows, cls in ((landmarks, Landmarks), (subset, Subset)):
        if rows is not None and not isinstance(rows, cls):
            raise TypeError(
                f"{cls.argument}: expected None or {cls.__name__}(count), "
                f"{cls.__name__}(fraction=…) or {cls.__name__}(indices=…); got {rows!r}"
            )
    if landmarks is not None and subset is not None:
        raise ValueError("subset: expected None with landmarks; got both. Drop one of the two")
    for rows in (landmarks, subset):
        if rows is not None:
            rows.check(num_samples)
    if landmarks is not None and sharding is not None and not divides(sharding, num_samples):
        raise ValueError(
            f"samples: expected a multiple of {num_shards(sharding)} with landmarks, as many for "
            f"every device; got {num_samples}. Leave some out"
        )


def _check_features(settings: FitSettings) -> None:
    """Raise for random features with another span, or of a kernel that has none."""
    features = settings.features
    if features is None:
        return
    if not isinstance(features, RandomFeatures):
        raise TypeError(
            f"features: expected None or RandomFeatures(num_features); got {features!r}"
        )
    for name in ("landmarks", "subset", "sharding"):
        if getattr(settings, name) is not None:
            raise ValueError(f"features: expected None with {name}; got both. Drop one of the two")
    if features.key is not None:
        check_key("features.key", features.key)
    if not isinstance(settings.kernel, CurlFree):
        raise TypeError(
            f"kernel: expected CurlFree(profile) with features; got {settings.kernel!r}"
        )
    check_spectral(settings.kernel.profile)


def check_context(context: Any, num_samples: int, settings: FitSettings, base: Any) -> jax.Array:
    """The context as an array, (n, c), for n samples and the ``base`` of the estimator."""
    context = as_points("context", context)
    if context.shape[0] != num_samples:
        raise ValueError(
            f"context: expected {num_samples} rows, as the samples have; got shape {context.shape}"
        )
    if settings.is_auto:
        raise TypeError(
            "context: expected None with an automatic strength or bandwidth; got one. Give both "
            "as numbers, e.g. NuMethod(45) and Median(0.8)"
        )
    others = {name: getattr(settings, name) for name in ("landmarks", "subset", "features")}
    others["base"] = base if isinstance(base, str) else None
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"context: expected None with {name}={value!r}; got one. Use {name}=None"
            )
    if not is_cached(num_samples):
        raise ValueError(
            f"context: expected few enough samples to keep all pairs of; got {num_samples}"
        )
    return context
