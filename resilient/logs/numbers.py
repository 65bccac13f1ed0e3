"""Numbers as logs write them: plain, quoted, with thousands separators, units, human suffixes or a wrapper."""

from __future__ import annotations

import re
from typing import Any

_WRAPPED = re.compile(r"^(?:np\.|numpy\.|torch\.|jnp\.)?(?:float|int|tensor|array|Array)\w*\(\s*([^,()]+)[^()]*\)$")
_SUFFIXED = re.compile(r"^([-+]?[\d.,]+(?:[eE][-+]?\d+)?)\s*([KMGBT]|%|ms|s|sec)?$")
_THOUSANDS = re.compile(r"^[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_TIMES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_OF = re.compile(r"^\s*(\d+)\s*/\s*(\d+)\s*$")


def number(value: Any) -> float | None:
    """`value` as a float (NaN and Inf included), or None if it is no number. Booleans are none."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, list) and len(value) == 1:  # one learning rate per parameter group
        return number(value[0])
    return _from_text(value) if isinstance(value, str) and len(value) <= 64 else None


def count(value: Any) -> tuple[int, int | None] | None:
    """A counter and, where it is written as `10/100`, its total; None if it is no whole number that fits a file."""
    if isinstance(value, str) and "/" in value:
        of = _OF.match(value[:64])
        if of:
            return whole(float(of.group(1))), whole(float(of.group(2)))
    found = number(value)
    return None if found is None or not abs(found) < 1e15 else (round(found), None)


def whole(value: float) -> int:
    """Rounded; what is too large to be a counter becomes 0."""
    return round(value) if abs(value) < 1e15 else 0


def _from_text(text: str) -> float | None:
    text = text.strip().strip("'\"")
    try:
        return float(text)
    except ValueError:
        pass
    if _THOUSANDS.match(text):
        return float(text.replace(",", ""))
    wrapped = _WRAPPED.match(text)
    if wrapped:
        return _from_text(wrapped.group(1))
    suffixed = _SUFFIXED.match(text)
    if suffixed and suffixed.group(2):
        base = _from_text(suffixed.group(1))
        return None if base is None else base * _TIMES.get(suffixed.group(2), 1.0)
    return None
