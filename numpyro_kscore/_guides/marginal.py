"""A model of the global latents alone, from one with latents in the rows of plates.

With a guide q(z | g) of the rows' latents z given the global ones g, a lower bound of
log p(data, g) is the mean over q of

    log p(data, z, g) - log q(z | g).

Its value at one draw, whose derivative in g goes through the draw, is the log density of a model of
g with a random factor. Where q is the posterior of z it is log p(data, g) itself, whatever the
draw. So a guide of g is fitted as for any model, and q as parameters of that model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import random
from numpyro import handlers

from numpyro_kscore._guides.row_blocks import RowBlock
from numpyro_kscore._guides.rows import Amortized, draw_plates
from numpyro_kscore._model.particle_model import own_key
from numpyro_kscore._model.site_density import site_log_prob
from numpyro_kscore._model.subsampling import with_rows


class Marginal:
    """The model of the global latents.

    ``noise`` gives what the rows of a block are drawn from. Without it they are at their modes,
    with Gaussians there: Laplace's approximation of the density, which has no network.
    """

    def __init__(
        self, amortized: Amortized, noise: Callable[[RowBlock], jax.Array] | None = None
    ) -> None:
        self.amortized = amortized
        self.noise = noise

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the model."""
        outline = self.amortized.outline(args, kwargs)
        plates = draw_plates(outline.subsampled)
        rows = {name: plate._indices for name, plate in plates.items()}
        found = self.amortized.trace_rows(outline, rows, self.noise, integrate=True)
        model = handlers.substitute(with_rows(self.amortized.model, rows), data=outline.values)
        given = {name: found.trace[name]["value"] for name in found.draws.coordinates}
        with handlers.block(hide=[*outline.values, *rows]):
            handlers.condition(model, data=given)(*args, **kwargs)
        sites = [found.trace.get(f"_{name}_log_det") for name in given]
        volumes = [jnp.sum(site_log_prob(site)) for site in sites if site is not None]
        factor = sum(volumes, jnp.zeros(())) + sum(found.draws.gains)
        numpyro.factor(f"_{self.amortized.prefix}_rows", factor)


def no_noise(block: RowBlock) -> jax.Array:
    """Zeros: the middle of the guide of the rows, whose density is not random."""
    return jnp.zeros(block.columns.shape)


def normal_noise(block: RowBlock) -> jax.Array:
    """Standard normal numbers for each particle."""
    return random.normal(own_key(), block.columns.shape)
