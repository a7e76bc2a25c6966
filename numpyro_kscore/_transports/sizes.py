"""Latents whose size varies with that of others.

Where a latent θ narrows as another one ω grows, as the standardized effects of a non-centered model
do under informative data, or widens with it, the posterior is a funnel. In the coordinate v of

    θ = v √(1 - r + r exp(2 t))⁻¹,  t = Σ_j rate_j (ω_j - center_j) / r

it is less of one. The logarithm of the size falls at ``rate_j`` where ω is at its center, and the
largest of the rates is r. On one side it becomes constant: where ω is the logarithm of the effects'
scale and data and prior are normal, this is the posterior width of an effect given ω, with r the
share of the data in its precision. For negative rates the effects are centered ones. Rates are
found from the model's scores (``_starts.fit_sizes``), not read off its code: it does not matter how
the model is written.
"""

from __future__ import annotations

from typing import Any

from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree

# Bounds on r: at 1 there would be nothing but the exponential.
SMALLEST_SHARE, LARGEST_SHARE = 1e-3, 0.98


@pytree
class Sizes:
    """Coordinates to latents whose sizes vary with other latents.

    Attributes:
        rates: the rate of coordinate i with coordinate j is ``rates[i, j]``, (d, d). Coordinates
            that others vary with have no rates themselves.
        center: shape (d,).
        causes: the :class:`~numpyro_kscore._transports.stretch.Marginals` that others' values are
            of their coordinates; None if they are equal. Rates are with the values. What varies
            itself has no such function.
    """

    rates: Any
    center: Any
    causes: Any = None

    def push(self, x: Any) -> Any:
        return x * namespace(x).exp(self.log_sizes(x))

    def log_volume(self, x: Any) -> Any:
        return namespace(x).sum(self.log_sizes(x), axis=-1)

    def pull(self, x: Any, gradients: Any) -> Any:
        sizes = namespace(x).exp(self.log_sizes(x))
        # Latents with rates vary with the others' coordinates, and so does their volume.
        through = (gradients * x * sizes - 1) * self.slopes(x)
        return gradients * sizes - through @ self.rates * self._steepness(x)

    def push_score(self, x: Any, score: Any) -> Any:
        xp = namespace(x, score)
        # Coordinates with rates change no others, so that their own gradients come first.
        through = (-score * x - 1) * self.slopes(x)
        moved = through @ self.rates * self._steepness(x)
        return (score - moved) * xp.exp(-self.log_sizes(x))

    @property
    def vary(self) -> Any:
        """Which latents are not their coordinates, (d,)."""
        return namespace(self.rates).any(self.rates != 0, axis=1)

    def log_sizes(self, x: Any) -> Any:
        """Logarithms of what coordinates (..., d) are multiplied by, (..., d)."""
        xp, share = namespace(x), self.shares
        # log(1 - r + r exp(x)), without overflow.
        return -0.5 * xp.logaddexp(xp.log1p(-share), xp.log(share) + self._moves(x))

    @property
    def shares(self) -> Any:
        """The largest rates of every latent, between their bounds, (d,)."""
        xp = namespace(self.rates)
        return xp.clip(xp.max(xp.abs(self.rates), axis=1), SMALLEST_SHARE, LARGEST_SHARE)

    def slopes(self, x: Any) -> Any:
        """The rates at coordinates (..., d) relative to those at the center, (..., d)."""
        xp, share = namespace(x), self.shares
        rest = xp.log1p(-share) - xp.log(share) - self._moves(x)
        return 1 / (share * (1 + xp.exp(xp.minimum(rest, 80.0))))

    def _moves(self, x: Any) -> Any:
        values = x if self.causes is None else self.causes.push(x)
        return 2 * (values - self.center) @ self.rates.T / self.shares

    def _steepness(self, x: Any) -> Any:
        return 1.0 if self.causes is None else self.causes.steepness(x)
