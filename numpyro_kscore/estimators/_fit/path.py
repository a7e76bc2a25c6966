"""The path of strengths an automatic selection tries, and which member of it is taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._fit.info import Selection
from numpyro_kscore.regularizers._filters import DEGREES, Filter, Regularizer, Tikhonov

# Largest number of samples the selection uses; each of its fits is to half of them.
SELECTION_POINTS = 2048
# Samples below which none can be held out.
FEWEST_POINTS = 4
# Members of the path beyond those of a family: wide kernels on many samples need little
# regularization.
WEAKER = 6
# Standard errors by which a bandwidth narrower than the reference has to be better.
NARROWER = 2.0


@pytree
class PathMember(Regularizer):
    """One filter of the path an automatic selection tries; the first is zero, the base alone.

    Attributes:
        family: the regularizer whose path it is.
        index: position on the path, an integer; 0 is the zero filter.
        bound: as for :meth:`Regularizer.path`.
        weaker: number of members beyond those of that path, each with half of λ, at most.
        least_steps: fewest steps of a Krylov space, where the family would take fewer.
    """

    family: Regularizer
    index: jax.Array
    bound: float | None = static(default=None)
    weaker: int = static(default=0)
    least_steps: int = static(default=0)

    @property
    def spectral_bound(self) -> Any:
        return self.family.spectral_bound

    def krylov_steps(self, bound: float | None) -> int:
        return max(self.least_steps, self.family.krylov_steps(bound))

    def evaluate(self, sigma: jax.Array) -> Filter:
        return jax.tree.map(lambda rows: rows[self.index], self._path(sigma))

    def rescaled_path(self, sigma: jax.Array, rho: jax.Array) -> Filter:
        """All members, the filters ``g(σ/ρ)/ρ``: (p, k), g0 (p,)."""
        g, g0, r = self._path(sigma / rho)
        return Filter(g / rho, g0 / rho, r / rho**2)

    def strengths(self, dtype: Any) -> jax.Array:
        """λ or the number of steps of all members, (p,)."""
        members = self.family.path(self.bound)
        if self._weaker_bound is not None:
            members += self.family.path(self._weaker_bound)[: self.weaker]
        nothing = jnp.inf if isinstance(self.family, Tikhonov) else 0.0
        values = (nothing, *(member.strength() for member in members))
        return jnp.stack([jnp.asarray(value, dtype) for value in values])

    @property
    def _weaker_bound(self) -> float | None:
        """A bound whose path goes on where that of ``bound`` ends; None without such members."""
        if not self.weaker or self.bound is None or not self.family.is_auto:
            return None
        return self.bound / 2 ** len(DEGREES)

    def _path(self, sigma: jax.Array) -> Filter:
        paths = [self.family.evaluate_path(sigma, self.bound)]
        paths = [jax.tree.map(lambda rows: jnp.concatenate([0.0 * rows[:1], rows]), paths[0])]
        if self._weaker_bound is not None:
            further = self.family.evaluate_path(sigma, self._weaker_bound)
            paths.append(jax.tree.map(lambda rows: rows[: self.weaker], further))
        return jax.tree.map(lambda *rows: jnp.concatenate(rows), *paths)


def path_for(family: Regularizer, dim: int, normalize: bool) -> PathMember:
    """The path of the strengths of a family that are tried, its member not chosen."""
    # The spectrum of a kernel divided by its trace is bounded by 1/d.
    bound, weaker = (1.0 / dim, WEAKER) if normalize else (None, 0)
    return PathMember(family, jnp.asarray(0), bound, weaker)


def pick(
    path: PathMember,
    loss: jax.Array,
    error: Callable[[jax.Array, jax.Array], jax.Array],
    bandwidths: jax.Array,
    growth: float = 1.0,
) -> tuple[Selection, PathMember]:
    """The bandwidth with the least loss, and the strongest member within one error of the least.

    The first bandwidth is the reference: a narrower one is taken only if its least loss is lower by
    two standard errors. A narrow kernel can follow the noise of the samples, a wide one cannot.
    Losses are those of fits to fewer samples than the estimate has: on a normalized path, whose
    neighbors differ by a factor of two in λ, a weaker member is then taken. The base alone, and a
    member whose weaker ones have no finite loss, stay.

    Args:
        path: the path; its strength is given if its family's is.
        loss: of b bandwidths by p members, in units of the first bandwidth, (b, p).
        error: standard error of differences from one entry in each row: members and rows (b,).
        bandwidths: (b,), in standardized units.
        growth: number of samples of the estimate over that of both halves together, at least 1.
    """
    loss = jnp.where(jnp.isfinite(loss), loss, jnp.inf)
    is_auto = path.family.is_auto
    # The base alone is a member of the path only where its strength is open.
    admissible = loss if is_auto else loss.at[:, 0].set(jnp.inf)
    least = jnp.argmin(admissible, axis=1)
    rows = jnp.arange(len(least))
    errors = _finite(error(least, rows))
    losses = admissible[rows, least]
    row = jnp.argmin(losses)
    if len(least) > 1:
        narrower = bandwidths < bandwidths[0]
        row = jnp.argmin(jnp.where(narrower, jnp.inf, losses))
        entry = jnp.full_like(rows, row)
        apart = _finite(error(least[entry], entry))[rows, least]
        better = losses < losses[row] - NARROWER * apart
        row = jnp.argmin(jnp.where(narrower & ~better, jnp.inf, losses))
    within = admissible[row] - losses[row] <= errors[row]
    within = within & jnp.isfinite(admissible[row])
    # Where nothing is finite, the strongest member.
    index = jnp.where(jnp.any(within), jnp.argmax(within), 0 if is_auto else 1)
    if is_auto and path.bound is not None:
        # λ halves from a half of the samples to all, and falls by the root of what is more
        # (benchmarks/results/2026-11-27-automatic-choice.md).
        further = 1 + round(0.5 * math.log2(growth))
        weaker = jnp.minimum(index + further, loss.shape[1] - 1)
        keeps = (index == 0) | ~jnp.isfinite(admissible[row, weaker])
        index = jnp.where(keeps, index, weaker)
    unit = lax.stop_gradient(bandwidths[0]) ** 2
    strengths = path.strengths(loss.dtype)
    number, no = jnp.asarray(math.nan, loss.dtype), jnp.asarray(False)
    selection = Selection(strengths, bandwidths, loss / unit, errors / unit, row, index, number, no)
    return selection, dataclasses.replace(path, index=index)


def _finite(errors: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(errors), errors, jnp.inf)


def pick_unseen(
    path: PathMember, bandwidths: jax.Array, dtype: Any
) -> tuple[Selection, PathMember]:
    """The first bandwidth and the strongest member that is not zero: nothing can be held out."""
    strengths = path.strengths(dtype)
    unknown = jnp.full((bandwidths.shape[0], strengths.shape[0]), jnp.nan, dtype)
    index = jnp.asarray(1)
    number, no = jnp.asarray(math.nan, dtype), jnp.asarray(False)
    selection = Selection(
        strengths, bandwidths, unknown, unknown, jnp.asarray(0), index, number, no
    )
    return selection, dataclasses.replace(path, index=index)


def without_discrete(
    selection: Selection, member: PathMember, discrete: jax.Array
) -> tuple[Selection, PathMember]:
    """A selection with the base alone where a coordinate of the samples is discrete.

    Held-out samples share its values with the fitted ones, and their losses have no minimum.
    """
    column = jnp.where(discrete & member.family.is_auto, 0, selection.column)
    selection = selection._replace(column=column, discrete=discrete)
    return selection, dataclasses.replace(member, index=column)
