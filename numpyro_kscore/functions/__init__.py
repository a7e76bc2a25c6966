"""Inference over functions: measurement sets, and priors known by simulation."""

from numpyro_kscore.functions._learned_prior import LearnedPrior, LearnedPriorInfo, learn_prior
from numpyro_kscore.functions._measurement import Measurement, measure, sampled_prior

__all__ = [
    "LearnedPrior",
    "LearnedPriorInfo",
    "Measurement",
    "learn_prior",
    "measure",
    "sampled_prior",
]
