"""The documentation against the code: links, configuration keys, errors and exit codes, file:function references."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import resilient.errors
from resilient.errors import ExitCode, ResilientError
from resilient.telemetry.files import TelemetryError
from resilient.telemetry.journal import STEP_FIELDS
from resilient.telemetry.run_directory import StaleGeneration
from resilient.telemetry.summary import Summary

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONF = ROOT / "conf"
PAGES = sorted(DOCS.glob("*.md"))

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_REFERENCE = re.compile(r"`((?:resilient|tests|conf|launch)/[\w/.-]+?)(?::(\w+))?`")


def text_of(page: str | Path) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


# -- links -------------------------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}


def broken_links(page: Path) -> Iterator[str]:
    for target in _LINK.findall(_CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        name, _, fragment = target.partition("#")
        where = (page.parent / name).resolve() if name else page
        if not where.exists():
            yield f"{page.name}: {target}: no such file"
        elif fragment and fragment not in anchors(where):
            yield f"{page.name}: {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_broken_link_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](gone.md) [b](#here) [c](#there) [d](page.md)\n")
    assert list(broken_links(page)) == ["page.md: gone.md: no such file", "page.md: #there: no such heading"]


def test_the_index_lists_every_page_and_example() -> None:
    linked = set(_LINK.findall(text_of("README.md")))
    there = {page.name for page in PAGES} | {f"examples/{path.name}" for path in (DOCS / "examples").glob("*.py")}
    assert there - linked == {"README.md"}


# -- configuration -----------------------------------------------------------------------------------------------------


def leaves(node: Any, path: str) -> Iterator[str]:
    """Full keys of all leaves; an entry of a list of groups is `key[]`. An empty group or null is a leaf, as written."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(node, list) and node and isinstance(node[0], dict):
        for item in node:
            yield from leaves(item, f"{path}[]")
    else:
        yield path


def choice(path: Path) -> dict[str, Any]:
    """The keys that one file of conf/ sets itself; `defaults` is Hydra's."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree.pop("defaults", None)
    return tree


def conf_keys() -> set[str]:
    keys: set[str] = set()
    for path in CONF.glob("*/*.yaml"):
        group = path.parent.name
        if group != "experiment":  # sets keys of the others
            keys.update(leaves(choice(path), group))
    listed = {key.split("[]")[0] for key in keys if "[]" in key}
    return keys - listed  # such a list may be empty in one file


def documented_keys() -> set[str]:
    """First cells of the tables of configuration.md that are a dotted key."""
    cells = re.findall(r"^\| `([a-z_]+(?:\[\])?(?:\.[a-z_]+(?:\[\])?)+)` \|", text_of("configuration.md"), re.MULTILINE)
    assert len(cells) == len(set(cells)), "a key is listed twice"
    return set(cells)


def test_every_key_of_conf_is_documented_and_no_other() -> None:
    assert len(conf_keys()) > 80
    assert documented_keys() == conf_keys()


def show(value: Any) -> str:
    """A value as YAML and the tables write it."""
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@pytest.mark.parametrize("group", ["engine", "model", "data", "optim", "policy", "run"])
def test_documented_defaults_are_those_of_conf(group: str) -> None:
    """A single value must be the one of every file of the group; of several (`128; 192`) each must be in some file."""
    found: dict[str, set[str]] = {}
    for path in (CONF / group).glob("*.yaml"):
        tree = choice(path)
        for key in leaves(tree, group):
            value: Any = tree
            for name in key.split(".")[1:]:
                value = value[name]
            found.setdefault(key, set()).add(show(value))
    rows = re.findall(rf"^\| `({group}\.[a-z_.]+)` \| ([^|]+) \|", text_of("configuration.md"), re.MULTILINE)
    assert {key for key, _ in rows} == set(found)
    for key, cell in rows:
        if cell != "by choice" and key != "engine.deepspeed":
            assert {_canonical(text) for text in cell.split("; ")} == {_canonical(text) for text in found[key]}, key


def _canonical(text: str) -> str:
    """Numbers by value: 1e-8 and 1e-08 are one."""
    try:
        return repr(float(text))
    except ValueError:
        return text


def test_every_group_and_choice_is_documented() -> None:
    text = text_of("configuration.md")
    for path in CONF.glob("*/*.yaml"):
        assert f"\n## {path.parent.name}\n" in text
        section = text.split(f"\n## {path.parent.name}\n")[1].split("\n## ")[0]
        assert re.search(rf"[`=]{re.escape(path.stem)}`", section), f"{path.parent.name}={path.stem} is not named"


@pytest.mark.parametrize("name", ["policy", "detector", "run"])
def test_keys_named_on_other_pages_exist(name: str) -> None:
    known = conf_keys()
    prefixes = {key[: i.start()] for key in known for i in re.finditer(r"\.|\[\]", key)}
    for page in PAGES:
        for key in re.findall(rf"`({name}\.[a-z_.]+)(?:=[^`]*)?`", text_of(page)):
            assert key in known or key in prefixes, f"{page.name}: {key}"


# -- errors, exit codes, files -------------------------------------------------------------------------------------------


def error_classes() -> list[type[ResilientError]]:
    members = vars(resilient.errors).values()
    return [m for m in members if inspect.isclass(m) and issubclass(m, ResilientError)] + [
        TelemetryError,
        StaleGeneration,
    ]


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_is_in_the_runbook_with_its_exit_code(error: type[ResilientError]) -> None:
    rows = re.findall(rf"^\| `{error.__name__}`[^|]*\| (\d+) \|", text_of("runbook.md"), re.MULTILINE)
    assert rows, f"{error.__name__} has no row"
    assert {int(code) for code in rows} == {int(error.exit_code)}


@pytest.mark.parametrize("code", list(ExitCode), ids=lambda code: code.name)
def test_every_exit_code_is_in_runbook_and_recovery(code: ExitCode) -> None:
    assert re.search(rf"^\| {int(code)} \|", text_of("runbook.md"), re.MULTILINE)
    assert re.search(rf"^\| {int(code)} \| {code.name} \|", text_of("recovery.md"), re.MULTILINE)


def test_every_key_of_the_files_is_described() -> None:
    text = text_of("recovery.md")
    for key in (*Summary("x").as_dict(), *STEP_FIELDS):
        assert f"`{key}`" in text, key


# -- references to code ----------------------------------------------------------------------------------------------------


def names_in(path: Path) -> set[str]:
    """Functions, methods, classes and module-level names of a Python file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_to_code_exist(page: Path) -> None:
    references = _REFERENCE.findall(text_of(page))
    if page.name == "architecture.md":
        assert sum(bool(name) for _, name in references) >= 20, "the step is followed by file:function"
    for file, name in references:
        path = ROOT / file
        assert path.exists(), f"{page.name}: {file}"
        if name:
            assert name in names_in(path), f"{page.name}: {file}:{name}"


def test_every_room_is_in_the_table() -> None:
    rows = " ".join(re.findall(r"^\| (`resilient/.*?) \|", text_of("architecture.md"), re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "resilient").glob("*/__init__.py")}
    assert {room for room in rooms if f"`resilient/{room}`" not in rows} == set()
