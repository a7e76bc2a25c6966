"""The guide of the latents in the rows of plates, and its draws as sites."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_kscore._guides.networks import perceptron
from numpyro_kscore._guides.row_blocks import RowBlock, RowTarget, plate_of, start_of
from numpyro_kscore._guides.row_latents import (
    RowDraws,
    RowMap,
    draw_rows,
    num_features,
    residual_map,
    row_couplings,
)
from numpyro_kscore._model.dependencies import is_latent
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.implicit import Implicit
from numpyro_kscore._model.layout import value_at_zero
from numpyro_kscore._model.subsampling import spread_rows, with_rows
from numpyro_kscore._model.target import Target
from numpyro_kscore._util.checks import is_traced
from numpyro_kscore._util.compiling import quick_jit

# Widths of the network of rows: the residual of a posterior in a few dimensions is simple.
WIDTHS = (32, 32)
# Share of other rows in a product with a Hessian, above which rows are dependent.
MOST_COUPLED = 1e-3


class Plate(NamedTuple):
    """A plate of a model; ``drawn`` is None for all rows, ``dim`` where no site is in it."""

    size: int
    drawn: int | None
    dim: int | None

    @property
    def is_subsampled(self) -> bool:
        """Whether only some rows are drawn."""
        return self.drawn not in (None, self.size)


class Outline(NamedTuple):
    """The part of a model outside of the rows: global latents and parameters, and all plates."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: dict[str, Any]
    plates: dict[str, Plate]

    def conditional(self, rows: dict[str, jax.Array], *, is_fixed: bool = False) -> RowTarget:
        """The model of the rows, given these values and rows of the plates it subsamples."""
        values = lax.stop_gradient(self.values) if is_fixed else self.values
        return RowTarget(Target(with_rows(self.model, rows), self.args, self.kwargs, data=values))

    @property
    def subsampled(self) -> dict[str, Plate]:
        """The plates that draw some of their rows."""
        return {name: plate for name, plate in self.plates.items() if plate.is_subsampled}


class RowTrace(NamedTuple):
    """A draw of the latents of all rows, and the trace of the model there."""

    blocks: tuple[RowBlock, ...]
    draws: RowDraws
    trace: dict[str, Any]


class Amortized(NamedTuple):
    """The guide of the rows of a model, in the plates of some names."""

    model: Callable[..., Any]
    plates: tuple[str, ...]
    prefix: str

    def outline(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any] | None = None
    ) -> Outline:
        """Run the model for its global latents and parameters, which handlers outside see.

        If values of the global latents are given, handlers see only parameters.
        """
        names: set[str] = set()

        def is_hidden(site: dict[str, Any]) -> bool:
            if site["type"] in ("param", "mutable"):
                return False
            if given is None and is_latent(site) and plate_of(site, self.plates) is None:
                names.add(site["name"])
                return False
            return site.get("name", "") not in {f"_{name}_log_det" for name in names}

        model = _Placeholders(self.model, self.plates)
        if given is not None:
            model = handlers.substitute(model, data=given)
        with handlers.block(hide_fn=is_hidden):
            trace = handlers.trace(model).get_trace(*args, **kwargs)
        kept = {*names, *(given or {})}
        values = {
            name: site["value"]
            for name, site in trace.items()
            if name in kept or site["type"] in ("param", "mutable")
        }
        stacks = [site["cond_indep_stack"] for site in trace.values() if site["type"] == "sample"]
        dims = {frame.name: frame.dim for stack in stacks for frame in stack}
        plates = {
            name: Plate(site["args"][0], site["args"][1], dims.get(name))
            for name, site in trace.items()
            if site["type"] == "plate"
        }
        return Outline(self.model, args, kwargs, values, plates)

    def outer(self, *args: Any, **kwargs: Any) -> None:
        """The model without what is in the rows."""
        self.outline(args, kwargs)

    def check(self, trace: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``ValueError`` where rows depend on each other, by their densities' Hessian.

        It also raises where a minibatch has some rows, and densities outside of their plate use
        them: they would look up the wrong rows, and are not scaled. The trace is that of the global
        latents; where it is not concrete nothing is checked.
        """
        values = {name: site["value"] for name, site in trace.items() if is_latent(site)}
        if is_traced((args, kwargs, values)):
            return
        names: list[str] = []

        def couplings(values: dict[str, Any]) -> list[jax.Array]:
            with Hidden():
                outline = self.outline(args, kwargs, values)
            rows = {name: jnp.arange(plate.drawn) for name, plate in outline.subsampled.items()}
            conditional = outline.conditional(rows)
            blocks = conditional.blocks(self.plates)
            names[:] = [block.plate for block in blocks]
            _check_places(conditional, blocks)
            return row_couplings(conditional, blocks)

        found = quick_jit(couplings)(values)
        for plate, coupling in zip(names, found, strict=True):
            if coupling > MOST_COUPLED:
                raise ValueError(
                    f"amortize: expected rows of '{plate}' that are independent given the latents "
                    "outside; got a density in which they depend on each other. Leave the plate "
                    "out: its latents are then global"
                )

    def trace_rows(
        self,
        outline: Outline,
        rows: dict[str, jax.Array],
        noise: Callable[[RowBlock], jax.Array] | None,
        *,
        integrate: bool = False,
    ) -> RowTrace:
        """Draw latents of given rows from standard normal noise (E, k); None takes their modes."""
        conditional, fixed = outline.conditional(rows), outline.conditional(rows, is_fixed=True)
        blocks = fixed.blocks(self.plates)
        start = start_of(blocks)
        if noise is None:
            maps, drawn = None, [jnp.zeros(block.columns.shape) for block in blocks]
        else:
            maps, drawn = [self._map(block) for block in blocks], [noise(b) for b in blocks]
        draws = draw_rows(conditional, blocks, fixed, start, maps, drawn, integrate=integrate)
        return RowTrace(blocks, draws, conditional.at(draws.coordinates)[1])

    def _map(self, block: RowBlock) -> RowMap:
        """The network of the rows of a block, as a parameter."""
        dim = block.columns.shape[1]
        name = f"{self.prefix}_{block.plate}_layers"
        return residual_map(perceptron(name, dim + num_features(dim), WIDTHS, 2 * dim))


def _check_places(conditional: RowTarget, blocks: Sequence[RowBlock]) -> None:
    """Raise for sites that use the latents of some of the rows outside of their plate."""
    start = start_of(blocks)
    for block in blocks:
        if block.scale <= 1:
            continue
        outside = conditional.row_sites(block, block.others(start)).outside
        if outside:
            raise ValueError(
                f"amortize: expected sites that use the latents of subsampled '{block.plate}' to "
                f"be inside that plate; got {list(outside)} outside. Give each row its data as an "
                "array over rows, inside the plate, or take all rows in a step"
            )


def draw_plates(plates: dict[str, Plate]) -> dict[str, numpyro.plate]:
    """Plates by name, which draw rows that are spread over all unless a handler says which."""
    with _Spread():
        return {
            name: numpyro.plate(name, plate.size, plate.drawn, dim=plate.dim)
            for name, plate in plates.items()
        }


class _Spread(Messenger):
    """A handler that lets plates draw rows at a cost that does not depend on their size."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            msg["fn"] = lambda size, drawn, rng_key=None: spread_rows(rng_key, size, drawn)


class _Placeholders(Messenger):
    """A handler that gives latents in rows arbitrary values, and plates their first rows."""

    def __init__(self, fn: Callable[..., Any], plates: Sequence[str]) -> None:
        self.plates = plates
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["value"] is not None:
            return
        if msg["type"] == "plate":
            msg["value"] = jnp.arange(msg["args"][1])
        elif msg["type"] == "sample" and plate_of(msg, self.plates):
            msg["value"] = value_at_zero(msg)


def sample_rows(amortized: Amortized, outline: Outline) -> dict[str, jax.Array]:
    """Draw the latents in rows as sites of a guide, given the global latents of an outline."""
    inside = {name: plate for name, plate in outline.plates.items() if plate.dim is not None}
    plates = draw_plates(inside)
    rows = {name: plates[name]._indices for name in outline.subsampled}

    def noise(block: RowBlock) -> jax.Array:
        unit = dist.Normal().expand((*block.batch_shape, block.columns.shape[1])).to_event(1)
        with _inside(plates, block.plates):
            name = f"_{amortized.prefix}_{block.plate}_noise"
            drawn = numpyro.sample(name, unit, infer={"is_auxiliary": True})
        return drawn.reshape(block.columns.shape)

    found = amortized.trace_rows(outline, rows, noise)
    out = {}
    for block, log_density in zip(found.blocks, found.draws.log_density, strict=True):
        density: jax.Array | None = log_density / block.scale
        for site in block.sites:
            of_model = found.trace[site.name]
            fn = Implicit(
                of_model["value"],
                of_model["fn"].event_dim,
                unconstrained=found.draws.coordinates[site.name],
                local_log_density=density,
            )
            density = None  # one site has that of the block
            with _inside(plates, (frame.name for frame in site.frames)):
                out[site.name] = numpyro.sample(site.name, fn)
    return out


@contextlib.contextmanager
def _inside(plates: dict[str, numpyro.plate], names: Iterable[str]) -> Any:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(plates[name])
        yield
