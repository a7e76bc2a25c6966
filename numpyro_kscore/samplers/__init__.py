"""From a fitted guide to samplers: a warm start for any, and chains that make the fit exact."""

from numpyro_kscore.samplers._refine import refine
from numpyro_kscore.samplers._refinement import Refinement
from numpyro_kscore.samplers._warm_start import WarmStart, warm_start

__all__ = ["Refinement", "WarmStart", "refine", "warm_start"]
