"""Which signals are judged over time, in which direction, and how much of a change matters. Data, not code.

A name not listed here is shown and recorded, but not judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Spec:
    """How one signal is read.

    direction: which way is bad. log: judge the logarithm (positive signals; a signal that turns out not to be positive
    is judged as it is). floor: smallest robust sigma, in (log) units; below it a curve is called smooth, not unstable.
    strictness: multiplies the thresholds; 1 for the loss, more where healthy runs have heavier tails.
    jump: smallest change that may warn. single: smallest change of one step alone that may warn where every step is
    logged. refuse: smallest change that may refuse a step (severity act of `point` and `confirmed`); None: never.
    least_scale: of its own, where dispersion says less; None: SeriesConfig's."""

    direction: Literal["up", "down", "both"] = "up"
    log: bool = True
    floor: float = 0.003
    strictness: float = 1.4
    jump: float = 0.0
    single: float = 2.3
    refuse: float | None = None
    least_scale: float | None = None


LOSS = Spec(strictness=1.0, jump=0.015, single=0.25, refuse=0.25, least_scale=1.3)
NORM = Spec(floor=0.02, jump=0.3, single=1.25, refuse=1.1)

SPECS: tuple[tuple[str, Spec], ...] = (
    ("loss", LOSS),
    ("loss_max", Spec(jump=0.05, single=0.7, least_scale=1.2)),
    ("grad_norm", NORM),
    ("grad_norm/*", Spec(floor=0.02, strictness=1.8, jump=0.3)),
    ("update_norm", Spec(floor=0.01, jump=0.15)),
    ("update_norm/*", Spec(floor=0.01, strictness=1.8, jump=0.15)),
    ("adam_lag", Spec(floor=0.01, jump=0.15)),
    ("adam_lag/*", Spec(floor=0.01, strictness=1.8, jump=0.15)),
    ("weight_norm", Spec(floor=0.001, strictness=1.8, jump=0.01)),
    ("logit_max", Spec(floor=0.01, jump=0.03)),
    ("attention_logit_max", Spec(floor=0.01, jump=0.03)),
    ("attention_entropy", Spec(direction="both", floor=0.01, strictness=1.8, jump=0.1)),
)
"""First match wins. `name/*` matches every `name/<something>`."""


def spec_of(signal: str) -> Spec | None:
    """The spec of a signal, or None if it is not judged."""
    for pattern, spec in SPECS:
        if signal == pattern or (pattern.endswith("/*") and signal.startswith(pattern[:-1])):
            return spec
    return None
