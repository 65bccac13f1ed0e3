"""The picture of a run: loss, gradient norm, the ranks' spread and the LR over the optimizer step.

The x axis is the step, so that a rollback goes visibly back and the undisturbed twin lies underneath. What was undone
later is drawn pale; what stands is drawn full.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.telemetry.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ed"
RUN, TWIN, REFUSED, ROLLBACK, DATA, ONSET, EVAL = (
    "#2458c5",
    "#a3acb8",
    "#d1293d",
    "#d97706",
    "#7c3aed",
    "#b45309",
    "#0f8a5f",
)
OTHERS = ("#2458c5", "#d97706", "#0f8a5f", "#7c3aed", "#d1293d", "#0e7490", "#a16207", "#be185d", "#4d7c0f", "#475569")

_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c5ccd4",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "resilient",
}
UNDONE = (0, (3, 1.5))
_POINTS = 3000  # a line is thinned to about this many points, extremes kept


@dataclass(frozen=True)
class Stretch:
    """Consecutive applied attempts of a run without a jump back. `upto`: the last step that was not undone later."""

    records: list[dict[str, Any]]
    upto: int


def stretches(run: RunData) -> list[Stretch]:
    """Applied attempts cut wherever training went back (rollback or restart)."""
    cut: list[list[dict[str, Any]]] = [[]]
    for record in run.steps:
        if record.get("applied"):
            if cut[-1] and record["step"] <= cut[-1][-1]["step"]:
                cut.append([])
            cut[-1].append(record)
    found: list[Stretch] = []
    upto = math.inf
    end = run.summary.get("steps")
    if isinstance(end, int):
        upto = end
    for records in reversed(cut):
        if records:
            found.append(Stretch(records, int(min(upto, records[-1]["step"]))))
            upto = min(upto, records[0]["step"] - 1)
    return found[::-1]


def run_figure(run: RunData, twin: RunData | None = None) -> Figure:
    """The report's figure. Panels: loss, gradient norm, local gradient norm per rank (if recorded), LR."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spread = _has_spread(run)
    heights = [3.3, 2.3, *([1.7] if spread else []), 1.0]
    with matplotlib.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.05, hspace=0.02)
        figure = Figure(figsize=(11.5, sum(heights) + 1.35), layout=layout)
        axes = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
        pieces = stretches(run)
        for ax, key, label in ((axes[0], "loss", "loss"), (axes[1], "grad_norm", "gradient norm\nbefore clipping")):
            _curve(ax, run, pieces, key, twin)
            ax.set_ylabel(label)
            _refused(ax, run, key)
        _evaluations(axes[0], run)
        if spread:
            _rank_spread(axes[2], run)
        _learning_rate(axes[-1], run, pieces, twin)
        for ax in axes:
            _marks(ax, run, labels=ax is axes[0])
        _limits(axes[-1], run, twin)
        axes[-1].set_xlabel("optimizer step")
        _legend(figure, run, twin)
    return figure


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for a page: no prolog, no metadata, no reference to anything outside."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)  # HTML knows svg without them
    return re.sub(
        r'(<svg\b[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )


def loss_figure(runs: Sequence[RunData], baseline: RunData | None = None) -> Figure:
    """Loss of several runs over the step, as they stand in the end; the baseline in grey underneath."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11.5, 4.2), layout="constrained")
        ax = figure.subplots()
        if baseline is not None:
            x, y = _loss_curve(baseline)
            ax.plot(*thin(x, y), color=TWIN, linewidth=3.0, label=f"{baseline.run_id} (baseline)")
        for i, run in enumerate(r for r in runs if baseline is None or r.path != baseline.path):
            x, y = _loss_curve(run)
            dash = "-" if i < len(OTHERS) else "--"
            mark = None if run.steps else "D"
            label = run.run_id if run.steps else f"{run.run_id} (evaluations only)"
            color = OTHERS[i % len(OTHERS)]
            ax.plot(*thin(x, y), color=color, linestyle=dash, linewidth=1.3, marker=mark, markersize=5, label=label)
        _loss_scale(ax, [np.asarray(line.get_ydata(), float) for line in ax.get_lines()])
        ax.set_xlabel("optimizer step")
        ax.set_ylabel("loss")
        ax.legend(frameon=False, ncols=2, fontsize=8.5)
    return figure


# -- parts ----------------------------------------------------------------------------------------------------------


def _curve(ax: Axes, run: RunData, pieces: list[Stretch], key: str, twin: RunData | None) -> None:
    values: list[np.ndarray] = []
    if twin is not None:
        x, y = _standing(twin, stretches(twin), key)
        ax.plot(*thin(x, y), color=TWIN, linewidth=2.6, solid_capstyle="round", zorder=2)
        values.append(y)
    for piece in pieces:
        x, y = _series(run, piece.records, key)
        ax.plot(*thin(x, y), color=RUN, alpha=0.5, linewidth=1.2, linestyle=UNDONE, zorder=3)
    x, y = _standing(run, pieces, key)
    ax.plot(*thin(x, y), color=RUN, linewidth=1.6, zorder=4, marker="." if len(x) <= 3 else None)
    values.append(y)
    values.extend(_series(run, piece.records, key)[1] for piece in pieces)
    if key == "loss":
        _loss_scale(ax, values)
    elif any((v[np.isfinite(v)] > 0).any() for v in values):
        ax.set_yscale("log")
        _plain_ticks(ax)


def _loss_scale(ax: Axes, values: list[np.ndarray]) -> None:
    """Linear, unless the accepted losses span more than a factor of 8."""
    joined = np.concatenate(values) if values else np.zeros(0)
    joined = joined[np.isfinite(joined)]
    if len(joined) and joined.min() > 0 and joined.max() > 8 * joined.min():
        ax.set_yscale("log")
        _plain_ticks(ax)


def _refused(ax: Axes, run: RunData, key: str) -> None:
    """Refused attempts as crosses. What is not finite or far beyond the picture is drawn as a triangle at its top."""
    points = [(r["step"], run.value(r, key)) for r in run.steps if not r.get("applied")]
    if not points:
        return
    ax.relim()
    ax.autoscale_view()
    low, high = ax.get_ylim()
    ceiling = high * (high / max(low, 1e-12)) if ax.get_yscale() == "log" else high + 2.5 * (high - low)
    inside = [(s, v) for s, v in points if math.isfinite(v) and v <= ceiling]
    beyond = [s for s, v in points if not (math.isfinite(v) and v <= ceiling)]
    if inside:
        ax.plot(*zip(*inside, strict=True), "x", color=REFUSED, markersize=7, markeredgewidth=1.8, zorder=6)
    if beyond:
        ax.plot(
            beyond,
            [0.975] * len(beyond),
            "^",
            color=REFUSED,
            markersize=8,
            transform=ax.get_xaxis_transform(),
            clip_on=False,
            zorder=7,
        )


def _evaluations(ax: Axes, run: RunData) -> None:
    if run.evaluations:
        x, y = zip(*run.evaluations, strict=True)
        ax.plot(x, y, "D", color=EVAL, markersize=5.5, markeredgecolor="white", markeredgewidth=0.9, zorder=8)


def _rank_spread(ax: Axes, run: RunData) -> None:
    """Local gradient norms: the median over ranks with its spread, ranks that are always named (a small world) as lines
    of their own, others where they stood out, and in red the ranks that an incident named."""
    rows = [(r, r["ranks"]["local_grad_norm"]) for r in run.steps if "local_grad_norm" in r.get("ranks", {})]
    last = {r["step"]: v for r, v in rows if r.get("applied")}  # each step as it was applied last
    x = np.array(sorted(last), float)
    median = np.array([_float(last[step].get("median")) for step in sorted(last)])
    spread = np.nan_to_num([_float(last[step].get("spread")) for step in sorted(last)], posinf=0.0)
    low = np.maximum(median - spread, median / 10)  # stays on a log axis
    stride = max(len(x) // _POINTS, 1)
    ax.fill_between(x[::stride], low[::stride], (median + spread)[::stride], color=RUN, alpha=0.15, linewidth=0)
    ax.plot(x[::stride], median[::stride], color=RUN, linewidth=1.4)
    named: dict[str, list[tuple[float, float]]] = {}
    for step in sorted(last):
        for rank, value in (last[step].get("outliers") or {}).items():
            named.setdefault(rank, []).append((float(step), _float(value)))
    for rank, points in sorted(named.items()):
        rx, ry = (np.array(values) for values in zip(*points, strict=True))
        always = len(points) > len(x) / 2
        color = OTHERS[(int(rank) + 1) % len(OTHERS)] if always else MUTED
        ax.plot(*thin(rx, ry), "-" if always else ".", color=color, linewidth=0.9, alpha=0.75, markersize=4)
        if always:
            ax.annotate(
                f"rank {rank}",
                (1.0, 0.02 + 0.16 * (int(rank) % 6)),
                xycoords="axes fraction",
                textcoords="offset points",
                xytext=(4, 0),
                fontsize=8,
                color=color,
                annotation_clip=False,
            )
    ax.set_yscale("log")
    _plain_ticks(ax)
    ax.set_ylabel("local norm\nper rank")
    _named_ranks(ax, run)


def _named_ranks(ax: Axes, run: RunData) -> None:
    """A labelled point for each rank that an incident named, at its norm; at the top of the panel if that was not finite."""
    lines = {(r.get("generation", 0), r["attempt"]): r for r in run.steps}
    for incident in run.incidents:
        record = lines.get((incident.get("generation", 0), incident["attempt"]), {})
        values = record.get("ranks", {}).get("local_grad_norm", {}).get("outliers") or {}
        for rank in incident.get("ranks") or ():
            value = _float(values.get(str(rank)))
            finite = math.isfinite(value) and value > 0
            ax.annotate(
                f"rank {rank}",
                (incident["step"], value if finite else 0.9),
                xycoords="data" if finite else ax.get_xaxis_transform(),
                textcoords="offset points",
                xytext=(7, -3),
                fontsize=8.5,
                color=REFUSED,
                annotation_clip=False,
            )
            place: dict[str, Any] = {} if finite else {"transform": ax.get_xaxis_transform()}
            mark = "o" if finite else "^"
            ax.plot(
                [incident["step"]], [value if finite else 0.93], mark, color=REFUSED, markersize=5.5, zorder=6, **place
            )


def _learning_rate(ax: Axes, run: RunData, pieces: list[Stretch], twin: RunData | None) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if twin is not None:
        ax.plot(*thin(*_standing(twin, stretches(twin), "lr")), color=TWIN, linewidth=2.0)
    ax.plot(*thin(*_standing(run, pieces, "lr")), color=INK, linewidth=1.3)
    ax.set_ylabel("LR")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(3))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _scientific(value)))


def _marks(ax: Axes, run: RunData, *, labels: bool) -> None:
    """Alarms, onsets, rollbacks, skipped data and restarts. On the top panel with numbers, as in the incident table."""
    top = ax.get_xaxis_transform()
    numbers: dict[int, list[int]] = {}
    rollbacks = 0  # their arrows lie one below the other
    for number, incident in enumerate(run.incidents, start=1):
        step, onset, target = incident["step"], incident.get("onset_step"), incident.get("target_step")
        numbers.setdefault(step, []).append(number)
        ax.axvline(step, color=REFUSED, linewidth=1.0, alpha=0.55, zorder=1)
        if onset is not None and onset < step:
            ax.axvline(onset, color=ONSET, linewidth=1.1, linestyle=(0, (4, 3)), alpha=0.9, zorder=1)
        if incident.get("action") == "rollback" and target is not None:
            ax.axvspan(target, step, color=ROLLBACK, alpha=0.09, linewidth=0, zorder=0)
            if labels:
                height = 0.91 - 0.075 * (rollbacks % 8)
                rollbacks += 1
                ax.annotate(
                    "",
                    (target, height),
                    (step, height),
                    xycoords=top,
                    textcoords=top,
                    arrowprops={"arrowstyle": "-|>", "color": ROLLBACK, "linewidth": 2.0, "shrinkA": 0, "shrinkB": 0},
                    zorder=9,
                )
                ax.annotate(
                    f"back to {target}",
                    (target, height),
                    xycoords=top,
                    textcoords="offset points",
                    xytext=(-5, 0),
                    ha="right",
                    va="center",
                    fontsize=8.5,
                    color=ONSET,
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
                    zorder=9,
                )
        window = skipped_steps(run, incident)
        if window is not None and labels:
            ax.axvspan(
                window[0] - 0.5, window[1] + 0.5, ymin=0, ymax=0.025, color=DATA, alpha=0.85, linewidth=0, zorder=5
            )
    for step in restarts(run):
        ax.axvline(step, color=INK, linewidth=1.1, linestyle=":", zorder=1)
        if labels:
            ax.annotate(
                "restart", (step, 1.0), xycoords=top, textcoords="offset points", xytext=(0, 3), ha="center", fontsize=8
            )
    if labels:
        _badges(ax, numbers)


def _badges(ax: Axes, numbers: dict[int, list[int]]) -> None:
    for step, found in numbers.items():
        text = str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"
        ax.annotate(
            text,
            (step, 1.0),
            xycoords=ax.get_xaxis_transform(),
            textcoords="offset points",
            xytext=(0, 10),
            ha="center",
            va="center",
            fontsize=8,
            color="white",
            fontweight="bold",
            bbox={"boxstyle": "round,pad=0.3", "facecolor": REFUSED, "edgecolor": "none"},
            annotation_clip=False,
            zorder=10,
        )


def _legend(figure: Figure, run: RunData, twin: RunData | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    incidents = run.incidents
    rollbacks = [i for i in incidents if i.get("action") == "rollback"]
    pieces = stretches(run)
    entries: list[tuple[Any, str, bool]] = [
        (Line2D([], [], color=RUN, linewidth=2), "this run", True),
        (
            Line2D([], [], color=RUN, alpha=0.5, linewidth=1.4, linestyle=UNDONE),
            "undone later",
            len(pieces) > 1 or bool(rollbacks),
        ),
        (Line2D([], [], color=TWIN, linewidth=3), f"twin ({twin.run_id})" if twin else "", twin is not None),
        (
            Line2D([], [], color=EVAL, marker="D", linestyle=""),
            "evaluation",
            bool(run.evaluations),
        ),
        (
            Line2D([], [], color=REFUSED, marker="x", linestyle="", markersize=7, markeredgewidth=1.8),
            "refused attempt",
            any(not r.get("applied") for r in run.steps),
        ),
        (
            Line2D([], [], color=REFUSED, marker="^", linestyle="", markersize=7),
            "refused, off scale or not finite",
            any(not r.get("applied") and not math.isfinite(run.value(r, "loss")) for r in run.steps),
        ),
        (Line2D([], [], color=REFUSED, linewidth=1), "alarm", bool(incidents)),
        (
            Line2D([], [], color=ONSET, linewidth=1.2, linestyle=(0, (4, 3))),
            "onset",
            any((i.get("onset_step") or i["step"]) < i["step"] for i in incidents),
        ),
        (Patch(facecolor=ROLLBACK, alpha=0.3), "rolled back", bool(rollbacks)),
        (Patch(facecolor=DATA), "data skipped", any(skipped_steps(run, i) for i in incidents)),
        (Line2D([], [], color=INK, linestyle=":"), "restart", bool(restarts(run))),
    ]
    shown = [(handle, label) for handle, label, wanted in entries if wanted]
    figure.legend(
        [handle for handle, _ in shown],
        [label for _, label in shown],
        loc="outside upper left",
        ncols=6,
        frameon=False,
        fontsize=9,
        handlelength=1.8,
        columnspacing=1.6,
    )


def _limits(ax: Axes, run: RunData, twin: RunData | None) -> None:
    shown = [data for data in (run, twin) if data is not None]
    steps = [r["step"] for data in shown for r in data.steps] + [step for data in shown for step, _ in data.evaluations]
    first, last = min(steps, default=0), max(steps, default=1)
    margin = max((last - first) * 0.015, 0.5)
    ax.set_xlim(first - margin, last + margin)


# -- readings of a run -----------------------------------------------------------------------------------------------


def restarts(run: RunData) -> list[int]:
    """The first step of every generation after the first."""
    first: dict[int, int] = {}
    for record in run.steps:
        first.setdefault(record.get("generation", 0), record["step"])
    return [step for generation, step in sorted(first.items()) if generation > 0]


def skipped_steps(run: RunData, incident: dict[str, Any]) -> tuple[int, int] | None:
    """The steps at which the data windows that a rollback skipped had been seen, both ends included."""
    window = incident.get("skipped_windows")
    if not window:
        return None
    steps = [
        r["step"]
        for r in run.steps
        if window[0] <= r.get("position", -1) < window[1]
        and (r.get("generation", 0), r["attempt"]) <= (incident.get("generation", 0), incident["attempt"])
    ]
    return (min(steps), max(steps)) if steps else None


def thin(x: np.ndarray, y: np.ndarray, limit: int = _POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most about `limit` points of a curve: per bucket its lowest and highest, so that no spike is lost."""
    if len(x) <= limit:
        return x, y
    edges = np.linspace(0, len(x), limit // 2 + 1).astype(int)
    keep: list[int] = []
    for a, b in pairwise(edges):
        part = y[a:b]
        if np.isfinite(part).any():
            keep.extend(sorted({a + int(np.nanargmin(part)), a + int(np.nanargmax(part))}))
        else:
            keep.append(int(a))
    return x[keep], y[keep]


def _standing(run: RunData, pieces: list[Stretch], key: str) -> tuple[np.ndarray, np.ndarray]:
    """The trajectory that stands: each step as it was last applied, unless undone."""
    return _series(run, [r for piece in pieces for r in piece.records if r["step"] <= piece.upto], key)


def _loss_curve(run: RunData) -> tuple[np.ndarray, np.ndarray]:
    """Loss over the steps that stand; the evaluations of a run that recorded no steps (policy=off)."""
    if run.steps or not run.evaluations:
        return _standing(run, stretches(run), "loss")
    x, y = zip(*run.evaluations, strict=True)
    return np.array(x, float), np.array(y)


def _series(run: RunData, records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    return np.array([float(r["step"]) for r in records]), np.array([run.value(r, key) for r in records])


def _has_spread(run: RunData) -> bool:
    return any("local_grad_norm" in r.get("ranks", {}) for r in run.steps)


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _scientific(value: float) -> str:
    """3e-4 rather than 3.0e-04."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def _plain_ticks(ax: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=9))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
