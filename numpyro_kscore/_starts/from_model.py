"""The search for a start, from a NumPyro model."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.distribution import validation_enabled

from numpyro_kscore._model.coordinates import hierarchical_sites, independent_sites
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.subsampling import few_rows, whole_plates
from numpyro_kscore._model.target import Target
from numpyro_kscore._starts.compiled_density import (
    TargetInForms,
    batched_density,
    in_all_forms,
)
from numpyro_kscore._starts.fit_marginals import fit_marginals
from numpyro_kscore._starts.gaussian_search import find_gaussian
from numpyro_kscore._starts.held_scales import batched_held, batched_products
from numpyro_kscore._starts.prior_draws import PriorDraws, are_among, draw_prior
from numpyro_kscore._starts.search import Density, HeldInForms, Latents, ProductsInForms
from numpyro_kscore._starts.start import GaussianStart
from numpyro_kscore._starts.structure_search import find_by_structure, higher, is_close
from numpyro_kscore._starts.subset_density import (
    MOST_BLOCKS,
    MOST_ROWS,
    AllData,
    DataSubset,
    of_batches,
    of_rows,
    sample_density,
)
from numpyro_kscore._starts.subset_search import moved_to_all_data
from numpyro_kscore._transports.centering import of_degrees
from numpyro_kscore._transports.stretch import Marginals
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.compiling import runs_in_double

# Most latents of a small model, whose shapes under the prior count and for which there are other
# searches and a network, and most whose whole covariance is looked at: its matrices take O(d³) on
# the host.
LARGEST_SMALL, LARGEST_START = 150, 1_000
# The warning of a start that is not close to its model, in words.
SKEWED = (
    "numpyro_kscore: at given scales the model's latents are not close to a Gaussian, which is all "
    "that a guide of more than 1000 latents has: spreads of single ones may be off by a tenth and "
    "more. diagnose(svi, result, ...) tells which"
)
# The loss by attempts that follow an error, in words.
SINGLE = "it goes on in single precision, in which bounds of many rows are rough"
PLAIN = "it goes on in unconstrained coordinates, which do not suit hierarchical models"


def find_start(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    latents: dict[str, Array],
    forward_mode: bool,
    plain: bool = False,
    batches: Batches | None = None,
    in_blocks: bool = False,
) -> GaussianStart | None:
    """A Gaussian near a model's posterior; None if its density is finite nowhere it was tried.

    ``latents`` are unconstrained values with a finite density, in the order of the flat
    coordinates. The search is a function of them: it takes no key of its own. A plain search stays
    in unconstrained coordinates. With batches their mean density counts, and the arguments are the
    first of them. Rows in blocks have latents of their own: a pass over all then takes some of them
    at a time.

    A search that ends with an error is followed by one in the precision that is set, and by a plain
    one; the error of the last is raised.

    Warns:
        UserWarning: for each of them, with the error and what is lost.
    """
    given = model, args, kwargs, latents, forward_mode
    is_double = jnp.result_type(float) == jnp.float64
    attempts = [("", plain, not is_double)]
    if not is_double:
        attempts.append((SINGLE, plain, False))
    if not plain:
        attempts.append((PLAIN, True, False))
    for k, (_, is_plain, in_double) in enumerate(attempts):
        try:
            return _find_start(*given, is_plain, batches, in_blocks, in_double)
        except Exception as error:  # whatever a model does: a start is an offer
            # Batches of a loader that are wrong here would be so in steps.
            is_of_loader = batches is not None and isinstance(error, ValueError)
            if k + 1 == len(attempts) or is_of_loader:
                raise
            warn_of_loss(error, attempts[k + 1][0])
        # A trace that ended with an error keeps its arrays, perhaps in double precision.
        gc.collect()
    return None


def warn_of_loss(error: Exception, lost: str) -> None:
    """Warn that a part of a search ended with an error, and of what is lost."""
    warnings.warn(
        f"numpyro_kscore: a part of the search for a start ended with {type(error).__name__} "
        f"({str(error).strip() or 'without a message'}): {lost}",
        UserWarning,
        stacklevel=3,
    )


def _find_start(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    latents: dict[str, Array],
    forward_mode: bool,
    plain: bool,
    batches: Batches | None,
    in_blocks: bool,
    in_double: bool,
) -> GaussianStart | None:
    """One attempt of :func:`find_start`, in double precision if that is possible."""
    whole = model if batches is not None else whole_plates(model, args, kwargs)
    most = MOST_BLOCKS if in_blocks else MOST_ROWS
    few = None if whole is model else few_rows(model, args, kwargs, most)
    seen = whole if few is None else few.model
    shapes = tuple((name, np.shape(value)) for name, value in latents.items())
    first = np.concatenate([np.ravel(np.asarray(a, float)) for a in latents.values()])
    target = Target(seen, args, kwargs, shapes)
    values, scales, between = _values(target, latents)
    hierarchical = () if plain else hierarchical_sites(seen, args, kwargs, values)
    # The distribution of a large model's scales is found with shapes of its own.
    has_shapes = not plain and len(first) <= LARGEST_SMALL
    independent = independent_sites(seen, args, kwargs, values) if has_shapes else ()
    rng = np.random.default_rng(first.view(np.uint32).tolist())

    known = Latents(
        first,
        np.zeros((0, len(first))),
        is_hierarchical=are_among(hierarchical, latents),
        is_scale=are_among(scales, latents),
        is_between=are_among(between, latents),
        sizes=tuple(int(np.size(value)) for value in latents.values()),
    )

    def search() -> GaussianStart | None:
        found: GaussianStart | None
        drawn = _draws_if_any(seen, args, kwargs, latents, independent)
        try:
            marginals = fit_marginals(drawn.many, drawn.columns, len(first))
            in_forms = in_all_forms(target, hierarchical, marginals)
            shaped = _seen_by(marginals, known, drawn)
            if batches is not None:
                found = _find_by_batches(in_forms, shaped, rng, forward_mode, plain, batches)
            elif few is not None:
                of_given = in_forms.of_model(model)
                some, every = of_rows(of_given, whole, few, forward_mode, in_blocks)
                found = _find_by_parts(some, every, shaped, rng, plain)
            else:
                found = _find_at_once(in_forms, shaped, rng, forward_mode, plain)
        except FloatingPointError:
            return None
        return None if found is None else found._replace(marginals=marginals)

    # Sums over many rows need double precision: a bound of 1e6 nats has errors of 1 without it.
    with _unseen():
        if not in_double or not _runs_in_double(in_all_forms(target, hierarchical), len(first)):
            return search()
        with jax.enable_x64(True):
            return search()


def _runs_in_double(in_forms: TargetInForms, dim: int) -> bool:
    """Whether the model does; see :func:`~numpyro_kscore._util.compiling.runs_in_double`."""
    ones = np.ones(dim)
    degrees = of_degrees(ones)
    return runs_in_double(lambda point: in_forms.energy(point, degrees, degrees), ones)


def _seen_by(marginals: Marginals | None, latents: Latents, drawn: PriorDraws) -> Latents:
    """Latents with draws of their prior, in coordinates that are normal under it."""
    if marginals is None:
        return latents._replace(from_prior=drawn.few)
    first, from_prior = (marginals.invert(u) for u in (latents.first[None], drawn.few))
    return latents._replace(first=first[0], from_prior=from_prior, marginals=marginals)


def _find_by_batches(
    in_forms: TargetInForms,
    latents: Latents,
    rng: np.random.Generator,
    forward_mode: bool,
    plain: bool,
    batches: Batches,
) -> GaussianStart:
    """The start by the mean density of all batches, or of some where nobody knows how many."""
    if batches.count is None:
        some_batches = sample_density(in_forms, batches, forward_mode)
        return find_gaussian(some_batches, latents, rng, with_forms=not plain)
    some, every = of_batches(in_forms, batches, forward_mode)
    return _find_by_parts(some, every, latents, rng, plain)


def _find_by_parts(
    some: DataSubset, every: AllData, latents: Latents, rng: np.random.Generator, plain: bool
) -> GaussianStart:
    """The start by some of the data, moved on by all."""
    found = find_gaussian(some.once, latents, rng, with_forms=False)
    return moved_to_all_data(found, some, every, latents, rng, with_sizes=not plain)


def _find_at_once(
    in_forms: TargetInForms,
    latents: Latents,
    rng: np.random.Generator,
    forward_mode: bool,
    plain: bool,
) -> GaussianStart | None:
    """The start by the density of all data: by its structure alone, if that says enough."""
    density, products, held = _open(in_forms, latents, forward_mode)
    dim, large = len(latents.first), None
    if not plain:
        # The searches that follow have the same draws with and without it.
        own, is_small = deepcopy(rng), dim <= LARGEST_SMALL
        large = find_by_structure(density, products, held, latents, own, is_small)
        if large is not None and is_close(large):
            return large
        if dim > LARGEST_START:
            if large is not None:
                warnings.warn(SKEWED, UserWarning, stacklevel=2)
            return large
    return higher(large, find_gaussian(density, latents, rng, with_forms=not plain))


@contextmanager
def _unseen() -> Iterator[None]:
    """Run a model that was seen before, in single precision, without its handlers and warnings."""
    # NumPyro checks the parameters of distributions operation by operation.
    with Hidden(), validation_enabled(False), warnings.catch_warnings():
        # Latents that stand for missing values are put into data of single precision.
        warnings.filterwarnings("ignore", "scatter inputs have incompatible types", FutureWarning)
        yield


def _open(
    in_forms: TargetInForms, latents: Latents, forward_mode: bool
) -> tuple[Density, ProductsInForms, HeldInForms]:
    """The density, and products of its Hessians and its gradients where scales are held.

    Only latents that are scales as a whole are.
    """
    names, free, start = [], [], 0
    for name, shape in in_forms.target.shapes:
        places = np.arange(start, start + math.prod(shape))
        start += len(places)
        if np.all(np.isin(places, latents.held)):
            names.append(name)
        else:
            free.append(places)
    held = partial(in_forms.energy_given, tuple(names))
    settings = held, forward_mode, np.concatenate([np.empty(0, int), *free])
    density = batched_density(in_forms.energy, forward_mode)
    return density, batched_products(*settings), batched_held(*settings)


def _draws_if_any(
    model: Callable[..., Any],
    args: Any,
    kwargs: Any,
    latents: dict[str, Array],
    independent: Collection[str],
) -> PriorDraws:
    """Draws of the prior; none where the model cannot be drawn from."""
    try:
        return draw_prior(model, args, kwargs, latents, independent)
    except Exception as error:  # whatever a model does: other paths start elsewhere
        warn_of_loss(error, "no path starts at draws of the prior")
    dim = sum(int(np.size(value)) for value in latents.values())
    return PriorDraws(np.zeros((0, dim)), np.zeros((0, 0)), np.zeros(0, int))


def _values(target: Target, latents: dict[str, Array]) -> tuple[dict[str, Any], set[str], set[str]]:
    """Shapes of the constrained values of latents, and the names of those that are positive.

    And, last, of others that are between two bounds, such as correlations.
    """
    positive, between = set(), set()

    def run(coordinates: dict[str, Array]) -> dict[str, Array]:
        trace = target.trace(coordinates)
        for name in coordinates:
            support = trace[name]["fn"].support
            while hasattr(support, "base_constraint"):
                support = support.base_constraint
            if _is_positive(support):
                positive.add(name)
            elif support in (constraints.corr_cholesky, constraints.corr_matrix) or (
                hasattr(support, "lower_bound") and hasattr(support, "upper_bound")
            ):
                between.add(name)
        return {name: trace[name]["value"] for name in coordinates}

    with Hidden():
        return jax.eval_shape(run, latents), positive, between


def _is_positive(support: Any) -> bool:
    """Whether all numbers of a support are positive, other than probabilities."""
    low = getattr(support, "lower_bound", None)
    # A bound that is computed has no value while shapes are traced.
    if low is None or support is constraints.unit_interval or isinstance(low, jax.core.Tracer):
        return False
    return bool(np.all(np.asarray(low) >= 0))
