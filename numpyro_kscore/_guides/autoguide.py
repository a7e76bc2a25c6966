"""An automatic guide that can only be sampled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.initialization import init_to_uniform

from numpyro_kscore._guides.guide_checks import (
    are_equal,
    check_amortized,
    check_coordinates,
    check_latents,
    check_names,
    check_noise,
    check_placed,
    check_plates,
    check_settings,
    is_concrete_call,
    warn_of_other_data,
)
from numpyro_kscore._guides.marginal import Marginal, no_noise, normal_noise
from numpyro_kscore._guides.networks import apply_network, check_network, perceptron
from numpyro_kscore._guides.posterior_draws import PosteriorDraws
from numpyro_kscore._guides.row_posterior import RowPosterior
from numpyro_kscore._guides.rows import Amortized, sample_rows
from numpyro_kscore._model.coordinates import LatentCoordinates, names_of, unravel
from numpyro_kscore._model.dependencies import seeded
from numpyro_kscore._model.handlers import Hidden, purpose_of_local_densities
from numpyro_kscore._model.implicit import Implicit
from numpyro_kscore._model.layout import support_transform
from numpyro_kscore._model.package_guide import PackageGuide, Split
from numpyro_kscore._model.preimages import announce_label
from numpyro_kscore._model.prototype import find_prototype
from numpyro_kscore._model.supports import has_dynamic_support
from numpyro_kscore._model.target import Target
from numpyro_kscore._starts.from_model import LARGEST_SMALL, LARGEST_START, find_start, warn_of_loss
from numpyro_kscore._starts.pathfinder import COLD_SCALE
from numpyro_kscore._starts.start import ExactDraws, GaussianStart
from numpyro_kscore._transports.affine import Affine, Diagonal, GaussianMixture, OfFirst
from numpyro_kscore._transports.conditional import Conditional
from numpyro_kscore._transports.network import (
    Perceptron,
    ResidualNetwork,
    push_network,
    standard_normal,
)
from numpyro_kscore._transports.skewed import Skewed
from numpyro_kscore._transports.transport import Chain, LocalDensity, push_density
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.keys import check_key

# Widths of the network, and those after a start that changes with scales: with more units and more
# steps some draws of such a guide had weights of a hundred others
# (benchmarks/results/2026-11-30-shapes-of-priors.md).
WIDTHS, SCALED_WIDTHS = (128, 128), (64, 64)
# The warning if no search has found a start for many latents, in words; and the loss if none is
# possible.
MANY = (
    "no start was found for {} latents. Its draws have independent coordinates, and are far from "
    "the posterior at first: do not trust spreads. Fewer latents, amortize= for those in plates, "
    "or another form of the model may help"
)
COLD = "the guide starts as a narrow Gaussian at init_loc_fn, as with warm_start=False"
# Names of parameters of transports other than the start itself.
_NAMES = {OfFirst: "scales", Conditional: "conditional", Skewed: "skewed"}
# Dimensions in which the volume of the map from noise is followed. In fewer a kernel sees all there
# is, and a map that never folds would have to tear a ring open; in more a step takes O(d³), once
# where the network's last hidden layer is narrower than that and for each draw where it is not.
SMALLEST_LOCAL, LARGEST_LOCAL, LARGEST_WIDTH = 4, 1_000, 128


class AutoImplicit(PosteriorDraws, PackageGuide):
    """A guide that pushes Gaussian noise through a network: any shape of posterior, no density.

    The default network is residual, ``x = loc + scale * ((ε * exp(g(ε))) A + f(ε))``, where f and g
    are a perceptron whose last layer starts at zero and A starts as the identity. f bends it; the
    gate ``exp(g)`` lets one coordinate set the scale of others, as in hierarchical models, and
    makes heavy tails. Fit it with :class:`~numpyro_kscore.ImplicitELBO`.

    The latents are ``m + C x`` with a Gaussian N(m, C Cᵀ) near the posterior, which the guide finds
    when it first sees the model and its data (docs/start), and where it starts. Latents whose
    prior's location or scale depends on other latents are in partially non-centered coordinates
    there.

    Args:
        model: a NumPyro model with continuous latents, those in subsampled plates amortized. Its
            discrete latents are summed out (docs/discrete).
        amortize: name of a plate, or several, whose rows get their latents from one small network
            for all rows (docs/amortize). Given all other latents, the *global* ones, rows must be
            independent of each other. A latent in several of the plates belongs to the first one.
        hidden_dims: widths of the hidden layers; by default 128 and 128, and half of it after a
            start that changes with scales, which leaves less to be learned (docs/start).
        noise_dim: dimension of the noise ε, at least the latent dimension for the default
            network (with less noise the guide would have no density at all); by default the
            latent dimension. With ``amortize`` these are the dimensions of the global latents.
        network: replaces the default network: a callable from noise (noise_dim,) to
            x (latent_dim,), which may use ``numpyro.param``, ``flax_module`` and further sample
            sites marked ``is_auxiliary``; or a flax linen module.
        warm_start: whether to look for a Gaussian near the posterior, see
            :func:`~numpyro_kscore.initial_gaussian` for its cost. Otherwise x is the unconstrained
            latents themselves, and the guide starts as the narrow Gaussian that NumPyro's own
            guides start from.
        init_loc_fn: per-site initial values, see NumPyro's initialization strategies; one of the
            paths of the search starts there.
        init_scale: initial standard deviation of every x, by default 1; without a warm start .1.
        prefix: prefix of the names of parameters and noise sites.
        forward_mode_differentiation: find initial values in forward mode, for models with
            ``while_loop``; give :class:`~numpyro_kscore.ImplicitELBO` the same flag.

    Raises:
        ValueError: for a model without continuous latents, with discrete ones that cannot be
            summed out or with local ones in subsampled plates that are not amortized, for plates
            that cannot be amortized, or a network whose output has the wrong shape.
        ImportError: for discrete latents without funsor.

    Example::

        guide = AutoImplicit(model, hidden_dims=(32, 32))
        svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
        result = svi.run(random.key(0), 400, y, progress_bar=False)
        latents = guide.sample_posterior(random.key(1), result.params, sample_shape=(1000,))
        latents["scale"]  # (1000,)
    """

    prototype_trace: Any  # a dict once the model has been seen; NumPyro leaves it untyped
    noise_dim: Any  # an integer once the model has been seen

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        amortize: str | Sequence[str] | None = None,
        hidden_dims: Sequence[int] | None = None,
        noise_dim: int | None = None,
        network: Callable[[jax.Array], jax.Array] | Any = None,
        warm_start: bool = True,
        init_loc_fn: Callable[..., Any] = init_to_uniform,
        init_scale: float | None = None,
        prefix: str = "auto",
        forward_mode_differentiation: bool = False,
    ) -> None:
        check_settings(amortize, hidden_dims, noise_dim, init_scale)
        if network is not None:
            check_network(network)
        self.amortize = (amortize,) if isinstance(amortize, str) else tuple(amortize or ())
        self.hidden_dims = None if hidden_dims is None else tuple(hidden_dims)
        self.noise_dim = noise_dim
        self.network = network
        self.warm_start = warm_start
        self.init_scale = init_scale
        self.start: GaussianStart | None = None
        self._batches: Batches | None = None
        self._programs: dict[Any, Callable[..., Any]] = {}
        super().__init__(
            model,
            prefix=prefix,
            init_loc_fn=init_loc_fn,
            forward_mode_differentiation=forward_mode_differentiation,
        )

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        asker = type(self).__name__
        target = Target(self.model, args, kwargs)
        check_latents(target, self.init_loc_fn, asker)
        forward = self._forward_mode_differentiation
        if self.amortize:
            check_amortized(target, self.init_loc_fn, self.amortize)
        found = find_prototype(
            numpyro.prng_key(), self._global_model(), args, kwargs, self.init_loc_fn, forward
        )
        check_coordinates(found.latents)
        check_placed(Target(self._global_model(), args, kwargs), found.latents, asker)
        check_plates(found.trace, asker)
        if self.amortize:
            self._amortized().check(found.trace, args, kwargs)
        self._init_latent = jnp.concatenate([jnp.ravel(u) for u in found.latents.values()])
        self._shapes = tuple((name, jnp.shape(u)) for name, u in found.latents.items())
        self.latent_dim = self._init_latent.size
        if self.noise_dim is None:
            self.noise_dim = self._default_noise_dim()
        self._check_noise()
        self.prototype_trace = found.trace
        self._arguments, self._is_in_batches = (args, kwargs), self._batches is not None
        self.start = None
        if self.warm_start and is_concrete_call(asker, (args, kwargs, self._init_latent)):
            given = (args, kwargs, found.latents, forward)
            in_blocks = bool(self.amortize)
            try:
                self.start = find_start(
                    self._global_model(), *given, batches=self._batches, in_blocks=in_blocks
                )
            except Exception as error:  # whatever a model does: a guide can start without
                with Hidden():
                    # A model without a density, which steps could not do without, says why.
                    whole = Target(self._global_model(), args, kwargs)
                    jax.eval_shape(whole.log_density, found.latents)
                warn_of_loss(error, COLD)
            if self.start is None and self.latent_dim > LARGEST_START:
                warnings.warn(f"{asker}: {MANY.format(self.latent_dim)}", UserWarning, stacklevel=2)
        self._is_dynamic = any(
            has_dynamic_support(found.trace[n]["fn"].support) for n in found.latents
        )

    def set_up(self, rng_key: jax.Array, *args: Any, **kwargs: Any) -> None:
        """See the model and its data, and look for a start, as the first ``svi.init`` does.

        Args:
            rng_key: random key; what is found is a function of it.
            *args: arguments of the model.
            **kwargs: keyword arguments of the model.

        Raises:
            TypeError: for anything but a random key.
            ValueError: see the class.
        """
        check_key("rng_key", rng_key, "the data")
        seeded(self._setup_prototype, rng_key, {})(*args, **kwargs)

    def prepare(
        self,
        rng_key: jax.Array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batches: Batches | None = None,
        is_start: bool = True,
    ) -> ExactDraws | None:
        """See the model and its data before a fit, or warn if they are not those seen before.

        Args:
            rng_key: random key.
            args: arguments of the model, those of the first batch with a loader.
            kwargs: keyword arguments of the model.
            batches: all that a loader gives, whose posterior is that of the model.
            is_start: whether the fit starts where the guide does, and not at a state of the user,
                to which other data may belong.

        Returns:
            Draws of the guide as it starts, if it is known to be close to the model of these data.
        """
        is_same = True
        if self.prototype_trace is not None:
            is_same = are_equal(self._arguments, (args, kwargs))
            is_new = is_start and batches is None and not is_same
            if is_new and self.start is not None and not self._is_in_batches:
                warn_of_other_data(type(self).__name__)
        else:
            self._batches = batches
            try:
                self.set_up(rng_key, *args, **kwargs)
            finally:
                self._batches = None
        if not (is_same and is_start) or self.start is None or self._is_in_batches:
            return None
        # Another class, or a network, may push noise elsewhere.
        own = type(self)
        is_own = (own._draw, own._push) == (AutoImplicit._draw, AutoImplicit._push)
        is_found = self.network is None and self.init_scale is None and not self.amortize
        has_noise = self.noise_dim == self.latent_dim
        return self.start.exact_draws if is_own and is_found and has_noise else None

    def forget(self) -> None:
        """Forget the data, and the start that was found: the next data set the guide up anew."""
        self.prototype_trace, self.start, self._programs = None, None, {}

    def _amortized(self, model: Callable[..., Any] | None = None) -> Amortized:
        return Amortized(model or self.model, self.amortize, self.prefix)

    def _global_model(self) -> Callable[..., Any]:
        """The model of the global latents, by Laplace's approximation where rows are amortized."""
        return Marginal(self._amortized()) if self.amortize else self.model

    def _row_posterior(self, *args: Any, **kwargs: Any) -> RowPosterior:
        given = (args, kwargs) if args or kwargs else self._arguments
        return RowPosterior(
            self._amortized(),
            *given,
            self._shapes,
            lambda key, params, count: self._draw_latent(key, params, (count,)),
            lambda params: handlers.substitute(self._coordinates, data=params)(),
        )

    def marginalized(self, model: Callable[..., Any]) -> Split | None:
        """The model and the guide of the global latents alone; None if nothing is amortized.

        Args:
            model: the model.
        """
        if not self.amortize:
            return None
        amortized = self._amortized(model)
        model, reference = (Marginal(amortized, noise) for noise in (normal_noise, no_noise))
        return Split(model, self._draw_globals, reference, amortized.outer)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Draw every latent site of the model once."""
        out = self._draw_globals(*args, **kwargs)
        if not self.amortize:
            return out
        amortized = self._amortized()
        return {**out, **sample_rows(amortized, amortized.outline(args, kwargs, out))}

    def _draw_globals(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Draw the latent sites outside of amortized plates, which may be all."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        elif self._has_loc():
            # Takes a key from the random stream, as the set-up did, but only while parameters are
            # made: a second fit with the same guide and key starts from the same weights.
            numpyro.param(f"{self.prefix}_loc", lambda key: self._init_loc())
        else:
            # The user's network may make its parameters anywhere, so a key is drawn at every call.
            numpyro.prng_key()
        with handlers.trace() as own:
            flat, local = self._draw()
        check_names(self.prefix, own, self.prototype_trace)
        scores = {} if local is None else unravel(local.score, self._shapes)
        coordinates = self._coordinates()
        coordinates.announce(f"_{self.prefix}_coordinates")
        trace, (latents, _) = {}, coordinates.latents(unravel(flat, self._shapes))
        if self._is_dynamic or coordinates.hierarchical:
            # Supports and priors that depend on other sites are known to the model only.
            with handlers.block(hide_fn=lambda site: site["type"] != "param"):
                model = self._amortized().outer if self.amortize else self.model
                trace = Target(model, args, kwargs, self._shapes, (coordinates,)).trace(flat)
        out: dict[str, jax.Array] = {}
        for name, x in unravel(flat, self._shapes).items():
            site = self.prototype_trace[name]
            value = trace[name]["value"] if trace else support_transform(site)(latents[name])
            fn = Implicit(
                value,
                site["fn"].event_dim,
                unconstrained=x,
                # One site carries the density of all.
                local_log_density=None if local is None or out else local.log_density,
                local_score=scores.get(name),
            )
            out[name] = numpyro.sample(name, fn)
        return out

    def _coordinates(self) -> LatentCoordinates:
        """The coordinates of the latents of a draw."""
        start = self.start
        if start is None:
            return LatentCoordinates()
        hierarchical = names_of(start.centering.degrees != 1, self._shapes)
        centering = self._frozen("centering", start.centering) if hierarchical else None
        sizes = None if start.sizes is None else self._frozen("sizes", start.sizes)
        sized = () if start.sizes is None else names_of(start.sizes.vary, self._shapes)
        marginals, shaped = start.marginals, tuple[str, ...]()
        if marginals is not None:
            shaped = names_of(marginals.vary, self._shapes)
            marginals = self._frozen("marginals", marginals)
        given = centering, sizes, self._shapes, hierarchical, sized
        return LatentCoordinates(*given, marginals, shaped)

    def _frozen(self, name: str, tree: Any) -> Any:
        """Arrays as parameters that are not fitted: a result needs no guide with the start."""

        def frozen(path: tuple[Any, ...], leaf: np.ndarray) -> jax.Array:
            whole = "_".join(
                [self.prefix, name, jax.tree_util.keystr(path, simple=True, separator="_")]
            )
            array = jnp.asarray(leaf, self._init_latent.dtype)
            return lax.stop_gradient(numpyro.param(whole, array))

        return jax.tree_util.tree_map_with_path(frozen, tree)

    def _sample_latent(self, *args: Any, **kwargs: Any) -> jax.Array:
        return self._draw()[0]

    def _draw(self) -> tuple[jax.Array, LocalDensity | None]:
        """Flat coordinates of a draw, and their local log density if it is wanted and known."""
        noise = numpyro.sample(
            f"_{self.prefix}_noise",
            standard_normal(self.noise_dim),
            infer={"is_auxiliary": True},
        )
        if self.start is None:
            return self._push(noise)
        if self.start.parts:
            return self._draw_mode(self.start, noise)
        transports = Chain(
            tuple(
                self._frozen(_NAMES.get(type(step), "start"), step)
                for step in self.start.transports.steps
            )
        )
        x, local = self._push(noise)
        if local is not None:
            local = push_density(transports, lax.stop_gradient(x), local)
        return transports.push(x), local

    def _draw_mode(
        self, start: GaussianStart, noise: jax.Array
    ) -> tuple[jax.Array, LocalDensity | None]:
        """A draw near one of several modes, which is drawn first, with fixed probabilities."""
        uniform = dist.Uniform(jnp.zeros(()), 1.0, validate_args=False)
        where = numpyro.sample(f"_{self.prefix}_mode", uniform, infer={"is_auxiliary": True})
        means, factors = (
            np.stack([getattr(part, name) for part in start.parts]) for name in ("mean", "factor")
        )
        mixture = self._frozen("modes", GaussianMixture(start.weights, means, factors))
        announce_label(self.prefix, f"_{self.prefix}_mode", mixture.weights)
        k = jnp.searchsorted(jnp.cumsum(mixture.weights)[:-1], where)
        label = jnp.zeros_like(mixture.weights).at[k].set(1.0)
        return self._push_to_mode(noise, label, mixture.component(k), mixture.weights[k])

    def _push_to_mode(
        self, noise: jax.Array, label: jax.Array, component: Affine, weight: jax.Array
    ) -> tuple[jax.Array, LocalDensity | None]:
        """Noise to latents near the mode of a label, by the Gaussian there."""
        x, local = self._push(noise, label)
        if local is not None:
            log_density = local.log_density + jnp.log(weight)
            local = push_density(component, x, LocalDensity(log_density, local.score))
        return component.push(x), local

    def _push(self, noise: jax.Array, *labels: jax.Array) -> tuple[jax.Array, LocalDensity | None]:
        """Noise (noise_dim,) to x, latents relative to the start, and their local log density.

        The default network also sees the labels, such as which mode the draw is at.
        """
        if self.network is not None:
            return self._apply_network(noise), None
        loc, scale = self._affine()
        if self._is_large():
            diagonal = Diagonal(loc, scale)
            if not purpose_of_local_densities():
                return diagonal.push(noise), None
            local = LocalDensity(standard_normal(self.noise_dim).log_prob(noise), -noise)
            return diagonal.push(noise), push_density(*lax.stop_gradient((diagonal, noise, local)))
        identity = jnp.asarray(np.eye(self.noise_dim, self.latent_dim, dtype=loc.dtype))
        mixing = numpyro.param(f"{self.prefix}_mixing", identity)
        size = self.latent_dim + self.noise_dim
        network = self._perceptron(size, labels)
        purpose = purpose_of_local_densities()
        is_given = self.noise_dim == self.latent_dim and purpose != ""
        if purpose == "step":
            is_given = is_given and SMALLEST_LOCAL <= self.latent_dim <= LARGEST_LOCAL
            is_given = is_given and min(self.latent_dim, network.bottleneck) <= LARGEST_WIDTH
        return push_network(ResidualNetwork(network, loc, scale, mixing, labels), noise, is_given)

    def _is_large(self) -> bool:
        """Whether there are too many latents for a network of all of them."""
        if self.start is None:
            return self.latent_dim > LARGEST_START and self.noise_dim == self.latent_dim
        return self.start.is_by_structure and self.latent_dim > LARGEST_SMALL

    def _perceptron(self, size: int, labels: tuple[jax.Array, ...]) -> Perceptron:
        """The default network from noise, followed by the labels, to (size,)."""
        fan_in = self.noise_dim + sum(label.shape[0] for label in labels)
        is_found = self.start is not None and len(self.start.transports.steps) > 1
        default = SCALED_WIDTHS if is_found else WIDTHS
        widths = default if self.hidden_dims is None else self.hidden_dims
        return perceptron(f"{self.prefix}_layers", fan_in, widths, size)

    def _apply_network(self, noise: jax.Array) -> jax.Array:
        return apply_network(f"{self.prefix}_network", self.network, noise, self.latent_dim)

    def _has_loc(self) -> bool:
        return self.network is None

    def _affine(self) -> tuple[jax.Array, jax.Array]:
        """Location and scale of the Gaussian a guide starts from."""
        loc = numpyro.param(f"{self.prefix}_loc", self._init_loc())
        init_scale = self.init_scale or (COLD_SCALE if self.start is None else 1.0)
        scale = numpyro.param(
            f"{self.prefix}_scale",
            jnp.asarray(np.full(self.latent_dim, init_scale, loc.dtype)),
            constraint=constraints.softplus_positive,
        )
        return loc, scale

    def _init_loc(self) -> jax.Array:
        """The location that a guide starts from."""
        return self._init_latent if self.start is None else jnp.zeros_like(self._init_latent)

    def _default_noise_dim(self) -> int:
        return self.latent_dim

    def _check_noise(self) -> None:
        if self.network is None:
            check_noise(self.noise_dim, self.latent_dim)
