"""Draws of a guide, with the model's density and score at them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore._util.checks import as_points, as_scored


class Draw(NamedTuple):
    """One draw from the guide.

    Attributes:
        flat: unconstrained coordinates of all latents, (d,); differentiable in the parameters.
        log_density: log density of the sites that have one, in these coordinates; differentiable.
        factors: log density of what the guide observes, its factors; differentiable. No part of the
            density of its draws, but of the objective, as in ``Trace_ELBO``.
        plates: rows of subsampled plates that the guide drew, which the model must share; without
            those that all particles share.
        mutable: values at mutable sites of guide and model.
        model_key: key the model is seeded with.
    """

    flat: Array
    log_density: Array
    factors: Array
    plates: dict[str, Array]
    mutable: dict[str, Any]
    model_key: Array

    @property
    def counted(self) -> Array:
        """The guide's log density as an objective counts it, without local ones."""
        return self.log_density + self.factors


class GuideDraws(NamedTuple):
    """Independent draws of a guide, in unconstrained coordinates, and the model at them.

    Attributes:
        samples: (n, d).
        log_density: the model's, with the log-Jacobian, up to a constant, (n,).
        scores: its gradient, (n, d).
        laplacian: its Laplacian in coordinates whitened by the samples, (n,), or None. Without it
            fewer estimates of the guide's density can be compared.
        log_q: the guide's log density, (n,), where it is known; otherwise None.
        num_lost: number of draws left out because something was not finite at them.
        folded: part of the draws that other noise of the guide is pushed to as well. What was found
            of it is in ``log_q``.

    Example::

        from numpyro_kscore.diagnostics import GuideDraws

        draws.samples  # (4000, 2)
        draws.num_lost  # 0
        GuideDraws(samples, -0.5 * jnp.sum(samples**2, axis=1), -samples)  # from arrays
    """

    samples: Array
    log_density: Array
    scores: Array
    laplacian: Array | None = None
    log_q: Array | None = None
    num_lost: int = 0
    folded: float = 0.0

    def checked(self, minimum: int = 100) -> GuideDraws:
        """These draws as arrays of one precision.

        Args:
            minimum: least number of draws.

        Raises:
            TypeError: for entries that are not floating point.
            ValueError: for shapes that do not fit, too few draws, or entries that are not finite.
        """
        x, scores = as_scored(self.samples, self.scores, minimum)
        n = x.shape[0]

        def column(name: str, values: Array | None) -> Any:
            if values is None:
                return None
            if jnp.shape(values) != (n,):
                raise ValueError(f"{name}: expected shape ({n},); got {jnp.shape(values)}")
            return as_points(name, jnp.reshape(jnp.asarray(values), (n, 1)))[:, 0]

        return GuideDraws(
            x,
            column("log_density", self.log_density),
            scores,
            column("laplacian", self.laplacian),
            column("log_q", self.log_q),
            self.num_lost,
            self.folded,
        )


class WeightedDraws(NamedTuple):
    """Draws of a guide with the log densities of guide and model there, all finite.

    Attributes:
        samples: (n, d), in the guide's coordinates or unconstrained ones.
        log_density: the model's, (n,), in the same coordinates.
        log_q: the guide's, (n,), in the same coordinates.
        num_lost: number of draws left out because something was not finite at them.
        folded: part of the draws that other noise is pushed to as well.
        seconds: time of one draw with its densities.
        log_shares: the guide's log density less that of what the draws are from, (n,), or zero for
            draws of the guide itself.
        is_own: whether a draw is one of the guide itself, (n,), or True.
    """

    samples: np.ndarray
    log_density: np.ndarray
    log_q: np.ndarray
    num_lost: int
    folded: float
    seconds: float = 0.0
    log_shares: Any = 0.0
    is_own: Any = True

    def first(self, count: int) -> WeightedDraws:
        """So many of the draws."""
        return self._replace(
            samples=self.samples[:count],
            log_density=self.log_density[:count],
            log_q=self.log_q[:count],
            log_shares=np.broadcast_to(self.log_shares, self.log_q.shape)[:count],
            is_own=np.broadcast_to(self.is_own, self.log_q.shape)[:count],
        )

    @property
    def log_ratios(self) -> np.ndarray:
        """The model's log density less the guide's, (n,), in double precision."""
        return np.asarray(self.log_density, np.float64) - np.asarray(self.log_q, np.float64)

    @property
    def log_weights(self) -> np.ndarray:
        """The logarithms of the weights, (n,), in double precision."""
        return np.asarray(self.log_ratios + self.log_shares)

    @property
    def shares(self) -> np.ndarray:
        """Weights by which averages of the draws are those of the guide, (n,), of sum 1."""
        shares = np.exp(np.broadcast_to(self.log_shares, self.log_q.shape).astype(np.float64))
        return np.asarray(shares / shares.sum())

    @property
    def rounding(self) -> float:
        """Error of the log weights that all draws may share: a sum of many terms is rounded."""
        sizes = np.abs(self.log_density) + np.abs(self.log_q)
        weights = np.exp(self.log_weights - np.max(self.log_weights))
        # Draws far out, where densities may be millions of nats down, have no weight.
        return float(np.finfo(self.samples.dtype).eps * np.average(sizes, weights=weights))
