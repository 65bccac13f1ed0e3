"""Public rules on the same runs: they read the mean loss and the gradient norm, and say "now". No rank, no cause.

Most of them need more history than these short runs have. So the first 20 steps, in which a loss falls steeply, are replaced by
160 of the run's own clean steps after them and before the fault, drawn at random: every rule is armed when the fault comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from resilient.bench.detection.baselines import BY_KEY
from resilient.bench.detection.events import Streams

_WITHIN = 10  # steps after the fault
HISTORY, SETTLED = 160, 20  # steps drawn, of those from here on


def detected_by_peers(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows (rule, faults seen of those injected, alarms per 10,000 clean steps)."""
    runs = [r for r in runs if r.get("series")]
    if not runs:
        return []
    runs = [{**r, "series": [*_earlier(r), *(p for p in r["series"] if p[0] >= SETTLED)]} for r in runs]
    longest = max(len(r["series"]) for r in runs)
    values = {name: np.full((len(runs), longest), np.nan) for name in ("loss", "grad_norm")}
    missing = np.ones((len(runs), longest), dtype=bool)
    for i, run in enumerate(runs):
        for j, (_, loss, norm) in enumerate(run["series"]):
            values["loss"][i, j] = math.nan if loss is None else loss
            values["grad_norm"][i, j] = math.nan if norm is None else norm
            missing[i, j] = False
    steps = np.tile(np.arange(longest), (len(runs), 1))
    nothing = np.full(len(runs), -1)
    streams = Streams("attribution", steps, values, nothing, nothing, nothing, missing={k: missing for k in values})
    rows = []
    for rule in BY_KEY.values():
        if math.isnan(rule.threshold):
            continue
        alarms = rule.alarms(rule.scores(streams))
        seen = faults = false = clean = 0
        for i, run in enumerate(runs):
            at = [s for s, _, _ in run["series"]]
            begun = next((j for j, s in enumerate(at) if run["truth"] and s >= run["truth"]["step"]), len(at))
            false += int(alarms[i, HISTORY:begun].sum())
            clean += begun - HISTORY
            if run["truth"]:
                faults += 1
                seen += bool(alarms[i, begun : begun + _WITHIN].any())
        rows.append([f"{rule.key} {rule.title}", f"{seen}/{faults}", f"{1e4 * false / max(clean, 1):.1f} per 10k"])
    return rows


def _earlier(run: dict[str, Any]) -> list[list[Any]]:
    """160 clean steps of this run, numbered before its first."""
    fault = run["truth"]["step"] if run["truth"] else len(run["series"]) + 1
    clean = [point for point in run["series"] if SETTLED <= point[0] < fault]
    drawn: list[int] = np.random.default_rng(run["seed"]).integers(0, len(clean), HISTORY).tolist() if clean else []
    return [[i - HISTORY, *clean[j][1:]] for i, j in enumerate(drawn)]
