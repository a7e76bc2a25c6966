"""The number of particles in a step."""

from __future__ import annotations

from numpyro_kscore._model.layout import Layout
from numpyro_kscore._objective.options import ObjectiveOptions
from numpyro_kscore._util.sharding import divides, num_shards

__all__ = ["count_particles"]


def count_particles(layout: Layout, settings: ObjectiveOptions, num_particles: int | None) -> int:
    """The number of particles of a step, checked; the default if ``num_particles`` is None.

    Raises:
        ValueError: for too few particles to take moments of, and for a number that does not
            divide evenly over the devices.
    """
    estimated = layout.implicit_parts
    if num_particles is None:
        num_particles = layout.default_num_particles
        if estimated and all(part.is_pooled for part in estimated):
            # Every element of a pooled part is a draw.
            num_particles = -(-num_particles // min(part.columns.shape[0] for part in estimated))
    if settings.base == "moments":
        for part in estimated:
            if not part.is_pooled and num_particles < part.dim + 2:
                raise ValueError(
                    f"num_particles: expected at least {part.dim + 2} with base='moments', for "
                    f"the covariance of the {part.dim} numbers of {list(part.sites)}; got "
                    f"{num_particles}. Use more, or base='model'"
                )
    if settings.sharding is not None and not divides(settings.sharding, num_particles):
        raise ValueError(
            f"num_particles: expected a multiple of {num_shards(settings.sharding)}, as many for "
            f"every device; got {num_particles}. Give a number that is one"
        )
    return num_particles
