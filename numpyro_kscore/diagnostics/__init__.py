"""Diagnostics of guides without a density: tests, importance weights, distances and plots."""

from numpyro_kscore._model.draws import GuideDraws
from numpyro_kscore._util.pareto import importance_resample, pareto_smooth, weight_ess
from numpyro_kscore.diagnostics._arviz import to_arviz
from numpyro_kscore.diagnostics._calibration import vsbc
from numpyro_kscore.diagnostics._diagnose import diagnose
from numpyro_kscore.diagnostics._diagnosis import Diagnosis, Values
from numpyro_kscore.diagnostics._discrepancy import (
    Discrepancy,
    SteinTest,
    ksd,
    spread_ratios,
    stein_discrepancy,
)
from numpyro_kscore.diagnostics._evidence import log_evidence
from numpyro_kscore.diagnostics._guide_draws import evaluate_guide
from numpyro_kscore.diagnostics._khat import KhatEstimate, fisher_divergence, khat
from numpyro_kscore.diagnostics._missed_modes import Modes
from numpyro_kscore.diagnostics._movement import Movement
from numpyro_kscore.diagnostics._plots import (
    plot_convergence,
    plot_pairs,
    plot_score_field,
    plot_vsbc,
    plot_weights,
)
from numpyro_kscore.diagnostics._two_samples import mmd_squared, sliced_wasserstein
from numpyro_kscore.diagnostics._weighing import Evidence, Weighing

__all__ = [
    "Diagnosis",
    "Discrepancy",
    "Evidence",
    "GuideDraws",
    "KhatEstimate",
    "Modes",
    "Movement",
    "SteinTest",
    "Values",
    "Weighing",
    "diagnose",
    "evaluate_guide",
    "fisher_divergence",
    "importance_resample",
    "khat",
    "ksd",
    "log_evidence",
    "mmd_squared",
    "pareto_smooth",
    "plot_convergence",
    "plot_pairs",
    "plot_score_field",
    "plot_vsbc",
    "plot_weights",
    "sliced_wasserstein",
    "spread_ratios",
    "stein_discrepancy",
    "to_arviz",
    "vsbc",
    "weight_ess",
]
