"""A grammar of small models: a number draws one, with its data.

A model is a linear predictor of one to three terms under a likelihood, perhaps with masked or
censored rows and inside a handler; or a vector with a distribution of its own. Terms are numbers
with a prior of any support, slopes, groups, walks, missing covariates, shares, ordered levels,
angles and curves. Data are drawn from the model's own prior predictive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions import transforms
from numpyro.infer.reparam import (
    LocScaleReparam,
    ProjectedNormalReparam,
    Reparam,
    TransformReparam,
)

from numpyro_kscore._util.compiling import quick_jit

__all__ = ["RandomModel", "draw_model"]

MOST_ATTEMPTS = 50
LARGEST = 1e4  # of the data
Rng = np.random.Generator
Term = Callable[[], Array]


@dataclass
class Plan:
    """The choices so far.

    Attributes:
        rng: the choices.
        num_rows: rows of the data.
        words: names of the choices.
        centered: sites to decenter for a reference, and how.
        is_reference: whether the model that runs is the reference, whose walks are decentered too.
    """

    rng: Rng
    num_rows: int
    words: list[str] = field(default_factory=list)
    centered: dict[str, Reparam] = field(default_factory=dict)
    is_reference: bool = False

    def as_reference(self, model: Callable[..., None]) -> Callable[..., None]:
        """The model in a form in which NUTS gets into small scales."""
        inner = handlers.reparam(model, config=self.centered) if self.centered else model

        def reference(*args: Any, **kwargs: Any) -> None:
            self.is_reference = True
            try:
                inner(*args, **kwargs)
            finally:
                self.is_reference = False

        return reference

    def choose(
        self, kind: str, options: Mapping[str, Any], weights: Sequence[float] | None = None
    ) -> Any:
        """One of the options, whose name becomes a word; weights add up to 1."""
        word = str(self.rng.choice(list(options), p=weights))
        self.words.append(f"{kind}:{word}")
        return options[word]

    def index(self, size: int) -> np.ndarray:
        """A group for each row; every group has one."""
        rest = self.rng.integers(size, size=self.num_rows - size)
        return self.rng.permutation(np.concatenate([np.arange(size), rest]))


@dataclass(frozen=True)
class RandomModel:
    """A model of the grammar.

    Attributes:
        number: what it was drawn by.
        words: its choices.
        model: takes ``y``, or draws it.
        reference: the same density in a form that suits NUTS; it has the sites of ``model``.
        y: the data, float32 or int32.
    """

    number: int
    words: tuple[str, ...]
    model: Callable[..., None]
    reference: Callable[..., None]
    y: np.ndarray


# --- Priors ---------------------------------------------------------------------------------------

REAL: dict[str, Callable[[], dist.Distribution]] = {
    "Normal": lambda: dist.Normal(0.5, 1),
    "StudentT": lambda: dist.StudentT(4, 0, 1),
    "Cauchy": lambda: dist.Cauchy(0, 0.5),
    "Laplace": lambda: dist.Laplace(0, 1),
    "Logistic": lambda: dist.Logistic(0, 0.7),
    "Gumbel": lambda: dist.Gumbel(0, 0.7),
    "SoftLaplace": lambda: dist.SoftLaplace(0, 0.7),
    "AsymmetricLaplace": lambda: dist.AsymmetricLaplace(0, 1, 1.5),
    "Mixture": lambda: dist.MixtureSameFamily(
        dist.Categorical(jnp.array([0.3, 0.7])), dist.Normal(jnp.array([-0.5, 0.7]), 0.8)
    ),
    "Affine": lambda: dist.TransformedDistribution(
        dist.Normal(0, 1), transforms.AffineTransform(0.5, 0.8)
    ),
}
POSITIVE: dict[str, Callable[[], dist.Distribution]] = {
    "HalfNormal": lambda: dist.HalfNormal(1),
    "HalfCauchy": lambda: dist.HalfCauchy(0.7),
    "Gamma": lambda: dist.Gamma(2, 2),
    "InverseGamma": lambda: dist.InverseGamma(3, 2),
    "LogNormal": lambda: dist.LogNormal(0, 0.7),
    "Exponential": lambda: dist.Exponential(1),
    "Weibull": lambda: dist.Weibull(1, 1.5),
    "Chi2": lambda: dist.Chi2(2),
    "Gompertz": lambda: dist.Gompertz(1, 0.5),
    "TruncatedNormal": lambda: dist.TruncatedNormal(0.5, 1, low=0.0),
    "TruncatedStudentT": lambda: dist.TruncatedDistribution(dist.StudentT(4, 0, 1), low=0.0),
    "Folded": lambda: dist.FoldedDistribution(dist.Normal(0.5, 1)),
    "Exp": lambda: dist.TransformedDistribution(dist.Normal(0, 0.6), transforms.ExpTransform()),
}
UNIT: dict[str, Callable[[], dist.Distribution]] = {
    "Beta": lambda: dist.Beta(2, 3),
    "Uniform": lambda: dist.Uniform(0, 1),
    "Kumaraswamy": lambda: dist.Kumaraswamy(1.5, 2.0),
    "Sigmoid": lambda: dist.TransformedDistribution(
        dist.Normal(0, 1), transforms.SigmoidTransform()
    ),
    "BetaProportion": lambda: dist.BetaProportion(0.4, 4.0),
}
OTHER: dict[str, Callable[[], dist.Distribution]] = {
    "Uniform": lambda: dist.Uniform(-2, 2),
    "TruncatedNormal": lambda: dist.TruncatedNormal(0, 1, low=-1.0, high=2.0),
    "TruncatedCauchy": lambda: dist.TruncatedCauchy(0, 1, low=-3.0, high=3.0),
    "Pareto": lambda: dist.Pareto(0.5, 3.0),
}


def logit(x: Array) -> Array:
    return jnp.log(x) - jnp.log1p(-x)


def scale_prior(plan: Plan) -> Callable[[], dist.Distribution]:
    """A prior of a scale."""
    kinds = ("HalfNormal", "HalfCauchy", "Gamma", "LogNormal", "Exponential", "InverseGamma")
    return plan.choose("scale", {name: POSITIVE[name] for name in kinds})


# --- Terms of the predictor -----------------------------------------------------------------------


def number(plan: Plan, name: str) -> Term:
    """One latent number, as it is or by a logarithm or logit."""
    supports = {"real": REAL, "positive": POSITIVE, "unit": UNIT, "interval": OTHER}
    support = str(plan.rng.choice(list(supports), p=[0.4, 0.3, 0.2, 0.1]))
    prior = plan.choose(support, supports[support])
    link = {"positive": jnp.log, "unit": logit}.get(support)
    if link is None or plan.rng.random() < 0.5:
        link = lambda x: x  # noqa: E731
    return lambda: link(numpyro.sample(name, prior()))


def slopes(plan: Plan, name: str) -> Term:
    """Weights of standardized features."""
    size = int(plan.rng.integers(2, 6))
    features = plan.rng.normal(size=(plan.num_rows, size)) / size**0.5
    correlation = 0.5 * np.eye(size) + 0.5
    prior = plan.choose(
        "slopes",
        {
            "Normal": lambda: dist.Normal(0, 1).expand([size]).to_event(1),
            "Laplace": lambda: dist.Laplace(0, 1).expand([size]).to_event(1),
            "MultivariateNormal": lambda: dist.MultivariateNormal(jnp.zeros(size), correlation),
            "MultivariateStudentT": lambda: dist.MultivariateStudentT(
                5.0, jnp.zeros(size), jnp.linalg.cholesky(jnp.asarray(correlation))
            ),
            "ZeroSumNormal": lambda: dist.ZeroSumNormal(1.0, (size,)),
            "LowRank": lambda: dist.LowRankMultivariateNormal(
                jnp.zeros(size), jnp.ones((size, 1)) * 0.7, jnp.ones(size) * 0.5
            ),
        },
    )
    return lambda: jnp.asarray(features) @ numpyro.sample(name, prior())


def effects(plan: Plan, name: str, size: int, plate: str, loc: Any = 0.0) -> Term:
    """Effects of a plate with an unknown scale, (size,), in one of four forms."""
    scale = scale_prior(plan)
    form = plan.choose("form", {f: f for f in ("centered", "noncentered", "decentered", "student")})
    if form in ("centered", "student"):
        shape = ("df",) if form == "student" else ()
        plan.centered[name] = LocScaleReparam(0, shape_params=shape)

    def sample() -> Array:
        tau = numpyro.sample(f"{name}_scale", scale())
        center = loc() if callable(loc) else loc
        config = {name: LocScaleReparam(0)} if form == "decentered" else {}
        with numpyro.plate(plate, size), handlers.reparam(config=config):
            if form == "noncentered":
                return center + tau * numpyro.sample(f"{name}_base", dist.Normal(0, 1))
            if form == "student":
                return numpyro.sample(name, dist.StudentT(5.0, center, tau))
            return numpyro.sample(name, dist.Normal(center, tau))

    return sample


def groups(plan: Plan, name: str) -> Term:
    """Groups in a plate, nested in others or crossed with them."""
    size = int(plan.rng.integers(3, 8))
    index = plan.index(size)
    kind = plan.choose("groups", {k: k for k in ("one", "nested", "crossed")})
    if kind == "nested":
        parents, parent = np.arange(size) % 3, effects(plan, f"{name}_parent", 3, f"{name}_parents")
        nested = effects(plan, name, size, f"{name}_plate", lambda: parent()[parents])
        return lambda: nested()[index]
    inner = effects(plan, name, size, f"{name}_plate")
    if kind == "one":
        return lambda: inner()[index]
    other, second = effects(plan, f"{name}_other", 3, f"{name}_columns"), plan.index(3)
    return lambda: inner()[index] + other()[second]


def varying_slopes(plan: Plan, name: str) -> Term:
    """Intercepts and slopes of groups, correlated by an unknown Cholesky factor."""
    x, index, size = plan.rng.normal(size=plan.num_rows), plan.index(4), 4
    plan.words.append("correlated")

    def sample() -> Array:
        scales = numpyro.sample(f"{name}_scales", dist.HalfNormal(1).expand([2]).to_event(1))
        factor = numpyro.sample(f"{name}_factor", dist.LKJCholesky(2, 1.5))
        with numpyro.plate(f"{name}_plate", size):
            base = numpyro.sample(f"{name}_base", dist.Normal(0, 1).expand([2]).to_event(1))
        values = base @ (scales[:, None] * factor).T
        return values[index, 0] + values[index, 1] * x

    return sample


def walk(plan: Plan, name: str) -> Term:
    """A path in time, by NumPyro's scan or its distribution of random walks."""
    size = int(plan.rng.integers(4, 9))
    times, scale = np.sort(plan.index(size)), scale_prior(plan)
    kind = plan.choose("path", {k: k for k in ("walk", "autoregression", "GaussianRandomWalk")})

    def sample() -> Array:
        tau, rho = numpyro.sample(f"{name}_scale", scale()), 1.0
        if kind == "autoregression":
            rho = numpyro.sample(f"{name}_share", dist.Uniform(-1, 1))
        if plan.is_reference:
            steps = numpyro.sample(f"{name}_steps", dist.Normal(0, 1).expand([size]).to_event(1))
            path = [tau * steps[0]]
            for standard in steps[1:]:
                path.append(rho * path[-1] + tau * standard)
            return numpyro.deterministic(name, jnp.stack(path))[times]
        if kind == "GaussianRandomWalk":
            return numpyro.sample(name, dist.GaussianRandomWalk(tau, size))[times]

        def step(last: Array, _: Any) -> tuple[Array, Array]:
            value = numpyro.sample(name, dist.Normal(rho * last, tau))
            return value, value

        return scan(step, jnp.zeros(()), None, length=size)[1][times]

    return sample


def missing(plan: Plan, name: str) -> Term:
    """The slope of a covariate of which some entries are missing and have a site of their own."""
    x, absent = plan.rng.normal(size=plan.num_rows), plan.rng.choice(plan.num_rows, 3, False)

    def sample() -> Array:
        loc = numpyro.sample(f"{name}_loc", dist.Normal(0, 1))
        numpyro.factor(f"{name}_seen", dist.Normal(loc, 1).log_prob(np.delete(x, absent)).sum())
        with numpyro.plate(f"{name}_absent", len(absent)):
            values = numpyro.sample(name, dist.Normal(loc, 1))
        return numpyro.sample(f"{name}_slope", dist.Normal(0, 1)) * jnp.asarray(x).at[absent].set(
            values
        )

    return sample


def levels(plan: Plan, name: str) -> Term:
    """A vector of a bounded kind: shares of known levels, ordered levels, a direction."""
    size, index = 3, plan.index(3)
    x, known = np.linspace(0, 1, plan.num_rows), np.array([-1.0, 0.0, 2.0])
    basis = np.stack([np.cos(6 * x), np.sin(6 * x)], axis=1)

    def direction() -> Array:
        with handlers.reparam(config={name: ProjectedNormalReparam()}):
            return basis @ numpyro.sample(name, dist.ProjectedNormal(jnp.ones(2)))

    def curve() -> Array:
        rate = numpyro.sample(f"{name}_rate", dist.Gamma(3, 1))
        height = numpyro.sample(f"{name}_height", dist.Normal(1, 0.5))
        return height * jnp.exp(-rate * x)

    def ordered() -> dist.Distribution:
        return dist.TransformedDistribution(
            dist.Normal(0, 0.7).expand([size]).to_event(1), transforms.OrderedTransform()
        )

    return plan.choose(
        "levels",
        {
            "Dirichlet": lambda: (
                2 * numpyro.sample(name, dist.Dirichlet(jnp.full(size, 1.5)))[index]
            ),
            "shares": lambda: jnp.broadcast_to(
                numpyro.sample(name, dist.Dirichlet(jnp.ones(3))) @ known, (plan.num_rows,)
            ),
            "ordered": lambda: numpyro.sample(name, ordered())[index],
            "angle": lambda: jnp.sin(6 * x - numpyro.sample(name, dist.VonMises(0.5, 2.0))),
            "direction": direction,
            "curve": curve,
        },
    )


TERMS = {
    "number": number, "slopes": slopes, "groups": groups, "varying": varying_slopes,
    "walk": walk, "levels": levels, "missing": missing,
}  # fmt: skip


# --- Likelihoods ----------------------------------------------------------------------------------


def _scaled(family: Callable[[Array, Array], dist.Distribution]) -> Callable[..., Any]:
    """A family of location and unknown scale."""

    def make(plan: Plan) -> Callable[[Array], dist.Distribution]:
        scale = scale_prior(plan)
        return lambda eta: family(eta, numpyro.sample("noise", scale()))

    return make


def _fixed(family: Callable[[Array], dist.Distribution]) -> Callable[..., Any]:
    return lambda plan: family


def _marginal_mixture(eta: Array) -> dist.Distribution:
    share = numpyro.sample("share", dist.Beta(4, 2))
    gap = numpyro.sample("gap", dist.Gamma(9, 3))
    both = jnp.stack([eta, eta + gap], axis=-1)
    shares = dist.Categorical(jnp.stack([share, 1 - share]))
    return dist.MixtureSameFamily(shares, dist.Normal(both, 0.5))


def _ordinal(eta: Array) -> dist.Distribution:
    prior = dist.TransformedDistribution(
        dist.Normal(jnp.array([-1.0, 0.3]), 0.7).to_event(1), transforms.OrderedTransform()
    )
    return dist.OrderedLogistic(eta, numpyro.sample("cutpoints", prior))


def _zero_inflated(eta: Array) -> dist.Distribution:
    gate = numpyro.sample("gate", dist.Beta(2, 4))
    return dist.ZeroInflatedPoisson(gate, jnp.exp(eta + 1))


LIKELIHOODS: dict[str, Callable[[Plan], Callable[[Array], dist.Distribution]]] = {
    "Normal": _scaled(dist.Normal),
    "StudentT": _scaled(partial(dist.StudentT, 4.0)),
    "LogNormal": _scaled(dist.LogNormal),
    "Laplace": _scaled(dist.Laplace),
    "Bernoulli": _fixed(lambda eta: dist.Bernoulli(logits=eta)),
    "Binomial": _fixed(lambda eta: dist.Binomial(8, logits=eta)),
    "Poisson": _fixed(lambda eta: dist.Poisson(jnp.exp(eta))),
    "NegativeBinomial": _scaled(lambda eta, c: dist.NegativeBinomial2(jnp.exp(eta), 1 / c)),
    "Gamma": _scaled(lambda eta, c: dist.Gamma(1 / c, 1 / (c * jnp.exp(eta)))),
    "Beta": _scaled(lambda eta, c: dist.BetaProportion(jax.nn.sigmoid(eta), 1 + 4 / c)),
    "Ordinal": _fixed(_ordinal),
    "Mixture": _fixed(_marginal_mixture),
    "ZeroInflatedPoisson": _fixed(_zero_inflated),
}
REAL_DATA = ("Normal", "StudentT", "Laplace")


def _observe(plan: Plan, name: str) -> Callable[[dist.Distribution, Any], None]:
    """A way to see rows: all, some, all with half the weight, or some with a bound alone."""
    seen = plan.rng.random(plan.num_rows) < 0.7
    seen[:3] = True

    def plain(rows: dist.Distribution, y: Any) -> None:
        with numpyro.plate("rows", plan.num_rows):
            numpyro.sample("y", rows, obs=y)

    def masked(rows: dist.Distribution, y: Any) -> None:
        with numpyro.plate("rows", plan.num_rows), handlers.mask(mask=jnp.asarray(seen)):
            numpyro.sample("y", rows, obs=y)

    def censored(rows: dist.Distribution, y: Any) -> None:
        if y is None:
            plain(rows, None)
            return
        # Rows that are not seen are known to be above their value less one.
        beyond = jnp.log(jnp.maximum(1 - rows.cdf(y - 1), 1e-30))
        numpyro.factor("seen", jnp.where(seen, rows.log_prob(y), beyond).sum())

    def scaled(rows: dist.Distribution, y: Any) -> None:
        with handlers.scale(scale=0.5):
            plain(rows, y)

    options = {"all": plain, "masked": masked, "scaled": scaled}
    if name in REAL_DATA:
        options["censored"] = censored
    rare = 0.5 / (len(options) - 1)
    return plan.choose("rows", options, [0.5, *[rare] * (len(options) - 1)])


# --- Models ---------------------------------------------------------------------------------------


def predictor(plan: Plan) -> Callable[..., None]:
    """A predictor of one to three terms under a likelihood."""
    # A third of all terms, as priors of numbers are many.
    shares = [1 / 3] + [2 / 3 / (len(TERMS) - 1)] * (len(TERMS) - 1)
    names = plan.rng.choice(list(TERMS), size=int(plan.rng.integers(1, 4)), p=shares)
    terms = []
    for i, kind in enumerate(names):
        plan.words.append(f"term:{kind}")
        terms.append(TERMS[str(kind)](plan, f"{kind}{i}"))
    family = str(plan.rng.choice(list(LIKELIHOODS)))
    plan.words.append(f"likelihood:{family}")
    likelihood = LIKELIHOODS[family](plan)
    observe = _observe(plan, family)

    def model(y: Any = None) -> None:
        eta = jnp.zeros(plan.num_rows)
        for term in terms:
            eta = eta + term()
        observe(likelihood(eta), y)

    return model


def table(plan: Plan) -> Callable[..., None]:
    """Rows of a vector: correlated numbers, counts of classes, directions."""
    n = plan.num_rows

    def correlated(y: Any = None) -> None:
        scales = numpyro.sample("scales", dist.Gamma(2, 2).expand([3]).to_event(1))
        factor = numpyro.sample("factor", dist.LKJCholesky(3, 1.0))
        loc = numpyro.sample("loc", dist.Normal(0, 1).expand([3]).to_event(1))
        rows = dist.MultivariateNormal(loc, scale_tril=scales[:, None] * factor)
        with numpyro.plate("rows", n):
            numpyro.sample("y", rows, obs=y)

    def matrix(y: Any = None) -> None:
        correlation = numpyro.sample("correlation", dist.LKJ(3, 2.0))
        with numpyro.plate("rows", n):
            numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(3), correlation), obs=y)

    def classes(y: Any = None) -> None:
        concentration = numpyro.sample("concentration", dist.Gamma(3, 1))
        shares = numpyro.sample("shares", dist.Dirichlet(concentration * jnp.ones(4)))
        with numpyro.plate("rows", n):
            numpyro.sample("y", dist.Multinomial(3, shares), obs=y)

    def overdispersed(y: Any = None) -> None:
        mean = numpyro.sample("mean", dist.Dirichlet(jnp.ones(3)))
        strength = numpyro.sample("strength", dist.LogNormal(1, 1))
        with numpyro.plate("rows", n):
            numpyro.sample("y", dist.DirichletMultinomial(mean * strength, 6), obs=y)

    def circular(y: Any = None) -> None:
        loc = numpyro.sample("loc", dist.VonMises(0.0, 0.5))
        strength = numpyro.sample("strength", dist.Gamma(2, 1))
        with numpyro.plate("rows", n):
            numpyro.sample("y", dist.VonMises(loc, strength), obs=y)

    def precision(y: Any = None) -> None:
        factor = numpyro.sample("factor", dist.WishartCholesky(5.0, jnp.eye(2)))
        with numpyro.plate("rows", n):
            numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(2), scale_tril=factor), obs=y)

    options = {f.__name__: f for f in (correlated, matrix, classes, overdispersed, circular)}
    return plan.choose("table", options | {"precision": precision})


def handled(plan: Plan, model: Callable[..., None]) -> Callable[..., None]:
    """The model, some of them inside a scope or with a latent that a handler transforms."""
    options = {k: k for k in ("none", "scope", "affine")}
    handler = plan.choose("handler", options, [0.7, 0.15, 0.15])
    if handler == "scope":
        plan.centered = {f"a/{name}": how for name, how in plan.centered.items()}
        # The data keep their name.
        return handlers.scope(model, prefix="a", hide_types=["plate"])
    if handler == "affine":

        def shifted(y: Any = None) -> None:
            prior = dist.TransformedDistribution(
                dist.Normal(0, 1), [transforms.AffineTransform(0, 2), transforms.ExpTransform()]
            )
            with handlers.reparam(config={"extra": TransformReparam()}):
                extra = numpyro.sample("extra", prior)
            numpyro.factor("tied", dist.Gamma(2, 1).log_prob(extra))
            model(y)

        return shifted
    return model


def draw_model(index: int) -> RandomModel:
    """The model of a number, with data of its prior predictive.

    Raises:
        ValueError: if no draw of the data was finite and small.
    """
    rng = np.random.default_rng([index, 20_261_129])
    plan = Plan(rng, int(rng.integers(8, 31)))
    model = table(plan) if rng.random() < 0.12 else predictor(plan)
    model = handled(plan, model)
    reference = plan.as_reference(model)

    def simulate(number: Array, attempt: Array) -> Array:
        key = random.fold_in(random.key(number), attempt)
        trace = handlers.trace(handlers.seed(model, key)).get_trace()
        (y,) = (site["value"] for name, site in trace.items() if name.rpartition("/")[2] == "y")
        return y

    draw = quick_jit(simulate, runs_once=True)
    for attempt in range(MOST_ATTEMPTS):
        y = np.asarray(draw(np.uint32(index), np.uint32(attempt)))
        varies = y.ndim > 1 or np.ptp(y) > 0
        if np.isfinite(y).all() and np.abs(y).max() < LARGEST and varies:
            kind = np.int32 if np.issubdtype(y.dtype, np.integer) else np.float32
            return RandomModel(index, tuple(plan.words), model, reference, y.astype(kind))
    raise ValueError(f"model {index}: expected finite data; got none in {MOST_ATTEMPTS} draws")
