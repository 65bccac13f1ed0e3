"""YAML and overrides -> one plain, resolved dict. Hydra and OmegaConf end here.

Every way in which that can fail becomes one ConfigError that names the full keys; Hydra's tracebacks never reach a person.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import resilient
from resilient.cli.argv import Arguments, parse_arguments
from resilient.cli.errors import all_in_one, did_you_mean, nearest
from resilient.errors import ConfigError

ResolvedConfig: TypeAlias = dict[str, Any]
"""Nested dict/list of str, int, float, bool and None: survives a round trip through JSON (BR-62)."""

PASS_THROUGH = ("engine.deepspeed",)
"""Sections whose keys belong to someone else: any key may be set there."""

DEPRECATED: dict[str, str] = {}
"""Old full key -> new full key. An old key still works, with a warning."""

Warn = Callable[[str], None]


def config_folder() -> Path:
    """The folder of the YAML groups: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(resilient.__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/config.yaml in or beside {package}: the installation is incomplete")


def compose_job(argv: Sequence[str], warn: Warn | None = None) -> ResolvedConfig:
    """Compose the job that the command line asks for (launcher arguments already removed).

    argv: overrides, --config-dir, --config-name. warn: receives one line per deprecated key; default: stderr.
    Raises ConfigError.
    """
    return compose_arguments(parse_arguments(argv), warn)


def compose_arguments(arguments: Arguments, warn: Warn | None = None) -> ResolvedConfig:
    """As `compose_job`, for a command line that is parsed already."""
    warn = warn or _warn_on_stderr
    folders = search_path(arguments)
    overrides, extra = prepare(arguments.overrides, warn), more_folders(folders)
    # version_base is the Hydra version whose defaults this configuration was written for.
    with initialize_config_dir(version_base="1.3", config_dir=str(folders[0])):
        try:
            config = compose(arguments.config_name, overrides=[*overrides, *extra])
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise _explain(error, overrides, extra, arguments.config_name, folders) from None
        return rename_deprecated(plain(config), warn)


def search_path(arguments: Arguments) -> list[Path]:
    """Folders in which groups are looked up, in this order. The first one holds the primary configuration: the packaged
    folder, or --config-dir if only that has a file named --config-name."""
    folders = [config_folder()]
    if arguments.config_dir is not None:
        folder = Path(arguments.config_dir).absolute()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {arguments.config_dir}: no such folder")
        folders.append(folder)
    primaries = [folder for folder in folders if (folder / f"{arguments.config_name}.yaml").is_file()]
    if not primaries:
        names = {path.stem for folder in folders for path in folder.glob("*.yaml")}
        raise ConfigError(
            f"--config-name {arguments.config_name}: no such file{did_you_mean(arguments.config_name, names)}"
        )
    return [primaries[0], *(folder for folder in folders if folder != primaries[0])]


def more_folders(folders: Sequence[Path]) -> list[str]:
    """The override that tells Hydra about all folders but the first."""
    rest = ",".join(quote(f"file://{folder}") for folder in folders[1:])
    return [f"hydra.searchpath=[{rest}]"] if rest else []


def prepare(overrides: Sequence[str], warn: Warn) -> list[str]:
    """Overrides as Hydra should see them: deprecated keys renamed, keys of pass-through sections allowed to be new.

    Raises ConfigError for an override that cannot be parsed."""
    ready = []
    for text in overrides:
        override = parse(text)
        key = override.key_or_group
        new = _renamed(key)
        if new is not None:
            warn(f"{key} is deprecated, use {new}")
            text, key = text.replace(key, new, 1), new
        if override.type == OverrideType.CHANGE and any(key.startswith(section + ".") for section in PASS_THROUGH):
            text = "++" + text
        ready.append(text)
    return ready


def parse(text: str) -> Override:
    """One override, by Hydra's grammar. Raises ConfigError with the place where it stops making sense."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        lines = str(error).splitlines()
        raise ConfigError(f"cannot read the override {text!r}: {lines[0]}; expected KEY=VALUE") from None


def quote(text: str) -> str:
    """`text` as a quoted string of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def plain(config: DictConfig) -> ResolvedConfig:
    """The one conversion at the border: recursive, resolved, enums and paths as text.

    Raises one ConfigError that lists every missing (???) and every unresolvable key."""
    problems: list[str] = []
    result = _plain(config, "", problems)
    if problems:
        raise all_in_one(problems)
    return result


def _plain(node: Any, path: str, problems: list[str]) -> Any:
    if isinstance(node, DictConfig):
        return {_text(key): _child(node, key, f"{path}.{_text(key)}" if path else _text(key), problems) for key in node}
    if isinstance(node, ListConfig):
        return [_child(node, i, f"{path}[{i}]", problems) for i in range(len(node))]
    if isinstance(node, (enum.Enum, Path)):
        return _text(node)
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    problems.append(f"{path}: a {type(node).__name__} cannot be part of a configuration")
    return None


def _child(parent: DictConfig | ListConfig, key: Any, path: str, problems: list[str]) -> Any:
    if OmegaConf.is_missing(parent, key):
        problems.append(f"{path}: no value given (???)")
        return None
    written = OmegaConf.to_container(parent, resolve=False)[key] if OmegaConf.is_interpolation(parent, key) else None  # type: ignore[index, call-overload]
    try:
        value = parent[key]
    except RecursionError:
        problems.append(f"{path}: {written} refers to itself")
        return None
    except OmegaConfBaseException as error:
        problems.append(f"{path}: cannot resolve {written}: {str(error).splitlines()[0]}")
        return None
    return _plain(value, path, problems)


def _text(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


def rename_deprecated(resolved: ResolvedConfig, warn: Warn) -> ResolvedConfig:
    """Move deprecated keys that came in through a file. The new key's own value must not be set otherwise."""
    for old, new in DEPRECATED.items():
        *parents, last = old.split(".")
        holder: Any = resolved
        for name in parents:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or last not in holder:
            continue
        warn(f"{old} is deprecated, use {new}")
        value = holder.pop(last)
        *parents, last = new.split(".")
        target = resolved
        for name in parents:
            target = target.setdefault(name, {})
        target[last] = value
    return resolved


def _renamed(key: str) -> str | None:
    for old, new in DEPRECATED.items():
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return None


def _explain(
    error: Exception, overrides: Sequence[str], extra: Sequence[str], config_name: str, folders: Sequence[Path]
) -> ConfigError:
    """What is wrong, by key. Hydra stops at the first problem and names no alternative; look at every override instead."""
    groups = group_options(folders)
    problems, usable, values = [], [], []
    for override in map(parse, overrides):
        if override.is_sweep_override():
            problems.append(f"{override.input_line}: several values need --multirun (-m)")
        elif override.key_or_group in groups:
            problem = _bad_choice(override, groups)
            problems += [problem] if problem else []
            usable += [] if problem else [override.input_line or ""]
        else:
            values.append(override)
    try:
        known = set(_keys(compose(config_name, overrides=[*usable, *extra])))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):
        known = set()  # the groups themselves do not compose: Hydra's own words say it best
    for override in values if known else ():
        key = override.key_or_group
        if override.type == OverrideType.CHANGE and key not in known and not key.startswith("hydra"):
            problems.append(f"{key}: unknown key{did_you_mean(key, known | set(groups))}")
    if problems:
        return all_in_one(problems)
    added = [o.input_line for o in map(parse, overrides) if o.type == OverrideType.ADD and o.key_or_group in groups]
    hint = f"; if the group has a place already, write {added[0][1:]}" if added and added[0] else ""
    return ConfigError(_hydra_words(error) + hint)


def _bad_choice(override: Override, groups: Mapping[str, set[str]]) -> str | None:
    group, choice = override.key_or_group, override.value()
    chosen = choice if isinstance(choice, list) else [choice]
    for name in chosen:
        if isinstance(name, str) and name.removesuffix(".yaml") not in groups[group]:
            close = nearest(name, groups[group])
            hint = f"; did you mean {group}={close}?" if close else ""
            return f"{group}={name}: no such choice{hint} There is: {', '.join(sorted(groups[group]))}"
    return None


def group_options(folders: Sequence[Path]) -> dict[str, set[str]]:
    """Group -> the choices it has, over all folders. Groups may be nested: `a/b`."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.rglob("*.yaml"):
            if path.parent != folder:
                groups.setdefault(path.parent.relative_to(folder).as_posix(), set()).add(path.stem)
    return groups


def _keys(node: Any, path: str = "") -> list[str]:
    """Full keys of all nodes below `node`, inner ones included, nothing resolved."""
    keys = [path] if path else []
    if isinstance(node, DictConfig):
        for key in (key for key in node if isinstance(key, str)):
            child = None if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) else node[key]
            keys += _keys(child, f"{path}.{key}" if path else key)
    return keys


def _hydra_words(error: BaseException) -> str:
    words = [str(error).strip()]
    if isinstance(error.__cause__, OmegaConfBaseException):
        words.append(str(error.__cause__).strip())
    return "\n".join(words)


def _warn_on_stderr(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"resilient: warning: {text}", file=sys.stderr, flush=True)
