"""Constants of the detectors, in one place. Units: robust sigmas, log units (0.1 is about 10 %), steps.

Where they come from: the thresholds are the smallest round numbers that keep synthetic healthy runs (Gaussian to
Student-t3 noise, autocorrelated) at the default targets; public training logs were used to check them, and none is fitted
to a single run. docs/detectors.md has the measured figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Targets:
    """False alarms per 10,000 healthy steps and signal that each severity may cost."""

    watch: float = 5.0
    warn: float = 1.0
    act: float = 0.1


@dataclass(frozen=True)
class SeriesConfig:
    """Statistics of one signal over time (detectors/series.py).

    least_*: smallest score at which a statistic may warn at the default target, whatever the run's own tail says.
    A signal's `strictness` (detectors/specs.py) multiplies all but `least_scale`."""

    start: int = 32  # points before any statistic speaks
    trend_after: int = 96  # points before level, drift and trend speak
    scale_after: int = 608  # points before the dispersion speaks: its window, and a reference five times as long
    accept_after: int = 48  # points off in a row after which a new level is accepted, with a warning
    hold: int = 256  # points that alarms may keep the references frozen; then the new regime is accepted, too
    suspect: float = 5.0  # robust sigmas; a point beyond does not enter the references
    cooldown: int = 24  # points after an alarm that do not count as healthy history
    least_point: float = 8.0  # where one logged point stands for several steps
    least_single: float = 14.0  # where every step is logged: one odd batch is no alarm unless it is giant
    least_confirmed: float = 6.5
    least_trend: float = 5.5  # level, drift and trend
    least_scale: float = 0.42  # relative widening of the step-to-step differences


@dataclass(frozen=True)
class CrossRankConfig:
    """Outlier across ranks of one per-rank column (detectors/crossrank.py).

    act and warn are least scores: heavy-tailed noise raises them by itself."""

    signal: str = "local_grad_norm"
    act: float = 10.0
    warn: float = 8.0
    floor: float = 0.12  # smallest robust sigma, log units
    history: int = 128  # steps of memory of what is usual for a rank
    min_history: int = 12  # steps before a rank is judged
    accept_after: int = 48  # steps off in a row after which a rank's new place is its usual one
    min_ratio: float = 3.5  # an act finding also needs this factor over the peers
    top: int = 4  # ranks with a finding of their own; when more are off, one finding names the worst 16


@dataclass(frozen=True)
class StragglersConfig:
    """Ranks that the others wait for, and a wire that all wait for (detectors/stragglers.py). Warns at most."""

    start: int = 8  # attempts before times count: compilation, first allocations
    window: int = 16  # attempts looked back on
    needed: int = 8  # of those, in which the rank must have been the slow one
    relative: float = 0.3  # longer compute than the peers' median, as a share of it
    absolute_s: float = 0.05  # and by this much
    wire_ratio: float = 3.0  # shortest wait of all ranks, in units of its usual value
    wire_absolute_s: float = 0.1  # and longer than usual by this much


@dataclass(frozen=True)
class ReductionConfig:
    """The reduction check: did ranks receive what was sent? (detectors/reduction.py)"""

    sigmas: float = 6.0  # of healthy rounding beyond which a cell fails
    window: int = 16  # healthy windows behind a cell's usual residual
    lossy: float = 0.25  # share of what was sent by which a transport may be off from the first window on


@dataclass(frozen=True)
class ReplicasConfig:
    """Ranks that must hold the same, and ranks that must not be fed the same (detectors/replicas.py)."""

    repeats: int = 3  # windows fed alike before a warning ...
    window: int = 8  # ... of the last so many


@dataclass(frozen=True)
class DropsConfig:
    """Consecutive drops of the fp16 loss scale (detectors/drops.py)."""

    window: int = 100  # steps looked back on
    warn: int = 3  # drops in the window, below the lowest value that has held
    act: int = 6
    settle: int = 500  # steps from the start in which the scaler is still finding its level


@dataclass(frozen=True)
class CollapseConfig:
    """Silent collapse (detectors/collapse.py)."""

    gap: float = 0.15  # share by which evaluation loss may exceed its best before it counts, while training loss falls
    patience: int = 3  # evaluations in a row
    repetition: float = 0.5  # share of repeated n-grams in sampled text
    entropy_share: float = 0.3  # output entropy below this share of its best


@dataclass(frozen=True)
class DetectorConfig:
    """conf/detector: which detectors run, and how often they may be wrong."""

    name: Literal["default", "nonfinite_only"] = "default"
    targets: Targets = field(default_factory=Targets)
    series: SeriesConfig = field(default_factory=SeriesConfig)
    drops: DropsConfig = field(default_factory=DropsConfig)
    collapse: CollapseConfig = field(default_factory=CollapseConfig)
    reduction: ReductionConfig = field(default_factory=ReductionConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    cross_rank: tuple[CrossRankConfig, ...] = (CrossRankConfig(), CrossRankConfig(signal="loss", floor=0.04))
