"""The autoencoder as a NumPyro model and guide, and its training with one program per epoch."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from numpyro import handlers
from numpyro.contrib.module import flax_module
from numpyro.infer import ELBO, SVI
from tqdm import tqdm

from examples.wae.data import Images, to_batch
from examples.wae.networks import WIDTH, make_networks
from examples.wae.objectives import ROWS, make_objective
from examples.wae.priors import PRIORS, make_prior, spread_examples
from numpyro_kscore import ImplicitELBO
from numpyro_kscore._fit.checkpoint import load_checkpoint, save_checkpoint
from numpyro_kscore._fit.svi import strongly_typed

COSTS = ("norm", "squared", "bernoulli")


class Settings(NamedTuple):
    """Settings of a run.

    Attributes:
        estimator: a name in ``ESTIMATORS``.
        value: parameter of the estimator; None takes the value in ``ESTIMATORS``.
        latent_dim: dimension of the codes.
        batch_size: images per step.
        learning_rate: learning rate of Adam, whose first moment decays by .5.
        decay_steps: steps over which the learning rate falls to zero along a cosine; 0 keeps it.
        cost: reconstruction cost: ``norm`` is the distance ``|x - x̂|``, ``squared`` half its
            square, ``bernoulli`` minus the log probability.
        seed: seed of all random numbers.
        width: channels after the first convolution.
        weight: of the divergence of the codes from the prior, next to the reconstruction cost.
        prior: a name in ``PRIORS``.
    """

    estimator: str = "default"
    value: float | None = None
    latent_dim: int = 8
    batch_size: int = 64
    learning_rate: float = 1e-4
    decay_steps: int = 0
    cost: str = "norm"
    seed: int = 0
    width: int = WIDTH
    weight: float = 1.0
    prior: str = "normal"


def reconstruction_cost(kind: str, x: Array, logits: Array) -> Array:
    """Reconstruction cost of each image: (n, ...) and (n, ...) -> (n,)."""
    x, logits = (a.reshape(a.shape[0], -1) for a in (x, logits))
    if kind == "bernoulli":
        return optax.sigmoid_binary_cross_entropy(logits, x).sum(1)
    squares = jnp.sum((x - jax.nn.sigmoid(logits)) ** 2, axis=1)
    return 0.5 * squares if kind == "squared" else jnp.sqrt(squares)


class Autoencoder:
    """Model, guide and optimizer of one run.

    Args:
        settings: the settings.
        shape: height, width and channels of an image.
        objective: used instead of that of the settings.

    Raises:
        ValueError: for an unknown cost, prior or estimator, or a weight that is not positive.
    """

    def __init__(
        self,
        settings: Settings,
        shape: tuple[int, int, int],
        objective: ELBO | None = None,
    ) -> None:
        if settings.cost not in COSTS:
            raise ValueError(f"cost: expected one of {', '.join(COSTS)}; got {settings.cost!r}")
        if settings.prior not in PRIORS:
            raise ValueError(f"prior: expected one of {', '.join(PRIORS)}; got {settings.prior!r}")
        if not settings.weight > 0:
            raise ValueError(f"weight: expected a positive number; got {settings.weight!r}")
        self.settings = settings
        self.shape = tuple(shape)
        self.encoder, self.decoder = make_networks(shape, settings.latent_dim, settings.width)
        if objective is None:
            objective = make_objective(settings.estimator, settings.value, settings.latent_dim)
        guide = self.guide
        if isinstance(objective, ImplicitELBO):
            guide = objective.stateful(self.model, guide)
        rate: Any = settings.learning_rate
        if settings.decay_steps:
            rate = optax.cosine_decay_schedule(rate, settings.decay_steps)
        self.svi = SVI(self.model, guide, optax.adam(rate, b1=0.5), objective)

    def model(self, x: Array, weight: Array | None = None) -> None:
        """Codes from the prior; the log likelihood is minus the reconstruction cost.

        ``weight`` takes the place of that of the settings, and may be traced.
        """
        dim = self.settings.latent_dim
        decode = flax_module("decoder", self.decoder, input_shape=(1, dim))
        prior = self.declare_prior(x)
        with numpyro.plate(ROWS, x.shape[0]):
            z = numpyro.sample("z", prior)
            cost = reconstruction_cost(self.settings.cost, x, decode(z))
            # The whole objective over the weight, to which Adam is indifferent.
            weight = self.settings.weight if weight is None else weight
            numpyro.factor("reconstruction", -cost / weight)

    def guide(self, x: Array, weight: Array | None = None) -> None:
        """A Gaussian code for each image; the density of their mixture is unknown."""
        codes = self.declare_codes(x)
        with numpyro.plate(ROWS, x.shape[0]):
            numpyro.sample("z", codes, infer={"implicit": True})

    def declare_codes(self, x: Array) -> dist.Distribution:
        """Gaussian codes of images, batch shape (n,), with the encoder as a module."""
        encode = flax_module("encoder", self.encoder, input_shape=(1, *self.shape))
        mean, sd = encode(x)
        return dist.Normal(mean, sd).to_event(1)

    def declare_prior(self, examples: Array) -> dist.Distribution:
        """The distribution of one code, with its parameters; they may start from examples."""
        settings = self.settings
        return make_prior(settings.prior, settings.latent_dim, self.declare_codes, examples)

    def init(self, images: Images | None = None) -> Any:
        """The initial training state.

        Args:
            images: training images for a prior that starts from some; without them the state is
                good for its structure and shapes only.
        """
        examples = jnp.zeros((self.settings.batch_size, *self.shape))
        if images is not None:
            examples = spread_examples(images.train)
        return strongly_typed(self.svi.init(random.key(self.settings.seed), examples))

    def make_epoch(self, images: Images) -> Callable[[Any, Array], tuple[Any, Array]]:
        """Compile ``(state, key) -> (state, mean loss)``: every image once, in random order."""
        return compile_epoch(self.svi.update, images, self.settings.batch_size)

    def encode(self, params: dict[str, Any], x: Array) -> tuple[Array, Array]:
        """Means and standard deviations of codes."""
        return self.encoder.apply({"params": params["encoder$params"]}, x)

    def decode(self, params: dict[str, Any], z: Array) -> Array:
        """Logits of pixels."""
        return self.decoder.apply({"params": params["decoder$params"]}, z)

    def prior(self, params: dict[str, Any]) -> dist.Distribution:
        """The trained prior of a code, event shape (latent_dim,)."""
        no_examples = jnp.zeros((1, *self.shape))
        return handlers.substitute(self.declare_prior, data=params)(no_examples)


def compile_epoch(
    update: Callable[[Any, Array], tuple[Any, Array]], images: Images, batch_size: int
) -> Callable[[Any, Array], tuple[Any, Array]]:
    """Compile ``(state, key) -> (state, mean loss)`` from one step, ``(state, batch)``.

    Raises:
        ValueError: if there are fewer images than ``batch_size``.
    """
    epoch = jax.jit(make_pass(update, images, batch_size), donate_argnums=0)
    # Pixels are an argument, because the compiler would process a constant of 47 MB.
    pixels = jnp.asarray(images.train)
    return lambda state, key: epoch(state, key, pixels)


def batches_of(images: Images, batch_size: int) -> int:
    """Steps of an epoch: an incomplete batch is left out."""
    return len(images.train) // batch_size


def make_pass(
    update: Callable[..., tuple[Any, Array]], images: Images, batch_size: int
) -> Callable[..., tuple[Any, Array]]:
    """A pass over all images, ``(state, key, pixels, *rest) -> (state, mean loss)``.

    Args:
        update: one step, ``(state, batch, *rest) -> (state, loss)``.
        images: training images; their pixels are an argument of the pass.
        batch_size: images per step.

    Raises:
        ValueError: if there are fewer images than ``batch_size``.
    """
    num_batches = batches_of(images, batch_size)
    if num_batches == 0:
        raise ValueError(
            f"batch_size: expected at most the {len(images.train)} training images; got "
            f"{batch_size}"
        )

    def epoch(state: Any, key: Array, pixels: Array, *rest: Any) -> tuple[Any, Array]:
        def step(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, Array]:
            rows, key = inputs
            return update(state, to_batch(key, pixels[rows], images.is_binary), *rest)

        order_key, key = random.split(key)
        order = random.permutation(order_key, pixels.shape[0])
        order = order[: num_batches * batch_size].reshape(num_batches, batch_size)
        keys = random.split(key, num_batches)
        state, losses = lax.scan(step, state, (order, keys))
        return state, jnp.mean(losses) / batch_size

    return epoch


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
        params: parameters of encoder and decoder.
        losses: mean loss of each epoch, an estimate of the objective per image.
        seconds: seconds of each epoch; the first one of a process includes compilation.
    """

    params: dict[str, Any]
    losses: np.ndarray
    seconds: np.ndarray


def train(
    autoencoder: Autoencoder,
    images: Images,
    num_epochs: int,
    checkpoint: Path | None = None,
    every: int = 10,
    progress: bool = True,
) -> Trained:
    """Train, or resume from a checkpoint.

    Args:
        autoencoder: the autoencoder to train.
        images: training images.
        num_epochs: total number of epochs, including those in the checkpoint.
        checkpoint: file to write to, and to resume from if it exists.
        every: epochs between two writes.
        progress: whether to show a progress bar.

    Raises:
        ValueError: if the checkpoint has other settings.
        FloatingPointError: if the loss is not finite.
    """
    state, losses, seconds = first_state(autoencoder, images, checkpoint)
    epoch = autoencoder.make_epoch(images)
    key = random.fold_in(random.key(autoencoder.settings.seed), 1)

    bar = tqdm(range(len(losses), num_epochs), disable=not progress, unit="epoch")
    for number in bar:
        start = time.perf_counter()
        # The key depends on the epoch only, so a resumed run gives the same result.
        state, loss = epoch(state, random.fold_in(key, number))
        loss = float(loss)
        losses = np.append(losses, loss)
        seconds = np.append(seconds, time.perf_counter() - start)
        bar.set_postfix(loss=f"{loss:.3f}")
        if not np.isfinite(loss):
            raise FloatingPointError(
                f"training: expected a finite loss; got {loss} in epoch {number + 1}. Take a "
                "stronger regularization with --value, or a smaller --learning-rate"
            )
        is_last = number == num_epochs - 1
        if checkpoint is not None and (is_last or (number + 1) % every == 0):
            save_state(checkpoint, autoencoder.settings, images, state, losses, seconds)
    return Trained(autoencoder.svi.get_params(state), losses, seconds)


def first_state(
    autoencoder: Autoencoder, images: Images, checkpoint: Path | None
) -> tuple[Any, np.ndarray, np.ndarray]:
    """The state that training goes on from, with losses and seconds of the epochs before it.

    Raises:
        ValueError: if the checkpoint has other settings.
    """
    state = autoencoder.init(images)
    if checkpoint is None or not checkpoint.exists():
        return state, np.empty(0), np.empty(0)
    settings = _record(autoencoder.settings, images)
    state, record, series = load_checkpoint(checkpoint, state)
    # What a record does not name has its default.
    record = Settings._field_defaults | record
    if record != settings:
        changed = [name for name in settings if record.get(name) != settings[name]]
        raise ValueError(
            f"{checkpoint}: expected a run with these settings; got another {changed[0]}, "
            f"{record.get(changed[0])!r} there and {settings[changed[0]]!r} here. Give "
            "another path"
        )
    return state, series[0], series[1]


def save_state(
    path: Path,
    settings: Settings,
    images: Images,
    state: Any,
    losses: np.ndarray,
    seconds: np.ndarray,
) -> None:
    """Write what :func:`first_state` reads."""
    save_checkpoint(path, state, _record(settings, images), np.stack([losses, seconds]))


def _record(settings: Settings, images: Images) -> dict[str, Any]:
    return settings._asdict() | {"images": images.name}
