"""Models with discrete latents, each also written with the sum over their values by hand."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.funsor import markov

# NumPy, so that they are double where the models are.
Y = np.array([-2.1, -1.4, 0.3, 1.9, 2.4, 3.0, -0.7])
WORDS = np.random.default_rng(0).integers(0, 5, size=(6, 4))
TRANSITIONS = 0.2 + 0.4 * np.eye(3)


def sum_over_states(of_each):
    """The log density of a chain by hand, from those of its states at each step, (steps, 3)."""
    state = jnp.log(TRANSITIONS[0]) + of_each[0]
    for now in of_each[1:]:
        state = logsumexp(state[:, None] + jnp.log(TRANSITIONS), axis=0) + now
    return logsumexp(state)


def in_rows(model, **rows):
    """A model whose plates draw given rows."""
    return handlers.substitute(model, data={n: jnp.array(index) for n, index in rows.items()})


def mixture(y=Y, by_hand=False, rows=None):
    """Locations have a hierarchical prior, so that their coordinates may be non-centered."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    spread = numpyro.sample("spread", dist.HalfNormal(2.0))
    means = numpyro.sample("means", dist.Normal(0.0, spread).expand([3]).to_event(1))
    with numpyro.plate("rows", 7, subsample_size=rows) as index:
        some = jnp.asarray(y)[index]
        if by_hand:
            of_each = jnp.log(weights) + dist.Normal(means, 1.0).log_prob(some[:, None])
            numpyro.factor("y", logsumexp(of_each, axis=1))
        else:
            kind = numpyro.sample("kind", dist.Categorical(weights))
            mean = numpyro.deterministic("mean", means[kind])
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=some)


def local_latents(by_hand=False):
    """A positive latent in every row, whose prior depends on the row's discrete one."""
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    with numpyro.plate("rows", 7, subsample_size=3) as index:
        if by_hand:
            x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.positive, (), ()))
            of_each = jnp.log(jnp.stack([1 - share, share])) + dist.LogNormal(
                jnp.array([0.0, 1.0]), 0.5
            ).log_prob(x[:, None])
            numpyro.factor("x_prior", logsumexp(of_each, axis=1))
        else:
            kind = numpyro.sample("kind", dist.Bernoulli(share))
            x = numpyro.sample("x", dist.LogNormal(1.0 * kind, 0.5))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=jnp.asarray(Y)[index])


def hmm(y=Y, by_hand=False, as_loop=False):
    """States in time; emissions have two independent columns, in a plate."""
    means = numpyro.sample("means", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    both = jnp.stack([y, y[::-1]], axis=1)
    if by_hand:
        of_each = dist.Normal(means, sd).log_prob(both[:, :, None]).sum(1)
        numpyro.factor("y", sum_over_states(of_each))
        return

    def step(state, now):
        state = numpyro.sample("state", dist.Categorical(jnp.asarray(TRANSITIONS)[state]))
        with numpyro.plate("columns", 2):
            numpyro.sample("y", dist.Normal(means[state], sd), obs=now)
        return state, None

    if as_loop:
        state = 0
        for t in markov(range(len(y))):
            state = numpyro.sample(f"state_{t}", dist.Categorical(jnp.asarray(TRANSITIONS)[state]))
            with numpyro.plate(f"columns_{t}", 2):
                numpyro.sample(f"y_{t}", dist.Normal(means[state], sd), obs=both[t])
    else:
        scan(step, 0, both)


def masked_hmm(by_hand=False):
    """A hidden Markov model of which some steps were not observed."""
    means = numpyro.sample("means", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
    seen = np.array([1, 0, 1, 1, 0, 1, 0], bool)
    if by_hand:
        state = jnp.log(jnp.asarray(TRANSITIONS))[0]
        for t, now in enumerate(Y):
            if t:
                state = logsumexp(state[:, None] + jnp.log(jnp.asarray(TRANSITIONS)), axis=0)
            state = state + seen[t] * dist.Normal(means, 1.0).log_prob(now)
        numpyro.factor("y", logsumexp(state))
        return

    def step(state, now):
        state = numpyro.sample("state", dist.Categorical(jnp.asarray(TRANSITIONS)[state]))
        with handlers.mask(mask=now[1]):
            numpyro.sample("y", dist.Normal(means[state], 1.0), obs=now[0])
        return state, None

    scan(step, 0, (jnp.asarray(Y), jnp.asarray(seen)))


def topics(by_hand=False, rows=None):
    """Words in documents: plates in plates."""
    topic = numpyro.sample("topic", dist.Dirichlet(jnp.ones((3, 5))).to_event(1))
    with numpyro.plate("documents", 4, subsample_size=rows) as index:
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
        words = jnp.asarray(WORDS)[:, index]
        with numpyro.plate("words", 6):
            if by_hand:
                numpyro.factor("w", jnp.log(jnp.einsum("dk,kwd->wd", share, topic[:, words])))
            else:
                kind = numpyro.sample("kind", dist.Categorical(share))
                numpyro.sample("w", dist.Categorical(topic[kind]), obs=words)


def chained_switch(by_hand=False):
    """A chain, a discrete latent in every step of it, and one outside that every step sees."""
    means = numpyro.sample("means", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    outer, inner = jnp.array([0.3, 0.7]), jnp.array([0.4, 0.6])
    if by_hand:
        shifts = means[:, None, None] + jnp.array([0.0, 1.0])[:, None] + jnp.array([-0.5, 0.5])
        # Axes: time, state, outside, inside; summed over what is inside.
        of_each = jnp.log(inner) + dist.Normal(shifts, 1.0).log_prob(Y[:, None, None, None])
        of_each = logsumexp(of_each, axis=-1)
        state = jnp.log(TRANSITIONS[0])[:, None] + of_each[0]
        for now in of_each[1:]:
            state = logsumexp(state[:, None] + jnp.log(TRANSITIONS)[:, :, None], axis=0) + now
        numpyro.factor("y", logsumexp(jnp.log(outer) + logsumexp(state, axis=0)))
        return
    outside = numpyro.sample("outside", dist.Categorical(outer))

    def step(state, now):
        state = numpyro.sample("state", dist.Categorical(jnp.asarray(TRANSITIONS)[state]))
        inside = numpyro.sample("inside", dist.Categorical(inner))
        numpyro.sample("y", dist.Normal(means[state] + outside + inside - 0.5, 1.0), obs=now)
        return state, None

    scan(step, 0, Y)


def chained_sizes(by_hand=False):
    """A chain whose every step has positive latents in a plate, and a factor."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    if by_hand:
        sizes = numpyro.sample("sizes", dist.Gamma(2.0, rate).expand([7, 2]).to_event(2))
        of_each = dist.Normal(sizes[:, :, None] + jnp.arange(3.0), 1.0).log_prob(Y[:, None, None])
        of_each = of_each.sum(1) + 0.1 * Y[:, None] * jnp.arange(3.0)
        numpyro.factor("y", sum_over_states(of_each))
        return

    def step(state, now):
        moves = dist.Categorical(jnp.asarray(TRANSITIONS)[state])
        state = numpyro.sample("state", moves, infer={"enumerate": "parallel"})
        numpyro.factor("tilt", 0.1 * now * state)
        with numpyro.plate("columns", 2):
            sizes = numpyro.sample("sizes", dist.Gamma(2.0, rate))
            numpyro.sample("y", dist.Normal(sizes + state, 1.0), obs=now)
        return state, None

    scan(step, 0, jnp.asarray(Y))
