"""Aggregates: the draws of all elements of a plate, taken as draws of one distribution."""

from __future__ import annotations

from numpyro_kscore._model.layout import Layout

__all__ = ["pool"]


def pool(layout: Layout, plate: str | None) -> Layout:
    """The layout with the latents of a plate pooled into one part; unchanged for None.

    Raises:
        ValueError: if the plate has no latents, or some that cannot be pooled.
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
