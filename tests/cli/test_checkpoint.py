"""`resilient checkpoint`: what it lists, finds, compares, deletes and refuses; and that nothing in a file can harm it."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.checkpoint.files import write_json
from resilient.checkpoint.manifest import MANIFEST, Health, Manifest, folder_name, part_name, write_manifest
from resilient.checkpoint.parts import write_part
from resilient.checkpoint.snapshot import PARTS, Snapshot
from resilient.checkpoint.storage import LocalStorage
from resilient.checkpoint.trust import TRUST, Key, TrustBook
from resilient.checkpoint.verify import CHUNK
from resilient.cli.main import main
from resilient.telemetry.checkpoint_diff import compare_groups, groups_of
from resilient.telemetry.checkpoints import STATE_PARTS
from resilient.telemetry.checkpoints_view import age_text, printable, ranks_text, size_text
from tests.cli.commands import finish, start

HEALTHY = Health(level="A")
_WEIGHTS = ["embed.weight", "block.weight"]


def engine_state(step: int, **options: Any) -> dict[str, Any]:
    groups = [
        {
            "params": list(_WEIGHTS),
            "options": {"lr": 1e-3 / step, "betas": (0.9, 0.95), "weight_decay": 0.1, **options},
        },
        {"params": ["norm.bias"], "options": {"lr": 1e-3 / step, "weight_decay": 0.0}},
    ]
    return {"params": {"w": torch.full((1000,), float(step))}, "optimizer": {"class": "AdamW", "groups": groups}}


def commit(
    place: Path,
    step: int,
    *,
    world: int = 2,
    health: Health = HEALTHY,
    size: int = 0,
    here: tuple[int, ...] = (),
    engine: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A committed checkpoint as a store writes it."""
    folder, storage = folder_name(step, step), LocalStorage(place)
    storage.make_folder(folder)
    here = here or tuple(range(world))
    parts = []
    for rank in here:
        state = {
            "engine": engine or engine_state(step),
            "rng": {"torch": torch.tensor([rank])},
            "data": {"window": step, "ballast": torch.zeros(size, dtype=torch.uint8)},
            "judge": {},
        }
        snapshot = Snapshot(step, step, step, 1e-3 / step, step, state, Snapshot.digest_parts(state))
        parts.append(write_part(storage, folder, rank, snapshot))
    content: dict[str, Any] = {
        "run_id": "run",
        "generation": 0,
        "serial": step,
        "step": step,
        "attempt": step,
        "position": step,
        "lr": 1e-3 / step,
        "schedule": step,
        "world": world,
        "ranks": here,
        "samples": step * 8,
        "fingerprint": {"engine": "ddp", "precision": "bf16"},
        "parts": tuple(parts),
        "versions": {"torch": "2.13.0"},
        "written_at": "2026-01-01T00:00:00+00:00",
        "health": health,
        "about": {"config": "c0ffee", "git": "deadbeef"},
    }
    write_manifest(place / folder, Manifest(**{**content, **fields}))
    return place / folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 10 (good), 20 (good, best), 30 (tainted), 40 (newest); an orphan; a book."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    book = TrustBook(after=2)
    for step in (10, 20, 30, 40):
        loss = {"eval_loss": 2.5} if step == 20 else {}
        commit(place, step, health=Health(level="B" if step == 30 else "A", evaluation=loss))
        book.saved(Key(step, step))
        for clean in (step + 1, step + 2) if step < 30 else ():
            book.clean_step(clean)
    book.onset(25, "loss/level on rank 1")
    book.deleted(Key(40, 40))
    book.loaded(Key(20, 20))
    book.saved(Key(40, 40))
    write_json(place / TRUST, book.state_dict())
    orphan = place / folder_name(50, 50)
    orphan.mkdir()
    (orphan / part_name(0)).write_bytes(b"x" * 2048)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, Any]]:
    code, out, _ = told(capsys, *words, "--format", "json")
    return code, json.loads(out)


# -- ls -----------------------------------------------------------------------------------------------------------------


def test_state_parts_are_those_of_a_snapshot():
    assert STATE_PARTS == PARTS


def test_ls_shows_what_there_is_and_how_far_it_may_be_trusted(run: Path, capsys: pytest.CaptureFixture[str]):
    code, out, err = told(capsys, "ls", run)
    assert (code, err) == (0, "")
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│") and "disk" in line}
    assert list(rows) == ["40", "30", "20", "10"]  # newest commit first
    assert "provisional" in rows["40"] and "tainted (given up)" in rows["30"]
    assert "A, loss 2.5" in rows["20"] and "good" in rows["20"] and "good" in rows["10"]
    assert "step 30 (attempt 30): onset at step 25: loss/level on rank 1" in out
    assert "orphan: step-00000050-a00000050, 2.0 KiB" in out and "no manifest: it is being written, or was left" in out
    assert out.splitlines()[-1].startswith("4 checkpoints, ")


def test_ls_as_json(run: Path, capsys: pytest.CaptureFixture[str]):
    code, found = as_json(capsys, "ls", run, run / "checkpoints" / folder_name(20, 20))
    whole, single = found["places"]
    assert code == 0
    assert [row["step"] for row in whole["checkpoints"]] == [40, 30, 20, 10]
    assert [row["trust"] for row in whole["checkpoints"]] == ["provisional", "tainted", "good", "good"]
    (row,) = single["checkpoints"]
    assert (row["step"], row["world"], row["lacks"], row["tiers"]) == (20, 2, [], ["disk"])
    assert row["bytes"] == sum(p.stat().st_size for p in (run / "checkpoints" / row["name"]).glob("*.pt"))
    assert row["age_s"] > 0 and row["health"]["evaluation"] == {"eval_loss": 2.5}
    assert single["orphans"] == [] and whole["orphans"][0]["bytes"] == 2048


def test_ls_says_what_a_checkpoint_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    commit(tmp_path, 10, world=8, here=(0, 1, 2, 3), samples=None)
    _, out, _ = told(capsys, "ls", tmp_path)
    assert "disk (4 of 8 ranks)" in out
    assert "parts of ranks 4-7 (on other hosts), position in samples" in out
    assert " - " in out  # nobody has judged


def test_ls_shows_what_only_the_memory_of_a_live_run_holds(run: Path, capsys: pytest.CaptureFixture[str]):
    book = TrustBook()
    for step in (40, 45):
        book.saved(Key(step, step))
    write_json(run / "checkpoints" / TRUST, book.state_dict())
    assert as_json(capsys, "ls", run)[1]["places"][0]["in_memory"] == []
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = as_json(capsys, "ls", run)[1]["places"][0]["in_memory"]
        assert found == [{"step": 45, "attempt": 45, "trust": "provisional"}]
        assert "memory" in told(capsys, "ls", run)[1]


def test_a_run_that_keeps_its_checkpoints_elsewhere_is_followed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    commit(tmp_path / "big" / run.name, 20)
    (run / "config.yaml").write_text(f"run: {{checkpoint: {{location: {tmp_path / 'big'}}}}}\n")
    (found,) = as_json(capsys, "ls", run)[1]["places"]
    assert found["place"] == str(tmp_path / "big" / run.name)
    assert [(row["step"], row["trust"]) for row in found["checkpoints"]] == [(20, "good")]  # by the run's own book


def test_ls_of_an_empty_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert told(capsys, "ls", tmp_path)[:2][1].endswith("no checkpoint\n")


def test_a_damaged_trust_book_is_named_and_nothing_is_trusted(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "checkpoints" / TRUST).write_text('{"format": 1')
    code, found = as_json(capsys, "ls", run)
    assert code == 0 and {row["trust"] for row in found["places"][0]["checkpoints"]} == {None}
    assert "trust.json cannot be used" in found["places"][0]["remarks"][0]


# -- verify --------------------------------------------------------------------------------------------------------------


def test_verify_reads_every_byte(run: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = told(capsys, "verify", run)
    assert (code, out.splitlines()[-1]) == (0, "4 verified, 0 damaged")
    assert out.count("ok: ") == 4


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "link", "manifest", "grown"])
def test_verify_names_file_and_part_and_is_exit_1(harm: str, run: Path, capsys: pytest.CaptureFixture[str]):
    folder = run / "checkpoints" / folder_name(20, 20)
    part = folder / part_name(1)
    if harm == "flip":
        flip(part)
    elif harm == "cut":
        os.truncate(part, part.stat().st_size - 1)
    elif harm == "grown":
        part.write_bytes(part.read_bytes() + b"x")
    elif harm == "gone":
        part.unlink()
    elif harm == "link":
        part.rename(run / "elsewhere")
        part.symlink_to(run / "elsewhere")
    else:
        flip(folder / MANIFEST)
    expected = {
        "flip": "its content is not what was written (digest differs)",
        "link": "not a regular file",
        "manifest": "unusable manifest",
        "gone": "No such file",
    }.get(harm, "bytes")
    for path in (run, folder):
        code, out, _ = told(capsys, "verify", path)
        assert code == 1
        (line,) = [line for line in out.splitlines() if line.startswith("damaged: ")]
        named = MANIFEST if harm == "manifest" else f"{part_name(1)} (part of rank 1)"
        assert f"{folder.name}/{named}" in line and expected in line
        assert out.splitlines()[-1].endswith(" 1 damaged")
    code, found = as_json(capsys, "verify", folder)
    assert code == 1 and found["exit"] == 1
    assert found["checkpoints"][0]["damage"][0]["rank"] == (None if harm == "manifest" else 1)


def test_verify_names_every_damaged_part(run: Path, capsys: pytest.CaptureFixture[str]):
    folder = run / "checkpoints" / folder_name(20, 20)
    for rank in range(2):
        flip(folder / part_name(rank))
    _, found = as_json(capsys, "verify", folder)
    assert [d["rank"] for d in found["checkpoints"][0]["damage"]] == [0, 1]


def test_verify_of_an_orphan_by_name_and_of_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert told(capsys, "verify", run / "checkpoints" / folder_name(50, 50))[0] == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    assert told(capsys, "verify", empty)[0] == 64


def test_verify_needs_no_torch_and_little_memory(tmp_path: Path):
    """A part of 160 MB by a process that may have 100 MB above what its start takes."""
    commit(tmp_path, 10, world=1, size=160 << 20)
    code = f"""
import resource, sys
from resilient.cli.main import main
main(["checkpoint", "ls", {str(tmp_path)!r}])
assert not {{"torch", "deepspeed", "hydra", "omegaconf"}} & set(sys.modules), sorted(sys.modules)
before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + {6 * CHUNK}, before + {6 * CHUNK}))
assert main(["checkpoint", "verify", {str(tmp_path)!r}]) == 0
assert "torch" not in sys.modules
"""
    status, out, err = finish(start(["-c", code], tmp_path))
    assert status == 0, err
    assert "160.0 MiB" in out and err == ""


# -- show, diff ------------------------------------------------------------------------------------------------------------


def test_show(run: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = told(capsys, "show", run, "--step", "30")
    assert code == 0
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "step 30, attempt 30, commit 30 of generation 0" in lines["state"]
    assert "tainted; onset at step 25: loss/level on rank 1" in lines["trust"]
    assert "window 30, sample 240" in lines["data"]
    assert "3.33333e-05, schedule at 30" in lines["learning rate"]
    assert lines["fingerprint.engine"].endswith("ddp") and lines["about.git"].endswith("deadbeef")
    assert out.count("rank-0000") == 2 and "judge=" in out
    _, found = as_json(capsys, "show", run)
    assert (found["step"], found["manifest"]["step"], found["trust"]) == (40, 40, "provisional")


def test_show_of_what_is_not_there(run: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = told(capsys, "show", run, "--step", "35")
    assert code == 64 and "no checkpoint of step 35" in err and "10, 20, 30, 40" in err
    code, _, err = told(capsys, "show", run / "checkpoints" / folder_name(50, 50))
    assert code == 64 and "unusable manifest" in err


def test_diff_of_two_steps(run: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = told(capsys, "diff", run, run, "--step", "10", "--step", "20")
    assert code == 0
    for line in (
        "  lr: 0.0001 -> 5e-05",
        "  samples: 80 -> 160",
        "  step: 10 -> 20",
        "  evaluation.eval_loss: absent -> 2.5",
        "  engine: differs on ranks 0-1",
        "      lr: 0.0001 -> 5e-05",
    ):
        assert line in out.splitlines(), line
    assert "rng" not in out  # equal on all ranks


def test_diff_of_the_same(run: Path, capsys: pytest.CaptureFixture[str]):
    code, found = as_json(capsys, "diff", run, run, "--step", "10")
    assert code == 0 and found["equal"] and found["parts"] == {} and found["groups"] == []
    assert told(capsys, "diff", run, run)[1].endswith("nothing differs\n")


def test_br21_diff_of_parameter_groups_and_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a, b = tmp_path / "a" / "checkpoints", tmp_path / "b" / "checkpoints"
    moved = engine_state(10, weight_decay=0.05)
    first, second = moved["optimizer"]["groups"]
    first["params"], second["params"] = ["embed.weight", "head.weight"], ["norm.bias", "block.weight"]
    moved["optimizer"]["groups"] = [second, first]
    commit(a, 10)
    commit(b, 10, engine=moved, world=1, fingerprint={"engine": "fsdp2", "precision": "bf16"})
    for place, seed in ((a, 1), (b, 2)):
        (place.parent / "config.yaml").write_text(f"run: {{seed: {seed}, steps: 100}}\n")
    _, out, _ = told(capsys, "diff", a, b)
    assert "  config.run.seed: 1 -> 2" in out and "  fingerprint.engine: ddp -> fsdp2" in out
    assert "steps" not in out
    assert "  world: 2 -> 1" in out and "  judge: only in A: rank 1" in out
    groups = out[out.index("parameter groups") :].splitlines()
    assert groups[1:] == [
        "  group 0, now 1",
        "      weight_decay: 0.1 -> 0.05",
        "      - block.weight",
        "      + head.weight",
        "  group 1, now 0",
        "      + block.weight",
    ]


def test_groups_of_both_kinds_of_engine():
    deepspeed = {
        "layout": {"parameter group 0": '["a", "b"]'},
        "groups": [{"lr": torch.tensor(0.5), "betas": (0.9, 1)}],
    }
    assert groups_of(deepspeed) == [(("a", "b"), {"lr": 0.5, "betas": [0.9, 1]})]
    assert groups_of(engine_state(1))[1] == (("norm.bias",), {"lr": 1e-3, "weight_decay": 0.0})
    assert compare_groups([(("a",), {})], []) == [{"group": [0, None], "added": [], "removed": ["a"], "options": {}}]


def test_diff_goes_on_where_a_part_cannot_be_read(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "checkpoints" / folder_name(20, 20) / part_name(0)).write_bytes(b"")
    code, _, err = told(capsys, "diff", run, run, "--step", "10", "--step", "20")
    assert code == 64 and "no checkpoint of step 20" in err  # it is none any more
    data = (run / "checkpoints" / folder_name(10, 10) / part_name(0)).read_bytes()
    (run / "checkpoints" / folder_name(10, 10) / part_name(0)).write_bytes(b"\0" * len(data))
    code, out, _ = told(capsys, "diff", run, run, "--step", "10", "--step", "40")
    assert code == 0 and "  not compared: " in out and "cannot be read" in out and "  step: 10 -> 40" in out


# -- rm ---------------------------------------------------------------------------------------------------------------------


def left(run: Path) -> list[int]:
    return sorted(int(p.name[5:13]) for p in (run / "checkpoints").glob("step-*"))


def test_rm_deletes_and_never_the_last_good_one(run: Path, capsys: pytest.CaptureFixture[str]):
    place = run / "checkpoints"
    names = {step: place / folder_name(step, step) for step in (10, 20, 30, 40, 50)}
    assert told(capsys, "rm", names[20], names[50])[:2] == (0, f"deleted: {names[20]}\ndeleted: {names[50]}\n")
    code, _, err = told(capsys, "rm", names[30], names[10])
    assert code == 64 and f"{names[10]} is refused: no other good checkpoint would be left" in err
    assert left(run) == [10, 30, 40]  # all or none
    assert told(capsys, "rm", names[10], "--force")[0] == 0
    assert left(run) == [30, 40]
    assert told(capsys, "rm", names[40])[0] == 64  # the last that could be gone back to at all
    assert told(capsys, "rm", names[30])[0] == 0


def test_rm_without_a_book_keeps_the_last_usable_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place = tmp_path / "checkpoints"
    sick = commit(place, 20, health=Health(finite=False))
    last = commit(place, 10)
    assert told(capsys, "rm", last)[0] == 64
    assert told(capsys, "rm", sick)[0] == 0


@pytest.mark.parametrize("path", ["{run}", "{place}", "{place}/..", "{place}/{ten}/..", "{place}/trust.json", "/", "."])
def test_rm_refuses_whatever_is_no_checkpoint(path: str, run: Path, capsys: pytest.CaptureFixture[str]):
    place = run / "checkpoints"
    code, _, err = told(capsys, "rm", path.format(run=run, place=place, ten=folder_name(10, 10)), "--force")
    assert code == 64 and "refused" in err
    assert left(run) == [10, 20, 30, 40, 50]


def test_rm_refuses_links_and_folders_with_other_things_in_them(run: Path, capsys: pytest.CaptureFixture[str]):
    place, outside = run / "checkpoints", run / "precious"
    outside.mkdir()
    (outside / "thesis.tex").write_text("years of work")
    link = place / folder_name(60, 60)
    link.symlink_to(outside)
    for words in ([link], [link, "--force"]):
        code, _, err = told(capsys, "rm", *words)
        assert code == 64 and "it is a link" in err
    (place / folder_name(10, 10) / "notes\x1b[2J.txt").write_text("mine")
    code, _, err = told(capsys, "rm", place / folder_name(10, 10))
    assert code == 64 and "it holds what no checkpoint has" in err and "\x1b" not in err
    assert told(capsys, "rm", place / folder_name(10, 10), "--force")[0] == 0
    assert (outside / "thesis.tex").exists() and left(run) == [20, 30, 40, 50, 60]


def test_rm_that_cannot_delete_is_exit_1(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(storage: LocalStorage, folder: str, first: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(LocalStorage, "delete_folder", refuse)
    code, out, err = told(capsys, "rm", run / "checkpoints" / folder_name(10, 10))
    assert (code, out) == (1, "") and "could not delete" in err and "Permission denied" in err


# -- export -----------------------------------------------------------------------------------------------------------------


def test_export_calls_the_writer_with_one_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    called: list[Any] = []
    monkeypatch.setattr(
        "resilient.engines.export.export_checkpoint", lambda folder, to, out: called.append((folder, to, out))
    )
    out = tmp_path / "out"
    code, said, _ = told(capsys, "export", run, "--step", "20", "--to", "dcp", "--out", out)
    assert code == 0 and said.startswith("exported: ")
    assert called == [(run / "checkpoints" / folder_name(20, 20), "dcp", out)]
    out.mkdir()
    (out / "x").touch()
    assert told(capsys, "export", run, "--to", "dcp", "--out", out)[0] == 64
    assert told(capsys, "export", run, "--to", "dcp", "--out", tmp_path / "no" / "such")[0] == 64
    assert len(called) == 1


def test_export_of_a_damaged_checkpoint_is_exit_1(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flip(run / "checkpoints" / folder_name(20, 20) / part_name(1))
    code, _, err = told(capsys, "export", run, "--step", "20", "--to", "dcp", "--out", tmp_path / "out")
    assert code == 1 and part_name(1) in err
    assert not (tmp_path / "out").exists()


# -- what somebody else wrote --------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_part_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The file is exactly what the manifest says it is, and its pickle makes a folder when it is loaded."""
    from resilient.checkpoint.manifest import Part, read_manifest

    a, b = commit(tmp_path / "a", 10, world=1), commit(tmp_path / "b", 10, world=1)
    mark = tmp_path / "mark"
    torch.save({"parts": {"engine": Bomb(mark)}}, a / part_name(0))
    size = (a / part_name(0)).stat().st_size
    import xxhash

    digest = xxhash.xxh3_128((a / part_name(0)).read_bytes()).hexdigest()
    manifest = read_manifest(a)
    part = Part(part_name(0), size, digest, manifest.parts[0].digests)
    write_manifest(a, replace(manifest, parts=(part,)))
    assert told(capsys, "verify", a)[0] == 0
    code, out, _ = told(capsys, "diff", a, b)
    assert code == 0 and "not compared" in out
    code, _, err = told(capsys, "export", a, "--to", "dcp", "--out", tmp_path / "out")
    assert code == 1 and "cannot be read" in err
    assert not mark.exists()
    with open(a / part_name(0), "wb") as file:  # and a bare pickle
        pickle.dump(Bomb(mark), file)
    told(capsys, "diff", a, b)
    assert not mark.exists()


def hostile() -> Iterator[tuple[str, Any]]:
    yield "run_id", "\x1b]0;owned\x07\x1b[2J[bold red]x[/]" * 50
    yield "written_at", 10**400
    yield "written_at", ["\x1b[31m"]
    yield "lr", "1e-3\x1b[31m"
    yield "lr", float("nan")
    yield "samples", {"a": [None] * 3}
    yield "schedule", [[]]
    yield "fingerprint", {"\x1b[2J": "\r\nresilient: all is well"}
    yield "about", {"a": {"b": ["[link=http://x]"] * 1000}}
    yield "outer", ["not", "a", "mapping"]
    yield "versions", {"torch": None}


@pytest.mark.parametrize(("name", "value"), list(hostile()))
def test_a_manifest_may_hold_anything_and_steers_no_terminal(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = commit(tmp_path / "checkpoints", 10, **{name: value})
    for words in (
        ["ls"],
        ["show"],
        ["verify"],
        ["diff", path],
        ["show", "--format", "json"],
        ["ls", "--format", "json"],
    ):
        code, out, err = told(capsys, words[0], *words[1:], path)
        assert code in (0, 1, 64), (words, err)
        assert not any(ord(c) < 32 and c != "\n" for c in out + err), words
        assert len(out) < 200_000


def test_a_health_that_lies_and_a_manifest_without_bottom(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = commit(tmp_path / "checkpoints", 10)
    content = json.loads((path / MANIFEST).read_text())
    for evaluation in ({"eval_loss": "best\x1b[2J"}, {"eval_loss": 1e999}, {"x": {"y": 1}}):
        content["health"] = {"finite": "yes", "level": 7, "evaluation": evaluation}
        (path / MANIFEST).write_text(json.dumps(content))
        for command in ("ls", "show", "verify"):
            code, out, err = told(capsys, command, path)
            assert code in (0, 1, 64) and "\x1b" not in out + err
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    sys.setrecursionlimit(10_000)
    try:
        text = json.dumps({**content, "health": {"finite": True, "level": "", "evaluation": {"a": deep}}})
    finally:
        sys.setrecursionlimit(1000)
    (path / MANIFEST).write_text(text)
    for command in ("ls", "show", "verify"):
        code, out, err = told(capsys, command, path)
        assert code in (0, 1, 64)


def test_a_manifest_that_points_elsewhere_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = commit(tmp_path / "checkpoints", 10, world=1)
    secret = tmp_path / "secret"
    secret.write_text("x")
    from resilient.checkpoint.manifest import read_manifest

    part = replace(read_manifest(path).parts[0], file="../../secret", size=1)
    write_manifest(path, replace(read_manifest(path), parts=(part,)))
    code, out, _ = told(capsys, "verify", path)
    assert code == 1 and "part 0 is named '../../secret'" in out


def test_a_manifest_too_long_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = commit(tmp_path / "checkpoints", 10, world=1)
    with open(path / MANIFEST, "r+b") as file:
        file.truncate(40 << 30)  # a hole: it takes no room
    code, out, _ = told(capsys, "verify", path)
    assert code == 1 and "longer than" in out


# -- usage --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["list"], ["ls"], ["diff", "a"], ["export", "a"], ["show", "a", "--step", "x"]])
def test_bad_usage_is_64(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["checkpoint", *words])
    assert end.value.code == 64
    assert "resilient checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_a_path_that_is_not_there_is_64(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, err = told(capsys, command, tmp_path / "nowhere")
    assert (code, out) == (64, "") and "is not a folder" in err


def test_a_store_by_url(capsys: pytest.CaptureFixture[str]):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    from resilient.checkpoint.storage_remote import RemoteStorage

    url = "memory://bucket/run/checkpoints"
    storage = RemoteStorage(url)
    state = {"engine": engine_state(10), "rng": {}, "data": {}, "judge": {}}
    snapshot = Snapshot(10, 10, 10, 1e-3, 10, state, Snapshot.digest_parts(state))
    part = write_part(storage, folder_name(10, 10), 0, snapshot)
    manifest = Manifest(
        run_id="run", generation=0, serial=1, step=10, attempt=10, position=10, lr=1e-3, schedule=10, world=1,
        fingerprint={}, parts=(part,), versions={}, written_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    write_manifest(Path(folder_name(10, 10)), manifest, storage)
    try:
        assert as_json(capsys, "ls", url)[1]["places"][0]["checkpoints"][0]["tiers"] == ["remote"]
        assert told(capsys, "verify", f"{url}/{folder_name(10, 10)}")[0] == 0
        name = f"/bucket/run/checkpoints/{folder_name(10, 10)}/{part_name(0)}"
        memory.pipe_file(name, memory.cat_file(name)[:-1] + b"?")
        assert told(capsys, "verify", url)[0] == 1
        assert told(capsys, "rm", f"{url}/{folder_name(10, 10)}")[0] == 64
        assert told(capsys, "rm", f"{url}/{folder_name(10, 10)}", "--force")[0] == 0
        assert not memory.find("/bucket/run/checkpoints")
    finally:
        memory.store.clear()
    code, _, err = told(capsys, "ls", "s3://key:secret@bucket/run")
    assert code == 64 and "secret" not in err


def test_texts():
    assert [ranks_text(r) for r in ([3], [0, 1, 2, 3], [0, 2, 3, 7])] == ["rank 3", "ranks 0-3", "ranks 0, 2-3, 7"]
    assert ranks_text(list(range(0, 40, 2))) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 12 more"
    assert [size_text(n) for n in (0, 1023, 1024, 5 << 30, 1 << 60)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "1048576.0 TiB",
    ]
    assert [age_text(s) for s in (None, -5.0, 59.0, 3600.0, 90000.0)] == [
        "?",
        "0.0 s",
        "59.0 s",
        "1 h 00 min",
        "1 d 1 h",
    ]
    assert printable("a\x1b[31m\nb") == "a\ufffd[31m\ufffdb" and len(printable("x" * 9999)) == 400
