"""Radial profiles: the scalar functions that kernels are made of.

A profile is a function φ(s) of the *squared* distance ``s = |x - y|²``, in units of the
bandwidth. It never sees the distance itself: the derivative of ``sqrt`` at 0 is infinite, and
every kernel has s = 0 on its diagonal.

To write one, wrap a function in :class:`Profile`, or subclass :class:`RadialProfile` with
``__call__`` (derivatives then come from autodiff) under the decorator
:func:`~numpyro_kscore.pytree`. Override ``derivatives`` where a closed form is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.checks import check_positive, is_concrete
from numpyro_kscore._util.pytree import pytree, static


class RadialProfile:
    """A positive-definite radial function φ(s) of the squared distance.

    Attributes:
        differentiability: how many continuous derivatives ``x -> φ(|x|²)`` has. A diagonal
            kernel needs 2; a curl-free kernel, itself a second derivative, needs 4.

    Example::

        from numpyro_kscore import pytree
        from numpyro_kscore.kernels import CurlFree, RadialProfile


        @pytree
        class Narrow(RadialProfile):
            def __call__(self, s):
                return jnp.exp(-s)


        value, slope = Narrow().derivatives(jnp.zeros(()), 1)
        slope  # -1.0
        estimator = ScoreEstimator(CurlFree(Narrow()))
    """

    @property
    def differentiability(self) -> float:
        """Number of continuous derivatives of ``x -> φ(|x|²)``."""
        return math.inf

    def __call__(self, s: jax.Array) -> jax.Array:
        """φ at squared distances ``s`` (any shape), elementwise."""
        raise NotImplementedError

    def derivatives(self, s: jax.Array, order: int) -> tuple[jax.Array, ...]:
        """``(φ, φ', ..., φ^(order))`` at ``s``, elementwise; by forward-mode autodiff."""

        def differentiate(fn: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
            return lambda t: jax.jvp(fn, (t,), (jnp.ones_like(t),))[1]

        fn: Callable[[jax.Array], jax.Array] = self.__call__
        out = [fn(s)]
        for _ in range(order):
            fn = differentiate(fn)
            out.append(fn(s))
        return tuple(out)

    def __add__(self, other: RadialProfile) -> Mixture:
        """The sum of two profiles."""
        if not isinstance(other, RadialProfile):
            return NotImplemented
        return Mixture((self, other))

    def __mul__(self, weight: Any) -> Mixture:
        """The profile times a positive weight."""
        if isinstance(weight, RadialProfile):
            return NotImplemented
        return Mixture((self,), (weight,))

    __rmul__ = __mul__


class _ClosedForm(RadialProfile):
    """A profile that subclasses define by its derivatives."""

    def __call__(self, s: jax.Array) -> jax.Array:
        return self.derivatives(s, 0)[0]


def _inverse_power(s: jax.Array, exponent: float, order: int) -> tuple[jax.Array, ...]:
    """``(1 + s)^-exponent`` and its derivatives: each is the last times ``-(b + k)/(1 + s)``."""
    inverse = 1.0 / (1.0 + s)
    # rsqrt instead of pow for the default exponent: pow is several times the cost of the rest.
    value = jnp.sqrt(inverse) if exponent == 0.5 else inverse**exponent
    out = [value]
    for k in range(order):
        value = value * (-(exponent + k)) * inverse
        out.append(value)
    return tuple(out)


@pytree
class IMQ(_ClosedForm):
    """Inverse multiquadric ``(1 + s)^-exponent``; heavy tails, the default.

    Args:
        exponent: positive; 0.5 is the usual inverse multiquadric.

    Example::

        from numpyro_kscore.kernels import IMQ, CurlFree

        IMQ()(3.0)  # 0.5
        estimator = ScoreEstimator(CurlFree(IMQ(exponent=1.0)))
    """

    exponent: float = static(default=0.5)

    def __post_init__(self) -> None:
        check_positive("exponent", self.exponent)

    def derivatives(self, s: jax.Array, order: int) -> tuple[jax.Array, ...]:
        return _inverse_power(s, self.exponent, order)


@pytree
class Gaussian(_ClosedForm):
    """Gaussian profile ``exp(-s/2)``.

    Example::

        from numpyro_kscore.kernels import CurlFree, Gaussian

        Gaussian()(1.0)  # 0.607: at distance 1
        estimator = ScoreEstimator(CurlFree(Gaussian()))
    """

    def derivatives(self, s: jax.Array, order: int) -> tuple[jax.Array, ...]:
        value = jnp.exp(-0.5 * s)
        return tuple((-0.5) ** k * value for k in range(order + 1))


@pytree
class RationalQuadratic(_ClosedForm):
    """Rational quadratic ``(1 + s/(2α))^-α``: a scale mixture of Gaussians.

    Args:
        alpha: positive; large values approach :class:`Gaussian`.

    Example::

        from numpyro_kscore.kernels import CurlFree, RationalQuadratic

        RationalQuadratic(alpha=1.0)(2.0)  # 0.5
        estimator = ScoreEstimator(CurlFree(RationalQuadratic(alpha=2.0)))
    """

    alpha: float = static(default=1.0)

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    def derivatives(self, s: jax.Array, order: int) -> tuple[jax.Array, ...]:
        rate = 0.5 / self.alpha
        terms = _inverse_power(rate * s, self.alpha, order)
        return tuple(rate**k * term for k, term in enumerate(terms))


@pytree
class Matern(_ClosedForm):
    """Matérn profile with unit lengthscale: rougher than the other profiles.

    Args:
        nu: smoothness, one of 1.5, 2.5 and 3.5. Curl-free kernels need at least 2.5; 1.5
            serves diagonal kernels only.

    Example::

        from numpyro_kscore.kernels import CurlFree, Matern

        Matern(3.5).differentiability  # 6: a curl-free kernel needs 4
        estimator = ScoreEstimator(CurlFree(Matern(3.5)))
    """

    nu: float = static(default=2.5)

    def __post_init__(self) -> None:
        is_array = isinstance(self.nu, jax.Array | np.ndarray)  # refused by pytree, which says why
        if not is_array and self.nu not in (1.5, 2.5, 3.5):
            raise ValueError(f"nu: expected 1.5, 2.5 or 3.5; got {self.nu}")

    @property
    def differentiability(self) -> float:
        return 2 * int(self.nu)

    def derivatives(self, s: jax.Array, order: int) -> tuple[jax.Array, ...]:
        # With t = sqrt(2ν s), G_p(t) = t^(p+1/2) K_(p+1/2)(t) obeys dG_p/ds = -ν G_(p-1): every
        # derivative is the Matérn function one step rougher.
        degree = int(self.nu)
        # G_(-1) and rougher functions are singular at 0, but enter only times powers of s that
        # outweigh this: below t = 1e-8 the product is below rounding, and 0 is used. The inner
        # where keeps the derivative of the root finite there.
        squared = 2.0 * self.nu * s
        away = squared > 1e-16
        t = jnp.where(away, jnp.sqrt(jnp.where(away, squared, 1.0)), 0.0)
        t_away = jnp.where(away, t, 1.0)
        decay = jnp.exp(-t)
        norm = {1: 1.0, 2: 3.0, 3: 15.0}[degree]
        out = []
        for k in range(order + 1):
            p = degree - k
            if p >= 0:
                value = _matern_polynomial(p, t) * decay
            else:
                singular = _matern_polynomial(-p - 1, t_away) / t_away ** (-2 * p - 1)
                value = jnp.where(away, singular, 0.0) * decay
            out.append((-self.nu) ** k / norm * value)
        return tuple(out)


def _matern_polynomial(p: int, t: jax.Array) -> jax.Array:
    """``t^(p+1/2) K_(p+1/2)(t) e^t sqrt(2/π)``, a polynomial of degree p."""
    if p == 0:
        return jnp.ones_like(t)
    if p == 1:
        return 1.0 + t
    if p == 2:
        return 3.0 + t * (3.0 + t)
    return 15.0 + t * (15.0 + t * (6.0 + t))


@pytree
class Profile(RadialProfile):
    """Any function φ(s) as a profile; its derivatives come from autodiff.

    Args:
        fn: elementwise function of the squared distance, differentiable at 0 (write it in s,
            not in ``sqrt(s)``), and such that ``fn(|x - y|²)`` is positive definite.
        smoothness: how many continuous derivatives ``x -> fn(|x|²)`` has; infinite by default.

    Example::

        from numpyro_kscore.kernels import CurlFree, Profile

        profile = Profile(lambda s: jnp.exp(-0.5 * s) + 0.1 / (1.0 + s))
        profile(0.0)  # 1.1
        estimator = ScoreEstimator(CurlFree(profile))
    """

    fn: Callable[[jax.Array], jax.Array] = static()
    smoothness: float = static(default=math.inf)

    @property
    def differentiability(self) -> float:
        return self.smoothness

    def __call__(self, s: jax.Array) -> jax.Array:
        return self.fn(s)


@pytree
class Mixture(_ClosedForm):
    """Weighted sum ``Σ_i w_i φ_i(s / ℓ_i²)`` of profiles at relative lengthscales.

    Args:
        profiles: the components, at least one; lists count as tuples here and below.
        weights: positive weights, one a profile; all 1 by default.
        lengthscales: in units of the bandwidth, one a profile; all 1 by default.

    Example::

        from numpyro_kscore.kernels import IMQ, CurlFree, Gaussian, Mixture

        profile = 0.5 * IMQ() + Gaussian()  # sums of profiles are mixtures
        profile(jnp.zeros(()))  # 1.5
        wide = Mixture((Gaussian(), Gaussian()), weights=(0.5, 0.5), lengthscales=(1.0, 4.0))
        estimator = ScoreEstimator(CurlFree(wide))
    """

    profiles: tuple[RadialProfile, ...]
    weights: tuple[Any, ...] | None = None
    lengthscales: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        given: Any = self.profiles
        if isinstance(given, list):
            object.__setattr__(self, "profiles", tuple(given))
        if isinstance(given, RadialProfile):
            raise TypeError(f"profiles: expected a tuple of profiles; got {given!r}")
        if not given:
            raise ValueError("profiles: expected at least one profile; got none")
        for name in ("weights", "lengthscales"):
            values = _as_tuple(name, getattr(self, name), len(self.profiles))
            object.__setattr__(self, name, values)

    @property
    def differentiability(self) -> float:
        return min(p.differentiability for p in self.profiles)

    def derivatives(self, s: jax.Array, order: int) -> tuple[jax.Array, ...]:
        # A Python number has no dtype, and lengthscales in an integer one would be rounded.
        s = jnp.asarray(s, jnp.result_type(s, float))
        total: list[Any] = [0.0] * (order + 1)
        for profile, weight, lengthscale in zip(
            self.profiles, self.weights or (), self.lengthscales or (), strict=True
        ):
            rate = 1.0 / jnp.square(jnp.asarray(lengthscale, s.dtype))
            for k, term in enumerate(profile.derivatives(rate * s, order)):
                total[k] = total[k] + weight * rate**k * term
        return tuple(total)


def _as_tuple(name: str, values: Any, count: int) -> Any:
    """Numbers of a mixture as a tuple, one a profile; what JAX puts in its place is left alone."""
    if values is None:
        return (1.0,) * count
    if isinstance(values, list) or (
        isinstance(values, jax.Array | np.ndarray) and values.ndim == 1
    ):
        values = tuple(values)
    if is_concrete(values):
        raise TypeError(
            f"{name}: expected a tuple of {count} positive numbers, one a profile; got {values!r}"
        )
    if isinstance(values, tuple):
        if len(values) != count:
            raise ValueError(f"{name}: expected {count} values, one a profile; got {len(values)}")
        for value in values:
            check_positive(name, value)
    return values


def multi_bandwidth(profile: RadialProfile, lengthscales: tuple[float, ...]) -> Mixture:
    """One profile at several relative lengthscales, equally weighted.

    Args:
        profile: the profile to repeat.
        lengthscales: in units of the bandwidth, for example ``(0.5, 1.0, 2.0)``.

    Returns:
        The sum of the profiles, with weights that add up to one.

    Example::

        from numpyro_kscore.kernels import CurlFree, Gaussian, multi_bandwidth

        profile = multi_bandwidth(Gaussian(), (0.5, 1.0, 2.0))
        profile(jnp.zeros(()))  # 1.0
        estimator = ScoreEstimator(CurlFree(profile))
    """
    lengthscales = tuple(lengthscales)
    if not lengthscales:
        raise ValueError("lengthscales: expected at least one positive number; got none")
    count = len(lengthscales)
    return Mixture((profile,) * count, (1.0 / count,) * count, lengthscales)
