"""What is looked into when the table shows something: collective, the same on every rank, each with a budget.

    a failed reduction check      -> the rows of the failing cells: which rank, which parameters   (localise.py)
    replicas that differ          -> their digests by layer group: where they began to differ
    a suspected wire or machine   -> a probe of links and machines                                 (links.py)

All of it happens at the gate, before anything acts, and only on a finding that every rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from resilient.checkpoint.digest import joint_digest
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.links import probe
from resilient.coordinator.localise import localise
from resilient.detectors import Monitor
from resilient.detectors.reduction import ReductionCheck, located
from resilient.detectors.sketched import ReplicasByMode
from resilient.engines.base import Engine
from resilient.errors import ProbeFailed
from resilient.signals import CheckPlan, Exchanged, Finding, LinkReport, Observation, StepRecord
from resilient.signals.digest import MASK_48


class SecondLook:
    """One per coordinator. hosts: of the ranks."""

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        monitor: Monitor,
        *,
        digests_every: int,
        probes: int,
        probe_s: float,
        hosts: Sequence[str],
    ) -> None:
        self._engine, self._exchange = engine, exchange
        self._reduction = next((d for d in monitor.detectors if isinstance(d, ReductionCheck)), None)
        self._replicas = next((d for d in monitor.detectors if isinstance(d, ReplicasByMode)), None)
        self._every = digests_every if exchange.world_size > 1 else 0
        self._probes, self._probe_s = probes if exchange.world_size > 1 else 0, probe_s
        self._hosts = tuple(hosts)
        self._plan: CheckPlan | None = None  # as this rank's engine had it at the last gate
        self._plan_digest = 0.0
        self._table: Exchanged | None = None  # the one that is looked into, and the plan of its cells
        self._checked: CheckPlan | None = None
        # A probe that fails may take its process group with it: it has one of its own.
        self._group = exchange.another_group(2 * probe_s + 5) if self._probes else None
        self._groups = engine.replicas() if self._every else {}
        if self._replicas is not None:
            self._replicas.groups = self._groups

    def digests_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def fill(self, record: StepRecord) -> None:
        """The plan of the reduction check; and digests of what ranks hold alike, if they are due: a pass over it, no host
        sync."""
        plan = self._engine.check_plan()
        if plan is not self._plan:
            self._plan, self._plan_digest = plan, plan.digest() if plan is not None else 0.0
        record.check_plan = self._plan_digest
        if self.digests_due(record.step):
            for kind in self._groups:
                each = list(self._engine.replica_digests(kind).values())
                together = joint_digest([torch.stack(each)] if each else [], self._engine.device)
                setattr(record, f"digest_{kind}", (together & MASK_48).double())

    def agree_on_plan(self, table: Exchanged) -> None:
        """The cells of the reduction check ride in every row from the next one on, once all ranks have the same plan."""
        low, high = table.ends("check_plan")
        self._table, self._checked = table, self._exchange.plan
        self._exchange.plan = self._plan if low == high != 0 else None

    def look(self, observation: Observation, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings, with the place where it can be had, and with the ranks where a sketch could not name them. Raises
        ExchangeFailed."""
        looked = []
        for finding in findings:
            if finding.statistic == "check" and self._reduction is not None and self._checked is not None:
                cells = self._reduction.failed_cells(observation)
                found = localise(self._exchange, self._engine, self._checked, cells)
                finding = located(finding, found) if found else finding
            elif finding.detector == "replicas":
                kind = finding.signal.removeprefix("digest_")
                if observation.sketch is not None:
                    finding = self._who(observation, finding)
                if finding.statistic == "replica" and kind in self._groups:
                    finding = self._where(finding, kind)
            looked.append(finding)
        return tuple(looked)

    def links(self) -> LinkReport | None:
        """A probe of links and machines, if the budget allows one. Raises ExchangeFailed."""
        if self._probes == 0:
            return None
        self._probes -= 1
        try:
            return probe(
                self._group,
                self._engine.device,
                self._exchange.rank,
                self._exchange.world_size,
                self._hosts,
                self._probe_s,
            )
        except ProbeFailed as failure:  # on every rank that is alive: a link that does not answer is an answer
            self._probes = 0
            return failure.report

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _who(self, observation: Observation, finding: Finding) -> Finding:
        """The finding with the ranks that a sketch could not name."""
        assert self._replicas is not None and self._table is not None
        own = torch.tensor([self._table.own(finding.signal)], dtype=torch.float64)
        return self._replicas.named(observation, finding, self._exchange.gather(own)[:, 0])

    def _where(self, finding: Finding, kind: str) -> Finding:
        """The layer groups in which the replicas differ."""
        mine = self._engine.replica_digests(kind)
        names = list(mine)
        table = self._exchange.gather(_columns(mine))
        group = next(g for g in self._groups[kind] if set(finding.ranks) <= set(g) or not finding.ranks)
        rows = table[list(group)]
        different = [name for i, name in enumerate(names) if not (rows[:, i] == rows[0, i]).all()]
        shown = ", ".join(different[:4]) + (f" and {len(different) - 4} more" if len(different) > 4 else "")
        return replace(finding, message=f"{finding.message}; in {shown}") if different else finding


def _columns(digests: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(n,) float64, 48 bits each."""
    return torch.stack([d & MASK_48 for d in digests.values()]).double() if digests else torch.zeros(0)
