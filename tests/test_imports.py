"""Who may import whom (DESIGN 3), read from the source of every module, and what `import resilient` costs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import resilient

PACKAGE = Path(resilient.__file__).parent

# signals <- detectors, diagnosis, policies, checkpoint <- engines <- coordinator <- incidents, recovery, telemetry
# <- integrations, train, bench <- cli. `faults` wraps protocols: it may see what it wraps and is seen by few.
_LAYERS = (
    {"signals"},
    {"detectors", "diagnosis", "policies", "checkpoint"},
    {"engines"},
    {"coordinator"},
    {"incidents", "recovery", "telemetry", "logs"},
    {"integrations", "train", "bench", "faults"},
    {"cli"},
)
# Rooms of one layer that still may see each other, and in which direction.
_SIDEWAYS = {
    ("logs", "telemetry"),
    ("train", "integrations"),
    ("bench", "train"),
    ("bench", "integrations"),
    ("bench", "faults"),
    ("faults", "train"),
}
_MAY_IMPORT_FAULTS = {"faults", "bench", "cli"}
_PURE = {"detectors", "diagnosis", "policies"}
_IMPURE_MODULES = {
    "torch", "deepspeed", "os", "io", "pathlib", "socket", "subprocess", "threading", "time", "shutil", "tempfile",
    "multiprocessing", "logging", "requests", "urllib", "random", "sys",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room of a dotted name below the package; None for the package itself and its top-level modules."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else None


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also those inside functions and under TYPE_CHECKING."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def layer_of(room: str) -> int:
    return next(i for i, rooms in enumerate(_LAYERS) if room in rooms)


def offences(path: Path) -> Iterator[str]:
    room = room_of(name_of(path))
    for line, target in imports_of(path):
        where = f"{path.relative_to(PACKAGE.parent)}:{line} imports {target}"
        top = target.split(".")[0]
        if top in ("hydra", "omegaconf") and room != "cli":
            yield f"{where}: only cli knows Hydra"
        if top == "deepspeed" and not name_of(path).startswith("resilient.engines.deepspeed"):
            yield f"{where}: only engines/deepspeed* knows DeepSpeed"
        if room in _PURE and top in _IMPURE_MODULES:
            yield f"{where}: {room} is pure"
        other = room_of(target) if top == "resilient" else None
        if other is None or room is None or other == room:
            continue
        if other == "faults" and room not in _MAY_IMPORT_FAULTS:
            yield f"{where}: faults is for cli, bench and tests"
        if target.split(".")[2:3] == ["config"] and path.name == "config.py":
            continue  # configuration dataclasses may be put together anywhere
        if layer_of(other) > layer_of(room):
            yield f"{where}: {other} lies above {room}"
        elif layer_of(other) == layer_of(room) and (room, other) not in _SIDEWAYS:
            yield f"{where}: {other} lies beside {room}"


def test_every_room_has_a_layer() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert rooms == set().union(*_LAYERS)  # its layer is kept; the room comes with the readers of part 2


def test_import_direction() -> None:
    found = [offence for path in modules() for offence in offences(path)]
    assert not found, "\n".join(found)


def test_no_utils() -> None:
    assert not [path for path in PACKAGE.rglob("*util*") if path.suffix == ".py" or path.is_dir()]


@pytest.mark.parametrize(
    ("room", "source", "complaint"),
    [
        ("signals", "import resilient.engines.base", "engines lies above signals"),
        ("detectors", "from resilient import checkpoint", "checkpoint lies beside detectors"),
        ("detectors", "def f():\n    import torch.nn", "detectors is pure"),
        ("policies", "from ..coordinator import events", "coordinator lies above policies"),
        ("train", "from omegaconf import OmegaConf", "only cli knows Hydra"),
        ("engines", "from deepspeed import comm", "only engines/deepspeed* knows DeepSpeed"),
        ("coordinator", "from resilient.faults import parse", "faults is for cli, bench and tests"),
    ],
)
def test_the_test_sees_what_it_looks_for(
    room: str, source: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set().union(*_LAYERS):
        (tmp_path / "resilient" / name).mkdir(parents=True)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "resilient")
    path = tmp_path / "resilient" / room / "module.py"
    path.write_text(source)
    assert any(complaint in offence for offence in offences(path))


def test_import_resilient_is_cheap_and_pulls_in_no_framework() -> None:
    """Under 0.3 s beyond torch; neither deepspeed nor hydra (nor torch itself) before they are asked for."""
    script = (
        "import json, sys, time\n"
        "import torch\n"
        "start = time.perf_counter()\n"
        "import resilient\n"
        "spent = time.perf_counter() - start\n"
        "print(json.dumps([spent, sorted({m.split('.')[0] for m in sys.modules} & {'deepspeed', 'hydra', 'omegaconf'})]))"
    )
    spent, frameworks = json.loads(_python(script))
    assert frameworks == []
    assert spent < 0.3
    assert json.loads(_python("import json, sys, resilient; print(json.dumps('torch' in sys.modules))")) is False


def test_the_guard_needs_neither_hydra_nor_deepspeed() -> None:
    script = (
        "import json, sys\n"
        "from resilient import Guard\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules} & {'deepspeed', 'hydra', 'omegaconf'})))"
    )
    assert json.loads(_python(script)) == []


def _python(script: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
