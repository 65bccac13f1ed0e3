"""Numbers that stand for "not measured" and are never data. Decided causally: from this row and earlier ones only.

The rules, and what they are for:
- An exact 0 of a signal that cannot be 0 (loss, norms, ...) is absent until the first other value, and after that
  unless the values had come so close to 0 before that print rounding explains it (smallest of the last 16 < NEAR_ZERO):
  `grad norm: 0.000` of engines that do not report it; a loss of 0.0 where a logger filtered a NaN away.
- A negative norm or learning rate, and a loss scale that is not positive, is absent: DeepSpeed's -1.
- Before the first finite norm, a NaN norm beside a good loss is absent: nothing was measured yet.
- On a refused step the norm that repeats the one before exactly is stale, and absent; likewise where the loss scale fell
  and the repeated norm has so many digits that chance is out of the question.
- A NaN in an evaluation column beside a finite training loss fills a gap of a wide table, and so does a NaN training loss
  beside a finite evaluation.
Norms that change by the same power of two as the loss scale are kept and remarked on: they carry the scale.
"""

from __future__ import annotations

import math
from collections import deque

from resilient.logs.rows import Remarks

NEAR_ZERO = 0.02
_RECENT = 16
_MAX_NAMES = 1024  # per-layer names that are followed; beyond it a signal is taken as it comes

_NEVER_ZERO = frozenset({"loss", "grad_norm", "eval_loss", "weight_norm", "update_norm", "logit_max", "attention_entropy", "loss_max"})  # fmt: skip
_NEVER_NEGATIVE = frozenset({"grad_norm", "weight_norm", "update_norm", "lr", "attention_entropy"})


class _Seen:
    """What is remembered of one signal."""

    __slots__ = ("good", "recent", "zeros")

    def __init__(self) -> None:
        self.good = False  # a value other than 0 was seen
        self.zeros = 0  # withheld before it
        self.recent: deque[float] = deque(maxlen=_RECENT)


class Placeholders:
    """Drops placeholders from rows, in the order of the file, and says so in `remarks`."""

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self._seen: dict[str, _Seen] = {}
        self._counts: dict[tuple[str, str], int] = {}  # (signal, why) -> values left out
        self._last_norm: float | None = None
        self._last_scale: float | None = None
        self._jumps = 0

    def clean(self, values: dict[str, float], applied: bool) -> dict[str, float]:
        """`values` without placeholders. applied: False if the file says that the step was refused."""
        kept: dict[str, float] = {}
        loss = values.get("loss", math.nan)
        for name, value in values.items():
            if value == 0.0 and self._zero(name):
                continue
            if value < 0 and (name in _NEVER_NEGATIVE or name.startswith("grad_norm/")):
                self._drop(name, "negative: no measurement")
                continue
            if name == "loss_scale" and not value > 0:
                self._drop(name, "not positive: stands for no loss scaling")
                continue
            if name == "grad_norm" and value != value and math.isfinite(loss) and loss != 0 and not self._knows(name):
                self._drop(name, "NaN from the start beside finite losses: not measured")
                continue
            if value != 0.0 and value == value:
                self._good(name, value)
            if name in self._remarks.unread:
                del self._remarks.unread[name]
            kept[name] = value
        if "grad_norm" in kept or "loss_scale" in kept:
            self._scaled(kept, applied)
        return kept

    def finish(self) -> None:
        """Put what was counted into the remarks."""
        for (name, why), number in self._counts.items():
            if self._remarks.unread.get(name) != why:
                self._note(f"{name}: {number} value{'s' if number > 1 else ''} left out ({why})")

    # -- rules --------------------------------------------------------------------------------------------------

    def _follow(self, name: str) -> _Seen | None:
        seen = self._seen.get(name)
        if seen is None and len(self._seen) < _MAX_NAMES:
            seen = self._seen[name] = _Seen()
        return seen

    def _knows(self, name: str) -> bool:
        seen = self._seen.get(name)
        return seen is not None and seen.good

    def _good(self, name: str, value: float) -> None:
        if name in _NEVER_ZERO or name.startswith("grad_norm/"):
            seen = self._follow(name)
            if seen is None:
                return
            if not seen.good:
                seen.good = True
                if seen.zeros:
                    self._note(f"{name}: exactly 0 on the first {seen.zeros} rows, not measured there")
            seen.recent.append(abs(value))

    def _zero(self, name: str) -> bool:
        """True if an exact 0 of this signal is no data."""
        if name not in _NEVER_ZERO and not name.startswith("grad_norm/"):
            return False
        seen = self._follow(name)
        if seen is None:
            return False
        if not seen.good:
            seen.zeros += 1
            if seen.zeros == 1:
                self._remarks.unread[name] = "exactly 0 throughout: not measured"
            return True
        if min(seen.recent, default=1.0) < NEAR_ZERO:
            return False
        self._drop(name, "exactly 0 after values far from it: a placeholder, often for a NaN that the logger filtered")
        return True

    def _scaled(self, kept: dict[str, float], applied: bool) -> None:
        """Stale norms, and norms that carry the loss scale."""
        norm, scale = kept.get("grad_norm"), kept.get("loss_scale")
        last_norm, last_scale = self._last_norm, self._last_scale
        if norm is not None and norm == last_norm:
            lowered = scale is not None and last_scale is not None and scale < last_scale and _digits(norm) >= 6
            if not applied or lowered:
                del kept["grad_norm"]
                self._drop_stale()
                norm = None
        if norm is not None and scale is not None and last_norm and last_scale and scale != last_scale:
            change = scale / last_scale
            if math.isfinite(norm) and math.isfinite(last_norm) and change > 0:
                ratio = norm / last_norm
                if abs(ratio / change - 1) < 0.05 or abs(ratio * change - 1) < 0.05:
                    self._jumps += 1
                    if self._jumps == 2:
                        self._note(
                            "grad_norm changes by the same factor as loss_scale: it was logged with the loss scale "
                            "in it, and such steps are no growth of the gradient"
                        )
        if norm is not None:
            self._last_norm = norm
        if scale is not None:
            self._last_scale = scale

    # -- saying so ----------------------------------------------------------------------------------------------

    def _drop_stale(self) -> None:
        self._drop("grad_norm", "repeats the value before on a refused step: stale")

    def _drop(self, name: str, why: str) -> None:
        self._counts[name, why] = self._counts.get((name, why), 0) + 1
        if not self._knows(name):
            self._remarks.unread.setdefault(name, why)

    def _note(self, text: str) -> None:
        if text not in self._remarks.notes:
            self._remarks.notes.append(text)


def _digits(value: float) -> int:
    """Significant digits of a number as it was written."""
    return len(repr(value).split("e")[0].replace(".", "").strip("-0"))
