"""Plain dict -> frozen dataclass, strictly: nothing is guessed, every problem is reported, all of them together.

The only conversion is int -> float. `"true"` is text and not a truth value, 30.0 is not a number of steps.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from resilient.cli.errors import all_in_one, did_you_mean, nearest
from resilient.errors import ConfigError

T = TypeVar("T")

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_FAILED: Any = object()  # stands for a value that could not be converted; the reason is in `problems`


def convert(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Build `cls` from `data`. `path` is the full key of `data`, for messages.

    Raises ConfigError listing every unknown key (with the nearest valid one), missing key and wrong type, and whatever
    the dataclasses themselves refuse.
    """
    problems: list[str] = []
    value = collect(cls, data, path, problems)
    if problems:
        raise all_in_one(problems)
    return value


def collect(cls: Any, data: Any, path: str, problems: list[str]) -> Any:
    """As `convert`, but adds to `problems` instead of raising. The result is only meaningful if nothing was added."""
    return _value(cls, data, path, problems)


def _value(wanted: Any, found: Any, path: str, problems: list[str]) -> Any:
    origin = get_origin(wanted)
    if wanted is Any:
        return found
    if origin in (Union, types.UnionType):
        return _union(get_args(wanted), found, path, problems)
    if origin is Literal:
        return _literal(get_args(wanted), found, path, problems)
    if isinstance(wanted, type) and is_dataclass(wanted):
        return _dataclass(wanted, found, path, problems)
    if origin in (tuple, list):
        return _sequence(origin, get_args(wanted), found, path, problems)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(get_args(wanted), found, path, problems)
    return _scalar(wanted, found, path, problems)


def _scalar(wanted: Any, found: Any, path: str, problems: list[str]) -> Any:
    if wanted is float and type(found) is int:
        return float(found)
    if type(found) is wanted:
        return found
    return _refuse(found, _WORDS.get(wanted, getattr(wanted, "__name__", str(wanted))), path, problems)


def _literal(choices: tuple[Any, ...], found: Any, path: str, problems: list[str]) -> Any:
    if any(type(choice) is type(found) and choice == found for choice in choices):
        return found
    hint = nearest(found, [c for c in choices if isinstance(c, str)]) if isinstance(found, str) else None
    wanted = "one of " + ", ".join(str(choice) for choice in choices)
    return _refuse(found, wanted, path, problems, f"; did you mean {hint}?" if hint else "")


def _union(members: tuple[Any, ...], found: Any, path: str, problems: list[str]) -> Any:
    attempts: list[list[str]] = []
    for member in members:
        mine: list[str] = []
        value = _value(member, found, path, mine)
        if not mine:
            return value
        if member is not type(None):
            attempts.append(mine)
    if len(attempts) == 1:
        problems.extend(attempts[0])
        return _FAILED
    return _refuse(found, " or ".join(_describe(member) for member in members), path, problems)


def _dataclass(wanted: Any, found: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(found, Mapping):
        return _refuse(found, "a group of keys", path, problems)
    hints = get_type_hints(wanted)
    known = {f.name: f for f in fields(wanted) if f.init}
    before = len(problems)
    for key in found:
        if key not in known:
            problems.append(f"{_join(path, str(key))}: unknown key{_hint(str(key), path, known)}")
    values = {}
    for name, spec in known.items():
        if name in found:
            values[name] = _value(hints[name], found[name], _join(path, name), problems)
        elif spec.default is MISSING and spec.default_factory is MISSING:
            problems.append(f"{_join(path, name)}: missing")
    if len(problems) > before:
        return _FAILED
    try:
        return wanted(**values)
    except ConfigError as error:
        problems.append(str(error))
        return _FAILED


def _sequence(origin: Any, args: tuple[Any, ...], found: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(found, (list, tuple)):
        return _refuse(found, "a list", path, problems)
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(found) != len(args):
            return _refuse(found, f"a list of {len(args)}", path, problems)
        members = args
    else:
        members = (args[0] if args else Any,) * len(found)
    return origin(
        _value(m, item, f"{path}[{i}]", problems) for i, (m, item) in enumerate(zip(members, found, strict=True))
    )


def _mapping(args: tuple[Any, ...], found: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(found, Mapping):
        return _refuse(found, "a group of keys", path, problems)
    member = args[1] if len(args) == 2 else Any
    return {key: _value(member, item, _join(path, str(key)), problems) for key, item in found.items()}


def _refuse(found: Any, wanted: str, path: str, problems: list[str], hint: str = "") -> Any:
    problems.append(f"{path}: found {_show(found)}, wanted {wanted}{hint}")
    return _FAILED


def _show(found: Any) -> str:
    if isinstance(found, str):
        return f"the text {found!r}"
    if isinstance(found, Mapping):
        return "a group of keys"
    if isinstance(found, (list, tuple)):
        return "a list"
    if found is None or isinstance(found, bool):
        return str(found).lower().replace("none", "null")
    return f"the number {found!r}" if isinstance(found, (int, float)) else repr(found)


def _describe(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(wanted))
    if get_origin(wanted) in (tuple, list):
        return "a list"
    if is_dataclass(wanted) or get_origin(wanted) is not None:
        return "a group of keys"
    return _WORDS.get(wanted, str(wanted))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _hint(key: str, path: str, known: Iterable[str]) -> str:
    return did_you_mean(_join(path, key), [_join(path, name) for name in known])
