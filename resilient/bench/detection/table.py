"""The result of the benchmark as text: one table per question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = Sequence[str]


def text(found: dict[str, Any]) -> str:
    """Tables in the order: worked case, events, false alarms, availability, cost, ablation, real logs, bounds."""
    parts = []
    if "events" in found:
        parts += [_cases(found, mode) for mode in found["modes"]]
        parts += [_events(found, mode) for mode in found["modes"]]
        parts += [_false(found, mode) for mode in found["modes"]]
        parts += [_availability(found), _ablation(found)]
    if found["traces"]:
        parts.append(_traces(found))
    parts.append(_checks(found))
    return "\n\n".join(parts)


def _names(found: dict[str, Any], key: str) -> str:
    return f"{key:<10} {found['titles'][key]}"


def _cases(found: dict[str, Any], mode: str) -> str:
    rows = []
    columns = [cell for cell in next(iter(found["events"].values()))[found["modes"][0]] if _is_case(cell)]
    for key, modes in found["events"].items():
        if not modes[mode]:
            continue
        cells = [modes[mode].get(column) for column in columns]
        rows.append([_names(found, key), *(_case(c) if c else "-" for c in cells)])
    return table(f"Worked case S12, {mode}: early alarms, median and p10 lead (of 400 steps)", ["rule", *columns], rows)


def _case(c: dict[str, Any]) -> str:
    return f"{100 * c['recall_at_lead']['0']:.0f}% {c['median_lead']:+.0f} {c['p10_lead']:+.0f}"


def _is_case(cell: str) -> bool:
    return cell.startswith(("E1/", "E1 "))


def _events(found: dict[str, Any], mode: str) -> str:
    columns = [cell for cell in next(iter(found["events"].values()))[found["modes"][0]] if not _is_case(cell)]
    rows = []
    for key, modes in found["events"].items():
        if not modes[mode]:
            continue
        cells = [modes[mode].get(column) for column in columns]
        rows.append([key, *(f"{100 * c['caught']:.0f}% {c['median_lead']:+.0f}" if c else "-" for c in cells)])
    return table(f"Events, {mode}: caught, median lead before the blow-up", ["rule", *columns], rows)


def _false(found: dict[str, Any], mode: str) -> str:
    columns = list(next(iter(found["healthy"].values()))[found["modes"][0]])
    rows = []
    for key, modes in found["healthy"].items():
        if modes[mode]:
            cells = [modes[mode].get(column) for column in columns]
            rows.append([key, *(f"{c['per_10k']:.1f}" if c else "-" for c in cells)])
    points = next(iter(found["healthy"].values()))[found["modes"][0]][columns[0]]["points"]
    return table(f"False alarms per 10k healthy steps, {mode} ({points} steps a cell)", ["rule", *columns], rows)


def _availability(found: dict[str, Any]) -> str:
    rows = [
        [
            _names(found, key),
            f"{a['wrong_after_nan']:.0f}",
            f"{a['longest_wrong_row']:.0f}",
            f"{a['blind_after_nan']:.0f}",
            f"{100 * a['giants_flagged']:.0f}%",
            f"{100 * a['norm_x3_still_flagged']:.0f}%",
            f"{found['cost_us'][key]:.0f}",
        ]
        for key, a in found["availability"].items()
    ]
    head = [
        "rule",
        "wrong after NaN",
        "in a row",
        "blind for",
        "8 giants flagged",
        "norm x3 flagged for ever",
        "us/step",
    ]
    wide = found["cost_us"]["resilient, 30 signals"]
    return table(f"Availability as shipped, and cost (this project on 30 signals: {wide:.0f} us)", head, rows)


def _ablation(found: dict[str, Any]) -> str:
    columns = list(next(iter(found["ablation"].values()))["events"])
    rows = []
    for family, row in found["ablation"].items():
        cells = [row["events"][column] for column in columns]
        rows.append(
            [
                family,
                f"{row['false_per_10k']:.1f}",
                *(f"{100 * c['caught']:.0f}% {c['median_lead']:+.0f}" for c in cells),
            ]
        )
    return table("This project without one family of statistics", ["without", "false/10k", *columns], rows)


def _traces(found: dict[str, Any]) -> str:
    real = found["traces"]
    rows = [_trace_row(_names(found, key), score) for key, score in real["detectors"].items()]
    rows += [_trace_row(f"{'':<10} this project without {family}", score) for family, score in real["without"].items()]
    head = ["rule", "recall", "by source", "w/o largest", "false/10k"]
    return table(f"Real logs: {real['events']} events, {real['healthy_points']} healthy points", head, rows)


def _trace_row(name: str, score: dict[str, Any]) -> list[str]:
    shares = [f"{score[k]:.2f}" for k in ("recall", "by_source", "without_largest_source")]
    return [name, *shares, f"{score['false_per_10k']:.1f}"]


def _checks(found: dict[str, Any]) -> str:
    rows = [
        ["ok" if c["ok"] else "MISSED", c["name"], f"{c['value']:.4g}", f"{c['bound']:.4g}"] for c in found["checks"]
    ]
    return table(f"Bounds ({found['seconds']:.0f} s)", ["", "what", "value", "bound"], rows)


def table(title: str, head: Row, rows: Sequence[Row]) -> str:
    """Columns as wide as their widest entry; the first is left-aligned, as are texts without digits."""
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    lines = [title, "-" * len(title)]
    for row in [head, *rows]:
        cells = [
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
