"""Plain values and durable small files: what config.yaml, env.json, verdict.json and summary.json are made of."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

from resilient.checkpoint.files import write_whole
from resilient.errors import ConfigError, GuardError


class TelemetryError(GuardError):
    """A file of the run directory cannot be written (disk full, permission, lost mount). Training can do without it."""


def plain(value: Any, key: str = "") -> Any:
    """`value` as JSON types only, recursively (BR-62): dataclasses and mappings -> dict, sequences -> list, paths and
    dtypes -> text, int and str enums -> their value, other enums -> their name, arrays and tensors -> numbers. NaN and
    Inf stay.

    Raises ConfigError naming the full key for anything else: text like `<object at 0x...>` helps nobody later.
    """
    if isinstance(value, Enum):
        return value.value if isinstance(value, int | str) else value.name
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), _join(key, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v, _join(key, str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, _join(key, str(i))) for i, v in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(v, key) for v in value), key=str)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if type(value).__name__ == "dtype":  # torch.dtype and numpy.dtype, without importing either
        return str(value)
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist(), key)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise ConfigError(f"{key or 'value'}: a {kind} cannot be stored as plain data")


def finite(value: Any, lost: list[str], key: str = "") -> Any:
    """Plain `value` with every NaN and Inf replaced by None; their dotted keys are appended to `lost`."""
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(key)
        return None
    if isinstance(value, dict):
        return {k: finite(v, lost, _join(key, k)) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v, lost, _join(key, str(i))) for i, v in enumerate(value)]
    return value


def json_line(record: Mapping[str, Any]) -> str:
    """One line of strict JSON. Non-finite numbers become null and are named under `nonfinite` (DESIGN 8)."""
    lost: list[str] = []
    data = finite(plain(record), lost)
    if lost:
        data["nonfinite"] = lost
    return json.dumps(data, allow_nan=False)


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all. Raises TelemetryError; the old file is then untouched."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise TelemetryError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: pathlib.Path, data: Mapping[str, Any]) -> None:
    """`write_atomic` of one JSON object; non-finite numbers become null."""
    write_atomic(path, json.dumps(finite(plain(data), []), indent=2, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None if there is none that can be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Leaves of nested plain data by dotted key. Empty containers are leaves."""
    items: list[tuple[str, Any]]
    if isinstance(value, dict) and value:
        items = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {key: value}
    leaves: dict[str, Any] = {}
    for name, item in items:
        leaves.update(flatten(item, _join(key, name)))
    return leaves


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
