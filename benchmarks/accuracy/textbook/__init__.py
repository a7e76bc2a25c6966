"""Posteriors of textbooks and case studies, in raw units and centered where these are."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.textbook import dynamics, factors, fields, groups, regressions

__all__ = ["TEXTBOOK"]

TEXTBOOK: dict[str, Callable[[], Posterior]] = {
    "lotka_volterra": dynamics.lotka_volterra,
    "rats": groups.rats,
    "pumps": groups.pumps,
    "icar": fields.icar,
    "capture": factors.capture,
    "pharmacokinetics": dynamics.pharmacokinetics,
    "sir": dynamics.sir,
    "smooth_rw2": fields.smooth_rw2,
    "bradley_terry": groups.bradley_terry,
    "multinomial_logit": regressions.multinomial_logit,
    "growth_curve": dynamics.growth_curve,
    "zero_inflated_nb": regressions.zero_inflated_nb,
    "instrumental": regressions.instrumental,
    "missing_data": regressions.missing_data,
    "factor_model": factors.factor_model,
    "robust_t": regressions.robust_t,
    "tobit": groups.tobit,
    "exgaussian_rt": groups.exgaussian_rt,
    "mrp": groups.mrp,
    "gp_counts": fields.gp_counts,
}
