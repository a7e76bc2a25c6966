"""Log likelihoods of a decoder by annealed importance sampling: lower and upper bounds.

``log p(x) = log ∫ p(z) p(x | z) dz`` is the log normalizer of a code's posterior. Chains go from
the prior to the posterior through ``p(z) p(x | z)^β``, with one Hamiltonian transition for each β.
Their weights have mean p(x), so the log of their average is a lower bound on average (Neal 2001).
Backward chains from an exact draw of the posterior, which a simulated image provides, give an upper
bound (Grosse, Ghahramani and Adams 2015); the gap between the two bounds the error. The step size
follows the acceptance rate as in Wu, Burda, Salakhutdinov and Grosse (2017).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import logsumexp
from jax.tree_util import Partial
from tqdm import tqdm

LogLikelihood = Callable[[Array, Array], Array]
# β is a sigmoid over (-SLOPE, SLOPE), with small steps near the prior and the posterior.
SLOPE = 4.0
# Random variation of the step size: a path of a fixed length can be a whole period and end where it
# started.
JITTER = 0.5
FIRST_STEP_SIZE, STEP_SIZE_FACTOR, TARGET_ACCEPTANCE = 0.1, 1.02, 0.8


class Annealing(NamedTuple):
    """Settings of the annealing.

    Attributes:
        num_temperatures: number of values of β above 0.
        num_chains: chains for each image.
        num_leapfrog: leapfrog steps of a transition.
        batch_size: images at once.
    """

    num_temperatures: int = 1000
    num_chains: int = 5
    num_leapfrog: int = 10
    batch_size: int = 50


class Annealed(NamedTuple):
    """Results of the chains for each image.

    Attributes:
        log_likelihood: a lower bound on average, in nats, (n,); an upper bound from exact codes.
        acceptance: acceptance rate of the transitions, (n,).
    """

    log_likelihood: np.ndarray
    acceptance: np.ndarray


def temperatures(num_temperatures: int) -> np.ndarray:
    """Values of β from 0 to 1, (num_temperatures + 1,)."""
    line = 1 / (1 + np.exp(-np.linspace(-SLOPE, SLOPE, num_temperatures + 1)))
    return (line - line[0]) / (line[-1] - line[0])


def annealed_log_likelihood(
    key: Array,
    log_likelihood: LogLikelihood,
    images: Array,
    prior: dist.Distribution,
    annealing: Annealing = Annealing(),  # noqa: B008 (a tuple)
    exact_codes: Array | None = None,
    progress: bool = False,
) -> Annealed:
    """Log likelihood of each image.

    Args:
        key: random key.
        log_likelihood: log likelihood of one image given one code: (latent_dim,), image -> (). Of a
            ``jax.tree_util.Partial`` the parameters may change without another compilation.
        images: (n, ...).
        prior: distribution of a code, event shape (latent_dim,).
        annealing: temperatures, chains and transitions.
        exact_codes: draws from the posterior of each image's code, (n, latent_dim), that the chains
            of an upper bound start from; None starts from the prior.
        progress: whether to show a progress bar.

    Cost: ``num_temperatures (num_leapfrog + 1)`` gradients for each image and chain, of the decoder
    and of the prior's density.
    """
    n = images.shape[0]
    size = min(annealing.batch_size, n)
    if not isinstance(log_likelihood, Partial):
        log_likelihood = Partial(log_likelihood)
    anneal = partial(_anneal, log_likelihood, prior, annealing, exact_codes is not None)
    values, rates = [], []
    for number, start in enumerate(tqdm(range(0, n, size), disable=not progress, desc="AIS")):
        # The last batch is filled up with the first images, whose values are dropped below.
        rows = np.arange(start, start + size) % n
        codes = None if exact_codes is None else exact_codes[rows]
        value, rate = anneal(random.fold_in(key, number), images[rows], codes)
        values.append(np.asarray(value))
        rates.append(np.asarray(rate))
    return Annealed(np.concatenate(values)[:n], np.concatenate(rates)[:n])


def sandwich(
    key: Array,
    log_likelihood: LogLikelihood,
    simulate: Callable[[Array, Array], Array],
    num_images: int,
    prior: dist.Distribution,
    annealing: Annealing = Annealing(),  # noqa: B008 (a tuple)
) -> tuple[Annealed, Annealed]:
    """Lower and upper bounds for images that the decoder makes.

    Args:
        key: random key.
        log_likelihood: as for :func:`annealed_log_likelihood`.
        simulate: draws an image given a code: key, (latent_dim,) -> image.
        num_images: number of images.
        prior: distribution of a code, event shape (latent_dim,).
        annealing: temperatures, chains and transitions.
    """
    code_key, image_key, lower_key, upper_key = random.split(key, 4)
    codes = prior.sample(code_key, (num_images,))
    images = jax.vmap(simulate)(random.split(image_key, num_images), codes)
    run = partial(annealed_log_likelihood, annealing=annealing)
    lower = run(lower_key, log_likelihood, images, prior)
    upper = run(upper_key, log_likelihood, images, prior, exact_codes=codes)
    return lower, upper


def _make_transition(
    log_likelihood: LogLikelihood, prior: dist.Distribution, annealing: Annealing, backwards: bool
) -> Callable[..., tuple[Array, Array, Array]]:
    """A transition: code, image, step size, β, key -> new code, log p(x | z), acceptance rate."""
    # Imported here, because the import takes a second and only this function needs it.
    try:
        from blackjax.mcmc import hmc
    except ImportError as error:
        error.add_note("Annealed importance sampling needs blackjax: pip install blackjax")
        raise
    transition = hmc.build_kernel()
    inverse_mass = jnp.ones(prior.event_shape)

    def one_chain(
        z: Array, x: Array, step_size: Array, beta: Array, key: Array
    ) -> tuple[Array, Array, Array]:
        def log_density(z: Array) -> Array:
            return prior.log_prob(z) + beta * log_likelihood(z, x)

        before = hmc.init(z, log_density)
        jitter_key, key = random.split(key)
        step_size = step_size * random.uniform(jitter_key, minval=1 - JITTER, maxval=1.0)
        after, info = transition(
            key, before, log_density, step_size, inverse_mass, annealing.num_leapfrog
        )
        # log p(x | z) comes from the state, without another evaluation of the decoder.
        at = after if backwards else before
        likelihood = (at.logdensity - prior.log_prob(at.position)) / beta
        return after.position, likelihood, info.acceptance_rate

    return one_chain


@partial(jax.jit, static_argnums=(2, 3))
def _anneal(
    log_likelihood: LogLikelihood,
    prior: dist.Distribution,
    annealing: Annealing,
    backwards: bool,
    key: Array,
    images: Array,
    codes: Array | None,
) -> tuple[Array, Array]:
    """Values and acceptance rates of a batch of images."""
    chains = annealing.num_chains
    one_chain = _make_transition(log_likelihood, prior, annealing, backwards)
    all_chains = jax.vmap(jax.vmap(one_chain, (0, None, None, None, 0)), in_axes=(0, 0, 0, None, 0))

    def step(
        carry: tuple[Array, Array, Array, Array], inputs: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array, Array, Array], None]:
        z, log_weight, step_size, rate = carry
        beta, change, key = inputs
        keys = random.split(key, z.shape[:2])
        z, likelihood, accepted = all_chains(z, images, step_size, beta, keys)
        accepted = jnp.mean(accepted, axis=1)
        factor = jnp.where(accepted > TARGET_ACCEPTANCE, STEP_SIZE_FACTOR, 1 / STEP_SIZE_FACTOR)
        return (z, log_weight + change * likelihood, step_size * factor, rate + accepted), None

    betas = temperatures(annealing.num_temperatures)
    changes = np.diff(betas)
    betas = betas[1:]
    if backwards:
        betas, changes = betas[::-1], -changes[::-1]
    n = images.shape[0]
    start_key, key = random.split(key)
    if codes is None:
        z = prior.sample(start_key, (n, chains))
    else:
        # Several chains start from one draw: each has the right distribution, as the bound needs.
        z = jnp.repeat(codes[:, None], chains, axis=1)
    zeros = jnp.zeros((n, chains))
    carry = (z, zeros, jnp.full(n, FIRST_STEP_SIZE), jnp.zeros(n))
    inputs = (jnp.asarray(betas), jnp.asarray(changes), random.split(key, len(betas)))
    inputs = jax.tree.map(lambda a, like=z: a.astype(like.dtype), inputs[:2]) + inputs[2:]
    (_, log_weight, _, rate), _ = lax.scan(step, carry, inputs)
    value = logsumexp(log_weight, axis=1) - jnp.log(chains)
    return (-value if backwards else value), rate / len(betas)
