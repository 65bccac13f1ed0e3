"""A bound that a benchmark states, and whether it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """A figure and the bound it has to keep. at_least False: the bound is a maximum."""

    name: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def ok(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "bound": self.bound, "ok": self.ok}
