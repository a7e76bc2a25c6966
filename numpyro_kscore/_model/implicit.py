"""A guide site that can only be sampled."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution, constraints


class Implicit(Distribution):
    """A guide site that is given by a draw and has no known density.

    Use it for every latent site a guide computes from noise::

        def guide(data):
            noise = numpyro.sample(
                "noise", dist.Normal().expand([8]).to_event(1), infer={"is_auxiliary": True}
            )
            numpyro.sample("theta", Implicit(network(noise), event_dim=1))

    and fit with :class:`~numpyro_kscore.ImplicitELBO`. It is deliberately not a ``Delta``: under
    NumPyro's own ELBOs a ``Delta`` site collapses to the posterior mode without a warning.

    Args:
        value: the draw; the last ``event_dim`` dimensions are the event.
        event_dim: number of event dimensions, as the model's site has it.
        unconstrained: the draw in unconstrained coordinates, shape batch + anything, if the
            guide has it; this saves the inverse of the model's transform, and its rounding.
        local_log_density: a scalar, ``log p(ε) - log |det du/dε|`` with the noise ε and the draw's
            unconstrained coordinates u, if u has as many dimensions as ε: the log density of u if
            no other noise is mapped there. The site is of the draw of all latents that share the
            noise: give it at one of them. It sees what is finer than a kernel's bandwidth.
        local_score: the gradient of the local log density in this site's ``unconstrained``, at the
            draw and of that shape. Give it at all sites that share the noise, or at none. Gradients
            are then taken along the paths of draws, and this part of them has no noise at the
            posterior. NaN says that other noise is mapped to the same place, as behind a fold: the
            more such draws, the less the local log densities count (docs/theory).

    Raises:
        TypeError: if ``event_dim`` is not an integer.
        ValueError: if ``value`` has fewer dimensions than ``event_dim``.

    Example::

        from numpyro_kscore import Implicit


        def guide(y=None):
            noise = numpyro.sample("noise", dist.Normal().expand([2]), infer={"is_auxiliary": True})
            u = numpyro.param("shift", jnp.ones(2)) + numpyro.param("mixing", jnp.eye(2)) @ noise
            numpyro.sample("loc", Implicit(u[0]))
            numpyro.sample("scale", Implicit(jnp.exp(u[1])))


        svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
        result = svi.run(random.key(0), 400, y, progress_bar=False)
    """

    arg_constraints = {"value": constraints.dependent(is_discrete=False)}
    reparametrized_params = ["value"]
    pytree_data_fields = ("value", "unconstrained", "local_log_density", "local_score")

    def __init__(
        self,
        value: Any,
        event_dim: int = 0,
        *,
        unconstrained: Any = None,
        local_log_density: Any = None,
        local_score: Any = None,
        validate_args: bool | None = None,
    ) -> None:
        ndim = jnp.ndim(value)
        if isinstance(event_dim, bool) or not isinstance(event_dim, int | np.integer):
            raise TypeError(f"event_dim: expected an integer; got {event_dim!r}")
        if event_dim < 0 or event_dim > ndim:
            raise ValueError(
                f"event_dim: expected between 0 and the {ndim} dimension(s) of value; "
                f"got {event_dim}"
            )
        self.value = value
        if local_score is not None and jnp.shape(local_score) != jnp.shape(unconstrained):
            raise ValueError(
                "local_score: expected the shape of unconstrained, "
                f"{None if unconstrained is None else jnp.shape(unconstrained)}; got "
                f"{jnp.shape(local_score)}"
            )
        self.unconstrained = unconstrained
        if local_log_density is not None and jnp.ndim(local_log_density) != 0:
            raise ValueError(
                "local_log_density: expected a scalar, for the whole draw; got shape "
                f"{jnp.shape(local_log_density)}"
            )
        self.local_log_density = local_log_density
        self.local_score = local_score
        shape = jnp.shape(value)
        batch_shape, event_shape = shape[: ndim - event_dim], shape[ndim - event_dim :]
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    @constraints.dependent_property
    def support(self) -> Any:
        """All real numbers; the support that counts is that of the model's site."""
        return constraints.independent(constraints.real, self.event_dim)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """The draw itself, repeated to ``sample_shape``."""
        # Not batch_shape: numpyro.contrib.control_flow.scan leaves it at the shape of one step.
        return jnp.broadcast_to(self.value, sample_shape + jnp.shape(self.value))

    def log_prob(self, value: Any, intermediates: Any = None) -> NoReturn:
        """Not available.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "Implicit: expected an objective that needs no density of the guide; got a call of "
            "log_prob. Use SVI(model, guide, optim, ImplicitELBO()) instead of Trace_ELBO and "
            "its relatives"
        )
