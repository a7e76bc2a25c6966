"""What a guide that can only be sampled says to those who ask for its density."""

from __future__ import annotations

from typing import Any, NoReturn

from numpyro.infer.autoguide import AutoContinuous

__all__ = ["WithoutDensity"]


class WithoutDensity(AutoContinuous):
    """An automatic guide without a density."""

    def get_base_dist(self) -> NoReturn:
        """Not available: the guide is not a transformed distribution with a density."""
        self._no_density()

    def get_transform(self, params: dict[str, Any]) -> NoReturn:
        """Not available: the guide is not a transformed distribution with a density."""
        self._no_density()

    def get_posterior(self, params: dict[str, Any]) -> NoReturn:
        """Not available: the guide has no density. Use ``sample_posterior``."""
        self._no_density()

    def _get_posterior(self) -> NoReturn:
        self._no_density()

    def _no_density(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: expected no use of a density; the guide can only be "
            "sampled. Use guide.sample_posterior(rng_key, params, sample_shape=...)"
        )
