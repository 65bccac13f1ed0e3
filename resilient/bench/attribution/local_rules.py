"""Two public peers on what the ranks of the same runs measured: OLMo-core's skip step and Megatron-LM's local checks.

Both install from PyPI and run on the CPU (ai2-olmo-core 3.0.0, megatron-core 0.16.1), but inside their own trainers; here
their rules are rebuilt from their sources and fed with the recorded tables. The rules only: what they then do (skip, run
again) is not replayed.

    OLMo-core   `SkipStepOptimizer`: skips when the mean loss or the reduced gradient norm lies more than 6 standard deviations
                above the mean of the last 128, skipped ones included, from the 64th value on; a NaN skips and stays in the window.
    Megatron    `RerunStateMachine` with all its checks on: on each rank by itself, before the reduction, a loss or gradient
                norm that is not finite, or is 10 times the largest of its first 100. It logs its own rank. Its cause is what a
                re-run says: transient or persistent (both: the machine), or reproducible (the batch). The wire is none of them.

lm-resiliency (0.2.0 on PyPI) asks something else, whether peers compute the same from the same input every N steps, and needs
three of them: it is not here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from resilient.bench.attribution.peers import HISTORY, SETTLED

_WITHIN = 10  # steps after the fault


class SkipStep:
    """OLMo-core's rule. interval, sigmas: as in its constructor."""

    def __init__(self, interval: int = 128, sigmas: float = 6.0) -> None:
        self._interval, self._sigmas = interval, sigmas
        self._losses: deque[float] = deque(maxlen=interval + 1)
        self._norms: deque[float] = deque(maxlen=interval + 1)

    def skips(self, loss: float, norm: float) -> bool:
        """Of the step with this mean loss and reduced gradient norm, in fp32 as there; both are let in."""
        self._losses.append(loss)
        self._norms.append(norm)
        if len(self._losses) < max(2, self._interval // 2):
            return False
        return not (self._usual(self._losses) and self._usual(self._norms))

    def _usual(self, values: deque[float]) -> bool:
        seen = np.array(values, dtype=np.float32)
        with np.errstate(all="ignore"):
            deviation = np.float32(seen[:-1].std(ddof=1, dtype=np.float64))
            return bool(seen[-1] - np.float32(seen[:-1].mean(dtype=np.float64)) <= np.float32(self._sigmas) * deviation)


class LocalChecks:
    """Megatron's rules on one rank."""

    def __init__(self, factor: float = 10.0, samples: int = 100) -> None:
        self._factor, self._samples = factor, samples
        self._largest: dict[str, tuple[int, float]] = {}  # context -> how many were looked at, the largest of them

    def fires(self, loss: float, norm: float) -> bool:
        """loss: of this rank; norm: of its own gradient before the reduction."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        return any([self._large("loss", loss), self._large("grads", norm), not finite])  # all of them are asked

    def _large(self, context: str, value: float) -> bool:
        value = abs(value)
        if not math.isfinite(value):
            return False
        seen, largest = self._largest.get(context, (0, 0.0))
        if seen < self._samples:
            self._largest[context] = seen + 1, max(largest, value)
            return False
        return value >= largest * self._factor


@dataclass
class Heard:
    """Of the runs of one scenario. runs: those with a fault. skipped: seen by OLMo-core. fired: seen by Megatron; named: with
    the right rank and no other. skipped_clean, fired_clean: alarms in `clean` clean steps."""

    runs: int = 0
    skipped: int = 0
    fired: int = 0
    named: int = 0
    skipped_clean: int = 0
    fired_clean: int = 0
    clean: int = 0


def heard_by_peers(runs: Sequence[dict[str, Any]]) -> dict[str, Heard]:
    """Scenario -> what the two would have said, each armed by 160 drawn clean steps of the same run (see peers.py)."""
    found: dict[str, Heard] = {}
    for run in runs:
        if run.get("rows") and run["rows"]["step"]:
            _listen(run, found.setdefault(run["scenario"], Heard()))
    return found


def _listen(run: dict[str, Any], heard: Heard) -> None:
    rows, truth = run["rows"], run["truth"]
    steps = np.array(rows["step"])
    local = _by_rank(rows)
    loss, norm = local["loss"].mean(axis=1), np.array([math.nan if n is None else n for n in rows["grad_norm"]])
    fault = truth["step"] if truth else int(steps[-1]) + 1
    settled = np.flatnonzero((steps >= SETTLED) & (steps < fault))
    if not len(settled):
        return
    earlier = np.random.default_rng(run["seed"]).choice(settled, HISTORY)
    order = np.concatenate([earlier, np.flatnonzero(steps >= SETTLED)])
    skip = SkipStep()
    checks = [LocalChecks() for _ in range(local["loss"].shape[1])]
    skipped, fired = [], []
    for i in order:
        skipped.append(skip.skips(float(loss[i]), float(norm[i])))
        here = zip(checks, local["loss"][i], local["local_grad_norm"][i], strict=True)
        fired.append([c.fires(float(x), float(g)) for c, x, g in here])
    said = np.array(skipped)[HISTORY:], np.array(fired)[HISTORY:]
    at = steps[order[HISTORY:]]
    before, after = at < fault, (at >= fault) & (at < fault + _WITHIN)
    heard.clean += int(before.sum())
    heard.skipped_clean += int(said[0][before].sum())
    heard.fired_clean += int(said[1][before].any(axis=1).sum())
    if truth:
        heard.runs += 1
        heard.skipped += bool(said[0][after].any())
        alarms = said[1][after]
        first = alarms[alarms.any(axis=1)][:1]
        heard.fired += len(first)
        hit = set(truth["ranks"]) or set(range(len(checks)))
        heard.named += bool(len(first)) and set(np.flatnonzero(first[0]).tolist()) == hit


def _by_rank(rows: dict[str, Any]) -> dict[str, np.ndarray]:
    """(attempts, ranks) of a rank's own loss and gradient norm, NaN where a flag says that they were not finite."""
    found = {}
    for name, flags in (
        ("loss", ("nonfinite_forward", "nonfinite_loss")),
        ("local_grad_norm", ("nonfinite_forward", "nonfinite_loss", "nonfinite_backward")),
    ):
        values = np.array([[math.nan if v is None else v for v in row] for row in rows[name]], dtype=float)
        bad = np.any([np.nan_to_num(np.array(rows[flag], dtype=float)) > 0 for flag in flags], axis=0)
        found[name] = np.where(bad, math.nan, values)
    return found
