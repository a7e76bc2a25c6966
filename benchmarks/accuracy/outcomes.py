"""A fit as users run it, and what it says of itself: the columns that two benchmarks share."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpyro
from jax import Array
from numpyro.infer import SVI

from benchmarks.accuracy.report import within_limits
from examples.common.tables import Row
from numpyro_kscore import AutoImplicit, FitResult, ImplicitELBO, diagnose, fit, log_evidence

__all__ = [
    "FIGURES",
    "SAID",
    "Fitted",
    "classify",
    "fit_as_users_do",
    "is_called_good",
    "is_wrong_and_good",
    "report",
]

FIGURES = ("mean", "low", "high")
SAID = (
    *("steps", "fit_cpu", "weights_cpu", "khat", "effective"),
    *("converged", "cause", "doubt", "warned", "reason", "verdict"),
)
GOOD_KHAT = 0.7


class Fitted(NamedTuple):
    """A fitted guide.

    Attributes:
        svi: model, guide and loss.
        result: what ``fit`` returned.
        said: the columns of ``SAID``.
    """

    svi: SVI
    result: FitResult
    said: Row

    def draw(self, key: Array, num_draws: int, **data: Any) -> dict[str, Array]:
        """Draws of all sites, (num_draws, ...) each."""
        shape = (num_draws,)
        return self.svi.guide.sample_posterior(key, self.result.params, sample_shape=shape, **data)


def fit_as_users_do(
    model: Callable[..., Any],
    key: Array,
    data: Mapping[str, Any],
    max_steps: int = 5_000,
    with_verdict: bool = False,
    with_evidence: bool = True,
) -> Fitted:
    """``AutoImplicit`` by ``fit`` with the defaults, then its importance weights.

    Raises:
        KeyboardInterrupt: if the fit was interrupted, which it reports as a result.
    """
    svi = SVI(model, AutoImplicit(model), numpyro.optim.Adam(1e-2), ImplicitELBO())
    begin = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(svi, key, progress_bar=False, max_steps=max_steps, **data)
    info, fitted = result.info, time.process_time()
    # NumPyro says of any angle that it is handled poorly.
    warned = {str(w.message) for w in caught if "circular sample site" not in str(w.message)}
    if info.cause == "interrupted":
        raise KeyboardInterrupt
    said: Row = dict.fromkeys(SAID, "") | {
        "steps": info.steps,
        "fit_cpu": round(fitted - begin, 1),
        "converged": int(info.converged),
        "cause": info.cause,
        "doubt": info.doubt,
        "warned": "; ".join(sorted(text.partition(". ")[0][:160] for text in warned)),
        "reason": info.reason,
    }
    if with_evidence:
        evidence = log_evidence(svi, result, **data)
        said |= {
            "weights_cpu": round(time.process_time() - fitted, 1),
            "khat": round(evidence.khat, 3),
            "effective": round(evidence.num_effective),
        }
    if with_verdict:
        found = diagnose(svi, result, progress_bar=False, **data)
        said["verdict"] = found.verdict
    return Fitted(svi, result, said)


def is_called_good(row: Row) -> bool:
    """Whether a fit converged without a doubt, a warning, or a ``diagnose`` that says otherwise."""
    calm = bool(int(row["converged"])) and not row["doubt"] and not row["warned"]
    return calm and row["verdict"] in ("", "good")


def classify(row: Row) -> str:
    """``"right"``, ``"called wrong"``, ``"wrong and called good"``, ``"put aside"`` or ``"crash"``.

    A wrong fit is also called wrong where k̂ of its weights is above 0.7.
    """
    if row["error"]:
        return "crash"
    if row["mean"] == "":
        return "put aside"
    if within_limits(*(float(row[name]) for name in FIGURES)):
        return "right"
    doubted = not is_called_good(row) or not float(row["khat"]) <= GOOD_KHAT
    return "called wrong" if doubted else "wrong and called good"


def is_wrong_and_good(row: Row) -> bool:
    """Whether a fit is wrong and ``fit`` neither doubts it nor warns, whatever k̂ is."""
    wrong = row["mean"] != "" and not within_limits(*(float(row[name]) for name in FIGURES))
    return wrong and is_called_good(row)


def report(rows: Sequence[Row], name: str) -> list[str]:
    """Lines with the number of each outcome, the names of all that are not right, and the cost."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(classify(row), []).append(f"{row[name]} ({row['seed']})")
    lines = [
        f"{kind}: {len(names)} of {len(rows)}"
        + ("" if kind == "right" else f": {', '.join(names)}")
        for kind, names in sorted(kinds.items())
    ]
    silent = [f"{row[name]} ({row['seed']})" for row in rows if is_wrong_and_good(row)]
    lines.append(f"wrong without doubt or warning: {len(silent)}: {', '.join(silent)}")
    cpu = [float(row["fit_cpu"]) for row in rows if row["fit_cpu"] != ""]
    return [*lines, f"CPU seconds of fits: {math.fsum(cpu):.0f}"]
