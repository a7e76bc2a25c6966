"""ArviZ's NumPyro converters, of versions 1.x and 0.2x, for draws of a guide and of chains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from numpyro_kscore._model.program import Program
from numpyro_kscore._util.pytree import named_leaves

INSTALL = 'Run: pip install "numpyro-kscore[arviz]"'


class ConvertedFit(NamedTuple):
    """A fit in the form that a converter reads.

    The model has its parameters substituted. Sites and statistics of draws are by name, with
    leading axes (chain, draw).
    """

    program: Program
    samples: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]


def make_converter() -> Callable[[ConvertedFit, dict[str, Any]], Any]:
    """``(fit, groups) -> tree`` by the ArviZ that is installed."""
    try:
        from arviz_base.io_numpyro import NumPyroConverter, NumPyroInferenceAdapter
    except ImportError:
        return _old_converter()

    class Adapter(NumPyroInferenceAdapter):
        """Draws as chains."""

        def __init__(self, fit: ConvertedFit) -> None:
            self.fit = fit
            shape = next(iter(fit.samples.values())).shape[:2]
            program = fit.program
            super().__init__(fit, program.model, program.args, program.kwargs, shape)

        @property
        def sample_dims(self) -> list[str]:
            return ["chain", "draw"]

        def get_samples(self, seed: int | None = None, **_: Any) -> dict[str, Any]:
            return self.fit.samples

        def get_sample_stats(self, **_: Any) -> dict[str, Any]:
            return self.fit.stats

    def make(fit: ConvertedFit, groups: dict[str, Any]) -> Any:
        groups = {**groups, "prior": one_chain(groups["prior"])}
        with _unwarned():
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
            sampler=SimpleNamespace(model=fit.program.model),
            _args=fit.program.args,
            _kwargs=fit.program.kwargs,
        )
        with _unwarned():
            return NumPyroConverter(posterior=chains, **groups).to_inference_data()

    return make


def add_log_likelihoods(tree: Any, values: dict[str, np.ndarray]) -> None:
    """Add the group of log likelihoods, with the dimensions and labels of the observed data."""
    if not values:
        return
    import xarray

    observed = tree["observed_data"]
    arrays = {}
    for name, value in values.items():
        dims = observed[name].dims[: value.ndim - 1]
        coords = {dim: observed[dim].values for dim in dims if dim in observed.coords}
        arrays[name] = xarray.DataArray(value[None], dims=("chain", "draw", *dims), coords=coords)
    posterior = tree["posterior"]
    labels = {dim: posterior[dim].values for dim in ("chain", "draw")}
    group = xarray.Dataset(arrays, coords=labels)
    if hasattr(tree, "add_groups"):
        tree.add_groups(log_likelihood=group)
    else:
        tree["log_likelihood"] = xarray.DataTree(group)


@contextmanager
def _unwarned() -> Iterator[None]:
    """Silence warnings that do not apply to these draws."""
    with warnings.catch_warnings():
        # NumPyro's: ArviZ looks for initial values where the model has some already.
        warnings.filterwarnings("ignore", r"init_to_median\(\) skipping", UserWarning)
        # ArviZ's, 1.x and 0.2x: many short chains look like exchanged axes.
        warnings.filterwarnings("ignore", "Found chain dimension to be longer", UserWarning)
        warnings.filterwarnings("ignore", "More chains .* than draws", UserWarning)
        yield


def one_chain(values: Any) -> Any:
    """Arrays by name with a leading axis for the one chain; None stays None."""
    if values is None:
        return None
    return {name: np.asarray(value)[None] for name, value in named_leaves(values).items()}
