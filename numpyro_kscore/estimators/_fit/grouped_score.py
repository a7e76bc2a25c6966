"""The fitted score of separate groups: that of a mixture of one density for each.

The density of group k is a component of the base times the exponential of a potential f_k, that of
the residual in the group's own coordinates: ``p(x) = Σ_k w_k b_k(x) exp(f_k(x)) / Z_k``. Score and
divergence are those of the mixture; far from boundaries they are those of one group.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._base.mixture import (
    GroupLayout,
    MixtureBase,
    mixed_divergence,
    mixed_score,
)
from numpyro_kscore.estimators._base.standardization import Coordinates
from numpyro_kscore.estimators._fit.score import Score, at_points

# Draws of each component of the base, from which its constant is found.
DRAWS = 2048


@pytree
class GroupedScore(Score):
    """An estimate of ``∇ log q`` with a residual of its own for each group of samples.

    Attributes:
        layout: the maps of the groups to the kernel's coordinates, and the samples' groups.
        log_constants: the log Z_k, (K,).
    """

    layout: GroupLayout
    log_constants: jax.Array

    @at_points
    def __call__(self, x: Any) -> jax.Array:
        return mixed_score(self._shares(x), self._scores(x))

    @at_points
    def residual(self, x: Any) -> jax.Array:
        return self(x) - self.base.score(x)

    @at_points
    def log_density(self, x: Any) -> jax.Array:
        return jax.nn.logsumexp(self._joint(x), axis=1)

    @at_points
    def residual_potential(self, x: Any) -> jax.Array:
        return self.log_density(x) - self.base.log_density(x)

    @at_points
    def divergence(self, x: Any) -> jax.Array:
        each = self._mixture.each("divergence", x) + self._residuals("divergence", x)
        return mixed_divergence(self._shares(x), self._scores(x), each)

    @at_points
    def residual_divergence(self, x: Any) -> jax.Array:
        return self.divergence(x) - self.base.divergence(x)

    @property
    def _frame(self) -> GroupLayout:
        # After a fit with a subset the estimate at a sample is that of its own group.
        return self.layout

    @property
    def _mixture(self) -> MixtureBase:
        base: Any = self.base
        return base

    def _joint(self, x: jax.Array) -> jax.Array:
        """Log density of points and groups, (m, K)."""
        potentials = self._residuals("potential", x).T
        return self._mixture.joint(x) + potentials - self.log_constants

    def _shares(self, x: jax.Array) -> jax.Array:
        """Probabilities of the groups given points: those of the base without a potential."""
        if not self.kernel.has_potential:
            return self._mixture.shares(x)
        # A single group needs no potential.
        return lax.cond(
            self._mixture.number > 1,
            lambda x: jax.nn.softmax(self._joint(x), axis=1),
            self._mixture.shares,
            x,
        )

    def _scores(self, x: jax.Array) -> jax.Array:
        """The score of each group, (K, m, d)."""
        return self._mixture.each("score", x) + self._residuals("field", x)

    def _residuals(self, what: str, x: jax.Array) -> jax.Array:
        """Fields, potentials or divergences of the residual of each group, (K, ...)."""

        def evaluate(coordinates: Coordinates) -> jax.Array:
            z = coordinates.to_kernel(x)
            if what == "field":
                return coordinates.scores_from_kernel(self._evaluate(what, z))
            more = (coordinates.factor(),) if what == "divergence" else ()
            return self._evaluate(what, z, *more)

        shape = x.shape if what == "field" else x.shape[:1]

        def one(each: tuple[Coordinates, jax.Array]) -> jax.Array:
            return lax.cond(each[1], evaluate, lambda _: jnp.zeros(shape, x.dtype), each[0])

        return lax.map(one, (self.layout.each, self._mixture.used))


def grouped(score: Score, layout: GroupLayout, samples: jax.Array) -> GroupedScore:
    """A score fitted to samples, (n, d), in the layout of groups, with their constants.

    Score matching does not see the constants, which give every group its share of the mass. They
    are found by fixed draws of the components of the base.

    Cost: O(n d) for each of 2048 draws a group, and for each sample and group; nothing for one.
    """
    parts = {f.name: getattr(score, f.name) for f in dataclasses.fields(Score)}
    mixture: Any = score.base
    start = jnp.zeros_like(layout.each.bandwidth)
    fitted = GroupedScore(**parts, layout=layout, log_constants=start)
    if score.kernel.has_potential:
        fitted = dataclasses.replace(fitted, log_constants=_log_constants(fitted))
    if score.stored is None:
        return fitted
    stored = lax.cond(mixture.number > 1, lambda x: fitted(x), lambda _: score.stored, samples)
    return dataclasses.replace(fitted, stored=stored)


def _log_constants(score: GroupedScore) -> jax.Array:
    """Logarithms of ``∫ b_k exp(f_k)``, (K,); 0 where there is one group."""
    base: Any = score.base

    def evaluate(each: Any) -> jax.Array:
        component, coordinates = each
        # The same draws in the coordinates of every group: for groups of one shape, whatever it
        # is, errors are the same too, and shares have none.
        key = random.key(0)
        potential = score._evaluate("potential", coordinates.to_kernel(component.draw(key, DRAWS)))
        return jax.nn.logsumexp(potential) - math.log(DRAWS)

    def one(each: Any) -> jax.Array:
        return lax.cond(each[1], evaluate, lambda _: score.log_constants[0], each[0])

    several = base.used & (base.number > 1)
    return lax.map(one, ((base.components, score.layout.each), several))
