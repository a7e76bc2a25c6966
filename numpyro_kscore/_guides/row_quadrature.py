"""The densities of rows with their latents integrated out, by quadrature.

Gauss and Hermite's rule at the mode of a row, in the coordinates in which the Gaussian there is a
standard one (Naylor and Smith 1982; Liu and Pierce 1994). It takes the density of each row at the
nodes, where the rest of the guide of rows needs only derivatives of the sum over rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from numpyro.distributions.util import scale_and_mask

from numpyro_kscore._guides.newton import RowGaussians
from numpyro_kscore._guides.row_blocks import RowBlock
from numpyro_kscore._tracing.dependencies import sources_of

__all__ = ["RowSites", "find_row_sites", "integrate_rows", "is_integrable", "sum_by_row"]

# Nodes along an axis, by the number of latents of a row. In more dimensions a rule takes too many.
# With two factors behind eight binary items and 100 000 rows, whose posterior is narrow, the fine
# rule moves no global latent by more than .007 of its standard deviations, the coarse one by .4,
# and Laplace's approximation, one node, by 155.
FINE = {1: 15, 2: 7, 3: 5}
COARSE = {1: 5, 2: 4, 3: 3}

# From unconstrained values of the latents in rows to the trace of a model.
TraceAt = Callable[[dict[str, jax.Array]], dict[str, Any]]


class RowSites(NamedTuple):
    """The sites whose densities are computed from the latents in rows, by name.

    Attributes:
        inside: those in the plates of the rows, whose densities tell rows apart.
        outside: others, such as observations in a long table.
    """

    inside: tuple[str, ...]
    outside: tuple[str, ...]


def find_row_sites(trace_at: TraceAt, block: RowBlock) -> RowSites:
    """The sites that depend on rows.

    Args:
        trace_at: from the latents of the block to the trace of the model there.
        block: the rows.
    """
    in_plates: set[str] = set()

    def densities(latents: dict[str, jax.Array]) -> dict[str, jax.Array]:
        found = {}
        for name, site in trace_at(latents).items():
            if site["type"] == "sample":
                plates = {frame.name for frame in site["cond_indep_stack"]}
                if plates.issuperset(block.plates):
                    in_plates.add(name)
                found[name] = _log_prob(site)
        return found

    shapes = jax.eval_shape(block.unravel, jnp.zeros(block.columns.shape))
    names = [name for name, found in sources_of(densities, shapes).items() if found]
    inside = tuple(name for name in names if name in in_plates)
    return RowSites(inside, tuple(name for name in names if name not in in_plates))


def sum_by_row(trace: dict[str, Any], block: RowBlock, names: tuple[str, ...]) -> jax.Array:
    """The log density of each row, (E,), up to a constant, from a trace; not scaled.

    Args:
        trace: of the model.
        block: the rows.
        names: of the sites that depend on rows, all in their plates.
    """
    found = (block.by_row(_log_prob(trace[name])) for name in names)
    return sum(found, jnp.zeros(block.columns.shape[0])) / block.scale


def _log_prob(site: dict[str, Any]) -> jax.Array:
    return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"])


def is_integrable(block: RowBlock) -> bool:
    """Whether the rows of a block have so few latents that quadrature is affordable."""
    return block.columns.shape[1] in FINE


class _Rule(NamedTuple):
    """Nodes (m, k), and logarithms of weights over the standard normal density there (m,)."""

    nodes: np.ndarray
    log_weights: np.ndarray


def _rule(dim: int, count: int) -> _Rule:
    """The rule for integrals over R^dim, with ``count`` nodes along an axis."""
    x, w = np.polynomial.hermite_e.hermegauss(count)
    nodes = np.array(list(itertools.product(x, repeat=dim)))
    log_weights = np.array(list(itertools.product(np.log(w), repeat=dim))).sum(1)
    return _Rule(nodes, log_weights + 0.5 * (nodes**2).sum(1))


def integrate_rows(
    log_density: Callable[[jax.Array], jax.Array], gaussians: RowGaussians, *, coarse: bool
) -> jax.Array:
    """Logarithms of the integrals of the densities of rows, (E,).

    Their derivative is that at fixed nodes, the mean of the rows' scores under the posteriors of
    their latents. Cost: an evaluation of the density at each node, of which there are 15, 49 and
    125 with one, two and three latents in a row, and 5, 16 and 27 if coarse.

    Args:
        log_density: of rows, (E, k) to (E,).
        gaussians: near the modes; they are not differentiated.
        coarse: whether to take fewer nodes.
    """
    gaussians = jax.tree.map(jax.lax.stop_gradient, gaussians)
    dim = gaussians.mean.shape[1]
    rule = _rule(dim, (COARSE if coarse else FINE)[dim])
    dtype = gaussians.mean.dtype

    def at(node: jax.Array) -> jax.Array:
        return log_density(gaussians.push(jnp.broadcast_to(node, gaussians.mean.shape)))

    terms = jax.vmap(at)(jnp.asarray(rule.nodes, dtype))
    log_weights = jnp.asarray(rule.log_weights, dtype)[:, None]
    return logsumexp(terms + log_weights, axis=0) + gaussians.log_volume
