"""What differs between two checkpoints: configuration, learning rate, parameter groups, state part by state part.

The engine state of one rank is opened from each to read the parameter groups: mapped into memory, not copied, and loaded with
`weights_only`, so that nothing in a file can run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from resilient.checkpoint.manifest import Checkpoint, Manifest
from resilient.checkpoint.storage import Storage, redact
from resilient.errors import CheckpointError, ConfigError
from resilient.telemetry.checkpoints import Place
from resilient.telemetry.checkpoints_view import printable, ranks_text
from resilient.telemetry.files import finite, flatten, plain
from resilient.telemetry.run_directory import read_config

_STATE = ("run_id", "generation", "step", "attempt", "position", "samples", "lr", "schedule", "loss_scale", "world")
_SHOWN = 40  # lines of one section

Group = tuple[tuple[str, ...], dict[str, Any]]
"""One parameter group: names of its parameters, its options."""


def diff(a: tuple[Place, Checkpoint], b: tuple[Place, Checkpoint]) -> dict[str, Any]:
    """Plain JSON: `equal`, and for each of state, config, health the keys that differ with both values; `parts`: per state
    part the ranks whose digests differ and those that only one of the two holds; `groups`: the parameter groups that
    differ, or why they could not be read."""
    one, other = a[1].manifest, b[1].manifest
    sections = {
        "state": _changed({k: getattr(one, k) for k in _STATE}, {k: getattr(other, k) for k in _STATE}),
        "config": _changed(_config(a[0], one), _config(b[0], other)),
        "health": _changed(_leaves(one.health), _leaves(other.health)),
        "parts": _parts(one, other),
        **_groups(a, b),
    }
    equal = not any(sections.values())
    names = [f"{place.storage.name}/{checkpoint.path.name}" for place, checkpoint in (a, b)]
    return finite(plain({"a": names[0], "b": names[1], "equal": equal, **sections}), [])


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    """key -> [there, here] where they differ; None for one that is not there. NaN equals NaN."""
    return {
        key: [a.get(key), b.get(key)]
        for key in sorted({*a, *b})
        if (key in a) != (key in b) or not _same(a[key], b[key])
    }


def _leaves(value: Any) -> dict[str, Any]:
    """By dotted key, without empty containers."""
    return {key: leaf for key, leaf in flatten(plain(value)).items() if leaf not in ({}, [])}


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or (a == b and isinstance(a, bool) == isinstance(b, bool))


def _config(place: Place, manifest: Manifest) -> dict[str, Any]:
    """The run's own config.yaml where it is at hand, and what the manifest says of the job."""
    known: dict[str, Any] = {}
    if place.run is not None:
        with suppress(ConfigError):  # a checkpoint that was copied elsewhere
            known.update(flatten(read_config(place.run), "config"))
    for name in ("fingerprint", "about", "versions"):
        known.update({f"{name}.{key}": value for key, value in _leaves(getattr(manifest, name)).items()})
    return known


def _parts(a: Manifest, b: Manifest) -> dict[str, dict[str, list[int]]]:
    """state part -> ranks whose digests differ, and ranks that only one has it of."""
    digests = [dict(zip(m.ranks, (part.digests for part in m.parts), strict=True)) for m in (a, b)]
    found: dict[str, dict[str, list[int]]] = {}
    for name in sorted({name for by_rank in digests for held in by_rank.values() for name in held}):
        one, other = ({rank: held[name] for rank, held in by_rank.items() if name in held} for by_rank in digests)
        kinds = {
            "differs": sorted(rank for rank in one.keys() & other.keys() if one[rank] != other[rank]),
            "only_a": sorted(one.keys() - other.keys()),
            "only_b": sorted(other.keys() - one.keys()),
        }
        if any(kinds.values()):
            found[name] = kinds
    return found


# -- parameter groups ---------------------------------------------------------------------------------------------------------


def _groups(a: tuple[Place, Checkpoint], b: tuple[Place, Checkpoint]) -> dict[str, Any]:
    try:
        return {"groups": compare_groups(*(_read_groups(place.storage, found) for place, found in (a, b)))}
    except CheckpointError as error:
        return {"groups": [], "groups_unread": str(error)}


def _read_groups(storage: Storage, checkpoint: Checkpoint) -> list[Group]:
    """Of the lowest rank here: all ranks have the same groups."""
    import torch  # only here: everything else is read from manifests

    manifest, folder = checkpoint.manifest, checkpoint.path.name
    file = f"{folder}/{manifest.parts[0].file}"
    try:
        if storage.size(file) != manifest.parts[0].size:
            raise CheckpointError(f"{storage.name}/{file} is damaged: see `resilient checkpoint verify`")
        with storage.open(file) as stream:  # by descriptor: what was opened is what is mapped
            path = Path(f"/proc/self/fd/{stream.fileno()}")
            content = torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=True)
        return groups_of(content["parts"]["engine"])
    except CheckpointError:
        raise
    except Exception as error:  # torch.load raises many kinds
        line = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{storage.name}/{file} cannot be read: {type(error).__name__}: {redact(line)}"
        ) from error


def groups_of(engine: Mapping[str, Any]) -> list[Group]:
    """The parameter groups in an engine's state. CheckpointError if it has none that are known here."""
    optimizer = engine.get("optimizer")
    if isinstance(optimizer, Mapping) and "groups" in optimizer:  # torch optimizers: DDP, FSDP2
        found = [(group["params"], group["options"]) for group in optimizer["groups"]]
    elif "groups" in engine and isinstance(engine.get("layout"), Mapping):  # DeepSpeed
        layout = engine["layout"]
        found = [(json.loads(layout[f"parameter group {i}"]), group) for i, group in enumerate(engine["groups"])]
    else:
        raise CheckpointError("the engine state names no parameter groups")
    return [
        (tuple(map(str, names)), {str(k): _plain_option(v) for k, v in options.items()}) for names, options in found
    ]


def _plain_option(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain_option(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def compare_groups(a: Sequence[Group], b: Sequence[Group]) -> list[dict[str, Any]]:
    """Groups matched by the parameters they hold, whatever their order: the most alike first (BR-21).

    Each: `group` ([index there, index here], None where it has no partner), `added`, `removed` (parameter names), `options`
    (that differ). Parameters that only changed their group are among `added` of one and `removed` of the other."""
    pairs = sorted(
        ((_alike(x, y), -abs(i - j), i, j) for i, (x, _) in enumerate(a) for j, (y, _) in enumerate(b)), reverse=True
    )
    partner: dict[int, int] = {}
    for alike, _, i, j in pairs:
        if alike and i not in partner and j not in partner.values():
            partner[i] = j
    rows: list[tuple[int | None, int | None]] = [(i, partner.get(i)) for i in range(len(a))]
    rows += [(None, j) for j in range(len(b)) if j not in partner.values()]
    found = []
    for left, right in rows:
        there, old = a[left] if left is not None else ((), {})
        here, new = b[right] if right is not None else ((), {})
        row = {
            "group": [left, right],
            "added": sorted(set(here) - set(there)),
            "removed": sorted(set(there) - set(here)),
            "options": _changed(old, new) if left is not None and right is not None else {},
        }
        if left is None or right is None or row["added"] or row["removed"] or row["options"]:
            found.append(row)
    return found


def _alike(a: Sequence[str], b: Sequence[str]) -> float:
    """Share of the parameters of both that they have in common."""
    return len({*a} & {*b}) / max(len({*a, *b}), 1)


# -- for people ----------------------------------------------------------------------------------------------------------------


def diff_lines(found: Mapping[str, Any]) -> list[str]:
    """`-` is A, `+` is B, as in any diff."""
    lines = [f"- {printable(found['a'])}", f"+ {printable(found['b'])}"]
    for title in ("state", "config", "health"):
        changed = [
            f"  {printable(key)}: {_value(there)} -> {_value(here)}" for key, (there, here) in found[title].items()
        ]
        lines += _section(title, changed)
    lines += _section("state parts (by digest)", list(_part_lines(found["parts"])))
    lines += _section("parameter groups", [line for row in found["groups"] for line in _group_lines(row)])
    if found.get("groups_unread"):
        lines += _section("parameter groups", [f"  not compared: {printable(found['groups_unread'])}"])
    if found["equal"]:
        lines.append("nothing differs")
    return lines


def _section(title: str, lines: list[str]) -> list[str]:
    more = [f"  and {len(lines) - _SHOWN} more (--format json has all)"] if len(lines) > _SHOWN else []
    return ["", title, *lines[:_SHOWN], *more] if lines else []


def _value(value: Any) -> str:
    if value is None:
        return "absent"
    return printable(f"{value:.8g}" if isinstance(value, float) else value)


def _part_lines(parts: Mapping[str, Mapping[str, list[int]]]) -> Iterator[str]:
    for name, kinds in parts.items():
        words = {"differs": "differs on", "only_a": "only in A:", "only_b": "only in B:"}
        told = [f"{words[kind]} {ranks_text(ranks)}" for kind, ranks in kinds.items() if ranks]
        yield f"  {printable(name)}: {', '.join(told)}"


def _group_lines(row: Mapping[str, Any]) -> Iterator[str]:
    there, here = row["group"]
    if here is None:
        yield f"  - group {there}"
    elif there is None:
        yield f"  + group {here}"
    else:
        yield f"  group {there}" + (f", now {here}" if here != there else "")
    for key, (old, new) in row["options"].items():
        yield f"      {printable(key)}: {_value(old)} -> {_value(new)}"
    for sign, names in (("-", row["removed"]), ("+", row["added"])):
        yield from (f"      {sign} {printable(name)}" for name in names[:20])
        if len(names) > 20:
            yield f"      {sign} and {len(names) - 20} more"
