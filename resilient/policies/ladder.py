"""The ladder: verdict -> decision, with budgets, cool-down and knobs. Pure; the same on every rank.

    nothing found, or only a warning        apply
    fp16 overflow of a dynamic scale        skip and tell the scaler; an incident only when it does not end (BR-02)
    machine or wire to blame, passing       retry: the same window is the next attempt, as if this one had not been
    1st..max_in_a_row-th refusal in a row   skip
    the same within a rollback's probation  skip on, up to `stretch`: the restored weights ran cleanly, so it is the data
    then                                    roll back before the onset, skip the data window, cut LR and clip, re-warm
    machine or wire to blame, again         roll back before the onset; the data are trained on again, LR and clip stay
    replicas differ (BR-39)                 roll back at once to before they did: the weights themselves are wrong
    budgets used up                         stop, with a report; for machine or wire as soon as no rollback is left
    silent collapse, if `on_collapse` says  stop early, or roll back before its onset (never a skip)

Everything in `state_dict` outlives a rollback (BR-46): otherwise the budget would reset itself each time it is used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from resilient.policies.config import PolicyConfig
from resilient.signals import Decision, Knobs, Severity, Verdict

_NO_DATA_SKIP = ("communication", "compute")  # the batch is not to blame: it stays in the training set


class Ladder:
    """Policy state machine. Call `decide` once per attempt, then `settle` with what was really done."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.refused_in_a_row = 0
        self.rollbacks = 0
        self._overflows_in_a_row = 0
        self._retries_in_a_row = 0
        self._onset: int | None = None  # of the current run of refusals
        self._spared = False  # in the current run of refusals machine or wire was to blame: no data are left out for it
        self._skips: deque[int] = deque(maxlen=4096)  # attempts at which a step was skipped
        self._last_rollback: int | None = None  # attempt
        self._repeats = 0  # rollbacks since the last probation that was passed
        self._rewarm_left = 0
        self._clean_since_rollback: int | None = None  # applied steps, while the probation of a rollback lasts
        self._cut = Knobs()

    # -- deciding -----------------------------------------------------------------------------------------------

    def decide(self, verdict: Verdict | None, *, step: int, attempt: int, targets: int) -> Decision:
        """targets: how many snapshots could be gone back to for this verdict's onset."""
        decision = self._decide(verdict, step, attempt, targets)
        if self.config.mode == "observe" and decision.action != "apply":
            return replace(
                decision, action="apply", would=decision.action, knobs=Knobs(), skip_data=False, overflow=False
            )
        return decision

    def _decide(self, verdict: Verdict | None, step: int, attempt: int, targets: int) -> Decision:
        if verdict is None or verdict.severity < Severity.ACT:
            collapse = next((f for f in verdict.findings if f.statistic == "collapse"), None) if verdict else None
            if verdict is None or collapse is None or self.config.on_collapse == "continue":
                return Decision("apply", step, attempt, knobs=self.knobs())
            return self._on_collapse(verdict, collapse.message, step, attempt, targets)
        onset = min(verdict.onset_step, self._onset if self._onset is not None else step)
        found = {
            "cause": verdict.cause,
            "ranks": verdict.ranks,
            "place": verdict.place,
            "onset_step": onset,
        }
        if verdict.scale_overflow and self._overflows_in_a_row < self.config.max_overflows_in_a_row:
            return Decision("skip", step, attempt, reason="overflow of the loss scale", overflow=True, **found)  # type: ignore[arg-type]
        found["incident"] = True
        if any(f.statistic == "replica" and f.severity >= Severity.ACT for f in verdict.findings):
            return self._replicas_differ(verdict, step, attempt, targets, found)
        not_the_data = verdict.cause in _NO_DATA_SKIP and not verdict.scale_overflow
        may_refuse = self.skips_left(attempt) > 0
        if not_the_data and self._retries_in_a_row < self.config.retry.max_in_a_row and may_refuse:
            return Decision("retry", step, attempt, reason=self._why(verdict), **found)  # type: ignore[arg-type]
        in_a_row = self.refused_in_a_row
        limit = self.config.skip.stretch if self.weights_proven else self.config.skip.max_in_a_row
        if in_a_row < limit and may_refuse and not not_the_data:
            return Decision("skip", step, attempt, reason=self._why(verdict), overflow=verdict.scale_overflow, **found)  # type: ignore[arg-type]
        if self._may_roll_back(attempt) and targets > 0:
            knobs = Knobs() if not_the_data else self._harder()
            skip_data = self.config.rollback.skip_data and not (self._spared or not_the_data)
            reason = f"{self._why(verdict)}; {in_a_row + self._retries_in_a_row} refusals in a row did not help"
            return Decision("rollback", step, attempt, reason=reason, knobs=knobs, skip_data=skip_data, **found)  # type: ignore[arg-type]
        does_not_pass = (
            not_the_data and self.rollbacks >= self.config.rollback.budget
        )  # leaving data out would not cure it
        if may_refuse and not does_not_pass:
            return Decision("skip", step, attempt, reason=self._why(verdict), overflow=verdict.scale_overflow, **found)  # type: ignore[arg-type]
        return Decision("stop", step, attempt, reason=f"{self._why(verdict)}; the budget is used up", **found)  # type: ignore[arg-type]

    def _replicas_differ(
        self, verdict: Verdict, step: int, attempt: int, targets: int, found: dict[str, Any]
    ) -> Decision:
        """Refusing the attempt would leave weights in force that are known to be wrong on some rank."""
        if targets > 0 and self.rollbacks < self.config.rollback.budget:
            return Decision("rollback", step, attempt, reason=self._why(verdict), **found)
        lacking = "no snapshot from before" if targets == 0 else "the budget is used up"
        return Decision("stop", step, attempt, reason=f"{self._why(verdict)}; {lacking}", **found)

    def _on_collapse(self, verdict: Verdict, message: str, step: int, attempt: int, targets: int) -> Decision:
        """Refusing the attempt would cure nothing: the weights themselves have gone wrong, slowly."""
        found = {"cause": verdict.cause, "ranks": verdict.ranks, "onset_step": verdict.onset_step, "incident": True}
        if self.config.on_collapse == "rollback" and targets > 0 and self._may_roll_back(attempt):
            return Decision("rollback", step, attempt, reason=message, knobs=self._harder(), **found)  # type: ignore[arg-type]
        return Decision("stop", step, attempt, reason=f"early stop: {message}", **found)  # type: ignore[arg-type]

    def _why(self, verdict: Verdict) -> str:
        return verdict.evidence[0] if verdict.evidence else verdict.cause

    def _may_roll_back(self, attempt: int) -> bool:
        if self.rollbacks >= self.config.rollback.budget:
            return False
        return self._last_rollback is None or attempt - self._last_rollback > self.config.rollback.cooldown

    def _harder(self) -> Knobs:
        """The cut of this rollback: each repeat within the probation of the one before cuts once more."""
        times = self._repeats + 1
        return Knobs(self.config.rollback.lr_factor**times, self.config.rollback.clip_factor**times)

    # -- settling -----------------------------------------------------------------------------------------------

    def settle(self, decision: Decision) -> None:
        """Book what was done. In observe mode the budgets are booked as if it had been done."""
        action = decision.would or decision.action
        self._retries_in_a_row = self._retries_in_a_row + 1 if action == "retry" else 0
        if action == "apply":
            self.refused_in_a_row = self._overflows_in_a_row = 0
            self._onset, self._spared = None, False
            self._rewarm_left = max(self._rewarm_left - 1, 0)
            if self._clean_since_rollback is not None:
                self._clean_since_rollback += 1
                if self._clean_since_rollback >= self.config.rollback.rewarm:
                    self._clean_since_rollback, self._repeats = None, 0
            return
        if decision.overflow and not decision.incident:
            self._overflows_in_a_row += 1
            return
        if action in ("skip", "retry"):
            self.refused_in_a_row += action == "skip"  # of other batches, on the same weights
            self._onset = decision.onset_step
            self._spared |= decision.cause in _NO_DATA_SKIP
            self._skips.append(decision.attempt)
        elif action == "rollback":
            self.rollbacks += 1
            self._last_rollback = decision.attempt
            self.refused_in_a_row = 0
            self._onset, self._spared = None, False
            self._clean_since_rollback = 0
            self._repeats += 1
            if not decision.knobs.neutral:
                self._cut = decision.knobs
                self._rewarm_left = self.config.rollback.rewarm

    def knobs(self) -> Knobs:
        """In effect for the next applied step: the cut LR comes back linearly, the cut clip stays until it is back."""
        if self._rewarm_left == 0:
            return Knobs()
        done = 1.0 - self._rewarm_left / self.config.rollback.rewarm
        return replace(self._cut, lr_factor=self._cut.lr_factor + (1.0 - self._cut.lr_factor) * done)

    @property
    def weights_proven(self) -> bool:
        """Weights were restored lately and have run cleanly since: what is off now is not them."""
        return bool(self._clean_since_rollback)

    @property
    def repeats(self) -> int:
        """How many older targets to pass over: each repeat goes one snapshot further back."""
        return self._repeats

    def skips_left(self, attempt: int) -> int:
        recent = sum(1 for a in self._skips if a > attempt - self.config.skip.window)
        return max(self.config.skip.budget - recent, 0)

    def budget_left(self, attempt: int) -> int:
        """Interventions left: skips in the window plus rollbacks of the run."""
        return self.skips_left(attempt) + max(self.config.rollback.budget - self.rollbacks, 0)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "refused_in_a_row": self.refused_in_a_row,
            "rollbacks": self.rollbacks,
            "overflows_in_a_row": self._overflows_in_a_row,
            "retries_in_a_row": self._retries_in_a_row,
            "onset": self._onset,
            "spared": self._spared,
            "skips": list(self._skips),
            "last_rollback": self._last_rollback,
            "repeats": self._repeats,
            "rewarm_left": self._rewarm_left,
            "clean_since_rollback": self._clean_since_rollback,
            "cut": {"lr_factor": self._cut.lr_factor, "clip_factor": self._cut.clip_factor},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.refused_in_a_row = state["refused_in_a_row"]
        self.rollbacks = state["rollbacks"]
        self._overflows_in_a_row = state["overflows_in_a_row"]
        self._retries_in_a_row = state["retries_in_a_row"]
        self._onset, self._spared = state["onset"], state["spared"]
        self._skips = deque(state["skips"], maxlen=4096)
        self._last_rollback = state["last_rollback"]
        self._repeats = state["repeats"]
        self._rewarm_left = state["rewarm_left"]
        self._clean_since_rollback = state["clean_since_rollback"]
        self._cut = Knobs(**state["cut"])
