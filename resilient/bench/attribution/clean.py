"""False verdicts on simulated healthy runs: what a live benchmark is too slow to count."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from resilient.bench.simulated import SimulatedRun
from resilient.coordinator.judge import Judge
from resilient.detectors import DetectorConfig, build_monitor
from resilient.diagnosis import wants_confirmation
from resilient.policies import Ladder, PolicyConfig
from resilient.signals import Confirmation, Severity, StepTable, Verdict
from resilient.signals.record import INDEX

_ACCUSING = ("compute", "communication")


@dataclass(frozen=True)
class FalseVerdicts:
    """Of one simulated run. refused: attempts that would have been refused, by cause. warned: verdicts that only warn.
    suspected: verdicts that blamed a machine or the wire before the window was run again."""

    world: int
    tails: str
    steps: int
    refused: dict[str, int]
    warned: dict[str, int]
    suspected: int

    @property
    def accusing(self) -> int:
        """Verdicts of either severity that blame a machine or the wire."""
        return sum(found.get(cause, 0) for found in (self.refused, self.warned) for cause in _ACCUSING)


def judge_clean(world: int, tails: str, steps: int, seed: int = 0) -> FalseVerdicts:
    """Judge `steps` tables of a healthy run. A verdict counts when it is news: its cause or its ranks have changed.

    Where a guard would hold the step and run a suspect's window again, on that rank and a peer, it is run again here."""
    run = SimulatedRun(world, tails=tails, seed=seed)
    judge = Judge(build_monitor(DetectorConfig()), Ladder(PolicyConfig(mode="observe")))
    refused: Counter[str] = Counter()
    warned: Counter[str] = Counter()
    suspected = 0
    last = suspect_of_last = None
    for step in range(1, steps + 1):
        table = run.table(step)
        observation, findings = judge.see(table)
        judgement = judge.conclude(observation, findings, dynamic_scale=False, targets=lambda onset: 1)
        blamed = _blamed(judgement.verdict)
        suspected += blamed is not None and blamed != suspect_of_last
        suspect_of_last = blamed
        suspect = wants_confirmation(judgement.verdict) if judgement.verdict is not None else None
        if suspect is not None and judgement.decision.would is not None:
            again = _again(run, table, suspect)
            judgement = judge.conclude(
                observation, findings, dynamic_scale=False, targets=lambda onset: 1, confirmation=again
            )
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
    return FalseVerdicts(world, tails, steps, dict(refused), dict(warned), suspected)


def _blamed(verdict: Verdict | None) -> tuple[str, tuple[int, ...]] | None:
    """Cause and ranks of a verdict that blames a machine or the wire."""
    if verdict is None or verdict.severity < Severity.WARN or verdict.cause not in _ACCUSING:
        return None
    return verdict.cause, verdict.ranks


def _again(run: SimulatedRun, table: StepTable, rank: int) -> Confirmation:
    """What comes out when the window runs again: what its batch gives, off as before unless the table had something else."""
    same = bool(table.rows[rank, INDEX["local_grad_norm"]] == run.norms[rank])
    return Confirmation(rank, same_again=same, bad_again=same, peer=(rank + 1) % run.world, peer_bad=same)
