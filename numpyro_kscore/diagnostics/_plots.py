"""Plots of a guide without a density: contours of its log density, its score, its weights.

Traces, forests, predictive checks and the k̂ of ``loo`` are ArviZ's, from the tree that
:func:`~numpyro_kscore.to_arviz` returns; these plots are the ones it lacks. Matplotlib is imported
where it is used, and every function returns the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numpyro_kscore._util.checks import as_points
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.pareto import GOOD_KHAT, pareto_smooth
from numpyro_kscore.diagnostics._khat import KhatEstimate
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator

# Most draws for contours, and points of the grid on a side: enough for the eye.
CONTOUR_DRAWS = 1_000
GRID = 60
ARROWS = 80
# Depths of contours below the top, in nats: 3, 2 and 1 standard deviations of a Gaussian.
DEPTHS = (-4.5, -2.0, -0.5)


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plots: expected matplotlib; got none installed. "
            'Run: pip install "numpyro-kscore[examples]"'
        ) from error
    return plt


def _names(names: Sequence[str] | None, dim: int) -> list[str]:
    labels = [f"u{k}" for k in range(dim)] if names is None else list(names)
    if len(labels) != dim:
        raise ValueError(
            f"names: expected {dim}, one for each column of the samples; got {len(labels)}"
        )
    return labels


def _ends(x: np.ndarray) -> np.ndarray:
    # Quantiles: the range of a heavy tail would shrink the bulk of the draws to a dot.
    return np.quantile(x, [0.002, 0.998], axis=0)


def _grid(pair: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = _ends(pair)
    margin = 0.1 * (high - low)
    axes = [np.linspace(a, b, GRID) for a, b in zip(low - margin, high + margin, strict=True)]
    first, second = np.meshgrid(*axes)
    return first, second, np.stack([first.ravel(), second.ravel()], axis=1)


def _density_and_scores() -> Callable[[np.ndarray, np.ndarray], Any]:
    """Make a program for the log density at points (m, 2) and the scores at draws (n, 2)."""

    def evaluate(draws: Any, points: Any) -> Any:
        score = ScoreEstimator().fit(draws)
        return score.log_density(points), score.at_samples

    return quick_jit(evaluate)


def plot_pairs(samples: Any, names: Sequence[str] | None = None, reference: Any = None) -> Any:
    """Every pair of columns, with contours of the estimated log density of the pair.

    The log density is that of a kernel score estimate, and contours are 0.5, 2 and 4.5 nats below
    its top: at one, two and three standard deviations of a Gaussian. No score says which of two
    modes far apart is higher: there the contours compare shapes, not masses.

    Args:
        samples: draws, (n, d), 2 ≤ d ≤ 8.
        names: names of the columns.
        reference: other draws, (m, d), shown beneath.

    Returns:
        The figure.

    Raises:
        TypeError: if draws are not floating point.
        ValueError: for another number of columns, or fewer than 10 draws.
        ImportError: without matplotlib.

    Example::

        from numpyro_kscore.diagnostics import plot_pairs

        figure = plot_pairs(draws.samples, names=["loc", "log scale"])
        figure.savefig("pairs.png")
    """
    x = np.asarray(as_points("samples", samples, minimum=10))
    dim = x.shape[1]
    if not 2 <= dim <= 8:
        raise ValueError(
            f"samples: expected 2 to 8 columns; got {dim}. Choose some: samples[:, :8]"
        )
    labels, plt = _names(names, dim), _pyplot()
    other = None if reference is None else np.asarray(as_points("reference", reference, dim=dim))
    # One program for all pairs.
    evaluate = _density_and_scores()
    size = max(4.0, 1.8 * dim)
    figure, panels = plt.subplots(dim, dim, figsize=(size, size), layout="constrained")
    for i in range(dim):
        for j in range(dim):
            panel = panels[i, j]
            if j > i:
                panel.axis("off")
                continue
            if i == j:
                edges = np.histogram_bin_edges(x[:, i], 30, tuple(_ends(x[:, i])))
                if other is not None:
                    panel.hist(other[:, i], edges, density=True, color="0.75")
                panel.hist(x[:, i], edges, density=True, histtype="step", color="C0")
                panel.set_yticks([])
            else:
                pair = x[:, [j, i]]
                if other is not None:
                    panel.plot(*other[:, [j, i]].T, ".", ms=1, color="0.75", zorder=0)
                panel.plot(*pair[:CONTOUR_DRAWS].T, ".", ms=1, color="C0", alpha=0.4)
                first, second, points = _grid(pair)
                fitted = pair[:CONTOUR_DRAWS].astype(np.float32)
                height = np.asarray(evaluate(fitted, points.astype(np.float32))[0])
                panel.contour(
                    first, second, (height - height.max()).reshape(GRID, GRID), DEPTHS, colors="k",
                    linewidths=0.8, linestyles="solid",
                )  # fmt: skip
                panel.set(xlim=(first.min(), first.max()), ylim=(second.min(), second.max()))
            if i == dim - 1:
                panel.set_xlabel(labels[j])
            if j == 0 and i > 0:
                panel.set_ylabel(labels[i])
    return figure


def plot_score_field(samples: Any, scores: Any = None, names: Sequence[str] | None = None) -> Any:
    """The estimated score of draws in the plane as arrows, over contours of their log density.

    Args:
        samples: draws, (n, 2).
        scores: the model's score at them, (n, 2), as arrows of another color.
        names: names of the two columns.

    Returns:
        The figure.

    Raises:
        TypeError: if draws or scores are not floating point.
        ValueError: unless there are two columns and at least 10 draws.
        ImportError: without matplotlib.

    Example::

        from numpyro_kscore.diagnostics import plot_score_field

        figure = plot_score_field(draws.samples, draws.scores, names=["loc", "log scale"])
        figure.savefig("score.png")
    """
    x = np.asarray(as_points("samples", samples, dim=2, minimum=10))
    labels, plt = _names(names, 2), _pyplot()
    fitted = x[:CONTOUR_DRAWS].astype(np.float32)
    first, second, points = _grid(x)
    height, at_samples = _density_and_scores()(fitted, points.astype(np.float32))
    height = np.asarray(height).reshape(GRID, GRID)
    figure, panel = plt.subplots(figsize=(5, 4.5), layout="constrained")
    panel.contourf(first, second, np.maximum(height - height.max(), -8), 12, cmap="Greys")
    some = slice(0, min(ARROWS, x.shape[0]))
    own = np.asarray(at_samples)[some]
    # One scale for both, so that their lengths can be compared.
    longest = np.quantile(np.linalg.norm(own, axis=1), 0.9)
    style = {"width": 0.004, "scale": 8 * longest, "scale_units": "width"}
    panel.quiver(*x[some].T, *own.T, color="C0", label="guide", **style)
    if scores is not None:
        s = np.asarray(as_points("scores", scores, dim=2))
        panel.quiver(*x[some].T, *s[some].T, color="C1", label="model", **style)
        panel.legend()
    panel.set(xlabel=labels[0], ylabel=labels[1])
    return figure


def plot_weights(estimate: KhatEstimate) -> Any:
    """Log importance weights, sorted, before and after Pareto smoothing; k̂ and its interval.

    Args:
        estimate: from :func:`~numpyro_kscore.khat`.

    Returns:
        The figure.

    Raises:
        ImportError: without matplotlib or ArviZ.

    Example::

        from numpyro_kscore import khat
        from numpyro_kscore.diagnostics import plot_weights

        figure = plot_weights(khat(draws))
        figure.savefig("weights.png")
    """
    plt = _pyplot()
    raw = np.sort(estimate.log_weights)[::-1]
    raw = raw - np.logaddexp.reduce(raw)
    smoothed = np.sort(pareto_smooth(estimate.log_weights)[0])[::-1]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8, 3), width_ratios=(3, 1), layout="constrained"
    )
    rank = np.arange(1, raw.shape[0] + 1)
    left.plot(rank, raw, ".", ms=3, label="weights")
    left.plot(rank, smoothed, lw=1, label="smoothed")
    left.axhline(-np.log(raw.shape[0]), color="0.7", lw=1)
    left.set(xscale="log", xlabel="rank", ylabel="log weight (gray: all equal)")
    left.legend()
    low, high = max(estimate.low, -1.0), max(estimate.high, -1.0)
    right.vlines(0, low, high, lw=6, color="C0", alpha=0.4)
    right.plot(0, max(estimate.value, -1.0), "ko")
    right.axhline(GOOD_KHAT, color="C3", lw=1)
    right.set(ylabel="k̂ (-1 stands for less)", xticks=[], xlim=(-1, 1), title=estimate.verdict)
    right.set_ylim(-1.1, max(1.2, high + 0.1))
    return figure


def plot_convergence(result: Any) -> Any:
    """Losses, and the discrepancy at every look if the fit has any.

    Args:
        result: from :func:`~numpyro_kscore.fit`, or from ``svi.run``, which has losses only.

    Returns:
        The figure.

    Raises:
        ImportError: without matplotlib.

    Example::

        from numpyro_kscore.diagnostics import plot_convergence

        figure = plot_convergence(result)
        figure.savefig("convergence.png")
    """
    plt = _pyplot()
    losses = np.asarray(result.losses)
    info = getattr(result, "info", None)
    figure, panels = plt.subplots(
        1, 1 if info is None else 2, figsize=(4 if info is None else 8, 3), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    size = max(1, losses.shape[0] // 200)
    blocks = losses[: size * (losses.shape[0] // size)].reshape(-1, size)
    # A fit that needed no step has the loss of its start alone.
    style = "-" if losses.shape[0] > 1 else "o"
    panels[0, 0].plot(size * (1 + np.arange(blocks.shape[0])), np.nanmean(blocks, axis=1), style)
    low, high = np.nanquantile(losses, [0.0, 0.9])
    panels[0, 0].set(xlabel="step", ylabel=f"loss, mean of {size} steps")
    if low < high:
        panels[0, 0].set_ylim(low, high)
    if info is not None:
        value, error = np.asarray(info.discrepancy), np.asarray(info.discrepancy_error)
        panels[0, 1].errorbar(info.trace_steps, np.maximum(value, 1e-5), error, fmt=".-", lw=1)
        panels[0, 1].axvline(info.best_step, color="0.7")
        panels[0, 1].set(xlabel="step", ylabel="discrepancy², sd²", yscale="log")
    return figure


def plot_vsbc(result: Any) -> Any:
    """Histograms of the probabilities of a ``VSBCResult``: symmetric about ½ if calibrated.

    Args:
        result: from :func:`~numpyro_kscore.diagnostics.vsbc`; twelve parameters are shown.

    Returns:
        The figure.

    Raises:
        ImportError: without matplotlib.

    Example::

        from numpyro_kscore.diagnostics import plot_vsbc, vsbc

        few = {"num_simulations": 5, "num_svi_steps": 100}  # 100 and 2000 in earnest
        calibration = vsbc(svi, random.key(0), observed_sites=["y"], **few)
        figure = plot_vsbc(calibration)
        figure.savefig("calibration.png")
    """
    plt = _pyplot()
    columns = [
        (f"{name}{list(index) if index else ''}", values[(slice(None), *index)], pvalue)
        for name in result.param_names
        for values in [np.asarray(result.probabilities[name])]
        for index, pvalue in np.ndenumerate(np.asarray(result.ks_pvalues[name]))
    ][:12]
    rows = -(-len(columns) // 4)
    figure, panels = plt.subplots(
        rows, min(4, len(columns)), figsize=(2.6 * min(4, len(columns)), 2.2 * rows),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for panel in panels.ravel()[len(columns) :]:
        panel.axis("off")
    for panel, (name, values, pvalue) in zip(panels.ravel(), columns, strict=False):
        panel.hist(values, np.linspace(0, 1, 11), color="C0", alpha=0.7)
        panel.axvline(0.5, color="k", lw=1)
        panel.set(title=f"{name}, p = {float(pvalue):.2f}", xticks=[0, 0.5, 1], yticks=[])
    return figure
