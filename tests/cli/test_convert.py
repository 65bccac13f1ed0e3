"""Strict conversion of plain dicts to frozen dataclasses (BR-64)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.cli.convert import convert
from resilient.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    size: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ConfigError(f"size={self.size}: must not be negative")


@dataclass(frozen=True)
class Outer:
    name: str
    mode: Literal["act", "observe"] = "act"
    flag: bool = False
    limit: int | None = None
    parts: tuple[Inner, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner = field(default_factory=lambda: Inner(1))
    free: Mapping[str, Any] | None = None


def message(data: Any, path: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        convert(Outer, data, path)
    return str(caught.value)


def test_everything_that_is_right() -> None:
    data = {
        "name": "x",
        "mode": "observe",
        "flag": True,
        "limit": None,
        "parts": [{"size": 1}, {"size": 2, "share": 1}],
        "pair": [1, 2.5],
        "inner": {"size": 3},
        "free": {"any": {"depth": [1, "2"]}},
    }
    outer = convert(Outer, data)
    assert outer.parts == (Inner(1), Inner(2, 1.0))
    assert isinstance(outer.parts[1].share, float), "a whole number is a number"
    assert outer.pair == (1.0, 2.5)
    assert outer.free == {"any": {"depth": [1, "2"]}}
    assert convert(Outer, {"name": "x"}) == Outer("x")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"flag": "true"}, "flag: found the text 'true', wanted true or false"),
        ({"flag": 1}, "flag: found the number 1, wanted true or false"),
        ({"limit": True}, "limit: found true, wanted a whole number"),
        ({"limit": 3.0}, "limit: found the number 3.0, wanted a whole number"),
        ({"limit": "3"}, "limit: found the text '3', wanted a whole number"),
        ({"name": None}, "name: found null, wanted text"),
        ({"name": 3}, "name: found the number 3, wanted text"),
        ({"mode": "observ"}, "mode: found the text 'observ', wanted one of act, observe; did you mean observe?"),
        ({"parts": {"size": 1}}, "parts: found a group of keys, wanted a list"),
        ({"parts": [{"size": 1}, {"size": "1"}]}, "parts[1].size: found the text '1', wanted a whole number"),
        ({"pair": [1.0]}, "pair: found a list, wanted a list of 2"),
        ({"inner": 3}, "inner: found the number 3, wanted a group of keys"),
        ({"inner": {}}, "inner.size: missing"),
        ({"inner": {"size": 1, "shar": 1.0}}, "inner.shar: unknown key; did you mean inner.share?"),
        ({"inner": {"size": -1}}, "size=-1: must not be negative"),
        ({"free": [1]}, "free: found a list, wanted a group of keys"),
    ],
)
def test_br64_wrong_value_names_key_found_and_wanted(data: dict[str, Any], expected: str) -> None:
    assert message({"name": "x", **data}) == expected


def test_br64_all_problems_at_once_with_full_keys() -> None:
    text = message({"mod": "act", "flag": "yes", "inner": {"size": 1.5}}, path="policy")
    assert text.splitlines() == [
        "4 problems:",
        "  - policy.mod: unknown key; did you mean policy.mode?",
        "  - policy.name: missing",
        "  - policy.flag: found the text 'yes', wanted true or false",
        "  - policy.inner.size: found the number 1.5, wanted a whole number",
    ]


def test_unknown_key_without_a_near_one_lists_what_there_is() -> None:
    assert message({"name": "x", "inner": {"size": 1, "qqq": 0}}).endswith("; there is: inner.share, inner.size")


@given(
    st.builds(
        Outer,
        name=st.text(),
        mode=st.sampled_from(["act", "observe"]),
        flag=st.booleans(),
        limit=st.none() | st.integers(),
        parts=st.lists(st.builds(Inner, st.integers(0), st.floats(allow_nan=False)), max_size=3).map(tuple),
        pair=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
        inner=st.builds(Inner, st.integers(0), st.floats(allow_nan=False)),
        free=st.none() | st.dictionaries(st.text(), st.integers()),
    )
)
def test_round_trip(outer: Outer) -> None:
    assert convert(Outer, asdict(outer)) == outer


@given(st.sampled_from([f.name for f in fields(Outer)]), st.text(min_size=1))
def test_any_other_key_is_refused(prefix: str, suffix: str) -> None:
    assert f"{prefix}{suffix}: unknown key" in message({"name": "x", prefix + suffix: 1})
