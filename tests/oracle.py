"""Dense float64 reference for the kernel score estimators, written from their definition.

Everything follows from one positive-definite matrix-valued kernel: curl-free,
``K(x, y) = -grad_x grad_x^T phi(|x - y|^2 / h^2)``, or diagonal,
``K(x, y) = phi(|x - y|^2 / h^2) I``. With ``L f = (1/n) sum_j K(., x_j) f(x_j)``,
``zeta(x) = (1/n) sum_j div_{x_j} K(x_j, x)^T`` and a base score ``s0`` the estimator is

    s = s0 - g(L) zeta',    zeta' = zeta + L s0.

On the samples ``L`` is the matrix ``K / n``. Elsewhere the exact functional calculus uses
``g(L) = g(0) + r(L) L`` with ``r(t) = (g(t) - g(0)) / t``, and ``L r(L) f = S* r(K/n) S f`` for the
sampling operator ``S`` and its adjoint ``S* c = (1/n) sum_j K(., x_j) c_j``.

Kernels are held twice: by explicit derivatives of phi (NumPy) and by automatic differentiation
(the ``*_autodiff`` functions, which need 64-bit mode). Nothing here is imported from the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

Array = np.ndarray


# ------------------------------------------------------------------------------------- profiles


@dataclass(frozen=True)
class RadialProfile:
    """phi(s) and its derivatives; ``traced`` is the same phi for automatic differentiation."""

    derivative: Callable[[Array, int], Array]
    traced: Callable[[jax.Array], jax.Array]

    def times(self, s: Array, order: int, power: int = 0) -> Array:
        """``s**power * phi^(order)(s)``, the limit 0 at s = 0 when ``power > 0``.

        A Matern profile has derivatives that blow up at 0 more slowly than the powers of s that
        multiply them in the estimator, so the product needs its limit there, not 0 * inf.
        """
        s = np.asarray(s, np.float64)
        if power == 0:
            return self.derivative(s, order)
        positive = s > 0
        safe = np.where(positive, s, 1.0)
        return np.where(positive, safe**power * self.derivative(safe, order), 0.0)


def imq(exponent: float = 0.5) -> RadialProfile:
    """(1 + s)^-exponent."""

    def derivative(s: Array, order: int) -> Array:
        scale = (-1) ** order * special.poch(exponent, order)
        return scale * (1 + s) ** (-exponent - order)

    return RadialProfile(derivative, lambda s: (1 + s) ** (-exponent))


def gaussian() -> RadialProfile:
    """exp(-s / 2)."""
    return RadialProfile(
        lambda s, order: (-0.5) ** order * np.exp(-0.5 * s), lambda s: jnp.exp(-0.5 * s)
    )


def rational_quadratic(alpha: float = 1.0) -> RadialProfile:
    """(1 + s / (2 alpha))^-alpha."""

    def derivative(s: Array, order: int) -> Array:
        scale = special.poch(alpha, order) * (-0.5 / alpha) ** order
        return scale * (1 + 0.5 * s / alpha) ** (-alpha - order)

    return RadialProfile(derivative, lambda s: (1 + 0.5 * s / alpha) ** (-alpha))


def _bessel(z: Array, mu: float) -> Array:
    """z^mu K_mu(z), with its limit at z = 0 (infinite for mu <= 0)."""
    z = np.asarray(z, np.float64)
    at_zero = 2 ** (mu - 1) * math.gamma(mu) if mu > 0 else np.inf
    safe = np.where(z > 0, z, 1.0)
    return np.where(z > 0, safe**mu * special.kv(abs(mu), safe), at_zero)


def matern(nu: float = 2.5) -> RadialProfile:
    """2^(1-nu) / Gamma(nu) z^nu K_nu(z) with z = sqrt(2 nu s).

    ``(1/z d/dz) z^nu K_nu = -z^(nu-1) K_(nu-1)`` and ``d/ds = nu (1/z) d/dz`` give all derivatives.
    """
    scale = 2 ** (1 - nu) / math.gamma(nu)

    def derivative(s: Array, order: int) -> Array:
        return (-nu) ** order * scale * _bessel(np.sqrt(2 * nu * np.asarray(s)), nu - order)

    def traced(s: jax.Array) -> jax.Array:
        z = jnp.sqrt(2 * nu * s)
        polynomial = {
            1.5: 1 + z,
            2.5: 1 + z + z**2 / 3,
            3.5: 1 + z + 2 * z**2 / 5 + z**3 / 15,
        }[nu]
        return polynomial * jnp.exp(-z)

    return RadialProfile(derivative, traced)


def shifted_exponential() -> RadialProfile:
    """exp(1 - sqrt(1 + s)): completely monotone and in no list of named profiles."""
    scale = math.e * math.sqrt(2 / math.pi)

    def derivative(s: Array, order: int) -> Array:
        return (-0.5) ** order * scale * _bessel(np.sqrt(1 + np.asarray(s)), 0.5 - order)

    return RadialProfile(derivative, lambda s: jnp.exp(1 - jnp.sqrt(1 + s)))


def mixture(profiles: tuple, weights: tuple, lengthscales: tuple) -> RadialProfile:
    """sum_i w_i phi_i(s / l_i^2)."""
    parts = tuple(zip(profiles, weights, lengthscales, strict=True))
    return RadialProfile(
        lambda s, order: sum(
            w * p.derivative(np.asarray(s) / ell**2, order) / ell ** (2 * order)
            for p, w, ell in parts
        ),
        lambda s: sum(w * p.traced(s / ell**2) for p, w, ell in parts),
    )


# -------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Kernel:
    """A matrix-valued kernel with profile ``phi(|x - y|^2 / bandwidth^2)``, over ``trace``."""

    curl_free: bool
    profile: RadialProfile
    bandwidth: float = 1.0
    trace: float = 1.0

    def normalized(self, dim: int) -> Kernel:
        """The same kernel divided by tr K(x, x)."""
        origin = np.zeros((1, dim))
        trace = float(np.trace(self.matrix(origin, origin)[0, 0]))
        return Kernel(self.curl_free, self.profile, self.bandwidth, self.trace * trace)

    def _differences(self, x: Array, y: Array) -> tuple[Array, Array]:
        r = x[:, None, :] - y[None, :, :]
        return r, np.sum(r**2, axis=-1)

    def _d(self, s: Array, order: int, power: int = 0) -> Array:
        """s^power times the derivative of ``s -> phi(s / h^2) / trace``."""
        h2 = self.bandwidth**2
        value = self.profile.times(s / h2, order, power)
        return value * h2 ** (power - order) / self.trace

    def _off_origin(self, s: Array, order: int) -> Array:
        """A derivative that is about to multiply components of r which outweigh its pole at 0."""
        positive = s > 0
        return np.where(positive, self._d(np.where(positive, s, 1.0), order), 0.0)

    def matrix(self, x: Array, y: Array) -> Array:
        """K(x_i, y_j), shape (m, n, d, d)."""
        r, s = self._differences(x, y)
        eye = np.eye(x.shape[1])
        if not self.curl_free:
            return self._d(s, 0)[..., None, None] * eye
        outer = r[..., :, None] * r[..., None, :]
        return (
            -4 * self._d(s, 2)[..., None, None] * outer - 2 * self._d(s, 1)[..., None, None] * eye
        )

    def gram(self, x: Array) -> Array:
        """The (n d, n d) matrix of K over the rows of x, points major."""
        n, d = x.shape
        return self.matrix(x, x).transpose(0, 2, 1, 3).reshape(n * d, n * d)

    def apply(self, x: Array, y: Array, c: Array) -> Array:
        """sum_j K(x_i, y_j) c_j."""
        return np.einsum("ijab,jb->ia", self.matrix(x, y), c)

    def zeta(self, x: Array, y: Array) -> Array:
        """(1/n) sum_j div_{y_j} K(y_j, x)^T.

        Curl-free: ``div_y`` of ``-grad grad^T psi(y - x)`` is ``-grad (Laplacian psi)(y - x)``, and
        the Laplacian ``2 d psi' + 4 s psi''`` is even, so this is its gradient in x.
        """
        r, s = self._differences(x, y)
        d = x.shape[1]
        if self.curl_free:
            weight = 4 * ((d + 2) * self._d(s, 2) + 2 * self._d(s, 3, 1))
        else:
            weight = -2 * self._d(s, 1)
        return np.mean(weight[..., None] * r, axis=1)

    def apply_potential(self, x: Array, y: Array, c: Array) -> Array:
        """The function whose gradient is ``apply`` (curl-free only)."""
        r, s = self._differences(x, y)
        return np.sum(-2 * self._d(s, 1) * np.einsum("ija,ja->ij", r, c), axis=1)

    def zeta_potential(self, x: Array, y: Array) -> Array:
        """The function whose gradient is ``zeta`` (curl-free only)."""
        _, s = self._differences(x, y)
        return np.mean(2 * x.shape[1] * self._d(s, 1) + 4 * self._d(s, 2, 1), axis=1)

    def apply_jacobian(self, x: Array, y: Array, c: Array) -> Array:
        """d (apply)_a / d x_b, shape (m, d, d)."""
        r, s = self._differences(x, y)
        along = np.einsum("ija,ja->ij", r, c)
        if not self.curl_free:
            return np.einsum("ij,ja,ijb->iab", 2 * self._d(s, 1), c, r)
        second = -4 * self._d(s, 2)
        jacobian = np.einsum("ij,ija,jb->iab", second, r, c)
        jacobian += np.einsum("ij,ja,ijb->iab", second, c, r)
        jacobian += np.einsum("ij,ab->iab", second * along, np.eye(x.shape[1]))
        third = -8 * self._off_origin(s, 3) * along
        return jacobian + np.einsum("ij,ija,ijb->iab", third, r, r)

    def zeta_jacobian(self, x: Array, y: Array) -> Array:
        """d zeta_a / d x_b, shape (m, d, d)."""
        r, s = self._differences(x, y)
        n, d = y.shape
        if self.curl_free:
            weight = 4 * ((d + 2) * self._d(s, 2) + 2 * self._d(s, 3, 1))
            slope = 4 * ((d + 4) * self._off_origin(s, 3) + 2 * self._off_origin(s, 4) * s)
        else:
            weight = -2 * self._d(s, 1)
            slope = -2 * self._off_origin(s, 2)
        jacobian = np.einsum("ij,ab->iab", weight, np.eye(d))
        return (jacobian + np.einsum("ij,ija,ijb->iab", 2 * slope, r, r)) / n

    # The second derivation: nothing but phi and automatic differentiation.

    def point_autodiff(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """K(x, y) for two points from the Hessian of phi."""

        def psi(x: jax.Array) -> jax.Array:
            return self.profile.traced(jnp.sum((x - y) ** 2) / self.bandwidth**2) / self.trace

        return -jax.hessian(psi)(x) if self.curl_free else psi(x) * jnp.eye(x.shape[0])

    def zeta_autodiff(self, x: jax.Array, samples: jax.Array) -> jax.Array:
        """zeta at one point, as the divergence of K in its first argument."""

        def divergence(sample: jax.Array) -> jax.Array:
            jacobian = jax.jacfwd(lambda y: self.point_autodiff(y, x).T)(sample)
            # Row a of K(y, x)^T is a vector field in y; its divergence contracts the last two axes.
            return jnp.trace(jacobian, axis1=1, axis2=2)

        return jnp.mean(jax.vmap(divergence)(samples), axis=0)


# -------------------------------------------------------------------------------------- filters


@dataclass(frozen=True)
class Filter:
    """g, its value at 0, and ``r(t) = (g(t) - g(0)) / t`` free of cancellation."""

    g: Callable[[Array], Array]
    g0: float
    r: Callable[[Array], Array]

    def rescaled(self, rho: float) -> Filter:
        """g(t / rho) / rho."""
        return Filter(
            lambda t: self.g(t / rho) / rho, self.g0 / rho, lambda t: self.r(t / rho) / rho**2
        )


def tikhonov(lam: float) -> Filter:
    """1 / (t + lam)."""
    return Filter(lambda t: 1 / (t + lam), 1 / lam, lambda t: -1 / (lam * (t + lam)))


def _above(threshold: float, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def masked(t: Array) -> Array:
        t = np.asarray(t, np.float64)
        keep = t > threshold
        return np.where(keep, function(np.where(keep, t, 1.0)), 0.0)

    return masked


def truncated_tikhonov(lam: float, zero: float = 0.0) -> Filter:
    """1{t > 0} / (t + lam); ``zero`` is the rounding level below which t counts as 0."""
    return Filter(
        _above(zero, lambda t: 1 / (t + lam)), 0.0, _above(zero, lambda t: 1 / (t * (t + lam)))
    )


def spectral_cutoff(lam: float) -> Filter:
    """1{t > lam} / t."""
    return Filter(_above(lam, lambda t: 1 / t), 0.0, _above(lam, lambda t: 1 / t**2))


def cutoff_for_share(spectrum: Array, share: float) -> float:
    """A threshold that keeps the smallest leading set with ``share`` of the trace.

    Equal eigenvalues stay together: a diagonal kernel repeats each one d times, and no estimator
    may depend on which copy an eigensolver happens to list first.
    """
    descending = np.sort(spectrum)[::-1]
    held = np.cumsum(descending) / np.sum(descending)
    last = descending[np.searchsorted(held, share - 1e-12)]
    lower = descending[descending < last * (1 - 1e-9)]
    return math.sqrt(last * max(lower[0], 1e-300)) if lower.size else 0.0


def landweber(num_steps: int, step_size: float = 1.0) -> Filter:
    """step_size * sum_{i < num_steps} (1 - step_size t)^i."""

    def g(t: Array) -> Array:
        t = np.asarray(t, np.float64)
        return step_size * sum((1 - step_size * t) ** i for i in range(num_steps))

    def r(t: Array) -> Array:
        # ((1 - e)^i - 1) / t with e = step_size t is -step_size times the partial geometric sum.
        factor = 1 - step_size * np.asarray(t, np.float64)
        partial, total, power = np.zeros_like(factor), np.zeros_like(factor), np.ones_like(factor)
        for _ in range(num_steps):
            total = total + partial
            partial = partial + power
            power = power * factor
        return -(step_size**2) * total

    return Filter(g, step_size * num_steps, r)


def nu_coefficients(step: int, nu: float) -> tuple[float, float]:
    """(mu_t, omega_t) of Engl, Hanke and Neubauer's nu-method, t = 1, 2, ..."""
    t = step
    if t == 1:
        return 0.0, (4 * nu + 2) / (4 * nu + 1)  # the general mu_1 is 0/0 at nu = 1/2
    mu = (t - 1) * (2 * t - 3) * (2 * t + 2 * nu - 1)
    mu = mu / ((t + 2 * nu - 1) * (2 * t + 4 * nu - 1) * (2 * t + 2 * nu - 3))
    omega = 4 * (2 * t + 2 * nu - 1) * (t + nu - 1) / ((t + 2 * nu - 1) * (2 * t + 4 * nu - 1))
    return mu, omega


def nu_method(num_steps: int, nu: float = 1.0) -> Filter:
    """g_t = g_{t-1} + mu_t (g_{t-1} - g_{t-2}) + omega_t (1 - t g_{t-1}), in extended precision."""

    def run(t: Array) -> tuple[Array, Array]:
        t = np.asarray(t, np.longdouble)
        g, g_before = np.zeros_like(t), np.zeros_like(t)
        r, r_before = np.zeros_like(t), np.zeros_like(t)
        for step in range(1, num_steps + 1):
            mu, omega = nu_coefficients(step, np.longdouble(nu))
            r, r_before = r + mu * (r - r_before) - omega * g, r
            g, g_before = g + mu * (g - g_before) + omega * (1 - t * g), g
        return np.asarray(g, np.float64), np.asarray(r, np.float64)

    g0 = num_steps * (num_steps + 2 * nu) / (2 * nu + 0.5)
    return Filter(lambda t: run(t)[0], g0, lambda t: run(t)[1])


def nu_residual_jacobi(t: Array, num_steps: int, nu: float) -> Array:
    """1 - t g(t) as the Jacobi polynomial P^(2 nu - 1/2, -1/2)(1 - 2t), scaled to 1 at 0."""
    alpha, beta = 2 * nu - 0.5, -0.5
    at_zero = special.eval_jacobi(num_steps, alpha, beta, 1.0)
    return special.eval_jacobi(num_steps, alpha, beta, 1 - 2 * np.asarray(t)) / at_zero


def nu_exact(t: Fraction, num_steps: int, nu: Fraction) -> tuple[Fraction, Fraction]:
    """(g, r) in rational arithmetic from ``1 - t g(t) = 2F1(-T, T + 2 nu; 2 nu + 1/2; t)``."""
    coefficient, g, r = Fraction(1), Fraction(0), Fraction(0)
    for k in range(1, num_steps + 1):
        coefficient *= (k - 1 - num_steps) * (num_steps + 2 * nu + k - 1)
        coefficient /= (2 * nu + Fraction(1, 2) + k - 1) * k
        g -= coefficient * t ** (k - 1)
        if k >= 2:
            r -= coefficient * t ** (k - 2)
    return g, r


# ------------------------------------------------------------------------------------ estimator


@dataclass(frozen=True)
class Estimate:
    """The estimator in the coordinates ``u = whitener (x - mean)``; results in those of x.

    Gradients pull back by the transpose, ``s_x = whitener^T s_u``; divergences are taken in x.
    """

    kernel: Kernel
    nodes: Array  # the samples in u
    whitener: Array
    mean: Array
    g0: float
    weights: Array  # residual = -g0 zeta + sum_j K(., u_j) weights_j, in u
    spectrum: Array
    in_sample: Array  # residual at the samples by the spectral calculus of K / n, in x

    def _to_u(self, x: Array) -> Array:
        return (np.asarray(x, np.float64) - self.mean) @ self.whitener.T

    def residual(self, x: Array) -> Array:
        u = self._to_u(x)
        value = -self.g0 * self.kernel.zeta(u, self.nodes)
        return (value + self.kernel.apply(u, self.nodes, self.weights)) @ self.whitener

    def residual_potential(self, x: Array) -> Array:
        u = self._to_u(x)
        value = -self.g0 * self.kernel.zeta_potential(u, self.nodes)
        return value + self.kernel.apply_potential(u, self.nodes, self.weights)

    def residual_autodiff(self, x: jax.Array) -> jax.Array:
        """The residual at one point off the samples, by automatic differentiation of phi alone."""
        u = self.whitener @ (x - self.mean)
        nodes = jnp.asarray(self.nodes)
        matrices = jax.vmap(lambda y: self.kernel.point_autodiff(u, y))(nodes)
        value = jnp.einsum("jab,jb->a", matrices, jnp.asarray(self.weights))
        return self.whitener.T @ (value - self.g0 * self.kernel.zeta_autodiff(u, nodes))

    def residual_divergence(self, x: Array) -> Array:
        """tr(d residual / dx)."""
        u = self._to_u(x)
        jacobian = self.kernel.apply_jacobian(u, self.nodes, self.weights)
        jacobian = jacobian - self.g0 * self.kernel.zeta_jacobian(u, self.nodes)
        return np.einsum("ba,ibc,ca->i", self.whitener, jacobian, self.whitener)


def _krylov_space(operator: Array, start: Array, size: int) -> Array:
    """Orthonormal basis of span{v, A v, ..., A^(size-1) v}, one column a vector."""
    columns = [start / np.linalg.norm(start)]
    while len(columns) < size:
        new, basis = operator @ columns[-1], np.stack(columns, axis=1)
        for _ in range(2):
            new = new - basis @ (basis.T @ new)
        columns.append(new / np.linalg.norm(new))
    return np.stack(columns, axis=1)


def estimate(
    kernel: Kernel,
    samples: Array,
    make_filter: Filter | Callable[[Array], Filter],
    base_scores: Array | None = None,
    whitener: Array | None = None,
    normalize: bool = False,
    krylov_steps: int | None = None,
) -> Estimate:
    """Solve by dense ``eigh``.

    Args:
        kernel: the kernel in the coordinates u.
        samples: shape (n, d), coordinates x.
        make_filter: a filter, or a function from the spectrum of K/n to one.
        base_scores: s0 at the samples in x, zero when None.
        whitener: ``u = whitener (x - mean)``, the identity when None.
        normalize: divide K by tr K(x, x).
        krylov_steps: restrict K/n to its Krylov space of this size from the right-hand side; for
            Tikhonov that is what conjugate gradients reach in as many steps.
    """
    samples = np.asarray(samples, np.float64)
    n, d = samples.shape
    whitener = np.eye(d) if whitener is None else np.asarray(whitener, np.float64)
    mean = samples.mean(axis=0)
    nodes = (samples - mean) @ whitener.T
    kernel = kernel.normalized(d) if normalize else kernel
    base = np.zeros((n, d)) if base_scores is None else np.asarray(base_scores, np.float64)
    base = base @ np.linalg.inv(whitener)  # s0_u = whitener^-T s0_x, row by row

    operator = kernel.gram(nodes) / n
    rhs = kernel.zeta(nodes, nodes).reshape(-1) + operator @ base.reshape(-1)
    space = np.eye(n * d) if krylov_steps is None else _krylov_space(operator, rhs, krylov_steps)
    spectrum, vectors = np.linalg.eigh(space.T @ operator @ space)
    spectrum, vectors = np.maximum(spectrum, 0.0), space @ vectors
    filt = make_filter if isinstance(make_filter, Filter) else make_filter(spectrum)
    projected = vectors.T @ rhs
    in_sample = -(vectors @ (filt.g(spectrum) * projected)).reshape(n, d)
    calculus = (vectors @ (filt.r(spectrum) * projected)).reshape(n, d)
    weights = -(filt.g0 * base + calculus) / n
    return Estimate(kernel, nodes, whitener, mean, filt.g0, weights, spectrum, in_sample @ whitener)


# ---------------------------------------------------------------- coordinates, bandwidth, base


def median_distance(points: Array) -> float:
    """Median of the n (n - 1) / 2 distances between different points."""
    rows, columns = np.triu_indices(len(points), 1)
    return float(np.median(np.linalg.norm(points[rows] - points[columns], axis=-1)))


def whitener(samples: Array, mode: str, ddof: int = 0) -> Array:
    """W with ``W^T W`` the inverse covariance ("full") or the inverse variances ("diagonal").

    Which root is taken does not matter: radial kernels commute with rotations.
    """
    samples = np.asarray(samples, np.float64)
    d = samples.shape[1]
    if mode == "none":
        return np.eye(d)
    if mode == "diagonal":
        return np.diag(1 / samples.std(axis=0, ddof=ddof))
    return np.linalg.inv(np.linalg.cholesky(np.cov(samples.T, ddof=ddof).reshape(d, d)))


SHRINKAGES = (0, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.06, 0.1, 0.16, 0.25, 0.4, 0.6, 0.8, 1)


def held_out_parameters(samples: Array) -> tuple[Array, float, float]:
    """Scales, shrinkage and sharpness that predict left-out samples best, by leaving them out."""
    samples = np.asarray(samples, np.float64)
    n, d = samples.shape

    def left_out(points):
        for i in range(n):
            others = np.delete(points, i, axis=0)
            yield others, points[i] - others.mean(axis=0)

    def sharpest(pairs, most=math.inf):
        """Least mean of γ² a/2 - γ b, and the γ that attains it."""
        a, b = np.mean(list(pairs), axis=0)
        gamma = min(b / a, most)
        return gamma**2 * a / 2 - gamma * b, gamma

    sd = samples.std(axis=0)
    evened = {}
    for tau in (0.0, 0.25, 0.5, 0.75, 1.0):
        pairs = []
        for others, deviation in left_out(samples / sd):
            log_variance = np.log(others.var(axis=0) * sd**2)
            inverse = sd**2 / np.exp(log_variance + tau * (log_variance.mean() - log_variance))
            pairs.append((np.sum((inverse * deviation) ** 2), inverse.sum()))
        evened[tau] = sharpest(pairs)[0]
    tau = min(evened, key=evened.get)
    scale = np.exp(np.log(sd) + tau * (np.log(sd).mean() - np.log(sd)))

    shrunk = {}
    for rho in SHRINKAGES if d > 1 else (1,):
        pairs = []
        for others, deviation in left_out(samples / scale):
            covariance = np.cov(others.T, ddof=0).reshape(d, d)
            covariance = (1 - rho) * covariance + rho * np.eye(d)
            # With fewer samples than dimensions there is no Gaussian without shrinkage; whether
            # rounding hides that differs by machine.
            if np.linalg.matrix_rank(covariance) < d:
                break
            precision = np.linalg.inv(covariance)
            pairs.append((np.sum((precision @ deviation) ** 2), np.trace(precision)))
        else:
            shrunk[rho] = sharpest(pairs, most=4.0)
    rho = min(shrunk, key=lambda key: shrunk[key][0])
    return scale, rho, shrunk[rho][1]


def held_out_gaussian(samples: Array) -> Array:
    """W with ``W^T W`` the precision of the Gaussian with these parameters."""
    samples = np.asarray(samples, np.float64)
    scale, rho, sharpness = held_out_parameters(samples)
    d = samples.shape[1]
    covariance = np.cov((samples / scale).T, ddof=0).reshape(d, d)
    covariance = ((1 - rho) * covariance + rho * np.eye(d)) / sharpness
    return np.linalg.inv(np.linalg.cholesky(covariance)) @ np.diag(1 / scale)


def left_out_gaussian_scores(samples: Array) -> Array:
    """Score at each sample of the Gaussian fitted to the others, its parameters held fixed."""
    samples = np.asarray(samples, np.float64)
    scale, rho, sharpness = held_out_parameters(samples)
    x, d = samples / scale, samples.shape[1]
    scores = []
    for i in range(len(x)):
        others = np.delete(x, i, axis=0)
        covariance = (1 - rho) * np.cov(others.T, ddof=0).reshape(d, d) + rho * np.eye(d)
        scores.append(-sharpness * np.linalg.solve(covariance, x[i] - others.mean(axis=0)))
    return np.array(scores) / scale


def gaussian_score(x: Array, samples: Array) -> Array:
    """Score of that Gaussian."""
    root = held_out_gaussian(samples)
    return -(np.asarray(x, np.float64) - samples.mean(axis=0)) @ root.T @ root


def literal_nu_steps(
    kernel: Kernel, nodes: Array, num_steps: int, nu: float = 1.0, base: Array | None = None
) -> Array:
    """The residual at the samples by num_steps literal steps with the dense matrix."""
    n, d = nodes.shape
    operator = kernel.gram(nodes) / n
    base = np.zeros((n, d)) if base is None else base
    rhs = kernel.zeta(nodes, nodes).reshape(-1) + operator @ base.reshape(-1)
    value, before = np.zeros(n * d), np.zeros(n * d)
    for step in range(1, num_steps + 1):
        mu, omega = nu_coefficients(step, nu)
        value, before = value + mu * (value - before) - omega * (rhs + operator @ value), value
    return value.reshape(n, d)


def relative_error(value: Array, reference: Array) -> float:
    """Norm-wise relative error; NaN counts as infinite."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    if value.shape != reference.shape:
        raise ValueError(f"expected shape {reference.shape}; got {value.shape}")
    error = np.linalg.norm(value - reference) / np.linalg.norm(reference)
    return float(error) if np.isfinite(error) else math.inf
