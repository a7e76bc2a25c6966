"""LatentCoordinates for NUTS, whose chains start within two of zero in each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions.transforms import AffineTransform, ComposeTransform, ExpTransform
from numpyro.infer.reparam import ExplicitReparam, LocScaleReparam, Reparam, TransformReparam

from benchmarks.accuracy.targets import Draws, Model, Target

__all__ = [
    "NONCENTERED",
    "around",
    "in_coordinates",
    "noncentered_logs",
    "ratio",
    "to_arrays",
    "without_coordinates",
]

NONCENTERED = LocScaleReparam(0)


def to_arrays(*data: np.ndarray) -> tuple[Array, ...]:
    """Data as models get them: real numbers in float32, integers in int32."""
    kinds = {"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_}
    return tuple(jnp.asarray(array, kinds[array.dtype.kind]) for array in data)


def around(center: float | Sequence[float], spread: float | Sequence[float]) -> Reparam:
    """Real numbers as center + spread · z."""
    return ExplicitReparam(AffineTransform(np.asarray(center), np.asarray(spread)).inv)


def ratio(center: float | Sequence[float], spread: float | Sequence[float]) -> Reparam:
    """Positive numbers as center · exp(spread · z)."""
    logarithm = AffineTransform(np.log(center), np.asarray(spread))
    return ExplicitReparam(ComposeTransform([logarithm, ExpTransform()]).inv)


def noncentered_logs(*names: str) -> dict[str, Reparam]:
    """Log-normal sites as exponentials of location + scale · z."""
    steps: dict[str, Reparam] = {}
    for name in names:
        steps |= {name: TransformReparam(), f"{name}_base": NONCENTERED}
    return steps


def in_coordinates(
    name: str, model: Model, data: tuple[Array, ...], coordinates: Mapping[str, Reparam]
) -> Target:
    """A target that NUTS draws from in other coordinates.

    Args:
        name: of the target.
        model: with the coordinates of the user.
        data: arguments of the model.
        coordinates: of some sites. NumPyro computes these sites from them, under their names.
    """
    nuts_model = handlers.reparam(model, config=dict(coordinates))
    return Target(name, model, data, nuts_model=nuts_model, from_nuts=without_coordinates)


def without_coordinates(draws: Draws) -> Draws:
    """Sites of the model alone. NumPyro names coordinates by endings."""
    return {
        site: values
        for site, values in draws.items()
        if not site.endswith(("_base", "_decentered"))
    }
