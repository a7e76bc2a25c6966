"""The report of a fit, as data."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The error of the estimate is up to ten times the residual (measured, ν-method), so this stands
# for about 1 %, well below the statistical error at any affordable n.
RESIDUAL_TOLERANCE = 1e-3

PATHS = ("matrix", "tiles", "kernel")


class Selection(NamedTuple):
    """An automatic selection: the losses of b bandwidths by p strengths, and the pair taken.

    Attributes:
        strengths: λ or the number of steps, (p,), strongest first; the first stands for the base
            score alone (λ = ∞, no steps).
        bandwidths: in standardized units, (b,).
        loss: held-out score-matching loss less that of the base, in standardized units, (b, p);
            infinite where it is not finite, NaN for fewer than 4 samples, too few to hold any out.
        standard_error: of the loss's difference from the least at that bandwidth, (b, p).
        row: index of the selected bandwidth.
        column: index of the selected strength.
        distinct: effective number of distinct samples among those (at most 2048) that were used:
            ``n²/Σ m²`` where one occurs m times, equal or nearly. Copies stay in one half. NaN if
            unknown, as for a stream, whose batches should have none.
        discrete: whether a coordinate takes few values. Along it there is no score, and the base
            alone was taken, or the strongest member if the strength was given.

    Example::

        score = ScoreEstimator().fit(samples)
        score.info.selection.strength  # a number of steps
        score.info.selection.bandwidths  # (4,)
    """

    strengths: jax.Array
    bandwidths: jax.Array
    loss: jax.Array
    standard_error: jax.Array
    row: jax.Array
    column: jax.Array
    distinct: jax.Array
    discrete: jax.Array

    @property
    def strength(self) -> jax.Array:
        """The selected λ or number of steps."""
        return _entry(self.strengths, self.column)

    @property
    def bandwidth(self) -> jax.Array:
        """The selected bandwidth, in standardized units."""
        return _entry(self.bandwidths, self.row)


def _entry(values: jax.Array, index: jax.Array) -> jax.Array:
    """``values[index]``, also where ``vmap`` has put axes in front of both."""
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]


class ScoreInfo(NamedTuple):
    """The report of a fit, as data: nothing raises under ``jit``.

    Attributes:
        steps: steps of the solver, each a product with the Gram operator. The few more that a fit
            takes are not counted, nor those by which ``Recursion`` finds the largest eigenvalue.
        residual: relative residual of the solver; 0 where it is direct.
        bandwidth: in standardized units.
        spectral_scale: ρ ≥ 1; above 1 the spectrum of K/n did not suit the regularizer and was
            divided by ρ (never with ``normalize=True``).
        finite: whether all values at the samples are finite.
        path: how sums over pairs of samples were computed: by matrices of
            all weights (0), tile by tile (1), or by one kernel on a GPU (2). It is that of the
            solver's products; with a subset, of the pass over all samples.
        selection: of strength and bandwidth where one was automatic, otherwise None.

    Example::

        score = ScoreEstimator().fit(samples)
        score.info.raise_if_failed()
        score.info.residual < 1e-3  # True
        score.info.path_name  # "matrix"
    """

    steps: jax.Array
    residual: jax.Array
    bandwidth: jax.Array
    spectral_scale: jax.Array
    finite: jax.Array
    path: jax.Array
    selection: Selection | None = None

    @property
    def path_name(self) -> str:
        """:attr:`path` of one fit in a word: matrix, tiles or kernel. Call it outside ``jit``."""
        return PATHS[int(self.path)]

    @property
    def converged(self) -> jax.Array:
        """Whether values are finite, the residual is below 1e-3, and no coordinate is discrete."""
        solved = self.finite & (self.residual < RESIDUAL_TOLERANCE)
        return solved if self.selection is None else solved & ~self.selection.discrete

    def raise_if_failed(self) -> None:
        """Raise ``FloatingPointError`` if the fit failed. Call it outside ``jit``."""
        if not bool(self.finite):
            raise FloatingPointError(
                "score fit: expected finite values; got NaN or infinity. Look for samples or "
                "base scores that are not finite, or so large that squares overflow"
            )
        if self.selection is not None and bool(self.selection.discrete):
            raise FloatingPointError(
                "score fit: expected samples of a density; got a coordinate that takes few values, "
                "along which there is no score. Leave it out, or fit to the samples of each value"
            )
        if not bool(self.converged):
            raise FloatingPointError(
                f"score fit: expected a residual below {RESIDUAL_TOLERANCE:g}; got "
                f"{float(self.residual):.2g} after {int(self.steps)} steps. Give the solver more "
                "steps, regularize more, or use Dense() for a small problem"
            )
