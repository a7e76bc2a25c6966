"""A Gaussian near a model's posterior, as a start for any guide."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro.distributions import biject_to
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_kscore._model.call_checks import check_call
from numpyro_kscore._model.coordinates import unravel
from numpyro_kscore._model.implicit import Implicit
from numpyro_kscore._model.prototype import find_prototype
from numpyro_kscore._model.supports import has_dynamic_support
from numpyro_kscore._starts.from_model import find_start
from numpyro_kscore._util.keys import check_key


class InitialGaussian(NamedTuple):
    """A Gaussian near a posterior, in unconstrained coordinates.

    Attributes:
        locs: its means, by site, of the shapes of the unconstrained values.
        scales: its standard deviations, by site.
        mean: all means as one vector (d,), in the order of NumPyro's automatic guides.
        factor: lower Cholesky factor of the covariance, (d, d), in the same order.
        elbo: its evidence lower bound, in nats.
        num_gradients: how many gradients of the model the search took.
        modes: the distinct modes whose probability counts, (k, d).
        weights: fractions of probability by their Gaussian approximations, (k,).
        supports: supports of the sites.
    """

    locs: dict[str, Array]
    scales: dict[str, Array]
    mean: Array
    factor: Array
    elbo: float
    num_gradients: int
    modes: np.ndarray
    weights: np.ndarray
    supports: dict[str, Any]

    def init_params(self, guide: AutoGuide) -> dict[str, Array]:
        """Parameters with which one of NumPyro's Gaussian guides starts as this Gaussian.

        For ``svi.run(..., init_params=start.init_params(guide))`` and
        :func:`~numpyro_kscore.fit`. Guides of one's own take what they need from the attributes.

        Raises:
            ValueError: for a guide that has no such parameters, such as a flow; give it
                ``init_loc_fn=start.init_loc_fn`` instead.
        """
        prefix, scale = guide.prefix, jnp.linalg.norm(self.factor, axis=1)
        if isinstance(guide, AutoNormal):
            locs = {f"{name}_{prefix}_loc": value for name, value in self.locs.items()}
            return locs | {f"{name}_{prefix}_scale": s for name, s in self.scales.items()}
        if isinstance(guide, AutoMultivariateNormal):
            return {f"{prefix}_loc": self.mean, f"{prefix}_scale_tril": self.factor}
        if isinstance(guide, AutoDiagonalNormal):
            return {f"{prefix}_loc": self.mean, f"{prefix}_scale": scale}
        if isinstance(guide, AutoLowRankMultivariateNormal | AutoLaplaceApproximation):
            return {f"{prefix}_loc": self.mean}
        hint = "; AutoDelta has constrained values" if isinstance(guide, AutoDelta) else ""
        raise ValueError(
            "guide: expected one of NumPyro's Gaussian guides (AutoNormal, AutoDiagonalNormal, "
            "AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoLaplaceApproximation); "
            f"got {type(guide).__name__}{hint}. Make it with init_loc_fn=start.init_loc_fn"
        )

    def sample(self, x: Array) -> dict[str, Array]:
        """Sample every latent of the model in a guide of one's own, which works in standard units.

        The latents are the image of x under the Gaussian's affine map: ``mean + factor @ x``, and
        from there to their supports. A network of noise that gives x need not learn the units, the
        place and the correlations of a posterior, only its shape.

        Args:
            x: a draw of the guide, (d,); that of a standard normal is one of the Gaussian.

        Returns:
            The latents by name.

        Raises:
            ValueError: for x of another shape; for a support that other latents may determine.

        Example::

            from numpyro_kscore import initial_gaussian

            start = initial_gaussian(random.key(0), model, y)
            noise_law = dist.Normal().expand([8]).to_event(1)


            def guide(y=None):
                noise = numpyro.sample("noise", noise_law, infer={"is_auxiliary": True})
                first = numpyro.param("first", 0.3 * jax.random.normal(random.key(1), (8, 16)))
                second = numpyro.param("second", 0.3 * jax.random.normal(random.key(2), (16, 2)))
                start.sample(jnp.tanh(noise @ first) @ second)


            svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
            result = svi.run(random.key(0), 200, y, progress_bar=False)
        """
        if jnp.shape(x) != self.mean.shape:
            raise ValueError(
                f"x: expected {self.mean.shape[0]} numbers, one for each latent coordinate; got "
                f"shape {jnp.shape(x)}"
            )
        shapes = tuple((name, np.shape(value)) for name, value in self.locs.items())
        out = {}
        for name, free in unravel(self.mean + self.factor @ x, shapes).items():
            support = self.supports[name]
            if has_dynamic_support(support):
                raise ValueError(
                    f"model: expected supports that are the same in every draw; got {support} at "
                    f"site '{name}'. Give the network to AutoImplicit(model, network=...)"
                )
            value = biject_to(support)(free)
            implicit = Implicit(value, support.event_dim, unconstrained=free)
            out[name] = numpyro.sample(name, implicit)
        return out

    @property
    def init_loc_fn(self) -> Callable[..., Any]:
        """A strategy for initial values, the means, as NumPyro's guides and samplers take them."""
        return partial(_value_at, locs=self.locs)


def _value_at(site: dict[str, Any] | None = None, locs: dict[str, Array] | None = None) -> Any:
    if site is None:
        return partial(_value_at, locs=locs)
    if locs and site["type"] == "sample" and not site["is_observed"] and site["name"] in locs:
        return biject_to(site["fn"].support)(locs[site["name"]])
    return None


def initial_gaussian(
    rng_key: Array,
    model: Callable[..., Any],
    *args: Any,
    init_loc_fn: Callable[..., Any] = init_to_uniform,
    forward_mode_differentiation: bool = False,
    **kwargs: Any,
) -> InitialGaussian:
    """Find a Gaussian near the posterior of a model.

    Quasi-Newton paths from several starts lead to modes; of the Gaussians along them, with the
    inverse Hessians of BFGS as covariances, the one with the highest evidence lower bound is moved
    on by batch and match, in rounds of 20 steps in closed form (docs/start).
    :class:`~numpyro_kscore.AutoImplicit` does this by itself, in hierarchical coordinates.

    Args:
        rng_key: random key.
        model: a NumPyro model; its discrete latents are summed out.
        *args: arguments of the model.
        init_loc_fn: where the first path starts, one of NumPyro's initialization strategies.
        forward_mode_differentiation: differentiate in forward mode, for models with ``while_loop``.
        **kwargs: keyword arguments of the model.

    Returns:
        Means, standard deviations and the whole covariance in unconstrained coordinates, and how
        they were found.

    Raises:
        TypeError: for anything but a random key.
        ValueError: if the model has no continuous latents, or no finite density at its initial
            values.
        RuntimeError: by NumPyro, for discrete latents that cannot be summed out.
        ImportError: by NumPyro, for discrete latents without funsor.

    Cost: 2000 to 12000 gradients of the model in up to ten dimensions, 30000 to 150000 in a
    hundred, in double precision where the model allows it.
    Source: Zhang et al. 2022 (Pathfinder); Cai et al. 2024 (batch and match).

    Example::

        from numpyro.infer import Trace_ELBO
        from numpyro.infer.autoguide import AutoMultivariateNormal

        from numpyro_kscore import initial_gaussian

        start = initial_gaussian(random.key(0), model, y)
        guide = AutoMultivariateNormal(model)
        svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
        init_params = start.init_params(guide)
        result = svi.run(random.key(1), 500, y, init_params=init_params, progress_bar=False)
    """
    check_key("rng_key", rng_key, "the model")
    settings = inspect.signature(initial_gaussian).parameters
    check_call("initial_gaussian", settings, model, args, kwargs)
    forward = forward_mode_differentiation
    prototype = find_prototype(rng_key, model, args, kwargs, init_loc_fn, forward)
    latents = prototype.latents
    if not latents:
        raise ValueError("model: expected at least one continuous latent sample site; got none")
    found = find_start(model, args, kwargs, latents, forward, plain=True)
    if found is None:
        raise ValueError(
            "model: expected a finite density at one of the starts; got none. Give another "
            "init_loc_fn"
        )
    shapes = tuple((name, np.shape(value)) for name, value in latents.items())
    mean, factor = (
        jnp.asarray(a, jnp.result_type(float)) for a in (found.gaussian.mean, found.gaussian.factor)
    )
    return InitialGaussian(
        unravel(mean, shapes),
        unravel(jnp.linalg.norm(factor, axis=1), shapes),
        mean,
        factor,
        found.elbo,
        found.num_gradients,
        found.modes,
        found.weights,
        {name: prototype.trace[name]["fn"].support for name in latents},
    )
