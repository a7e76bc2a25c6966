"""Variants of the autoencoder that are compared: estimator, weight of the divergence, and prior."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from numpyro.infer import ELBO, TraceMeanField_ELBO

from examples.common.tables import Row
from examples.wae.objectives import ROWS, make_objective
from examples.wae.priors import PRIORS
from numpyro_kscore import ImplicitELBO, ScoreEstimator
from numpyro_kscore.estimators import Median, kef, kef_cg
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import ConjugateGradient, Krylov


def _kef(latent_dim: int, base: str | None = None) -> ELBO:
    """KEF in as many steps as make an error below 1 % on 64 codes.

    It is what conjugate gradients come to, without a stop that an accelerator has to wait for.
    """
    steps = 32 if latent_dim < 32 else 16 if latent_dim < 64 else 12
    estimator = kef(1e-4, solver=Krylov(steps))
    return ImplicitELBO(1, aggregate=ROWS, estimator=estimator, base=base, debias=None)


# What a variant changes: the estimator with its base and bias correction, for a latent dimension,
# or the divergence itself; then its weight, and the prior where it is not N(0, I).
OBJECTIVES: dict[str, Callable[[int], ELBO]] = {
    "default": partial(make_objective, "default", None),
    "whitened ν-method": partial(make_objective, "whitened-nu", None),
    "KEF-CG": partial(make_objective, "kef-cg", None),
    "KEF": _kef,
    "ν-method": partial(make_objective, "nu", None),
    "SSGE": partial(make_objective, "ssge", None),
    "KEF-CG, base prior": lambda _: ImplicitELBO(
        1, aggregate=ROWS, estimator=kef_cg(1e-4), base="model", debias=None
    ),
    "KEF, base prior": partial(_kef, base="model"),
    "KEF, base prior, own scales": lambda _: ImplicitELBO(
        1,
        aggregate=ROWS,
        estimator=ScoreEstimator(
            regularizer=Tikhonov(2e-4), solver=ConjugateGradient(), standardize="diagonal"
        ),
    ),
    "whitened ν-method, base zero": lambda dim: ImplicitELBO(
        1, aggregate=ROWS, estimator=make_objective("whitened-nu", None, dim).estimator, base=None
    ),
    "own scales only": lambda _: ImplicitELBO(
        1,
        aggregate=ROWS,
        estimator=ScoreEstimator(
            regularizer=NuMethod(45), bandwidth=Median(0.8), standardize="diagonal"
        ),
        debias="jackknife",
    ),
    "VAE": lambda _: TraceMeanField_ELBO(),
}
WEIGHTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


class Variant(NamedTuple):
    """The settings that the name of a variant stands for."""

    objective: Callable[[int], ELBO]
    weight: float
    prior: str
    later: str = ""  # a prior that is fitted to the codes of the trained autoencoder


VARIANTS = {
    f"{name}, weight {weight:g}{'' if prior == 'normal' else f', {prior}'}": Variant(
        objective, weight, prior
    )
    for name, objective in OBJECTIVES.items()
    for weight in WEIGHTS
    for prior in PRIORS
}
AFTERWARDS = " afterwards"
VARIANTS |= {
    f"{name}, {prior}{AFTERWARDS}": variant._replace(later=prior)
    for name, variant in VARIANTS.items()
    if variant.prior == "normal"
    for prior in ("mixture", "flow")
}


def trained_as(name: str) -> str:
    """The variant that is trained, to whose codes a prior may be fitted afterwards."""
    return name.rsplit(", ", 1)[0] if name.endswith(AFTERWARDS) else name


def estimator_of(row: Row) -> str:
    """The name of a variant without its weight."""
    return row["variant"].split(", weight")[0]
