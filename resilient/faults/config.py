"""The faults that can be injected, as plain data, and their strict reading from a mapping."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from resilient.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What all faults share. name: a label for reports, without effect.

    step: optimizer step, from 1. window: steps, beginning with it; null: to the end. rank: the only one that is hit; null, where that is
    allowed: all of them. repeat: again whenever a step is replayed (broken for good); otherwise a replay is clean, as
    after a transient. seed: of whatever is drawn, alike on all ranks and in every run.
    """

    kind: ClassVar[str]
    name: str = ""

    def __post_init__(self) -> None:
        for key, least in (("step", 1), ("window", 1), ("micro_step", 1), ("elements", 1)):
            self._at_least(key, least)
        for key in ("rank", "source", "element", "ms", "relative"):
            self._at_least(key, 0)

    def _at_least(self, key: str, least: int) -> None:
        value = getattr(self, key, None)
        if value is not None and not value >= least:
            raise ConfigError(f"fault.{key}={value}: must be at least {least}")


@dataclass(frozen=True)
class NoFault(Fault):
    """Nothing is injected."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class NanFault(Fault):
    """NaN at optimizer step `step` on `rank` (null: on all), first seen at `place`.

    forward: the model's output; loss: only the loss; backward: only the gradient, behind a finite loss.
    """

    kind: ClassVar[str] = "nan"
    step: int
    rank: int | None = 1
    place: Literal["forward", "loss", "backward"] = "forward"
    repeat: bool = False


@dataclass(frozen=True)
class NanInModule(Fault):
    """The submodule at path `module` of the model makes a NaN from the first micro-batch that `rank` (null: each rank) reads
    for step `step` in an undisturbed run, and from no other: in its output, or in the gradient that it passes back.

    It belongs to the data: whichever rank runs that batch again gets the NaN again.
    """

    kind: ClassVar[str] = "nan_in_module"
    step: int
    module: str
    rank: int | None = 1
    place: Literal["forward", "backward"] = "forward"


@dataclass(frozen=True)
class RankGradSpike(Fault):
    """The local gradient of `rank` (null: of all) is multiplied by `factor` for `window` steps; its loss stays what it is."""

    kind: ClassVar[str] = "rank_grad_spike"
    step: int
    window: int | None = 1
    rank: int | None = 1
    factor: float = 1000.0
    repeat: bool = False


@dataclass(frozen=True)
class PoisonedWindow(Fault):
    """The labels of `window` data windows, beginning with the one that step `step` reads in an undisturbed run, are
    replaced through a permutation of the vocabulary drawn from `seed`. rank null: on all ranks.

    It belongs to the data: whoever reads these windows again is poisoned again.
    """

    kind: ClassVar[str] = "poisoned_window"
    step: int
    window: int = 8
    rank: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class LrOvershoot(Fault):
    """The LR that the optimizer uses is `factor` times too high for `window` steps from `step`, on all ranks."""

    kind: ClassVar[str] = "lr_overshoot"
    step: int
    window: int | None = 5
    factor: float = 30.0
    repeat: bool = False


@dataclass(frozen=True)
class BitFlip(Fault):
    """One bit of one element of the local gradient of `rank` is inverted before the reduction, in the first micro-step.

    parameter: its name; null: drawn from `seed`, each by its size. element: of the flat parameter; null: drawn.
    bit: counted in a 32-bit word from its lowest, 31 the sign, 30..23 the exponent of fp32 and bf16. A 16-bit gradient is
    the upper half of such a word: bits 16..31.
    """

    kind: ClassVar[str] = "bit_flip"
    step: int
    rank: int = 1
    parameter: str | None = None
    element: int | None = None
    bit: int = 30
    seed: int = 0
    repeat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.bit <= 31:
            raise ConfigError(f"fault.bit={self.bit}: must be from 0 to 31")


@dataclass(frozen=True)
class GradNoise(Fault):
    """Gaussian noise on the local gradient of `rank` for `window` steps, in every micro-step; its loss stays what it is.

    parameter: the only one that gets it; null: all. relative: expected L2 of the noise over L2 of a parameter's gradient.
    """

    kind: ClassVar[str] = "grad_noise"
    step: int
    window: int | None = 1
    rank: int = 1
    parameter: str | None = None
    relative: float = 30.0
    seed: int = 0
    repeat: bool = False


@dataclass(frozen=True)
class GradStuck(Fault):
    """The local gradient of one parameter on `rank` is `value` in every element for `window` steps, whatever was computed.

    parameter: its name; null: drawn from `seed`, each by its size. The value is that of the mean over micro-steps.
    """

    kind: ClassVar[str] = "grad_stuck"
    step: int
    window: int | None = 8
    rank: int = 1
    parameter: str | None = None
    value: float = 0.0
    seed: int = 0
    repeat: bool = False


@dataclass(frozen=True)
class DroppedMicroStep(Fault):
    """What one micro-step of `rank` contributes to the gradient is missing: its forward and loss are as ever.

    micro_step: which one, from 1; the last one in a window that has fewer.
    """

    kind: ClassVar[str] = "dropped_micro_step"
    step: int
    rank: int = 1
    micro_step: int = 1
    repeat: bool = False


@dataclass(frozen=True)
class BadReduction(Fault):
    """`rank` receives something else than was sent: its reduced gradient is wrong, the others' are right.

    how: nan; finite (off by `relative` of the L2 norm of what the rank holds of that layer group's reduced gradient);
    unreduced (the rank's own local gradient); stale (what was received in the step before).
    layer: the layer group that it hits; null: drawn from `seed` among those that the rank holds, by size.
    elements: how many in a row, beginning at a drawn one; null: all that the rank holds of the group.
    """

    kind: ClassVar[str] = "bad_reduction"
    step: int
    window: int | None = 1
    rank: int = 1
    how: Literal["nan", "finite", "unreduced", "stale"] = "finite"
    layer: str | None = None
    elements: int | None = 1
    relative: float = 0.1
    seed: int = 0
    repeat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.how == "stale" and self.step == 1:
            raise ConfigError("fault.step=1: a stale gradient (fault.how=stale) needs a step before")


@dataclass(frozen=True)
class SkippedReduction(Fault):
    """`rank` (null: each rank) goes on with its own local gradient for `window` steps, as if nothing had been reduced."""

    kind: ClassVar[str] = "skipped_reduction"
    step: int
    window: int | None = 1
    rank: int | None = 1
    repeat: bool = False


@dataclass(frozen=True)
class ReplicaDrift(Fault):
    """When `step` begins, one parameter, or its optimizer moments, changes on `rank` alone, and nothing is said.

    what: parameter; moment (of Adam: exp_avg_sq). parameter: its name; null: drawn from `seed`, each by its size.
    relative: L2 of the change over L2 of the tensor. Refused where that tensor has no replica: FSDP2 without HSDP, ZeRO 3, and for
    moments ZeRO 1 and 2. Under ZeRO 1 and 2 the next optimizer step writes the parameters anew, from their owners.
    """

    kind: ClassVar[str] = "replica_drift"
    step: int
    rank: int = 1
    what: Literal["parameter", "moment"] = "parameter"
    parameter: str | None = None
    relative: float = 0.01
    seed: int = 0
    repeat: bool = False


@dataclass(frozen=True)
class SwappedRng(Fault):
    """When `step` begins, `rank` is given the random streams of the rank `source`: from then on both draw alike."""

    kind: ClassVar[str] = "swapped_rng"
    step: int
    rank: int = 1
    source: int = 0
    repeat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank == self.source:
            raise ConfigError(f"fault.source={self.source}: must be another rank than fault.rank")


@dataclass(frozen=True)
class BadSample(Fault):
    """One sample is bad on whichever rank reads it, every time: the first one that `rank` reads for step `step` in an
    undisturbed run. The gradient of its micro-batch is `factor` times as large.

    loss: odd (the labels are wrong, and the loss is as many times too large); normal (the loss tells nothing).
    """

    kind: ClassVar[str] = "bad_sample"
    step: int
    rank: int = 1
    loss: Literal["odd", "normal"] = "odd"
    factor: float = 30.0
    seed: int = 0


@dataclass(frozen=True)
class EmptyBatch(Fault):
    """No label carries loss in what `rank` reads in `window` data windows, beginning with that of step `step` in an
    undisturbed run. It belongs to the data."""

    kind: ClassVar[str] = "empty_batch"
    step: int
    window: int = 1
    rank: int = 1


@dataclass(frozen=True)
class ShuffleMismatch(Fault):
    """The sampler of `rank` differs from the others' in what it reads for `window` steps, beginning with `step`.

    differs: seed (another order: `seed` more than the run's), epoch (the next one's order), rank (it takes the share of the
    next rank, so that both read the same samples). It belongs to the data. told: the stream says by which order it goes, as
    torch's DistributedSampler does; false: it says what the others say, and only the samples themselves tell.
    """

    kind: ClassVar[str] = "shuffle_mismatch"
    step: int
    window: int | None = None
    rank: int = 1
    differs: Literal["seed", "epoch", "rank"] = "seed"
    seed: int = 1
    told: bool = True


@dataclass(frozen=True)
class SlowCompute(Fault):
    """`rank` computes `ms` milliseconds longer in each of `window` steps, spread over their micro-steps."""

    kind: ClassVar[str] = "slow_compute"
    step: int
    window: int | None = None
    rank: int = 1
    ms: float = 50.0


@dataclass(frozen=True)
class SlowLink(Fault):
    """Each collective of `rank` during a backward, and each message that it sends to a single rank, takes `ms` milliseconds
    longer for `window` steps."""

    kind: ClassVar[str] = "slow_link"
    step: int
    window: int | None = None
    rank: int = 1
    ms: float = 50.0


@dataclass(frozen=True)
class Fp16Overflow(Fault):
    """Values beyond the range of fp16 become infinite for `window` steps on `rank` (null: on all), whatever the loss scale.

    place: forward (the model's output), backward (the gradient of it, behind a finite loss). times: the largest value
    over the largest of fp16. The engine's own precision does not matter: the range is that of fp16.
    """

    kind: ClassVar[str] = "fp16_overflow"
    step: int
    window: int | None = 1
    rank: int | None = None
    place: Literal["forward", "backward"] = "backward"
    times: float = 4.0
    repeat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.times > 1:
            raise ConfigError(f"fault.times={self.times}: must be above 1, or nothing overflows")


@dataclass(frozen=True)
class Beta2Shock(Fault):
    """Adam's beta2 is `value` for `window` steps, on all ranks."""

    kind: ClassVar[str] = "beta2_shock"
    step: int
    window: int | None = 5
    value: float = 0.5
    repeat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.value < 1:
            raise ConfigError(f"fault.value={self.value}: a beta must be at least 0 and below 1")


@dataclass(frozen=True)
class SecondMomentLost(Fault):
    """Just before the optimizer takes `step`, Adam's second moments are multiplied by `factor` on all ranks: the next updates
    are far too large."""

    kind: ClassVar[str] = "second_moment_lost"
    step: int
    factor: float = 0.0
    repeat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor >= 0:
            raise ConfigError(f"fault.factor={self.factor}: must be at least 0, or a second moment is negative")


@dataclass(frozen=True)
class KillRank(Fault):
    """`rank` sends itself SIGKILL when `step` begins. Only in the first start of a run (generation 0)."""

    kind: ClassVar[str] = "kill_rank"
    step: int
    rank: int = 0


@dataclass(frozen=True)
class FaultSequence(Fault):
    """Several faults in one run. The first in the list is the innermost."""

    kind: ClassVar[str] = "sequence"
    faults: tuple[SingleFault, ...] = ()


SingleFault = (
    NoFault
    | NanFault
    | NanInModule
    | RankGradSpike
    | BitFlip
    | GradNoise
    | GradStuck
    | DroppedMicroStep
    | BadReduction
    | SkippedReduction
    | ReplicaDrift
    | SwappedRng
    | PoisonedWindow
    | BadSample
    | EmptyBatch
    | ShuffleMismatch
    | SlowCompute
    | SlowLink
    | Fp16Overflow
    | LrOvershoot
    | Beta2Shock
    | SecondMomentLost
    | KillRank
)
FaultConfig = SingleFault | FaultSequence

KINDS: dict[str, type[Fault]] = {cls.kind: cls for cls in (*get_args(SingleFault), FaultSequence)}

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def parse(mapping: Mapping[str, Any] | None, key: str = "fault") -> FaultConfig:
    """A mapping as composed from conf/fault -> the fault it describes. None or an empty one: no fault.

    ConfigError names the full key (`fault.windw`, `fault.faults[1].step`) and the nearest valid one.
    """
    if not mapping:
        return NoFault()
    if "kind" not in mapping:
        raise ConfigError(f"{key}.kind: missing; one of {', '.join(KINDS)}")
    kind = mapping["kind"]
    if kind not in KINDS:
        raise ConfigError(f"{key}.kind={kind}: unknown{nearest(str(kind), list(KINDS))}")
    cls = KINDS[kind]
    known = {f.name: f for f in fields(cls)}
    for name in mapping:
        if name not in (*known, "kind"):
            raise ConfigError(f"{key}.{name}: unknown for kind {kind}{nearest(str(name), sorted(known), key + '.')}")
    for name, field in known.items():
        if name not in mapping and field.default is MISSING:
            raise ConfigError(f"{key}.{name}: missing for kind {kind}")
    if cls is FaultSequence:
        faults = _parse_list(mapping.get("faults", ()), f"{key}.faults")
        return FaultSequence(faults, name=_convert(str, mapping.get("name", ""), f"{key}.name"))
    wanted = get_type_hints(cls)
    values = {n: _convert(wanted[n], v, f"{key}.{n}") for n, v in mapping.items() if n != "kind"}
    try:
        return cls(**values)  # type: ignore[return-value]
    except ConfigError as error:
        raise ConfigError(str(error).replace("fault.", f"{key}.", 1)) from None


def _parse_list(items: Any, key: str) -> tuple[SingleFault, ...]:
    if not isinstance(items, list | tuple):
        raise ConfigError(f"{key}={items!r}: must be a list of faults")
    found: list[SingleFault] = []
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ConfigError(f"{key}[{i}]={item!r}: must be a mapping with a kind")
        fault = parse(item, f"{key}[{i}]")
        if isinstance(fault, FaultSequence):
            raise ConfigError(f"{key}[{i}].kind=sequence: a sequence cannot hold another one")
        found.append(fault)
    return tuple(found)


def _convert(wanted: Any, value: Any, key: str) -> Any:
    """`value` if it is of the type `wanted`: a scalar, one or null, or one of several words."""
    choices = get_args(wanted)
    if get_origin(wanted) is Literal:
        if value not in choices:
            raise ConfigError(f"{key}={value}: unknown{nearest(str(value), list(choices))}")
        return value
    nullable = get_origin(wanted) in (Union, types.UnionType)
    if nullable:
        if value is None:
            return None
        wanted = next(choice for choice in choices if choice is not type(None))
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{key}={value!r}: must be {_WORDS[wanted]}{' or null' if nullable else ''}")
    return value


def nearest(word: str, valid: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, valid, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; valid are {', '.join(valid)}"


def check_world(fault: FaultConfig, world: int, key: str = "fault") -> None:
    """ConfigError if a fault aims at a rank that a world of this size does not have."""
    if isinstance(fault, FaultSequence):
        for i, item in enumerate(fault.faults):
            check_world(item, world, f"{key}.faults[{i}]")
        return
    for name in ("rank", "source"):
        rank = getattr(fault, name, None)
        if rank is not None and rank >= world:
            raise ConfigError(f"{key}.{name}={rank}: there are only {world} rank(s), 0 to {world - 1}")
