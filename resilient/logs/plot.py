"""An analysis as a picture: the curves over the step, with alarms, onset and blow-up. Imports matplotlib when asked to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.logs.analysis import Analysis
from resilient.logs.series import Series
from resilient.telemetry import figure as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("logit_max", "peak logit"),
    ("attention_entropy", "attention\nentropy"),
    ("update_norm", "update norm"),
    ("loss_scale", "loss scale"),
    ("lr", "LR"),
)
_LOG = ("grad_norm", "loss_scale")  # on a log axis whatever their range
_PLAIN = 1e4  # a smaller range has its ticks in plain numbers
_TALL = 24  # alarms; more of them are ticks at the foot instead of lines
_MOST_FILES = 12
_LOG_RATIO = 8.0  # beyond this range a positive curve is drawn on a log axis


def analysis_figure(analyses: Sequence[Analysis]) -> Figure:
    """One file: every panel there is data for. Several: loss and gradient norm of each, one below the other."""
    import matplotlib
    from matplotlib.figure import Figure

    if len(analyses) > _MOST_FILES:
        raise ConfigError(f"--plot draws at most {_MOST_FILES} files at once, not {len(analyses)}")
    panels = _PANELS if len(analyses) == 1 else _PANELS[:2]
    chosen = [[(name, label) for name, label in panels if a.series.get(name)] or [("loss", "loss")] for a in analyses]
    heights = [[3.0 if name == "loss" else 1.7 if name == "grad_norm" else 1.2 for name, _ in row] for row in chosen]
    with matplotlib.rc_context(style._STYLE):
        figure = Figure(figsize=(11.5, sum(sum(row) + 0.8 for row in heights)), layout="constrained")
        parts = figure.subfigures(len(analyses), 1, squeeze=False, height_ratios=[sum(row) + 0.8 for row in heights])
        for analysis, part, names, rows in zip(analyses, parts[:, 0], chosen, heights, strict=True):
            axes = part.subplots(len(names), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
            part.suptitle(f"{analysis.file}: {analysis.verdict}", fontsize=11, x=0.01, ha="left")
            for ax, (name, label) in zip(axes, names, strict=True):
                _panel(ax, analysis, name)
                ax.set_ylabel(label)
            _evaluations(axes[0], analysis)
            _legend(axes[0], analysis)
            axes[-1].set_xlabel(
                "step, counted on where the file's counter began anew" if analysis.counter_began_anew else "step"
            )
    return figure


def write_png(analyses: Sequence[Analysis], path: str | PathLike[str]) -> None:
    """Draw to `path`. Raises OSError if it cannot be written."""
    import matplotlib

    with matplotlib.rc_context(style._STYLE):
        analysis_figure(analyses).savefig(path, dpi=130, format="png")


def _panel(ax: Axes, analysis: Analysis, name: str) -> None:
    series = analysis.series.get(name) or Series()
    points = list(series.points())
    if points:
        xs, ys = zip(*points, strict=True)
        ax.plot(
            xs, ys, color=style.INK if name == "lr" else style.RUN, linewidth=1.2, marker="." if len(xs) < 8 else None
        )
    finite = [y for _, y in points if math.isfinite(y)]
    if finite and name != "lr" and min(finite) > 0 and (name in _LOG or max(finite) > _LOG_RATIO * min(finite)):
        ax.set_yscale("log")
        if max(finite) < _PLAIN * min(finite):
            style._plain_ticks(ax)
    top: dict[str, Any] = {"transform": ax.get_xaxis_transform()}
    lost = series.nonfinite()
    if lost:
        ax.plot(lost, [0.96] * len(lost), "^", color=style.REFUSED, markersize=5, label="not finite", **top)
    tall = len(analysis.alarm_x) <= _TALL
    for x in analysis.alarm_x:
        ax.axvline(x, ymax=1.0 if tall else 0.06, color=style.REFUSED, linewidth=0.8, alpha=0.45, zorder=1)
    if analysis.counter_began_anew:
        return
    if analysis.onset_step is not None:
        ax.axvline(analysis.onset_step, color=style.ONSET, linewidth=1.3, linestyle=(0, (4, 3)), zorder=2)
    if analysis.blowup_step is not None:
        ax.axvline(analysis.blowup_step, color=style.INK, linewidth=1.3, zorder=2)


def _evaluations(ax: Axes, analysis: Analysis) -> None:
    series = analysis.series.get("eval_loss")
    if series:
        ax.plot(*zip(*series.points(), strict=True), "D", color=style.EVAL, markersize=4, label="evaluation")


def _legend(ax: Axes, analysis: Analysis) -> None:
    from matplotlib.lines import Line2D

    handles = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    if analysis.alarms:
        handles.append(Line2D([], [], color=style.REFUSED, linewidth=1, label=f"alarm ({len(analysis.alarms)})"))
    if not analysis.counter_began_anew:
        if analysis.onset_step is not None:
            label = f"began, step {analysis.onset_step}"
            handles.append(Line2D([], [], color=style.ONSET, linestyle=(0, (4, 3)), label=label))
        if analysis.blowup_step is not None:
            handles.append(Line2D([], [], color=style.INK, label=f"blew up, step {analysis.blowup_step}"))
    if handles:
        ax.legend(
            handles=handles, frameon=False, fontsize=8.5, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1)
        )
