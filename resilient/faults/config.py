"""The faults that can be injected, as plain data, and their strict reading from a mapping."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

from resilient.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What all faults share. name: a label for reports, without effect."""

    kind: ClassVar[str]
    name: str = ""

    def __post_init__(self) -> None:
        for key, least in (("step", 1), ("window", 1), ("rank", 0)):
            value = getattr(self, key, None)
            if value is not None and value < least:
                raise ConfigError(f"fault.{key}={value}: must be at least {least}")


@dataclass(frozen=True)
class NoFault(Fault):
    """Nothing is injected."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class NanFault(Fault):
    """NaN at optimizer step `step` on `rank` (null: on all), first seen at `place`.

    forward: the model's output; loss: only the loss; backward: only the gradient, behind a finite loss.
    repeat: again whenever the step is replayed.
    """

    kind: ClassVar[str] = "nan"
    step: int
    rank: int | None = 1
    place: Literal["forward", "loss", "backward"] = "forward"
    repeat: bool = False


@dataclass(frozen=True)
class NanInModule(Fault):
    """The submodule at path `module` of the model makes a NaN on `rank` (null: on all) from the first micro-batch that
    step `step` reads in an undisturbed run, and from no other: in its output, or in the gradient that it passes back.

    It belongs to the data: whoever reads that batch again gets the NaN again.
    """

    kind: ClassVar[str] = "nan_in_module"
    step: int
    module: str
    rank: int | None = 1
    place: Literal["forward", "backward"] = "forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.place not in ("forward", "backward"):
            raise ConfigError(f"fault.place={self.place}: a module makes it forward or backward")


@dataclass(frozen=True)
class RankGradSpike(Fault):
    """The local gradient of `rank` (null: of all) is multiplied by `factor` at `step`; its loss stays what it is.

    repeat: again whenever the step is replayed.
    """

    kind: ClassVar[str] = "rank_grad_spike"
    step: int
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
    """The LR that the optimizer uses is `factor` times too high for `window` steps from `step`, on all ranks.

    repeat: again whenever a step is replayed.
    """

    kind: ClassVar[str] = "lr_overshoot"
    step: int
    window: int = 5
    factor: float = 30.0
    repeat: bool = False


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


SingleFault = NoFault | NanFault | NanInModule | RankGradSpike | PoisonedWindow | LrOvershoot | KillRank
FaultConfig = SingleFault | FaultSequence

KINDS: dict[str, type[Fault]] = {
    cls.kind: cls
    for cls in (NoFault, NanFault, NanInModule, RankGradSpike, PoisonedWindow, LrOvershoot, KillRank, FaultSequence)
}
_PLACES = ("forward", "loss", "backward")

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "int | None": ((int, type(None)), "an integer or null"),
    "float": ((float,), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
}


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
        raise ConfigError(f"{key}.kind={kind}: unknown{_nearest(str(kind), list(KINDS))}")
    cls = KINDS[kind]
    known = {f.name: f for f in fields(cls)}
    for name in mapping:
        if name not in (*known, "kind"):
            raise ConfigError(f"{key}.{name}: unknown for kind {kind}{_nearest(str(name), sorted(known), key + '.')}")
    for name, field in known.items():
        if name not in mapping and field.default is MISSING:
            raise ConfigError(f"{key}.{name}: missing for kind {kind}")
    if cls is FaultSequence:
        faults = _parse_list(mapping.get("faults", ()), f"{key}.faults")
        return FaultSequence(faults, name=_convert("str", mapping.get("name", ""), f"{key}.name"))
    values = {n: _convert(known[n].type, v, f"{key}.{n}") for n, v in mapping.items() if n != "kind"}
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


def _convert(annotation: Any, value: Any, key: str) -> Any:
    if annotation not in _TYPES:  # the one Literal: a place
        if value not in _PLACES:
            raise ConfigError(f"{key}={value}: unknown{_nearest(str(value), list(_PLACES))}")
        return value
    if annotation == "float" and type(value) is int:
        value = float(value)
    types, wording = _TYPES[annotation]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(f"{key}={value!r}: must be {wording}")
    return value


def _nearest(word: str, valid: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, valid, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; valid are {', '.join(valid)}"


def check_world(fault: FaultConfig, world: int, key: str = "fault") -> None:
    """ConfigError if a fault aims at a rank that a world of this size does not have."""
    if isinstance(fault, FaultSequence):
        for i, item in enumerate(fault.faults):
            check_world(item, world, f"{key}.faults[{i}]")
        return
    rank = getattr(fault, "rank", None)
    if rank is not None and rank >= world:
        raise ConfigError(f"{key}.rank={rank}: there are only {world} rank(s), 0 to {world - 1}")
