"""Checkpoints as text and tables. Values may be of any type and text may hold anything: a manifest is somebody else's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from resilient.telemetry.messages import duration, number

_TRUST_STYLE = {"good": "green", "provisional": "", "tainted": "bold red", "quarantined": "bold red"}
_LONGEST = 400  # characters of one text


def list_table(found: Mapping[str, Any]) -> Table:
    """The table of `listing`."""
    table = Table(title=Text(printable(found["place"])), title_justify="left", caption_justify="left")
    for heading in ("step", "attempt", "health", "trust", "tiers", "size", "age", "lacks"):
        table.add_column(heading, justify="right" if heading in ("step", "attempt", "size", "age") else "left")
    for row in found["in_memory"]:
        trust = Text(row["trust"], style=_TRUST_STYLE.get(row["trust"], ""))
        table.add_row(str(row["step"]), str(row["attempt"]), "", trust, "memory", "", "", "")
    for row in found["checkpoints"]:
        table.add_row(
            str(row["step"]),
            str(row["attempt"]),
            _health_text(row["health"]),
            _trust_text(row),
            _tiers_text(row),
            size_text(row["bytes"]),
            age_text(row["age_s"]),
            Text(", ".join(row["lacks"])),
        )
    return table


def list_lines(found: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    lines = []
    for row in found["checkpoints"]:
        lines += [f"step {row['step']} (attempt {row['attempt']}): {printable(reason)}" for reason in row["reasons"]]
    for row in found["orphans"]:
        what = "damaged" if row["committed"] else "orphan"
        lines.append(
            f"{what}: {printable(row['name'])}, {size_text(row['bytes'])}, {age_text(row['age_s'])} old: {printable(row['reason'])}"
        )
    lines += [f"note: {printable(remark)}" for remark in found["remarks"]]
    count = len(found["checkpoints"])
    lines.append(
        f"{count} checkpoint{'s' if count != 1 else ''}, {size_text(found['bytes'])}" if count else "no checkpoint"
    )
    return lines


def show_text(found: Mapping[str, Any]) -> list[str]:
    """The lines of `details`: what a person wants to know first comes first."""
    m: Mapping[str, Any] = found["manifest"]
    rows: list[tuple[str, str]] = [
        ("checkpoint", f"{found['place']}/{found['name']}"),
        ("state", f"step {m['step']}, attempt {m['attempt']}, commit {m['serial']} of generation {m['generation']}"),
        ("run", str(m["run_id"])),
        ("written", f"{m['written_at']} ({age_text(found['age_s'])} ago)"),
        ("trust", "; ".join([found["trust"] or "not judged (no trust.json)", *found["reasons"]])),
        *(("cannot be read", f"{tier}: {why}") for tier, why in found["refused"].items()),
        ("health", str(_health_text(found["health"]))),
        ("data", f"window {m['position']}, sample {_or_unknown(m['samples'])}"),
        ("learning rate", f"{_number(m['lr'])}, schedule at {_or_unknown(m['schedule'])}"),
        ("loss scale", _number(m["loss_scale"])),
        ("world", f"{m['world']} ranks, {ranks_text(m['ranks'])} here"),
        ("size", size_text(found["bytes"])),
        ("lacks", ", ".join(found["lacks"]) or "nothing"),
    ]
    for title in ("fingerprint", "about", "versions", "outer"):
        values = m[title] if isinstance(m[title], Mapping) else {}
        rows += [(f"{title}.{key}", _brief(value)) for key, value in sorted(values.items())]
    width = max(len(name) for name, _ in rows)
    lines = [f"{printable(name):<{min(width, 40)}}  {printable(value)}" for name, value in rows]
    lines += ["", "rank  file            bytes           digest                            state parts"]
    for rank, part in zip(m["ranks"], m["parts"], strict=True):
        digests = " ".join(f"{name}={str(digest)[:8]}" for name, digest in sorted(part["digests"].items()))
        lines.append(
            printable(f"{rank:<5} {part['file']:<15} {part['size']:<15,} {str(part['digest'])[:32]:<33} {digests}")
        )
    return lines


def printable(text: Any) -> str:
    """One line without control characters: a manifest may not steer a terminal."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: _LONGEST + 1])
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7, 9`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    names = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    shown = names if len(names) <= 8 else [*names[:8], f"{len(names) - 8} more"]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown)


def size_text(count: int) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def age_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    days = int(seconds // 86400)
    return f"{days} d {int(seconds % 86400 // 3600)} h" if days >= 1 else duration(max(seconds, 0.0))


def _health_text(health: Mapping[str, Any]) -> Text:
    words = [printable(health["level"])] if health["level"] else []
    if not health["finite"]:
        words.append("weights not finite")
    evaluation = health["evaluation"]
    words += [f"{printable(name)} not finite" for name, value in sorted(evaluation.items()) if value is None]
    if evaluation.get("eval_loss") is not None:
        words.append(f"loss {_number(evaluation['eval_loss'])}")
    return Text(", ".join(words) or "-", style="" if health["sound"] else "bold red")


def _trust_text(row: Mapping[str, Any]) -> Text:
    text = Text(row["trust"] or "-", style=_TRUST_STYLE.get(row["trust"] or "", ""))
    if row["in_force"] is False:
        text.append(" (given up)", style="dim")
    return text


def _tiers_text(row: Mapping[str, Any]) -> str:
    here, world = len(row["ranks_here"]), row["world"]
    return row["tiers"][0] + ("" if here == world else f" ({here} of {world} ranks)")


def _number(value: Any) -> str:
    return number(value, 6) if isinstance(value, int | float) and math.isfinite(value) else printable(value)


def _or_unknown(value: Any) -> str:
    return "unknown" if value is None else printable(value)


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={_brief(v)}" for k, v in value.items()) or "{}"
    return str(value)
