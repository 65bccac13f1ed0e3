"""From a table to a decision that all ranks share: judged, looked into where something is suspected, and agreed upon.

decide(table)   the judge's findings; a second look at their place (second_look.py); the verdict; a probe of links where
                the verdict asks for one; requests from outside (requests.py); all ranks show what they decided
hold(...)       is the window to run again before anything acts (rerun.py)? Then later
resolve(...)    the decision, knowing what the second run has shown
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from resilient.coordinator.config import GuardConfig
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import Window, WindowFeed
from resilient.coordinator.fingerprints import Fingerprints
from resilient.coordinator.judge import Judge, Judgement
from resilient.coordinator.outer import Outer
from resilient.coordinator.requests import granted
from resilient.coordinator.rerun import FOR_GOOD, OriginProbe, Refused, Rerun
from resilient.coordinator.second_look import SecondLook
from resilient.diagnosis import wants_confirmation, wants_probe
from resilient.engines.base import Engine
from resilient.errors import GuardError
from resilient.signals import (
    Confirmation,
    Decision,
    Exchanged,
    Finding,
    Flag,
    Kind,
    LinkReport,
    Observation,
    StepRecord,
)


class Inquiry:
    """One per guarded coordinator, made when the run starts. Making it is collective.

    targets: how many states can be gone back to from an onset. tell: events."""

    def __init__(
        self,
        judge: Judge,
        engine: Engine,
        exchange: Exchange,
        feed: WindowFeed,
        config: GuardConfig,
        outer: Outer,
        origin: OriginProbe | None,
        *,
        targets: Callable[[int], int],
        tell: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._judge, self._engine, self._exchange, self._outer = judge, engine, exchange, outer
        self._targets, self._tell = targets, tell
        self._lrs = (0.0, 0.0)  # of the last two applied steps
        if not config.reduction_check:
            engine.uncheck()
        self._hosts = exchange.hosts()
        self.rerun = Rerun(
            engine,
            exchange,
            origin,
            origins=config.nan_probes,
            confirmations=config.confirmations,
            hosts=self._hosts,
        )
        self._second_look = SecondLook(
            engine,
            exchange,
            judge.monitor,
            digests_every=config.digests_every,
            probes=config.link_probes,
            probe_s=config.link_probe_s,
            hosts=self._hosts,
        )
        rank, world = exchange.rank, exchange.world_size
        self._fingerprints = Fingerprints(feed, engine.module, engine.device, rank=rank, world=world)
        wrong = np.flatnonzero(exchange.gather(torch.tensor([float(bool(self._fingerprints.problem))]))[:, 0])
        if len(wrong):
            problem = exchange.share(self._fingerprints.problem, source=int(wrong[0]))
            tell("warning", {"message": f"rank {', '.join(map(str, wrong[:8]))}: {problem}"})

    def fill(self, record: StepRecord, window: Window) -> None:
        """What the others need of this rank for it: the plan of the reduction check, digests, fingerprints."""
        self._second_look.fill(record)
        self._fingerprints.fill(record, window, due=self._second_look.digests_due(record.step))

    def decide(self, table: Exchanged) -> Judgement:
        """Raises ExchangeFailed, and GuardError where ranks decided differently."""
        self._second_look.agree_on_plan(table)
        observation, findings = self._judge.see(table)
        findings = self._second_look.look(observation, findings)
        judgement = self._conclude(observation, findings)
        if judgement.verdict is not None and wants_probe(judgement.verdict):
            links = self._second_look.links()
            if links is not None:
                self._tell("links", {"step": table.step, **asdict(links)})
                judgement = self._conclude(observation, findings, links=links)
        judgement, self._outer.lr_factor = granted(judgement, table, self._outer.lr_factor, self._targets)
        if judgement.decision.action != "apply":
            self._confirm(judgement.decision)
        return judgement

    def hold(self, judgement: Judgement, table: Exchanged, window: Window) -> Refused | None:
        """The window that is to run again before anything is done about its step."""
        if judgement.verdict is None:
            return None
        refused = self.rerun.confirm(judgement, table, window, wants_confirmation(judgement.verdict))
        if refused is None and judgement.decision.action in FOR_GOOD:  # after a skip there is time to look
            refused = self.rerun.origin(judgement, table, window, self._judge.ladder.refused_in_a_row == 0)
        return refused

    def resolve(self, refused: Refused, confirmation: Confirmation | None) -> Judgement:
        """The first run of a held step judged again, knowing what the second has shown of the suspect, if there is one.
        Raises as `decide`."""
        if confirmation is None:
            return refused.judgement
        judgement = self._conclude(refused.judgement.observation, refused.judgement.findings, confirmation)
        if judgement.decision.action == "apply":  # its gradients are gone
            decision = replace(judgement.decision, action="retry", reason="the second run was as it should be")
            judgement = replace(judgement, decision=decision)
        self._confirm(judgement.decision)
        return judgement

    def applied(self, lr: float) -> None:
        """The optimizer took a step with this LR."""
        self._lrs = (self._lrs[1], lr)

    def close(self) -> None:
        self._second_look.close()

    def _conclude(
        self,
        observation: Observation,
        findings: tuple[Finding, ...],
        confirmation: Confirmation | None = None,
        links: LinkReport | None = None,
    ) -> Judgement:
        return self._judge.conclude(
            observation,
            findings,
            dynamic_scale=self._engine.dynamic_loss_scale(),
            targets=self._targets,
            hosts=self._hosts,
            links=links,
            confirmation=confirmation,
            lr_change=self._lrs[1] / self._lrs[0] if self._lrs[0] > 0 else 1.0,
        )

    def _confirm(self, decision: Decision) -> None:
        """Before anything but `apply`: all ranks show their decision, so that none acts alone. Rare, so it may cost a
        second collective; `apply` is checked one step later for free."""
        digest = decision.digest()
        record = StepRecord(decision.step, decision.attempt, kind=Kind.CONFIRM, digest=digest, loss=0.0, loss_max=0.0)
        table = self._exchange.table(record)
        low, high = table.ends("digest")
        if table.ranks_flagged(Flag.GUARD_FAILED) or (low, high) != (digest, digest):
            raise GuardError(f"ranks decided differently at step {decision.step}: digests from {low:.0f} to {high:.0f}")
