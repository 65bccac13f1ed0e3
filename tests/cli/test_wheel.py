"""conf/ travels inside the wheel and is found from any working directory."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from resilient.cli.compose import config_folder
from tests.cli.commands import ROOT, finish, start


@pytest.mark.timeout(180)
def test_wheel_carries_the_configuration(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*build, "-w", str(tmp_path), str(ROOT)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("resilient_train-*.whl")
    unpacked, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    packaged = {
        p.relative_to(unpacked / "resilient" / "conf") for p in (unpacked / "resilient" / "conf").rglob("*.yaml")
    }
    assert packaged == {p.relative_to(ROOT / "conf") for p in (ROOT / "conf").rglob("*.yaml")}
    assert not (unpacked / "conf").exists()
    assert not list(unpacked.glob("tests*"))

    code, out, err = finish(
        start(["-m", "resilient", "train", "policy=observe", "--cfg", "job"], elsewhere, {"PYTHONPATH": str(unpacked)})
    )
    assert code == 0, err
    assert "mode: observe" in out


def test_checkout_uses_the_folder_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_folder() == ROOT / "conf"
