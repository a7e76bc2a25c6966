"""The coordinates of a model's latents, and the model at values of them.

The coordinates of a latent are its unconstrained value, or another form of it: partially
non-centered (see ``_transports.centering``), and of a size that varies with other latents (see
``_transports.sizes``). Densities are those of the coordinates. The logarithms of the Jacobians of
supports and of centering are added at the latent's place in the model, so that its plates scale
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to, constraints, transforms
from numpyro.distributions.util import sum_rightmost

from numpyro_kscore._model.dependencies import KEY, abstract, is_drawn, layers, seeded, sources_of
from numpyro_kscore._model.handlers import Hidden, announce, announced
from numpyro_kscore._model.layout import support_transform
from numpyro_kscore._transports.centering import Centering, LocationScale, centered
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.stretch import Marginals
from numpyro_kscore._util.pytree import pytree, static

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
KIND = "coordinates"
# Families u = loc + scale * noise.
LOCATION_SCALE = (
    dist.Normal,
    dist.StudentT,
    dist.Laplace,
    dist.Cauchy,
    dist.Logistic,
    dist.Gumbel,
    dist.SoftLaplace,
)
# Supports of vectors whose unconstrained values are broken off a stick one after the other.
IN_STICKS = (constraints.simplex, constraints.corr_cholesky, constraints.corr_matrix)
# Distributions of a transformed value.
TRANSFORMED = (dist.TransformedDistribution, dist.LogNormal)


@pytree
class LatentCoordinates:
    """The coordinates of some latents that are not all unconstrained values.

    Attributes:
        centering: degrees of centering, arrays (d,); None if all are 1.
        sizes: how sizes vary with other latents; None if they do not.
        shapes: names of the latents and shapes of their coordinates, d numbers in this order.
        hierarchical: names of the latents whose degrees count.
        sized: names of the latents whose sizes vary.
        marginals: functions that turn coordinates of normal latents into others; None if there are
            none. They come after the sizes.
        shaped: names of the latents whose functions count.
    """

    centering: Centering | None = None
    sizes: Sizes | None = None
    shapes: Shapes = static(default=())
    hierarchical: tuple[str, ...] = static(default=())
    sized: tuple[str, ...] = static(default=())
    marginals: Marginals | None = None
    shaped: tuple[str, ...] = static(default=())

    @property
    def transformed(self) -> tuple[str, ...]:
        """Names of the latents whose coordinates are not their unconstrained values."""
        every = {*self.hierarchical, *self.sized, *self.shaped}
        return tuple(name for name, _ in self.shapes if name in every)

    def latents(self, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """The coordinates but for centering from all of them, by name, and the log volume."""
        out, volume = dict(given), jnp.zeros(())
        if self.sizes is not None:
            flat = ravel(given, self.shapes)
            out.update(unravel(self.sizes.push(flat), self.shapes))
            volume = volume + self.sizes.log_volume(flat)
        for name, one in self._functions():
            flat = jnp.ravel(out[name])
            out[name] = one.push(flat).reshape(jnp.shape(out[name]))
            volume = volume + one.log_volume(flat)
        return out, volume

    def _functions(self) -> Iterator[tuple[str, Marginals]]:
        """The functions of every latent that has some: what one is, no other changes."""
        start = 0
        for name, shape in self.shapes:
            end = start + math.prod(shape)
            if self.marginals is not None and name in self.shaped:
                yield (
                    name,
                    Marginals(self.marginals.shift[start:end], self.marginals.slopes[start:end]),
                )
            start = end

    def centerings(self) -> dict[str, Centering]:
        """Degrees of centering by the names of latents."""
        if self.centering is None:
            return {}
        parts = [unravel(a, self.shapes) for a in self.centering]
        return {name: Centering(*(part[name] for part in parts)) for name in self.hierarchical}

    def announce(self, name: str) -> None:
        """Leave these coordinates in the trace of the guide, under a name that is unique there."""
        if self.transformed:
            announce(KIND, name, self)


def announced_coordinates(trace: dict[str, Any]) -> tuple[LatentCoordinates, ...]:
    """The coordinates that a guide has announced in its trace."""
    found = []
    for prefix, coordinates in announced(KIND, trace):
        shapes = tuple((prefix + one, shape) for one, shape in coordinates.shapes)
        named = (coordinates.hierarchical, coordinates.sized, coordinates.shaped)
        hierarchical, sized, shaped = (tuple(prefix + one for one in names) for names in named)
        given = coordinates.centering, coordinates.sizes, shapes, hierarchical, sized
        found.append(LatentCoordinates(*given, coordinates.marginals, shaped))
    return tuple(found)


def ravel(values: dict[str, Any], shapes: Shapes) -> jax.Array:
    """Arrays by name as one vector (d,), in the order of ``shapes``."""
    return jnp.concatenate([jnp.ravel(values[name]) for name, _ in shapes])


def unravel(flat: Any, shapes: Shapes) -> dict[str, Any]:
    """A vector (d,) as arrays by name."""
    out, start = {}, 0
    for name, shape in shapes:
        end = start + int(np.prod(shape))
        out[name] = flat[start:end].reshape(shape)
        start = end
    return out


def names_of(which: Any, shapes: Shapes) -> tuple[str, ...]:
    """Names of the latents of which some coordinates count, (d,)."""
    return tuple(name for name, some in unravel(which, shapes).items() if some.any())


def moved_coordinates(
    trace: dict[str, Any], names: Collection[str], centering: dict[str, Centering]
) -> dict[str, jax.Array]:
    """The coordinates of the latents of a trace, of sizes that do not vary."""
    out = {}
    for name in names:
        site = trace[name]
        u = biject_to(site["fn"].support).inv(site["value"])
        if name in centering:
            u = centered(_prior(site), centering[name]).invert(u)
        out[name] = u
    return out


def pushed(
    trace: dict[str, Any], latents: dict[str, Any], centerings: dict[str, Centering]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Unconstrained values at coordinates of sizes that do not vary, and the log volume.

    The volume is scaled as the plates of the latents scale their densities.
    """
    out, volume = dict(latents), jnp.zeros(())
    for name, centering in centerings.items():
        site, u = trace[name], latents[name]
        given = centered(_prior(site), centering)
        out[name] = given.push(u)
        scale = 1.0 if site["scale"] is None else site["scale"]
        volume = volume + jnp.sum(scale * given.log_volumes(u))
    return out, volume


def priors_of(
    trace: dict[str, Any], names: Collection[str]
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Locations and log scales of priors in unconstrained values, of their shapes or broadcast."""
    priors = {name: _prior(trace[name]) for name in names}
    return {name: (prior.loc, jnp.log(prior.diagonal)) for name, prior in priors.items()}


def placed(
    model: Callable[..., Any], latents: dict[str, Any], centerings: dict[str, Centering]
) -> Callable[..., Any]:
    """The model at coordinates of its latents, without varying sizes, with log-Jacobians added."""
    return handlers.substitute(model, substitute_fn=partial(_value, latents, centerings))


def _value(latents: dict[str, Any], centerings: dict[str, Centering], site: dict[str, Any]) -> Any:
    """The value of a site at its coordinate; adds the log-Jacobians to the density."""
    name = site["name"]
    if name not in latents or site["type"] != "sample":
        return latents.get(name)
    transform = support_transform(site)
    # Inside a scan this is one step, and the coordinates are those of all steps.
    index = site["infer"].get("_scan_current_index")
    u = _step(latents[name], index)
    prior = _prior(site) if name in centerings else None
    value_ndim = jnp.ndim(u) - transform.domain.event_dim + transform.codomain.event_dim
    _check_place(site, value_ndim, prior)
    log_dets = []
    if prior is not None:
        step = Centering(*(_step(array, index) for array in centerings[name]))
        given = centered(prior, step)
        log_dets.append(given.log_volumes(u))
        u = given.push(u)
        log_dets.append(_lost(u, prior))
    value = transform(u)
    if not is_identity(transform):
        log_dets.append(transform.log_abs_det_jacobian(u, value))
    if log_dets:
        # An event of the support may have fewer dimensions than one of the distribution.
        event_dim = len(site["fn"].event_shape)
        jacobian = sum(
            sum_rightmost(one, jnp.ndim(one) - jnp.ndim(value) + event_dim) for one in log_dets
        )
        numpyro.factor(f"_{name}_log_det", jacobian)
    return value


def _lost(u: jax.Array, prior: LocationScale) -> jax.Array:
    """Minus infinity at unconstrained values that are not told apart from each other, 0 elsewhere.

    A prior far narrower than the rounding of its location has all of its values at that, as far as
    numbers can tell. Their density would be too high by half a nat for each latent.
    """
    widest = jnp.finfo(u.dtype).eps * jnp.maximum(jnp.abs(u), jnp.abs(prior.loc))
    return jnp.where(prior.diagonal < widest, -jnp.inf, 0.0)


def is_identity(transform: Any) -> bool:
    """Whether a transform changes nothing, so that its log-Jacobian is no factor."""
    while hasattr(transform, "base_transform"):
        transform = transform.base_transform
    return isinstance(transform, transforms.IdentityTransform)


def _check_place(site: dict[str, Any], value_ndim: int, prior: LocationScale | None) -> None:
    """Raise for a latent whose value at a coordinate depends on a discrete one, which has none.

    All values of a discrete latent form an axis left of all plates, so extra axes of the support or
    of the prior, beyond the ``value_ndim`` of the value, show the dependence.
    """
    of_prior = () if prior is None else (prior.loc, prior.diagonal)
    axes = max(map(jnp.ndim, jax.tree.leaves((site["fn"].support, of_prior))), default=0)
    if axes > value_ndim:
        raise ValueError(
            f"model: expected a support of '{site['name']}' that depends on no discrete latent, "
            "and no centering where its prior does; got one for each value. Give it the same "
            "support for all of them"
        )
    if site["infer"].get("_scan_current_index") is not None and (
        value_ndim < len(site["fn"].shape())
    ):
        raise ValueError(
            f"model: expected continuous latents inside a scan that depend on no discrete latent; "
            f"got '{site['name']}', which NumPyro's scan cannot place. Sum the discrete one out by "
            "hand, or draw standardized values before the scan"
        )


def _step(array: Any, index: Any) -> Any:
    # Arrays of NumPy cannot be indexed by the counter of a scan.
    return array if index is None else jnp.asarray(array)[index]


def location_and_scale(fn: dist.Distribution) -> LocationScale | None:
    """Location and scale of a prior in unconstrained coordinates; None if its family has none."""
    # A wrapper that moves values, such as a truncated distribution, makes another family; those
    # that expand, mask or reinterpret axes keep it.
    keeps = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)
    family = next(layer for layer in layers(fn) if not isinstance(layer, keeps))
    if type(family) in TRANSFORMED:
        return _of_image(family.transforms, layers(family)[-1])
    return _of_family(family)


def _of_family(base: dist.Distribution) -> LocationScale | None:
    if isinstance(base, LOCATION_SCALE):
        return LocationScale(jnp.asarray(base.loc), jnp.asarray(base.scale))
    if isinstance(base, dist.MultivariateNormal | dist.MultivariateStudentT):
        return LocationScale(base.loc, base.scale_tril, is_matrix=True)
    if isinstance(base, dist.GaussianRandomWalk):
        steps = jnp.tril(jnp.ones((base.num_steps, base.num_steps)))
        scale = jnp.asarray(base.scale)[..., None, None] * steps
        return LocationScale(jnp.zeros(()), scale, is_matrix=True)
    size = _size_of_positive(base)
    if size is not None and isinstance(biject_to(base.support), transforms.ExpTransform):
        return LocationScale(jnp.log(size), jnp.ones_like(size))
    return None


def _size_of_positive(base: dist.Distribution) -> jax.Array | None:
    """A scale parameter of a distribution of positive numbers."""
    if isinstance(base, dist.HalfNormal | dist.HalfCauchy | dist.Weibull):
        return jnp.asarray(base.scale)
    if isinstance(base, dist.Exponential):
        return 1 / jnp.asarray(base.rate)
    if isinstance(base, dist.Gamma):
        return base.concentration / base.rate
    if isinstance(base, dist.InverseGamma):
        return base.rate / base.concentration
    return None


def _of_image(steps: list[transforms.Transform], base: dist.Distribution) -> LocationScale | None:
    """The family of ``loc + scale * base``, or of its exponential."""
    if steps and isinstance(steps[-1], transforms.ExpTransform):
        steps = steps[:-1]
    if not isinstance(base, LOCATION_SCALE):
        return None
    loc, scale = jnp.asarray(base.loc), jnp.asarray(base.scale)
    for step in steps:
        if not isinstance(step, transforms.AffineTransform):
            return None
        loc, scale = step.loc + step.scale * loc, jnp.abs(step.scale) * scale
    return LocationScale(loc, scale)


def _prior(site: dict[str, Any]) -> LocationScale:
    prior = location_and_scale(site["fn"])
    if prior is None:
        raise ValueError(
            f"centering: expected a prior with location and scale at site '{site['name']}'; got "
            f"{type(site['fn']).__name__}. The model's structure must not change between calls"
        )
    return prior


def hierarchical_sites(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    latents: dict[str, Any],
) -> tuple[str, ...]:
    """Names of the latents whose prior has a location or scale that depends on other latents.

    Priors that depend on hidden draws of the model, as where part of it is blocked, are left out:
    their location is unknown where the model is evaluated elsewhere. Only shapes of ``latents``
    matter.
    """

    def of_site(site: dict[str, Any]) -> Any:
        prior = location_and_scale(site["fn"]) if is_drawn(site) else None
        return None if prior is None else (prior.loc, prior.scale)

    sources = _sources_of_priors(model, args, kwargs, latents, of_site)
    chosen = {name for name, s in sources.items() if s - {name} and KEY not in s}
    return tuple(name for name in latents if name in chosen)


def independent_sites(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    latents: dict[str, Any],
) -> tuple[str, ...]:
    """Names of the bounded latents whose numbers have a prior each that depends on no other.

    These are single numbers, and vectors of shares or correlations, whose unconstrained values are
    independent of each other, or nearly. Only shapes of ``latents`` matter.
    """

    def of_site(site: dict[str, Any]) -> Any:
        support = site["fn"].support
        while hasattr(support, "base_constraint"):
            support = support.base_constraint
        is_alone = support is not constraints.real and support.event_dim == 0
        is_known = is_drawn(site) and site["scale"] is None
        if not is_known or not (is_alone or support in IN_STICKS):
            return None
        return [a for a in jax.tree.leaves(site["fn"]) if hasattr(a, "dtype")]

    sources = _sources_of_priors(model, args, kwargs, latents, of_site)
    return tuple(name for name in latents if name in sources and not sources[name])


def _sources_of_priors(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    latents: dict[str, Any],
    of_site: Callable[[dict[str, Any]], Any],
) -> dict[str, frozenset[str]]:
    """The latents that something of each prior is computed from, where there is something."""

    def priors(given: dict[str, Any]) -> dict[str, Any]:
        key = given.pop(KEY, None)
        run = handlers.substitute(model, data=given) if key is None else seeded(model, key, given)
        trace = handlers.trace(run).get_trace(*args, **kwargs)
        return {name: of_site(trace[name]) for name in latents}

    shapes = abstract(latents)
    with Hidden():
        try:
            sources = sources_of(priors, shapes)
        except Exception:
            # The model needs a key, for draws of its own. Inside control flow everything then
            # depends on the key, so it is left out where it can be.
            sources = sources_of(priors, {KEY: jax.random.key(0), **shapes})
    return {name: frozenset().union(*s) for name, s in sources.items() if s is not None}
