"""The options of an ``ImplicitELBO``, checked against each other and against a layout."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import NamedSharding

from numpyro_kscore._model.layout import Layout
from numpyro_kscore._util.checks import check_choice, check_positive
from numpyro_kscore._util.sharding import check_sharding, divides, num_shards
from numpyro_kscore.estimators._fit.guide_estimator import GuideEstimator


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
    """The options of an objective, resolved; :class:`~numpyro_kscore.ImplicitELBO` documents them.

    The estimator has the base and the sharding already.
    """

    estimator: GuideEstimator
    base: str | None
    debias: str | None
    clip: float | None
    local_share: float
    aggregate: str | None
    sharding: NamedSharding | None


def resolve_settings(
    estimator: Any,
    base: str | None,
    debias: str | None,
    clip: float | None,
    local_share: float,
    aggregate: str | None,
    sharding: NamedSharding | None,
) -> ObjectiveOptions:
    """Check the settings and let the estimator resolve every ``"auto"``."""
    if aggregate is not None and not isinstance(aggregate, str):
        raise TypeError(f"aggregate: expected the name of a plate or None; got {aggregate!r}")
    if not isinstance(estimator, GuideEstimator):
        raise TypeError(
            f"estimator: expected a ScoreEstimator or SlicedScoreMatching; got {estimator!r}"
        )
    check_choice("base", base, ("auto", "model", "moments", "gaussian", None))
    check_choice("debias", debias, ("auto", "jackknife", None))
    if clip is not None:
        check_positive("clip", clip)
    if not 0 <= local_share <= 1:
        raise ValueError(
            f"local_share: expected a number from 0 (scores are estimated from the draws alone) to "
            f"1 (entropies are those of the local densities); got {local_share!r}"
        )
    base = estimator.resolve_base(base)
    if debias == "auto" and aggregate is not None:
        # The jackknife doubles the squared error of an estimate from one batch (docs/wae_report).
        debias = None
    sharding = check_sharding(sharding)
    return ObjectiveOptions(
        estimator.in_objective(base, sharding),
        base,
        estimator.resolve_debias(debias),
        clip,
        float(local_share),
        aggregate,
        sharding,
    )


def pool(layout: Layout, plate: str | None) -> Layout:
    """Pool the latents of a plate into one part of the layout; None changes nothing.

    The draws of all elements of the plate, the aggregate, are taken as draws of one distribution.
    """
    if plate is None:
        return layout
    parts = [part for part in layout.parts if plate in part.plates]
    if not parts:
        raise ValueError(
            f"aggregate: expected a plate with latent sites that have noise of their own in it; "
            f"got {plate!r}, and the latents' plates are "
            f"{sorted({name for part in layout.parts for name in part.plates})}"
        )
    for part in parts:
        if not part.is_implicit or part.context is not None or len(part.plates) > 1:
            raise ValueError(
                f"aggregate: expected sites in plate {plate!r} alone that depend on no other "
                f"latent and are estimated; got {list(part.sites)}. Mark a site with a density by "
                "infer={'implicit': True}"
            )
    return layout.pooled(plate)


def count_particles(layout: Layout, settings: ObjectiveOptions, num_particles: int | None) -> int:
    """The number of particles of a step, checked; the default if ``num_particles`` is None."""
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
