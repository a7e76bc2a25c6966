"""Kernel density estimates from their definition: sums of normal densities, kernel by kernel."""

from dataclasses import dataclass

import numpy as np

from .coordinates import whitener


@dataclass(frozen=True)
class KernelDensity:
    """Sums of kernels with a covariance each, in the units of the samples.

    ``w`` takes points to whitened units: kernel j is the normal with mean ``centers[j]`` and
    precision ``wᵀ w / widths[j]²``, times ``1 + (d - |u|²)/2`` where of fourth order.
    """

    centers: np.ndarray
    widths: np.ndarray
    w: np.ndarray
    epsilon: float
    fourth_order: bool

    def terms(self, x, keep):
        """Values and gradients of the kernels at one point, of the plain and the taken kernel."""
        d = len(x)
        plain, plain_slopes, taken, slopes = [], [], [], []
        for center, width in zip(self.centers[keep], self.widths[keep], strict=True):
            u = self.w @ (x - center) / width
            volume = width**d / abs(np.linalg.det(self.w))
            value = np.exp(-0.5 * u @ u) / (2 * np.pi) ** (d / 2) / volume
            inner = -u @ self.w / width
            plain.append(value)
            plain_slopes.append(value * inner)
            polynomial = 1 + (d - u @ u) / 2
            taken.append(value * polynomial if self.fourth_order else value)
            # Of -|u|²/2 in the polynomial the gradient is the same as in the exponent.
            slopes.append(value * inner * (polynomial + 1 if self.fourth_order else 1))
        return tuple(np.mean(a, axis=0) for a in (plain, plain_slopes, taken, slopes))

    def at(self, x, keep=slice(None)):
        """The density and the score at one point."""
        plain, _, taken, slope = self.terms(x, keep)
        return taken, slope / max(taken, self.epsilon, 0.1 * plain)

    def values(self, points):
        pairs = [self.at(x) for x in points]
        return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])

    def left_out(self, samples):
        """Values and scores at each sample without its own kernel."""
        everyone = np.arange(len(samples))
        pairs = [self.at(x, everyone != i) for i, x in enumerate(samples)]
        return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])


def kernel_density(samples, correction, h, floor=1.0, pilot=None, w=None):
    """The estimate; ``h`` in whitened units, ``floor`` over n² in units of whitened density."""
    n = len(samples)
    w = whitener(samples, "full") if w is None else w
    # A density in the units of the samples is one of whitened samples times |det w|.
    epsilon = floor / n**2 * abs(np.linalg.det(w))
    plain = KernelDensity(samples, np.full(n, h), w, epsilon, False)
    if correction == "debiased":
        scores = plain.values(samples)[1] if pilot is None else pilot(samples)
        covariance = np.linalg.inv(w.T @ w)
        return KernelDensity(
            samples + 0.5 * h**2 * scores @ covariance, plain.widths, w, epsilon, False
        )
    if correction == "adaptive":
        density = plain.values(samples)[0]
        widths = h * np.sqrt(np.exp(np.mean(np.log(density))) / density)
        return KernelDensity(samples, widths, w, epsilon, False)
    return KernelDensity(samples, plain.widths, w, epsilon, correction == "laplace")
