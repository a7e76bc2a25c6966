"""ArviZ's NumPyro converters, of versions 1.x and 0.2x, for draws of a guide and of chains."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from numpyro_kscore._tracing.program import Program

__all__ = ["ConvertedFit", "make_converter", "one_chain"]

INSTALL = 'Run: pip install "numpyro-kscore[arviz]"'


class ConvertedFit(NamedTuple):
    """A fit in the form that a converter reads.

    Attributes:
        model: with its parameters substituted.
        program: guide, model and their arguments.
        samples: sites by name, leading axes (chain, draw).
        stats: statistics of draws by name, the same.
    """

    model: Callable[..., Any]
    program: Program
    samples: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]


def make_converter() -> Callable[[ConvertedFit, dict[str, Any]], Any]:
    """``(fit, groups) -> tree`` by the ArviZ that is installed.

    Raises:
        ImportError: without ArviZ.
    """
    try:
        from arviz_base.io_numpyro import NumPyroConverter, NumPyroInferenceAdapter
    except ImportError:
        return _old_converter()

    class Adapter(NumPyroInferenceAdapter):
        """Draws as chains."""

        def __init__(self, fit: ConvertedFit) -> None:
            self.fit = fit
            shape = next(iter(fit.samples.values())).shape[:2]
            args, kwargs = fit.program.args, fit.program.kwargs
            super().__init__(fit, fit.model, args, kwargs, shape)

        @property
        def sample_dims(self) -> list[str]:
            return ["chain", "draw"]

        def get_samples(self, seed: int | None = None, **_: Any) -> dict[str, Any]:
            return self.fit.samples

        def get_sample_stats(self, **_: Any) -> dict[str, Any]:
            return self.fit.stats

    def make(fit: ConvertedFit, groups: dict[str, Any]) -> Any:
        groups = {**groups, "prior": one_chain(groups["prior"])}
        return NumPyroConverter(posterior=Adapter(fit), **groups).to_datatree()

    return make


def _old_converter() -> Callable[[ConvertedFit, dict[str, Any]], Any]:
    try:
        from arviz.data.io_numpyro import NumPyroConverter
    except ImportError as error:
        raise ImportError(f"to_arviz: expected ArviZ; got none installed. {INSTALL}") from error

    def make(fit: ConvertedFit, groups: dict[str, Any]) -> Any:
        num_chains, count = next(iter(fit.samples.values())).shape[:2]

        def samples(group_by_chain: bool = True) -> dict[str, np.ndarray]:
            if group_by_chain:
                return fit.samples
            return {
                name: value.reshape(-1, *value.shape[2:]) for name, value in fit.samples.items()
            }

        # The attributes of an MCMC object that this converter reads.
        chains = SimpleNamespace(
            get_samples=samples,
            get_extra_fields=lambda group_by_chain=True: fit.stats,
            num_chains=num_chains,
            num_samples=count,
            thinning=1,
            sampler=SimpleNamespace(model=fit.model),
            _args=fit.program.args,
            _kwargs=fit.program.kwargs,
        )
        return NumPyroConverter(posterior=chains, **groups).to_inference_data()

    return make


def one_chain(values: Any) -> Any:
    """Arrays by name with a leading axis for the one chain; None stays None."""
    if values is None:
        return None
    return {name: np.asarray(value)[None] for name, value in values.items()}
