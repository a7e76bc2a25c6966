"""Samplers that start from a fitted guide: a warm start for any, and chains that refine the fit."""

from numpyro_kscore.samplers._refine import Refinement, refine
from numpyro_kscore.samplers._warm_start import WarmStart, warm_start

__all__ = ["Refinement", "WarmStart", "refine", "warm_start"]
