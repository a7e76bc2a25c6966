"""The interface of the package's own guides for a fit, an objective and a diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from numpyro_kscore._util.batches import Batches


class Split(NamedTuple):
    """The model and guide of the global latents alone, where rows of plates are amortized.

    Attributes:
        model: the model, whose density is random.
        guide: the guide of these latents.
        reference: a model without randomness near it.
        outline: a model of the same latents without data, for their supports.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    reference: Callable[..., Any]
    outline: Callable[..., Any]


class PackageGuide:
    """A guide that sees its model once before it is fitted."""

    model: Any

    def set_up(self, rng_key: jax.Array, *args: Any, **kwargs: Any) -> None:
        """See the model and its data."""
        raise NotImplementedError

    def prepare(
        self,
        rng_key: jax.Array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batches: Batches | None = None,
        is_start: bool = True,
    ) -> Any:
        """Get ready for a fit, and return exact draws of the guide if there are any."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forget the data: the next data set the guide up anew."""
        raise NotImplementedError

    def marginalized(self, model: Callable[..., Any]) -> Split | None:
        """The model and the guide of the global latents alone; None if these are all."""
        del model
        return None


def package_guide(guide: Any) -> PackageGuide | None:
    """The guide, if it is one of the package's own."""
    return guide if isinstance(guide, PackageGuide) else None
