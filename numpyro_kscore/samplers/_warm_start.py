"""``warm_start``: where samplers start, and in which metric, from a fitted guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import NUTS, SVI

from numpyro_kscore._util.checks import check_count
from numpyro_kscore.estimators._base.standardization import LARGEST_WHITENED, whiten_samples
from numpyro_kscore.samplers._guide import open_guide


class WarmStart(NamedTuple):
    """Initial positions and a metric for samplers, in unconstrained coordinates.

    Flat vectors are in the order of ``ravel_pytree``: sites sorted by name, as in NumPyro's
    samplers and BlackJAX's.

    Attributes:
        model: the model at its fitted parameters.
        log_density: unconstrained values by site, of one point, to the model's log density with
            the log-Jacobian; what BlackJAX's algorithms take.
        positions: draws of the guide at which the density is finite: unconstrained values by site,
            leading axis ``num_chains``.
        inverse_mass_matrix: the covariance of the guide's draws, (d, d); their variances, (d,), in
            more than 256 dimensions.

    Example::

        from numpyro_kscore import warm_start

        start = warm_start(svi, result, 4, y)
        start.positions["scale"]  # (4,)
        start.inverse_mass_matrix  # (2, 2)
    """

    model: Callable[..., Any]
    log_density: Callable[[dict[str, Array]], Array]
    positions: dict[str, Array]
    inverse_mass_matrix: Array

    @property
    def init_params(self) -> dict[str, Array]:
        """The positions as ``MCMC.run`` takes them: without the axis of chains if there is one."""
        if len(next(iter(self.positions.values()))) > 1:
            return self.positions
        return {name: value[0] for name, value in self.positions.items()}

    def nuts(self, **settings: Any) -> NUTS:
        """NumPyro's NUTS for the model, with the guide's metric.

        Args:
            **settings: of ``NUTS``. By default the metric is kept, and the warm-up adapts the step
                size alone; ``adapt_mass_matrix=True`` lets it find another metric, for which it
                needs hundreds of steps.
        """
        known = {
            "inverse_mass_matrix": self.inverse_mass_matrix,
            "dense_mass": self.inverse_mass_matrix.ndim == 2,
            "adapt_mass_matrix": False,
        }
        return NUTS(self.model, **(known | settings))


def warm_start(
    svi: SVI,
    result: Any,
    num_chains: int,
    *args: Any,
    rng_key: Array | None = None,
    **kwargs: Any,
) -> WarmStart:
    """Initial positions and a metric for NUTS and other samplers, from a fitted guide.

    A sampler that starts from draws of a guide, in the metric of the guide's covariance, has only
    a step size left to find.

    Args:
        svi: model, guide and loss; the guide may be one of NumPyro's.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        num_chains: number of positions.
        *args: arguments of the model, as in the fit.
        rng_key: random key; by default ``jax.random.key(0)``.
        **kwargs: keyword arguments of the model.

    Returns:
        Positions, metric and log density.

    Raises:
        TypeError: see :func:`~numpyro_kscore.evaluate_guide`.
        ValueError: see there; and for more chains than draws at which the density is finite.
        FloatingPointError: if fewer than half of the guide's draws are finite, or the density is
            at fewer than half of them.

    Cost: 10 000 draws of the guide, and one gradient of the model at 256 of them or more.

    Example::

        from numpyro.infer import MCMC

        from numpyro_kscore import warm_start

        start = warm_start(svi, result, 1, y)
        mcmc = MCMC(start.nuts(), num_warmup=100, num_samples=500, progress_bar=False)
        mcmc.run(random.key(2), y, init_params=start.init_params)
        mcmc.get_samples()["scale"]  # (500,)
    """
    check_count("num_chains", num_chains)
    guide = open_guide(svi, result, args, kwargs, rng_key, num_chains)
    program, layout = guide.program, guide.layout
    model = handlers.substitute(program.model, data=dict(program.params))
    log_density = guide.target._replace(coordinates=()).log_density
    positions = guide.unconstrained(jnp.asarray(guide.valid))
    if len(positions) < num_chains:
        raise ValueError(
            f"num_chains: expected at most {len(positions)}, the valid draws; got {num_chains}"
        )
    samples = np.asarray(guide.unconstrained(jnp.asarray(guide.draws)))
    finite = np.isfinite(samples).all(axis=1)
    columns = [
        np.arange(site.start, site.start + site.size)
        for site in sorted(layout.sites, key=lambda site: site.name)
    ]
    covariance = _covariance(samples[finite][:, np.concatenate(columns)])
    by_site = jax.jit(jax.vmap(layout.unravel))(positions)
    return WarmStart(model, log_density, by_site, covariance)


def _covariance(samples: np.ndarray) -> Array:
    """Covariance (d, d) of samples (n, d), positive definite; variances (d,) of many columns."""
    if samples.shape[1] > LARGEST_WHITENED:
        return jax.jit(lambda x: whiten_samples(x).scale ** 2)(samples)
    root = np.asarray(jax.jit(lambda x: whiten_samples(x).root())(samples), np.float64)
    return jnp.asarray(root @ root.T, samples.dtype)
