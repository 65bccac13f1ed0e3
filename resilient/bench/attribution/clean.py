"""False verdicts on simulated healthy runs: what a live benchmark is too slow to count."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from resilient.bench.simulated import SimulatedRun
from resilient.coordinator.judge import Judge
from resilient.detectors import DetectorConfig, build_monitor
from resilient.policies import Ladder, PolicyConfig
from resilient.signals import Severity


@dataclass(frozen=True)
class FalseVerdicts:
    """Of one simulated run. refused: attempts that would have been refused, by cause. warned: verdicts that only warn."""

    world: int
    tails: str
    steps: int
    refused: dict[str, int]
    warned: dict[str, int]

    @property
    def accusing(self) -> int:
        """Verdicts of either severity that blame a machine or the wire."""
        return sum(
            found.get(cause, 0) for found in (self.refused, self.warned) for cause in ("compute", "communication")
        )


def judge_clean(world: int, tails: str, steps: int, seed: int = 0) -> FalseVerdicts:
    """Judge `steps` tables of a healthy run. A verdict counts when it is news: its cause or its ranks have changed."""
    run = SimulatedRun(world, tails=tails, seed=seed)
    judge = Judge(build_monitor(DetectorConfig()), Ladder(PolicyConfig(mode="observe")))
    refused: Counter[str] = Counter()
    warned: Counter[str] = Counter()
    last = None
    for step in range(1, steps + 1):
        observation, findings = judge.see(run.table(step))
        judgement = judge.conclude(observation, findings, dynamic_scale=False, targets=lambda onset: 1)
        judge.settle(judgement, applied=judgement.decision.would is None)
        verdict = judgement.verdict
        if verdict is None or verdict.severity < Severity.WARN:
            last = None
            continue
        if judgement.decision.would is not None:
            refused[verdict.cause] += 1
        elif (verdict.cause, verdict.ranks) != last:
            warned[verdict.cause] += 1
        last = (verdict.cause, verdict.ranks)
    return FalseVerdicts(world, tails, steps, dict(refused), dict(warned))
