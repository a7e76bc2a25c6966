"""The density of a guide that is a mixture over noise: a semi-implicit one.

Its density is known given the noise, and the marginal one is an integral over all noise. Weights
need no marginal one. Draws whose noise is any of M given values are draws of the mixture over these
values, whose density is a mean of M terms: multiple importance sampling with the balance heuristic
(Veach and Guibas 1995). Weights by it have the evidence as their mean, whatever M is.

Rows of plates that are independent of each other have a mixture each. In any order of the noise of
a row its draws are as likely, so that draws of all rows are those of the product of the mixtures.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import logsumexp
from numpyro.distributions.util import scale_and_mask

from numpyro_kscore._model.layout import Layout, Part
from numpyro_kscore._model.program import Program, run_guide
from numpyro_kscore._model.site_density import sum_by_row

# Values of the noise that are mixed, and those that are taken at once.
NUM_NOISES, AT_ONCE = 1_000, 20


def log_mixture_ratios(key: Array, program: Program, layout: Layout, sources: Array) -> Array:
    """Log densities of the mixture over noise, less those given a draw's own noise, (n,).

    Args:
        key: for more noise than that of the draws.
        program: a program that was opened for weights.
        layout: its layout.
        sources: the keys of the draws, (n,).

    Cost: 1000 values of the density given noise for a draw.
    """
    names = [site.name for site in layout.sites]
    names += [name for part in layout.mixtures for name in part.mixed if name not in names]

    def drawn(source: Array) -> dict[str, Array]:
        trace = run_guide(source, program)
        return {name: trace[name]["value"] for name in names}

    def log_density(source: Array, values: dict[str, Array]) -> Array:
        """The log density of a draw's rows, given the noise of any source."""
        trace = run_guide(source, program._replace(noise=values))
        return jnp.concatenate([_by_row(trace, part) for part in layout.mixtures])

    def add(total: Array, some: Array) -> tuple[Array, None]:
        found = jax.vmap(lambda source: jax.vmap(log_density, (None, 0))(source, values))(some)
        return jnp.logaddexp(total, logsumexp(found, axis=0)), None

    values = jax.vmap(drawn)(sources)
    own = jax.vmap(log_density)(sources, values)
    num_groups = max(-(-NUM_NOISES // AT_ONCE), -(-len(sources) // AT_ONCE))
    rest = jax.random.split(key, num_groups * AT_ONCE - len(sources))
    noises = jnp.concatenate([sources, rest]).reshape(num_groups, AT_ONCE)
    total, _ = lax.scan(add, jnp.full_like(own, -jnp.inf), noises)
    return jnp.sum(total - jnp.log(noises.size) - own, axis=1)


def _by_row(trace: dict[str, Any], part: Part) -> Array:
    """The log density of a part's mixed sites at their values, (rows,)."""
    total: Any = 0.0
    for name in part.mixed:
        site = trace[name]
        fn, value = site["fn"], site["value"]
        log_prob = fn.log_prob(value)
        # Bounds that move with the noise: outside of them NumPyro's densities need not vanish.
        if jax.tree.leaves(fn.support):
            log_prob = jnp.where(fn.support(value), log_prob, -jnp.inf)
        dims = [frame.dim for frame in site["cond_indep_stack"] if frame.name in part.plates]
        total = total + sum_by_row(scale_and_mask(log_prob, site["scale"]), sorted(dims))
    return total
