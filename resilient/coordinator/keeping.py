"""What is kept of the run's states: the ring in memory, copies in other hosts' memory, checkpoints; and what is thought of them.

The coordinator says when a quiescent point is; here is what is taken and kept then, for whom, and what an attempt says about the
states that lie behind it. Methods that may communicate raise ExchangeFailed when the ranks cannot meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.filesystem import FilesystemStore
from resilient.checkpoint.peer import PeerStore
from resilient.checkpoint.ring import MemoryRing
from resilient.checkpoint.snapshot import Snapshot
from resilient.checkpoint.trust import Failure, TrustBook
from resilient.coordinator.contracts import Contracts
from resilient.coordinator.copies import PeerCopies
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.judge import Judge, Judgement
from resilient.coordinator.outer import Outer
from resilient.coordinator.preemption import Preemption
from resilient.coordinator.saving import Saver
from resilient.coordinator.state import StateKeeper
from resilient.coordinator.tiers import Candidate, Tiers
from resilient.engines.base import Engine
from resilient.signals import Exchanged, Flag, Severity


class Keeper:
    """One per coordinator. All methods but `flags`, `kept_at` and `close` are called on all ranks at the same point.

    tell: events. level: the stability letter now, "" where nobody judges."""

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        feed: WindowFeed,
        state: StateKeeper,
        contracts: Contracts,
        ring: MemoryRing,
        *,
        judge: Judge | None,
        store: FilesystemStore | None,
        checkpoint: CheckpointConfig,
        peer: PeerStore | None,
        preemption: Preemption,
        tell: Callable[[str, Mapping[str, Any]], None],
        level: Callable[[], str],
    ) -> None:
        self._engine, self._exchange, self._feed, self._state = engine, exchange, feed, state
        self._preemption, self._tell = preemption, tell
        self._goes_back = judge is not None and judge.ladder.config.mode != "observe"
        self._sized = 0  # snapshots of this start whose size was held against the budget
        self.ring = ring
        self.tiers = Tiers(
            exchange,
            ring,
            store=store,
            peer=peer,
            book=TrustBook(ring.config.trust_after),
            tell=tell,
            level=level if judge is not None else None,
        )
        self.saver = Saver(
            engine,
            exchange,
            feed,
            state,
            contracts,
            store=store,
            config=checkpoint,
            tell=tell,
            level=level,
            lend=ring.lend,
            give_back=ring.give_back,
            begun=self.tiers.begun,
            ended=self.tiers.ended,
        )
        self.copies: PeerCopies | None = None
        if peer is not None:
            self.copies = PeerCopies(peer, exchange, tell=tell, lend=ring.lend, give_back=ring.give_back)

    # -- what is done in the background -----------------------------------------------------------------------------

    def flags(self) -> int:
        """For this rank's row: where it stands with what it writes and copies."""
        saving = {"busy": Flag.SAVE_BUSY, "failed": Flag.SAVE_FAILED}.get(self.saver.state(), 0)
        return saving | (self.copies.flags() if self.copies is not None else 0)

    def hear(self, table: Exchanged, outer: Outer) -> None:
        """At a quiescent point, where all ranks stand by the rows of the attempt."""
        self.saver.stepped(outer)
        failed, busy = table.ranks_flagged(Flag.SAVE_FAILED), table.ranks_flagged(Flag.SAVE_BUSY)
        self.saver.hear(failed=bool(failed), busy=bool(busy))
        if self.copies is not None:
            self.copies.hear(table)

    # -- what is taken ------------------------------------------------------------------------------------------------

    def snapshot(self, step: int, outer: Outer) -> Snapshot | None:
        """Of this quiescent point, into the ring, and copied to another host's memory where that is asked for. None where
        nobody will go back to it: its place is marked, so that it is known what would have been done."""
        if not self._goes_back:
            lr, schedule = self._engine.lr(), self._engine.counters().schedule
            self.tiers.captured(Snapshot(step, outer.attempts, self._feed.position, lr, schedule, {}))
            return None
        snapshot = self._state.capture(step, outer.attempts, into=self.ring.spare())
        self.tiers.captured(snapshot)
        if self.ring.config.budget_mb is not None and self._sized < 2:  # the first has no moments yet
            self._sized += 1
            self._hold_to_budget(snapshot.bytes)
        return snapshot

    def _hold_to_budget(self, snapshot_bytes: int) -> None:
        """As many snapshots as the rank with the largest state has room for. Collective."""
        fits = self._exchange.gather(torch.tensor([float(self.ring.fits(snapshot_bytes))]))[:, 0].min()
        self.ring.limit(int(fits))
        if self._sized == 2 and fits < 3:
            size = f"{snapshot_bytes / 2**20:.0f} MB"
            message = f"run.snapshot.budget_mb does not hold three snapshots of {size}: three are kept"
            self._tell("warning", {"message": message})

    def copy(self, snapshot: Snapshot, outer: Outer) -> None:
        """To another host's memory, in the background, where that is asked for."""
        if self.copies is not None:
            self.copies.begin(snapshot, outer.as_dict())

    def save_if_due(
        self, outer: Outer, step: int, *, applied: bool, asked: bool, snapshot: Snapshot | None, leaving: bool = False
    ) -> None:
        """See Saver.save_if_due. leaving: the job is about to end; what does not fit the time left is copied to memory."""
        if leaving and self.copies is not None and not self._exchange.vote(self._preemption.fits(), step):
            return self._copy_now(snapshot or self._state.capture(step, outer.attempts), outer)
        with self._preemption.saving():
            self.saver.save_if_due(outer, step, applied=applied, asked=asked, snapshot=snapshot)

    def save(self, snapshot: Snapshot, outer: Outer) -> None:
        with self._preemption.saving():
            self.saver.save(snapshot, outer)

    def _copy_now(self, snapshot: Snapshot, outer: Outer) -> None:
        """There is no time for a checkpoint: the copies in memory, which outlive this process, are brought up to date."""
        assert self.copies is not None and self._preemption.grace_s is not None
        if not self.copies.make(snapshot, outer.as_dict(), self._preemption.grace_s):
            message = f"step {snapshot.step} could not be copied to memory in the time there was"
            self._tell("warning", {"message": message})

    def kept_at(self, step: int) -> bool:
        """Whether the state of `step` outlives this process."""
        return step == self.saver.last or (self.copies is not None and step == self.copies.last)

    # -- what is thought of it ----------------------------------------------------------------------------------------

    def book(self, judgement: Judgement, applied: bool, step: int) -> None:
        """What an attempt says about the states that lie behind it. step: in force now."""
        decision, verdict = judgement.decision, judgement.verdict
        if applied and all(finding.severity < Severity.WARN for finding in judgement.findings):
            self.tiers.clean_step(step)
        action = decision.would or decision.action
        if decision.onset_step is None or action not in ("skip", "rollback", "stop"):
            return
        self.tiers.onset(decision.onset_step, decision.reason or decision.cause or action)
        if verdict is not None and decision.action in ("rollback", "stop"):
            shown = next(iter(judgement.findings), None)
            what = verdict.place or (f"{shown.signal}/{shown.statistic}" if shown is not None else "")
            self.tiers.failed(Failure(verdict.cause, what, decision.onset_step))

    def refused(self, candidate: Candidate, differences: list[str]) -> None:
        """It could not be restored exactly, which all ranks tell in the words of the first that has found it. differences: on
        this rank. Collective."""
        found = self._exchange.gather(torch.tensor([float(bool(differences))]))[:, 0]
        why = self._exchange.share("; ".join(differences), source=int(found.argmax()))
        self._tell("warning", {"message": f"the state of step {candidate.key.step} cannot be restored: {why}"})
        self.tiers.refused(candidate, why)

    def gone_back(self, candidate: Candidate, outer: Outer) -> None:
        """Training goes on from an earlier state."""
        self.saver.failed(outer)
        if self.copies is not None:
            self.copies.give_up()
        self.tiers.loaded(candidate)

    def close(self) -> None:
        """Nothing more is committed or copied; what is there stays."""
        self.saver.close()
        if self.tiers.peer is not None:
            self.tiers.peer.close()
