"""Automatic guides that can only be sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import helpful_support_errors

from numpyro_kscore._pytree import check_count, check_positive, is_concrete
from numpyro_kscore.distributions import Implicit

__all__ = ["AutoImplicit"]

# Draws behind median and quantiles: their Monte-Carlo error is about 1 % of a standard deviation.
QUANTILE_DRAWS = 10_000
# Weights are stored at unit scale and divided by sqrt(fan-in) in use, so that a step of Adam moves
# the function equally little at any width; otherwise the last iterate of a run at a constant step
# size is visibly noisy. GAIN multiplies every layer's rate of learning. The gate learns at a
# quarter of it: at the full rate the guide falls into the neck of a funnel before it has seen the
# rest (docs/accuracy).
GAIN = 2.0
GATE_RATE = 0.25


class AutoImplicit(AutoContinuous):
    """A guide that pushes Gaussian noise through a network: any shape of posterior, no density.

    The default network is residual, ``u = loc + scale * ((ε * exp(g(ε))) A + f(ε))`` with f and g a
    perceptron whose last layer starts at zero and A starting as the identity: the guide starts as
    the narrow mean-field Gaussian NumPyro's own guides start from. f bends it; the gate ``exp(g)``
    lets one coordinate set the scale of others, as in hierarchical models, and makes heavy tails.
    Fit it with :class:`~numpyro_kscore.ImplicitELBO`.

    Args:
        model: a NumPyro model with continuous latents, none of them in subsampled plates.
        hidden_dims: widths of the hidden layers.
        noise_dim: dimension of the noise ε, at least the latent dimension for the default
            network (fewer would leave a guide without a density at all); by default the latent
            dimension.
        network: replaces the default network: a callable from noise (noise_dim,) to
            unconstrained latents (latent_dim,), which may use ``numpyro.param``,
            ``flax_module`` and further sample sites marked ``is_auxiliary``; or a flax linen
            module.
        init_loc_fn: per-site initial values, see NumPyro's initialization strategies.
        init_scale: initial standard deviation of every unconstrained coordinate.
        prefix: prefix of the names of parameters and noise sites.
        forward_mode_differentiation: find initial values in forward mode, for models with
            ``while_loop``; give :class:`~numpyro_kscore.ImplicitELBO` the same flag.

    Raises:
        ValueError: for a model with local latents in subsampled plates, or a network whose
            output has the wrong shape.

    Example::

        guide = AutoImplicit(model)
        optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 5_000))
        svi = SVI(model, guide, optimizer, ImplicitELBO())
        result = svi.run(random.key(0), 5_000, data)
        draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(1000,))
    """

    prototype_trace: Any  # a dict once the model has been seen; NumPyro leaves it untyped

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        hidden_dims: Sequence[int] = (64, 64),
        noise_dim: int | None = None,
        network: Callable[[jax.Array], jax.Array] | Any = None,
        init_loc_fn: Callable[..., Any] = init_to_uniform,
        init_scale: float = 0.1,
        prefix: str = "auto",
        forward_mode_differentiation: bool = False,
    ) -> None:
        if not isinstance(hidden_dims, list | tuple):
            raise TypeError(f"hidden_dims: expected a tuple of integers; got {hidden_dims!r}")
        for width in hidden_dims:
            check_count("hidden_dims", width)
        if noise_dim is not None:
            check_count("noise_dim", noise_dim)
        check_positive("init_scale", init_scale)
        if network is not None:
            _check_network(network)
        self.hidden_dims = tuple(hidden_dims)
        self.noise_dim = noise_dim
        self.network = network
        self.init_scale = init_scale
        super().__init__(
            model,
            prefix=prefix,
            init_loc_fn=init_loc_fn,
            forward_mode_differentiation=forward_mode_differentiation,
        )

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._setup_prototype(*args, **kwargs)
        except ValueError as error:
            if "local latent" not in str(error):
                raise
            self.prototype_trace = None
            raise ValueError(
                "AutoImplicit: expected latent sites outside subsampled plates; got local latent "
                "sites inside one. Subsample observed sites only, or write a guide of your own"
            ) from error
        if self.noise_dim is None:
            self.noise_dim = self.latent_dim
        self._dynamic = any(_is_dynamic(self.prototype_trace[name]) for name in self._init_locs)
        if self.network is None and self.noise_dim < self.latent_dim:
            self.prototype_trace = None
            raise ValueError(
                f"noise_dim: expected at least the latent dimension {self.latent_dim}; got "
                f"{self.noise_dim}. Less noise than latents has no density; leave noise_dim out"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Draw every latent site of the model once."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        unconstrained = self._unpack_latent(self._sample_latent(*args, **kwargs))
        values = {}
        if self._dynamic:
            # Only the model knows supports that depend on other sites.
            with handlers.block():
                values = self._postprocess_fn(unconstrained)
        out = {}
        for name, u in unconstrained.items():
            site = self.prototype_trace[name]
            with helpful_support_errors(site):
                value = values[name] if self._dynamic else biject_to(site["fn"].support)(u)
            fn = Implicit(value, site["fn"].event_dim, unconstrained=u)
            out[name] = numpyro.sample(name, fn)
        return out

    def _sample_latent(self, *args: Any, **kwargs: Any) -> jax.Array:
        noise = numpyro.sample(
            f"_{self.prefix}_noise",
            dist.Normal(jnp.zeros(self.noise_dim), 1.0).to_event(1),
            infer={"is_auxiliary": True},
        )
        flat = self._push(noise)
        if jnp.shape(flat) != (self.latent_dim,):
            raise ValueError(
                f"network: expected output of shape ({self.latent_dim},), one number for each "
                f"unconstrained coordinate; got {jnp.shape(flat)}"
            )
        return flat

    def _push(self, noise: jax.Array) -> jax.Array:
        if self.network is None:
            return self._residual_network(noise)
        if hasattr(self.network, "init") and hasattr(self.network, "apply"):
            from numpyro.contrib.module import flax_module

            module = flax_module(
                f"{self.prefix}_network", self.network, input_shape=(self.noise_dim,)
            )
            return module(noise)
        return self.network(noise)

    def _residual_network(self, noise: jax.Array) -> jax.Array:
        dim, prefix = self.latent_dim, self.prefix
        loc = numpyro.param(f"{prefix}_loc", self._init_latent)
        scale = numpyro.param(
            f"{prefix}_scale",
            jnp.full(dim, self.init_scale),
            constraint=constraints.softplus_positive,
        )
        mixing = numpyro.param(f"{prefix}_mixing", jnp.eye(self.noise_dim, dim))
        layers = numpyro.param(f"{prefix}_layers", self._init_layers)
        hidden = noise
        for weight, bias in layers[:-1]:
            fan_in = weight.shape[0]
            hidden = jax.nn.gelu(GAIN * (hidden @ weight * (2.0 / fan_in) ** 0.5 + bias))
        weight, bias = layers[-1]
        out = GAIN * (hidden @ weight / weight.shape[0] ** 0.5 + bias)
        shift, log_gate = out[:dim], GATE_RATE * out[dim:]
        return loc + scale * ((noise * jnp.exp(log_gate)) @ mixing + shift)

    def _init_layers(self, rng_key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Hidden layers at unit gain; the last one at zero, so that the guide starts linear."""
        widths: tuple[Any, ...] = (self.noise_dim, *self.hidden_dims)
        layers = []
        for key, (fan_in, fan_out) in zip(
            random.split(rng_key, len(self.hidden_dims)),
            zip(widths[:-1], widths[1:], strict=True),
            strict=True,
        ):
            weight = random.normal(key, (fan_in, fan_out)) / GAIN
            layers.append((weight, jnp.zeros(fan_out)))
        width = self.latent_dim + widths[0]
        layers.append((jnp.zeros((widths[-1], width)), jnp.zeros(width)))
        return layers

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Draws of the latent sites, with leading dimensions ``sample_shape``."""
        flat = self._draw_latent(rng_key, params, sample_shape)
        return self._unpack_and_constrain(flat, params)

    def median(self, params: dict[str, Any]) -> dict[str, jax.Array]:
        """Medians of the latent sites, from 10 000 draws with a fixed key."""
        return {name: value[0] for name, value in self.quantiles(params, [0.5]).items()}

    def quantiles(self, params: dict[str, Any], quantiles: Any) -> dict[str, jax.Array]:
        """Quantiles of every latent coordinate, from 10 000 draws with a fixed key.

        Args:
            params: fitted parameters.
            quantiles: levels in [0, 1], shape (k,) or a scalar.

        Returns:
            A dict of arrays with leading dimension k (none for a scalar).

        Raises:
            ValueError: for levels outside [0, 1].
        """
        if is_concrete(quantiles) or isinstance(quantiles, list | tuple):
            given = np.asarray(quantiles)
            if not np.all((given >= 0) & (given <= 1)):
                raise ValueError(f"quantiles: expected levels in [0, 1]; got {quantiles}")
        flat = self._draw_latent(random.key(0), params, (QUANTILE_DRAWS,))
        levels = jnp.quantile(flat, jnp.asarray(quantiles), axis=0)
        return self._unpack_and_constrain(levels, params)

    def get_base_dist(self) -> NoReturn:
        """Not available: the guide is no transformed distribution with a density."""
        self._no_density()

    def get_transform(self, params: dict[str, Any]) -> NoReturn:
        """Not available: the guide is no transformed distribution with a density."""
        self._no_density()

    def get_posterior(self, params: dict[str, Any]) -> NoReturn:
        """Not available: the guide has no density. Use :meth:`sample_posterior`."""
        self._no_density()

    def _get_posterior(self) -> NoReturn:
        self._no_density()

    def _no_density(self) -> NoReturn:
        raise NotImplementedError(
            "AutoImplicit: expected no use of a density; the guide can only be sampled. Use "
            "guide.sample_posterior(rng_key, params, sample_shape=...)"
        )

    def _draw_latent(
        self, rng_key: jax.Array, params: dict[str, Any], sample_shape: tuple[int, ...]
    ) -> jax.Array:
        if self.prototype_trace is None:
            raise RuntimeError(
                "AutoImplicit: expected a guide that has seen its model; got a new one. Call "
                "svi.init(rng_key, *args) or svi.run(...) first"
            )

        def one(key: jax.Array) -> jax.Array:
            return handlers.substitute(handlers.seed(self._sample_latent, key), data=params)()

        if not sample_shape:
            return one(rng_key)
        count = 1
        for length in sample_shape:
            count *= length
        flat = jax.vmap(one)(random.split(rng_key, count))
        return flat.reshape(*sample_shape, -1)


def _check_network(network: Any) -> None:
    """Raise ``TypeError`` for what is no network, or hides its parameters from NumPyro."""
    if not callable(network):
        raise TypeError(f"network: expected a callable or a flax module; got {network!r}")
    if any(base.__module__.startswith("flax.nnx") for base in type(network).__mro__):
        raise TypeError(
            "network: expected a callable or a flax linen module; got an nnx module, whose "
            "parameters NumPyro would not see. Wrap it: lambda noise: "
            "numpyro.contrib.module.nnx_module('network', module)(noise)"
        )


def _is_dynamic(site: dict[str, Any]) -> bool:
    """Whether a site's support has bounds that are values of the model, not plain numbers."""
    support = site["fn"].support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    bounds = (getattr(support, name, 0.0) for name in ("lower_bound", "upper_bound"))
    return not all(isinstance(bound, int | float) for bound in bounds)
