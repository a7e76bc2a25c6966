"""The score estimators of an objective that is given none."""

from __future__ import annotations

from numpyro_kscore.estimators._fit.bandwidth import Median
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.regularizers._filters import Tikhonov
from numpyro_kscore.regularizers._iterations import NuMethod
from numpyro_kscore.solvers._solvers import ConjugateGradient

__all__ = ["OF_AGGREGATES", "OF_POSTERIORS"]

# Numbers, not "auto": the best choice for one set of particles is far too strong for the average
# over the steps of a fit (benchmarks/results/2026-11-21-choice-inside-a-fit.md).
OF_POSTERIORS = ScoreEstimator(regularizer=NuMethod(45), bandwidth=Median(0.8), standardize="full")
# KEF-CG with λ = 1e-4 where codes have unit variance, the same in every unit (docs/wae_report).
OF_AGGREGATES = ScoreEstimator(
    regularizer=Tikhonov(2e-4), solver=ConjugateGradient(), bandwidth="median", standardize="none"
)
