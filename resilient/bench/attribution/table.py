"""The result as text: by fault, by engine, the public rules beside it, the bounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from resilient.bench.attribution.local_rules import Heard, heard_by_peers
from resilient.bench.attribution.peers import detected_by_peers
from resilient.bench.attribution.score import CAUSES, Score
from resilient.bench.bounds import Check
from resilient.bench.detection.table import table


def text(found: dict[str, Any], checks: Sequence[Check], runs: Sequence[dict[str, Any]]) -> str:
    parts = [
        table(
            "By fault",
            ["fault", "runs", "seen", "rank right", "cause right", "delay", "called", "false"],
            [_row(k, s) for k, s in found["scenarios"].items()],
        ),
        table(
            "By engine and ranks",
            ["engine", "runs", "seen", "rank right", "cause right", "delay", "called", "false"],
            [_row(k, s) for k, s in found["engines"].items()],
        ),
        table(
            "Causes of all detected faults",
            ["cause", "times"],
            [[c, str(found["all"].confusion.get(c, 0))] for c in CAUSES],
        ),
    ]
    peers = detected_by_peers(runs)
    if peers:
        parts.append(
            table(
                "Public rules on the loss and norm of the same runs",
                ["rule", "faults seen", "alarms in clean steps"],
                peers,
            )
        )
    heard = heard_by_peers(runs)
    if heard:
        parts.append(
            table(
                "Two peers on the tables of the same runs (of the runs with a fault: seen; rank right)",
                [
                    "fault",
                    "runs",
                    "resilient seen",
                    "rank right",
                    "cause right",
                    "OLMo-core seen",
                    "Megatron seen",
                    "rank right",
                ],
                [_beside(name, found["scenarios"][name], h) for name, h in heard.items() if h.runs],
            )
        )
        parts.append(_false_alarms(list(heard.values())))
    attempts = sum(r.get("attempts", 0) for r in runs)
    seconds = sum(r["seconds"] for r in runs)
    parts.append(
        f"{len(runs)} runs, {attempts} attempts, {1e3 * seconds / max(attempts, 1):.0f} ms each; clean steps {found['all'].clean_steps}"
    )
    parts += [f"broken: {line}" for line in found["all"].broken]
    parts.append(
        "\n".join(
            f"{'held  ' if c.ok else 'MISSED'} {c.name}: {c.value:.4g} ({'>=' if c.at_least else '<='} {c.bound:g})"
            for c in checks
        )
    )
    return "\n\n".join(parts)


def _row(name: str, s: Score) -> list[str]:
    called = ", ".join(f"{c} {n}" for c, n in sorted(s.confusion.items(), key=lambda item: -item[1]))
    delay = f"{statistics.median(s.delays):.0f} (most {max(s.delays)})" if s.delays else "-"
    seen = f"{s.detected}" if s.runs else "-"
    return [
        name,
        str(s.runs),
        seen,
        _share(s.ranks, s.detected),
        _share(s.causes, s.detected),
        delay,
        called or "-",
        str(s.false),
    ]


def _beside(name: str, ours: Score, theirs: Heard) -> list[str]:
    """Neither of the two names a cause by itself; OLMo-core names no rank."""
    seen = [str(ours.detected), _share(ours.ranks, ours.detected), _share(ours.causes, ours.detected)]
    return [name, str(theirs.runs), *seen, str(theirs.skipped), str(theirs.fired), _share(theirs.named, theirs.fired)]


def _false_alarms(heard: Sequence[Heard]) -> str:
    clean = max(sum(h.clean for h in heard), 1)
    skipped, fired = sum(h.skipped_clean for h in heard), sum(h.fired_clean for h in heard)
    return (
        f"in {clean} clean steps OLMo-core would have skipped {skipped} ({1e4 * skipped / clean:.0f} per 10k) and Megatron "
        f"would have run {fired} again ({1e4 * fired / clean:.0f} per 10k)"
    )


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}" if whole else "-"
