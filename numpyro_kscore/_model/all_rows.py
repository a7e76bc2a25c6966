"""The control variate of all rows, at the mean of a guide's draws, and what it leaves of each.

A function that is given a draw needs the key of :func:`mean_draw`, which made it, and a program
whose model has no parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._model.control_variate import MOST_CURVED, ControlVariate, KeptRows, Taylor
from numpyro_kscore._model.coreset import row_log_likelihoods, row_remainders, row_table, tall_plate
from numpyro_kscore._model.draws import Draw
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.particle_model import ParticleModel, at_mean, expanded, is_affordable
from numpyro_kscore._model.particles import (
    are_finite,
    at_source,
    draw_particle,
    draw_sources,
    with_shared,
)
from numpyro_kscore._model.program import Program
from numpyro_kscore._model.subsampling import with_all_rows

# Number of draws at whose mean the density is expanded.
EXPANSION_DRAWS = 64
# Number of these draws at which the remainder of every row is measured.
ROW_DRAWS = 4


def expand(
    key: jax.Array, program: Program, layout: Layout, num_draws: int
) -> ControlVariate | None:
    """The density of all rows, expanded to second order at the mean of the guide's draws.

    The result is None if no plate is subsampled, if the model has parameters, with which the
    expansion changes (a reference keeps those that it is expanded with), or if a pass over all rows
    costs too much for ``num_draws`` draws.

    Cost: a pass over all rows, and another two for each dimension up to 128; beyond, the expansion
    is of first order. Where rows are drawn by what it leaves of them, 17 of the likelihood alone.
    """
    is_fixed = not layout.model_params or program.reference is not None
    if not is_fixed or not is_affordable(layout, num_draws):
        return None
    first, some = mean_draw(key, program, layout)
    model = _fixed_model(key, program, layout, first)
    control_variate = expanded(model, {}, first, layout.size <= MOST_CURVED)
    if control_variate is None or program.reference is not None:
        return control_variate
    tall = tall_plate(program.model, model.trace(first, {}), 0)
    if tall is None:
        return control_variate
    every = program._replace(model=with_all_rows(program.model))
    return control_variate._replace(
        rows=row_table(row_sizes(key, every, layout, first, some, tall.name))
    )


def row_sizes(
    key: jax.Array, program: Program, layout: Layout, draw: Draw, some: jax.Array, plate: str
) -> jax.Array:
    """The size of what the expansion at a draw leaves of every row of a plate, (rows,).

    It is measured at the points ``some``, (n, d), for a program with all rows.
    """
    model = _fixed_model(key, program, layout, draw)

    def rows_at(point: jax.Array) -> jax.Array:
        return row_log_likelihoods(model.trace(draw._replace(flat=point), {}), plate)

    some = jnp.where(are_finite(some)[:, None], some, draw.flat)
    return row_remainders(rows_at, draw.flat, some, layout.size <= MOST_CURVED)


def kept_plate(
    key: jax.Array, program: Program, layout: Layout, draw: Draw, kept: KeptRows
) -> str | None:
    """The name of the plate to which more rows can be added; None if the model cannot take them."""
    model = _fixed_model(key, program, layout, draw)
    tall = tall_plate(program.model, model.trace(draw, {}), 0)
    if tall is None or program.reference is not None:
        return None
    try:
        model.with_rows({}, draw, kept=kept).value_and_gradients({}, draw)
    except (TypeError, ValueError):
        # The model takes batches of one size alone.
        return None
    return tall.name


def mean_draw(key: jax.Array, program: Program, layout: Layout) -> tuple[Draw, jax.Array]:
    """A draw of the guide moved to the mean of several, for an expansion, and a few of them."""
    program = program._replace(params=lax.stop_gradient(program.params))
    program = with_shared(key, program, layout)
    sources = draw_sources(key, program, layout, (EXPANSION_DRAWS,))
    draws = jax.vmap(at_source(draw_particle, key, program, layout))(sources)
    return at_mean(draws), draws.flat[:ROW_DRAWS]


def expand_at(key: jax.Array, program: Program, layout: Layout, draw: Draw) -> Taylor:
    """The expansion at a draw of the density of the data that the program has."""
    model = _fixed_model(key, program, layout, draw)
    return model.expansion({}, draw, layout.size <= MOST_CURVED)


def _fixed_model(key: jax.Array, program: Program, layout: Layout, draw: Draw) -> ParticleModel:
    program = program._replace(params=lax.stop_gradient(program.params))
    return ParticleModel(with_shared(key, program, layout), layout, draw.model_key, False)
