"""An automatic guide that is a mixture of Gaussians over network noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_kscore._guides.autoguide import AutoImplicit
from numpyro_kscore._model.handlers import purpose_of_local_densities
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.network import GATE_RATE, standard_normal
from numpyro_kscore._transports.transport import LocalDensity

# Default limit on the noise of a mixture: more makes layers wide and gains little.
MOST_NOISE = 16


class AutoSemiImplicit(AutoImplicit):
    """A mixture of mean-field Gaussians over network noise, which may be smaller than the latents.

    ``x | ε ~ N(loc + scale * (ε M + f(ε)), (scale * exp(g(ε)))²)``, where f and g are a perceptron
    whose last layer starts at zero, as M does, and the latents are ``m + C x`` with the Gaussian
    N(m, C Cᵀ) that :class:`~numpyro_kscore.AutoImplicit` starts from. It has a
    density given ε, but no marginal one (Yin and Zhou 2018); importance weights need no more
    (docs/weights). The Gaussian part keeps it from collapsing onto a surface of the noise's
    dimension; for a posterior that is a thin sheet, :class:`~numpyro_kscore.AutoImplicit` comes
    closer.

    Args:
        model: as for :class:`~numpyro_kscore.AutoImplicit`.
        amortize: as there.
        hidden_dims: widths of the hidden layers.
        noise_dim: dimension of ε, by default the latent dimension, at most 16.
        network: a callable from ε (noise_dim,) to the Gaussians' means less ``loc``
            (latent_dim,), or a flax linen module. Their standard deviations are then ``scale``.
        warm_start: as for :class:`~numpyro_kscore.AutoImplicit`.
        init_loc_fn: as there.
        init_scale: as there.
        prefix: prefix of the names of parameters and noise sites.
        forward_mode_differentiation: as for :class:`~numpyro_kscore.AutoImplicit`.

    Raises:
        ValueError: as :class:`~numpyro_kscore.AutoImplicit`, except for the size of the noise.

    Example::

        from numpyro_kscore import AutoSemiImplicit

        guide = AutoSemiImplicit(model, noise_dim=1)
        svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
        result = svi.run(random.key(0), 400, y, progress_bar=False)
        guide.sample_posterior(random.key(1), result.params, sample_shape=(1000,))["loc"]  # (1000,)
    """

    def _default_noise_dim(self) -> int:
        return min(self.latent_dim, MOST_NOISE)

    def _check_noise(self) -> None:
        """Any number of noise dimensions leaves a density."""

    def _has_loc(self) -> bool:
        return True

    def _push(self, noise: jax.Array, *labels: jax.Array) -> tuple[jax.Array, LocalDensity | None]:
        if purpose_of_local_densities() == "weights":
            return self._drawn(dist.Normal(*self._gaussian(noise, *labels)).to_event(1))
        unit = numpyro.sample(
            f"_{self.prefix}_spread",
            standard_normal(self.latent_dim),
            infer={"is_auxiliary": True},
        )
        mean, sd = self._gaussian(noise, *labels)
        return mean + sd * unit, None

    def _push_to_mode(
        self, noise: jax.Array, label: jax.Array, component: Affine, weight: jax.Array
    ) -> tuple[jax.Array, LocalDensity | None]:
        if purpose_of_local_densities() != "weights":
            return super()._push_to_mode(noise, label, component, weight)
        # The label is noise like other noise: draws of all modes are mixed where they are seen.
        mean, sd = self._gaussian(noise, label)
        factor = component.factor * sd
        return self._drawn(dist.MultivariateNormal(component.push(mean), scale_tril=factor))

    def _drawn(self, fn: dist.Distribution) -> tuple[jax.Array, LocalDensity]:
        """A draw given noise as a site of its own, of which weights take the density."""
        x = numpyro.sample(f"_{self.prefix}_given", fn, infer={"is_auxiliary": True})
        return x, LocalDensity(*jax.value_and_grad(fn.log_prob)(x))

    def _gaussian(self, noise: jax.Array, *labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and standard deviations of x given noise, (latent_dim,)."""
        dim = self.latent_dim
        loc, scale = self._affine()
        if self.network is not None:
            return loc + self._apply_network(noise), scale
        mixing = numpyro.param(f"{self.prefix}_mixing", jnp.zeros((self.noise_dim, dim)))
        out = self._perceptron(2 * dim, labels)(jnp.concatenate([noise, *labels]))
        shift, log_gate = out[:dim], GATE_RATE * out[dim:]
        return loc + scale * (noise @ mixing + shift), scale * jnp.exp(log_gate)
