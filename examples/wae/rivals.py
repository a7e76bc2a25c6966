"""Two well-known autoencoders with the networks, cost and loop of the Wasserstein autoencoder here.

* ``vae``: the variational autoencoder of Kingma and Welling (2014). The codes of *each* image are
  compared with the prior, not those of all images together.
* ``mmd``: the autoencoder of Tolstikhin, Bousquet, Gelly and Schölkopf (2018). Codes of a batch and
  draws of the prior are compared by their maximum mean discrepancy.
"""

import jax.numpy as jnp
import numpyro
from jax import Array, random
from numpyro import handlers
from numpyro.contrib.module import flax_module
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO

from examples.wae.objectives import ROWS
from examples.wae.training import Autoencoder, Settings, reconstruction_cost

# Of the discrepancy, next to the squared error of an image; that of the published experiments.
MMD_WEIGHT = 10.0


class VariationalAutoencoder(Autoencoder):
    """The same model, with the KL divergence of every code from the prior.

    It is that of the draw of a step, ``log q(z|x) - log p(z)``, where there is no closed form.
    """

    def __init__(self, settings: Settings, shape: tuple[int, int, int]) -> None:
        super().__init__(settings, shape, TraceMeanField_ELBO())


class MMDAutoencoder(Autoencoder):
    """Codes and draws of the prior are compared by a kernel; no density counts.

    Raises:
        ValueError: for a prior with parameters, which draws would have to be differentiated in.
    """

    def __init__(self, settings: Settings, shape: tuple[int, int, int]) -> None:
        if settings.prior != "normal":
            raise ValueError(
                f"prior: expected normal with the estimator mmd; got {settings.prior!r}. Use vae "
                "or a score estimator"
            )
        super().__init__(settings, shape, Trace_ELBO())

    def model(self, x: Array, weight: Array | None = None) -> None:
        """The reconstruction cost, and the discrepancy of all codes."""
        count, dim = len(x), self.settings.latent_dim
        decode = flax_module("decoder", self.decoder, input_shape=(1, dim))
        prior = self.declare_prior(x)
        with numpyro.plate(ROWS, count), handlers.mask(mask=False):
            z = numpyro.sample("z", prior)
        draws = random.normal(numpyro.prng_key(), z.shape)
        cost = reconstruction_cost(self.settings.cost, x, decode(z)).sum()
        weight = self.settings.weight if weight is None else weight
        numpyro.factor("cost", -cost / weight - MMD_WEIGHT * count * discrepancy(z, draws))

    def guide(self, x: Array, weight: Array | None = None) -> None:
        """Codes as before."""
        with handlers.mask(mask=False):
            super().guide(x)


RIVALS: dict[str, type[Autoencoder]] = {"vae": VariationalAutoencoder, "mmd": MMDAutoencoder}


def discrepancy(x: Array, y: Array) -> Array:
    """Unbiased squared MMD of draws (n, d) each, kernel ``C / (C + |x - y|²)`` with ``C = 2 d``.

    C is the mean squared distance of two draws of the prior.
    """
    count, dim = x.shape

    def kernel(a: Array, b: Array) -> Array:
        squares = jnp.sum(a**2, 1)[:, None] + jnp.sum(b**2, 1) - 2 * a @ b.T
        return 2 * dim / (2 * dim + jnp.maximum(squares, 0.0))

    others = 1 - jnp.eye(count)
    within = jnp.sum((kernel(x, x) + kernel(y, y)) * others) / (count * (count - 1))
    return within - 2 * jnp.mean(kernel(x, y))


def make_autoencoder(settings: Settings, shape: tuple[int, int, int]) -> Autoencoder:
    """The autoencoder with the estimator of the settings, or one of ``RIVALS`` of that name."""
    return RIVALS.get(settings.estimator, Autoencoder)(settings, shape)
