"""The ladder's constants: what is tried, how often, and what is changed along the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RetryConfig:
    """Run the same window again at once, for a fault of a machine or of the wire: most of them pass. max_in_a_row: times
    in a row before going back instead. A retry counts as a refused attempt in the budget of `skip`."""

    max_in_a_row: int = 2


@dataclass(frozen=True)
class SkipConfig:
    """Refuse the step. max_in_a_row: refused attempts before going back instead. stretch: the same, once restored weights
    have run cleanly again: then the data is the suspect, and a bad stretch of it is passed over batch by batch.
    budget: refused attempts per `window` attempts."""

    max_in_a_row: int = 3
    stretch: int = 32
    budget: int = 64
    window: int = 500


@dataclass(frozen=True)
class RollbackConfig:
    """Go back before the onset. budget: rollbacks per run. cooldown: attempts after a rollback during which the next one
    is not yet due. lr_factor/clip_factor: cut applied at once; the LR comes back over `rewarm` steps, linearly.
    skip_data: do not train on the window between onset and alarm again (never for communication or compute verdicts)."""

    budget: int = 4
    cooldown: int = 4
    lr_factor: float = 0.3
    clip_factor: float = 0.3
    rewarm: int = 20
    skip_data: bool = True


@dataclass(frozen=True)
class PolicyConfig:
    """conf/policy. mode: act | observe (log what would be done) | off (no guard at all).

    on_collapse: what follows a silent collapse or a widening gap between training and evaluation (S1, T10): continue (it
    is told) | stop (early, with the best checkpoint named) | rollback (to the newest snapshot before the onset, with the
    LR cut; stop where there is none)."""

    name: str = "default"
    mode: Literal["act", "observe", "off"] = "act"
    retry: RetryConfig = field(default_factory=RetryConfig)
    skip: SkipConfig = field(default_factory=SkipConfig)
    rollback: RollbackConfig = field(default_factory=RollbackConfig)
    on_collapse: Literal["continue", "stop", "rollback"] = "continue"
    max_overflows_in_a_row: int = 8  # fp16: more overflows in a row than this are not a scale problem (BR-02)
