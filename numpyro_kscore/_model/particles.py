"""Guide draws as one matrix of unconstrained particles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._model.coordinates import LatentCoordinates, announced_coordinates
from numpyro_kscore._model.dependencies import is_latent
from numpyro_kscore._model.draws import Draw
from numpyro_kscore._model.handlers import LocalDensities
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.program import (
    Program,
    inspect_program,
    local_log_density_of,
    local_scores_of,
    run_guide,
    trace_both,
    unconstrain,
    values_of,
)
from numpyro_kscore._model.site_density import site_log_density, site_log_prob
from numpyro_kscore._model.subsampling import subsampled_plates
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart

# Draws of a guide alone that are made at once.
DRAWS_AT_ONCE = 256


def with_shared(
    key: jax.Array,
    program: Program,
    layout: Layout,
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run,
) -> Program:
    """The program with what all particles share: rows of plates, and coordinates of latents.

    ``compiled`` compiles a function of arrays, outside of a program.
    """
    if not layout.shared_plates and not layout.transformed:
        return program

    def shared(key: jax.Array) -> tuple[dict[str, jax.Array], tuple[LatentCoordinates, ...]]:
        # The keys of particles are split from the same one. What is shared has no derivative.
        fixed = program._replace(params=lax.stop_gradient(program.params))
        trace = run_guide(key_apart(key, 0), fixed)
        rows = values_of(trace, "plate")
        plates = {name: rows[name] for name in layout.shared_plates}
        return plates, lax.stop_gradient(announced_coordinates(trace))

    plates, coordinates = compiled(shared)(key)
    return program._replace(plates=plates, coordinates=coordinates)


def open_for_weights(key: jax.Array, program: Program) -> tuple[Program, Layout]:
    """A program whose guide gives local log densities wherever it knows them, and its layout."""
    program = program._replace(guide=LocalDensities(program.guide, "weights"))
    layout = inspect_program(key, program).given_noise
    return with_shared(key, program, layout, quick_jit), layout


def draw_sources(key: jax.Array, program: Program, layout: Layout, shape: tuple[int, ...]) -> Any:
    """The noise that particles are drawn from, or else their keys, with leading axes ``shape``.

    Noise that depends on no parameter is drawn here, at once for all particles and all passes over
    them; a key for each particle and site would take as many random bits again.
    """
    if not layout.noise_sites:
        return jax.random.split(key, shape)
    trace = run_guide(key, program)
    # The first two keys are those of guide and model (trace_both).
    keys = jax.random.split(key, 2 + len(layout.noise_sites))[2:]
    return {
        name: trace[name]["fn"].sample(one_key, shape)
        for name, one_key in zip(layout.noise_sites, keys, strict=True)
    }


def at_source(
    draw: Callable[[jax.Array, Program, Layout], Any],
    key: jax.Array,
    program: Program,
    layout: Layout,
) -> Callable[[Any], Any]:
    """A function of a key, such as :func:`draw_particle`, as one of the source of a particle."""

    def from_source(source: Any) -> Any:
        if layout.noise_sites:
            return draw(key, program._replace(noise=source), layout)
        return draw(source, program, layout)

    return from_source


def draw_particle(key: jax.Array, program: Program, layout: Layout) -> Draw:
    """Run the guide once and express its latents in unconstrained coordinates."""
    with LocalDensities(asked="step" if layout.conditional_parts else ""):
        traces = trace_both(key, program)
    latents = {
        name: unconstrain(site, traces.guide[name])
        for name, site in traces.model.items()
        if is_latent(site)
    }
    flat = jnp.concatenate([jnp.ravel(u) for u in latents.values()])
    log_density = jnp.zeros((), flat.dtype)
    for name in sorted(layout.explicit_sites):
        of_site = site_log_density(name, latents[name], traces.guide, traces.model)
        log_density = log_density + of_site
    for part in layout.conditional_parts:
        of_part = local_log_density_of(traces.guide, part.sites)
        if of_part is not None:
            log_density = log_density + part.scale * of_part
    observed = (s for s in traces.guide.values() if s["type"] == "sample" and s["is_observed"])
    factors = sum((jnp.sum(site_log_prob(s)) for s in observed), jnp.zeros((), flat.dtype))
    # Rows that all particles share stay with the program. Copied for each particle, everything the
    # model computes from them would be computed as often, such as a prior's covariance.
    drawn = subsampled_plates(traces.guide)
    plates = {n: site["value"] for n, site in drawn.items() if n not in program.plates}
    return Draw(flat, log_density, factors, plates, traces.mutable, traces.model_key)


def draw_many(key: jax.Array, program: Program, layout: Layout, count: int) -> jax.Array:
    """Draws of a guide alone, (count, d), finite or not, by one compiled program."""

    @quick_jit
    def run(key: jax.Array) -> jax.Array:
        # Whole batches: a rest would be compiled as a program of its own.
        shape = (-(-count // DRAWS_AT_ONCE), DRAWS_AT_ONCE)
        sources = draw_sources(key, program, layout, shape)
        draw = at_source(draw_particle, key, program, layout)
        return lax.map(jax.vmap(lambda source: draw(source).flat), sources)

    return run(key).reshape(-1, layout.size)[:count]


def draw_finite(
    key: jax.Array, program: Program, layout: Layout, count: int
) -> tuple[np.ndarray, int]:
    """The finite ones of some draws, (n, d), and the number of the others, at most half."""
    draws = np.asarray(draw_many(key, program, layout, count))
    finite = np.isfinite(draws).all(axis=1)
    check_mostly_finite(finite)
    return draws[finite], int(count - finite.sum())


def check_mostly_finite(finite: Any) -> None:
    """Raise ``FloatingPointError`` if fewer than half of some draws are finite."""
    finite = np.asarray(finite)
    if 2 * finite.sum() < len(finite):
        raise FloatingPointError(
            f"guide: expected finite draws, densities and scores; got them at {finite.sum()} of "
            f"{len(finite)} draws. Look for parameters that are not finite, or a model whose "
            "density vanishes where the guide is"
        )


class LocalDraw(NamedTuple):
    """Local log densities of blocks, (b,), and their gradients, (d,), zero where none is given."""

    log_density: jax.Array
    scores: jax.Array


def draw_local(key: jax.Array, program: Program, layout: Layout) -> LocalDraw:
    """Local log densities of the blocks that have one, at the draw from the same source.

    They are apart from :func:`draw_particle`, since they cost more than the draw and fewer will do.
    """
    with LocalDensities():
        trace = run_guide(key, program)
    found = [local_log_density_of(trace, part.sites) for part in layout.local_parts]
    log_density = jnp.stack([value for value in found if value is not None])
    scores = jnp.zeros(layout.size, log_density.dtype)
    for part in layout.local_parts:
        given = local_scores_of(trace, part.sites)
        if given is not None:
            scores = scores.at[part.columns[0]].set(given)
    return LocalDraw(log_density, scores)


def are_finite(*arrays: jax.Array) -> jax.Array:
    """Whether all values of each particle are finite: arrays (n,) or (n, d) -> (n,)."""
    columns = [jnp.isfinite(array).reshape(array.shape[0], -1) for array in arrays]
    return jnp.all(jnp.concatenate(columns, axis=1), axis=1)
