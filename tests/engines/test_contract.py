"""The contract suite itself: a sound engine passes it in one process, and each deliberately broken one is caught."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from resilient.engines.base import Engine, EngineState, Taps
from resilient.engines.ddp import DDPEngine
from resilient.signals import Knobs
from tests.engines import contract
from tests.engines.models import Setup
from tests.engines.test_ddp import DDPAdapter
from tests.ranks import run_pooled


class SkipMovesSchedule(DDPEngine):
    def skip(self, overflow: bool = False) -> None:
        super().skip(overflow)
        assert self.scheduler is not None
        self.scheduler.step()


class SkipStepsOnZeros(DDPEngine):
    """A step on zeroed gradients looks like a skip, but decays moments and weights."""

    def skip(self, overflow: bool = False) -> None:
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        super().skip(overflow)


class SkipKeepsGradients(DDPEngine):
    def skip(self, overflow: bool = False) -> None:
        kept = self._grads()
        super().skip(overflow)
        for name, p in self._params.items():
            p.grad = kept.get(name)


class SkipKeepsBuffers(DDPEngine):
    def skip(self, overflow: bool = False) -> None:
        self._buffers.drop()
        super().skip(overflow)


class SkipUncounted(DDPEngine):
    def skip(self, overflow: bool = False) -> None:
        super().skip(overflow)
        self._skipped -= 1


class NormAfterClip(DDPEngine):
    def taps(self) -> Taps:
        taps = super().taps()
        return replace(taps, reduced_sq_share=taps.reduced_sq_share.clamp(max=1.0))


class NormOffByLittle(DDPEngine):
    def taps(self) -> Taps:
        taps = super().taps()
        return replace(taps, local_sq=taps.local_sq * (1 + 5e-5))


class LayersMixedUp(DDPEngine):
    def taps(self) -> Taps:
        taps = super().taps()
        return replace(taps, layer_sq_share=taps.layer_sq_share.flip(0))


class UpdateBeforeKnobs(DDPEngine):
    """Measures the change that the step would have made without the LR factor."""

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        super().apply(grad_norm, knobs)
        update = self._update_tap._update
        if update is not None:
            self._update_tap._update = replace(update, sq_share=update.sq_share / knobs.lr_factor**2)


class KeepsGradients(DDPEngine):
    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        kept = self._grads()
        super().apply(grad_norm, knobs)
        for name, p in self._params.items():
            p.grad = kept.get(name)


class SumsMicroSteps(DDPEngine):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class LeaksLRFactor(DDPEngine):
    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= knobs.lr_factor
        super().apply(grad_norm, replace(knobs, lr_factor=1.0))


class IgnoresClipFactor(DDPEngine):
    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        super().apply(grad_norm, replace(knobs, clip_factor=1.0))


class ScalesUpToClip(DDPEngine):
    """Clipping that also enlarges small gradients."""

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        if self.clip is not None and grad_norm is not None and grad_norm < self.clip * knobs.clip_factor:
            for grad in self._grads().values():
                grad.mul_(1.01)
        super().apply(grad_norm, knobs)


class LeaksBetas(DDPEngine):
    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        super().apply(grad_norm, knobs)
        if knobs.betas is not None:
            self.optimizer.param_groups[0]["betas"] = knobs.betas


class CapturesViews(DDPEngine):
    def capture(self) -> EngineState:
        state = super().capture()
        state["params"] = {name: p.detach() for name, p in self._params.items()}
        return state


class RestoreKeepsLateMoments(DDPEngine):
    def restore(self, state: EngineState) -> None:
        late = {p: dict(values) for p, values in self.optimizer.state.items()}
        super().restore(state)
        for p, values in late.items():
            if p not in self.optimizer.state:
                self.optimizer.state[p] = values


class RestoreForgetsSchedule(DDPEngine):
    def restore(self, state: EngineState) -> None:
        assert self.scheduler is not None
        super().restore({**state, "schedule": {**state["schedule"], "state": self.scheduler.state_dict()}})


class RestoreKeepsGradients(DDPEngine):
    def restore(self, state: EngineState) -> None:
        kept = self._grads()
        super().restore(state)
        for name, p in self._params.items():
            p.grad = kept.get(name)


class RestoreTouchesBeforeRefusing(DDPEngine):
    def restore(self, state: EngineState) -> None:
        with torch.no_grad():
            for name, b in self.module.named_buffers():
                b.copy_(state["buffers"][name].mean() + 1)
        super().restore(state)


class CompletesWithoutBeingAsked(DDPEngine):
    def complete(self, state: EngineState, allow_missing: Collection[str]) -> tuple[EngineState, tuple[str, ...]]:
        return super().complete(state, {*allow_missing, "moments"})[0], ()


class CompletesWithLiveTensors(DDPEngine):
    def complete(self, state: EngineState, allow_missing: Collection[str]) -> tuple[EngineState, tuple[str, ...]]:
        whole, kept = super().complete(state, allow_missing)
        return ({**whole, "buffers": self.live()["buffers"]} if "buffers/centre.mean" in kept else whole), kept


class NewScheduleForgotten(DDPEngine):
    """The counters of the state that knew no schedule."""

    def complete(self, state: EngineState, allow_missing: Collection[str]) -> tuple[EngineState, tuple[str, ...]]:
        whole, kept = super().complete(state, allow_missing)
        return {**whole, "counters": state["counters"]}, kept


class ChecksSums(DDPEngine):
    """Takes what a rank sends for its part of a sum, not of the mean."""

    def taps(self) -> Taps:
        taps = super().taps()
        checks = {**taps.checks, "check_before": taps.checks["check_before"] * 2} if taps.checks else {}
        return replace(taps, checks=checks)


class ChecksBlindly(DDPEngine):
    """Looks at what the collective returned, not at what the optimizer will use."""

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self._early = super().taps().checks if self._tap is not None and self._tap.squares else {}

    def taps(self) -> Taps:
        return replace(super().taps(), checks=self._early)


class ReplicasByRank(DDPEngine):
    def replica_digests(self, kind: str) -> dict[str, torch.Tensor]:
        return {name: digest + dist.get_rank() for name, digest in super().replica_digests(kind).items()}


class ReplicasOfNothing(DDPEngine):
    def replica_digests(self, kind: str) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(digest) for name, digest in super().replica_digests(kind).items()}


class CriesWolf(DDPEngine):
    def mismatched_weights(self) -> list[str]:
        return [name for name, _ in self.module.named_parameters()]


@dataclass(frozen=True)
class Broken(DDPAdapter):
    kind: type[DDPEngine] = DDPEngine
    precisions: tuple[str, ...] = ("fp32",)

    def make(self, setup: Setup, rank: int, world: int) -> Engine:
        engine = super().make(setup, rank, world)
        assert isinstance(engine, DDPEngine)
        return self.kind(engine.model, engine.optimizer, engine.scheduler, clip=setup.clip)


FAULTS = [
    (SkipMovesSchedule, "check_true_skip"),
    (SkipStepsOnZeros, "check_true_skip"),
    (SkipKeepsGradients, "check_true_skip"),
    (SkipKeepsBuffers, "check_true_skip"),
    (SkipUncounted, "check_counters"),
    (NormAfterClip, "check_norms"),
    (NormOffByLittle, "check_norms"),
    (LayersMixedUp, "check_norms"),
    (UpdateBeforeKnobs, "check_updates"),
    (KeepsGradients, "check_updates"),
    (SumsMicroSteps, "check_norms"),
    (LeaksLRFactor, "check_lr_factor"),
    (IgnoresClipFactor, "check_clip"),
    (ScalesUpToClip, "check_clip"),
    (LeaksBetas, "check_betas"),
    (CapturesViews, "check_replay"),
    (RestoreKeepsLateMoments, "check_restore_to_start"),
    (RestoreForgetsSchedule, "check_counters"),
    (RestoreKeepsGradients, "check_abandoned_window"),
    (RestoreTouchesBeforeRefusing, "check_refuses_foreign_state"),
    (CriesWolf, "check_weights_are_the_cast"),
    (CompletesWithoutBeingAsked, "check_what_a_state_may_lack"),
    (CompletesWithLiveTensors, "check_what_a_state_may_lack"),
    (NewScheduleForgotten, "check_a_schedule_that_is_new"),
]


AMONG_RANKS = [
    (ChecksSums, "check_reduction"),
    (ChecksBlindly, "check_reduction"),
    (ReplicasByRank, "check_replicas"),
    (ReplicasOfNothing, "check_replicas"),
]


def caught_among_ranks(rank: int, world: int) -> list[str]:
    caught = []
    for kind, check in AMONG_RANKS:
        try:
            contract.run(rank, world, Broken(kind=kind), [check])
        except AssertionError:
            caught.append(kind.__name__)
    return caught


@pytest.mark.timeout(120)
def test_a_broken_engine_is_caught_among_ranks() -> None:
    assert run_pooled(caught_among_ranks, 2, timeout=110) == [[kind.__name__ for kind, _ in AMONG_RANKS]] * 2


def test_a_sound_engine_passes_in_one_process() -> None:
    """The bare module, fp32 and bf16."""
    assert contract.run(0, 1, DDPAdapter(), contract.ALL) == list(contract.ALL)
    assert isinstance(DDPAdapter().make(Setup(), 0, 1), Engine)


@pytest.mark.parametrize(("kind", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_engine_is_caught(kind: type[DDPEngine], check: str) -> None:
    with pytest.raises(AssertionError, match=check):
        contract.run(0, 1, Broken(kind=kind), [check])
