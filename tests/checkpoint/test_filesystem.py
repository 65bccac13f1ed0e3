"""checkpoint/filesystem.py on two gloo ranks: bitwise round trip, damage, refusals, retention.

One spawn per group of scenarios; each scenario has a folder of its own and both ranks report what they saw."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resilient.checkpoint.filesystem import FilesystemStore, traces_of_training
from resilient.checkpoint.manifest import MANIFEST, list_checkpoints, part_name
from resilient.checkpoint.snapshot import PARTS, Snapshot
from resilient.errors import CheckpointError, NothingUsable
from tests.ranks import run_pooled

FINGERPRINT = {"engine": "ddp", "precision": "bf16", "betas": (0.9, 0.95)}


def vote(ok: bool) -> bool:
    """As the coordinator's: a small all-reduce."""
    noes = torch.tensor([0.0 if ok else 1.0])
    dist.all_reduce(noes)
    return noes.item() == 0


def store(root: str, rank: int, world: int, **changes: Any) -> FilesystemStore:
    arguments: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "vote": vote,
        "keep": 3,
        "run_id": "run",
        "generation": 0,
        "fingerprint": FINGERPRINT,
        "visible_s": 5.0,
    }
    return FilesystemStore(Path(root) / "checkpoints", **(arguments | changes))


def snapshot(step: int, rank: int, attempt: int | None = None, size: int = 100) -> Snapshot:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    weights = torch.randn(size, generator=generator)
    mask = torch.tensor([float("nan"), float("-inf"), -0.0])  # not of the weights: those would make it sick (BR-35)
    parts: dict[str, Any] = {
        "engine": {
            "weights": weights,
            "buffers": {"mask": mask},
            "half": weights.to(torch.bfloat16),
            "state": [{"step": torch.tensor(step), "exp_avg": weights**2}, {}],
            "schedule": {"last_lr": [1e-3 / 3], "name": "cosine", "none": None, "pair": (1, 2.5), 7: True},
        },
        "rng": {"torch": torch.arange(16, dtype=torch.uint8), "python": 2**62 + rank},
        "data": {"position": step * 4, "epoch": 0},
        "judge": {"history": torch.linspace(0, 1, 5, dtype=torch.float64)},
    }
    return Snapshot(
        step=step,
        attempt=step if attempt is None else attempt,
        position=step * 4,
        lr=1e-3 / 3,
        schedule=step,
        parts=parts,
        digests=Snapshot.digest_parts(parts),
    )


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit: NaN is equal to the same NaN, -0.0 is not 0.0, 1 is not 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
            if a.dtype is not torch.bfloat16
            else same(a.view(torch.int16), b.view(torch.int16))
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def names(root: str) -> list[str]:
    """What the checkpoint folder holds while all ranks stand still: rank 0 deletes after the last vote."""
    dist.barrier()
    folder = Path(root) / "checkpoints"
    found = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    dist.barrier()
    return found


def raised(action: Callable[[], Any]) -> tuple[str, str]:
    """Class and text of what `action` raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def damage(path: Path, bit: int = 1) -> None:
    """Flip one bit in the middle, size unchanged."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= bit
    path.write_bytes(bytes(data))


def by_rank_0(rank: int, action: Callable[[], Any]) -> None:
    """Something happens to the files while all ranks stand still."""
    dist.barrier()
    if rank == 0:
        action()
    dist.barrier()


# -- scenarios: (rank, world, root) -> what this rank saw ------------------------------------------------------------


def round_trip(rank: int, world: int, root: str) -> dict[str, Any]:
    first = store(root, rank, world)
    fresh = first.load()
    outer = {"budget": 4, "skipped": [[3, 5]], "by_step": {9: 1, 10: 2}}
    saved = [first.save(snapshot(s, rank), outer) for s in (5, 10)]
    first_manifest = (Path(root) / "checkpoints" / "step-00000010-a00000010" / MANIFEST).read_bytes()
    again = first.save(snapshot(10, rank), outer)
    after = (Path(root) / "checkpoints" / "step-00000010-a00000010" / MANIFEST).read_bytes()
    second = store(root, rank, world, generation=1)
    loaded, older = second.load(), second.load(5)
    assert loaded is not None
    assert older is not None
    assert first.manifest is not None
    return {
        "fresh": fresh,
        "saved": saved,
        "no-op": again and first_manifest == after,
        "same": same(vars(loaded), vars(snapshot(10, rank))),
        "older": same(vars(older), vars(snapshot(5, rank))),
        "digests": Snapshot.digest_parts(loaded.parts) == loaded.digests,
        "outer": first.manifest.outer,
        "no such step": raised(lambda: second.load(7)),
        "left over": [n for n in names(root) if not n.startswith("step-")],
    }


def flipped_byte(rank: int, world: int, root: str) -> dict[str, Any]:
    """The newest has a flipped bit in rank 1's part: rank 0 reads its own part well and must go back all the same."""
    writer = store(root, rank, world)
    for step in (5, 10):
        writer.save(snapshot(step, rank))
    newest = Path(root) / "checkpoints" / "step-00000010-a00000010"
    by_rank_0(rank, lambda: damage(newest / part_name(1)))
    reader = store(root, rank, world)
    loaded = reader.load()
    wanted = raised(lambda: store(root, rank, world).load(10))
    # The damaged step is reached again, in the same way: it must be replaced, not taken for saved.
    saved = reader.save(snapshot(10, rank))
    repaired = store(root, rank, world).load()
    return {
        "step": loaded and loaded.step,
        "problem": reader.problem,
        "wanted": wanted,
        "saved": saved,
        "repaired": repaired is not None and same(vars(repaired), vars(snapshot(10, rank))),
        "all damaged": _all_damaged(rank, world, root),
    }


def _all_damaged(rank: int, world: int, root: str) -> Any:
    def ruin() -> None:
        for path in Path(root).glob(f"checkpoints/*/{part_name(1)}"):
            damage(path, bit=2)  # another one: the same twice would be a repair

    by_rank_0(rank, ruin)
    stopped = raised(lambda: store(root, rank, world).load())
    forced = store(root, rank, world).load(on_no_valid_checkpoint="fresh")
    return stopped, forced


def missing_files(rank: int, world: int, root: str) -> dict[str, Any]:
    """A part gone, a manifest gone, a manifest flipped, a manifest that points elsewhere, a huge one: next older."""
    writer = store(root, rank, world, keep=10)
    for step in (1, 2, 3, 4, 5, 6):
        writer.save(snapshot(step, rank))
    folder = Path(root) / "checkpoints"

    def ruin() -> None:
        (folder / "step-00000006-a00000006" / part_name(1)).unlink()
        (folder / "step-00000005-a00000005" / MANIFEST).unlink()
        damage(folder / "step-00000004-a00000004" / MANIFEST)
        path = folder / "step-00000003-a00000003" / MANIFEST
        content = json.loads(path.read_text())
        content["parts"][1]["file"] = "../step-00000002-a00000002/rank-00001.pt"
        path.write_text(json.dumps(content))
        with open(folder / "step-00000002-a00000002" / MANIFEST, "ab") as file:
            file.truncate(1 << 30)
        (folder / "latest").write_text("step-00000006-a00000006")

    by_rank_0(rank, ruin)
    loaded = store(root, rank, world).load()
    listing = list_checkpoints(folder)
    return {
        "step": loaded and loaded.step,
        "complete": [c.manifest.step for c in listing.complete],
        "orphans": sorted(o.path.name for o in listing.orphans),
    }


def unfit(rank: int, world: int, root: str) -> dict[str, Any]:
    writer = store(root, rank, world)
    writer.save(snapshot(5, rank))
    by_rank_0(rank, lambda: None)
    wrong_world = raised(lambda: store(root, rank, 4).load())
    engine = FINGERPRINT | {"engine": "fsdp2"}
    lacking = {name: value for name, value in snapshot(6, rank).parts.items() if name != "rng"}
    digests = {name: "0" * 16 for name in PARTS if name != "rng"}

    def forget() -> None:
        path = Path(root) / "checkpoints" / "step-00000005-a00000005" / MANIFEST
        from resilient.checkpoint.manifest import Part, read_manifest, write_manifest

        manifest = read_manifest(path.parent)
        parts = tuple(
            Part(p.file, p.size, p.digest, {k: v for k, v in p.digests.items() if k != "judge"}) for p in manifest.parts
        )
        write_manifest(path.parent, type(manifest)(**{**vars(manifest), "parts": parts}))

    seen = {
        "world": wrong_world,
        "engine": raised(lambda: store(root, rank, world, fingerprint=engine).load()),
        "run": raised(lambda: store(root, rank, world, run_id="other").load()),
        "save without rng": raised(lambda: writer.save(Snapshot(6, 6, 6, 0.1, 6, lacking, digests))),
        "only one rank lacks it": raised(
            lambda: writer.save(Snapshot(7, 7, 7, 0.1, 7, lacking, digests) if rank == 1 else snapshot(7, rank))
        ),
        "unloadable state": writer.save(_with_object(8, rank)),
        "problem": writer.problem,
    }
    by_rank_0(rank, forget)
    seen["manifest without judge"] = raised(lambda: store(root, rank, world).load())
    seen["complete"] = [c.manifest.step for c in list_checkpoints(Path(root) / "checkpoints").complete]
    seen["names"] = names(root)
    return seen


def _with_object(step: int, rank: int) -> Snapshot:
    """A state that torch.save takes and weights_only refuses: must fail at the save, not at the resume."""
    good = snapshot(step, rank)
    parts = good.parts | {"judge": {"bad": Path("x")}}
    return Snapshot(step, step, step, 0.1, step, parts, good.digests)


def retention(rank: int, world: int, root: str) -> dict[str, Any]:
    """Keeps two; a rollback makes a lower step the newest; orphans go; the last one stays."""
    keeper = store(root, rank, world, keep=2)
    for step in (10, 20, 30):
        keeper.save(snapshot(step, rank))
    dist.barrier()  # rank 0 deletes after the last vote, before it returns
    kept = names(root)
    dist.barrier()
    keeper.save(snapshot(20, rank, attempt=35))  # after a rollback to 10: step 20 again, on another path
    after_rollback = store(root, rank, world).load()

    def litter() -> None:
        for step in (90, 91):
            (Path(root) / "checkpoints" / f"step-{step:08d}-a{step:08d}").mkdir()

    by_rank_0(rank, litter)
    one = store(root, rank, world, keep=0)
    one.save(snapshot(40, rank))
    dist.barrier()  # rank 0 deletes after the last vote
    return {
        "kept": kept,
        "after rollback": after_rollback and (after_rollback.step, after_rollback.attempt),
        "at the end": [(c.manifest.step, c.manifest.serial) for c in list_checkpoints(one.folder).complete],
        "orphans left": len(list_checkpoints(one.folder).orphans),
    }


def node_local(rank: int, world: int, root: str) -> dict[str, Any]:
    """Each rank has a folder of its own: seen by the probe, a manifest in each."""
    own = store(f"{root}/node{rank}", rank, world, visible_s=0.5)
    saved = own.save(snapshot(5, rank))
    loaded = store(f"{root}/node{rank}", rank, world, visible_s=0.5, generation=1).load()
    complete = list_checkpoints(own.folder).complete
    return {
        "saved": saved,
        "same": loaded is not None and same(vars(loaded), vars(snapshot(5, rank))),
        "ranks": [c.manifest.ranks for c in complete],
        "domains": own.layout().domains,
    }


def traces(rank: int, world: int, root: str) -> dict[str, Any]:
    """BR-25: an unfinished checkpoint and a log that says step 40."""
    run = Path(root)

    def unfinished() -> None:
        (run / "checkpoints" / "step-00000040-a00000040").mkdir(parents=True)
        (run / "steps.jsonl").write_text('{"step": 40}\n')

    by_rank_0(rank, unfinished)
    stop = raised(lambda: store(root, rank, world).load())
    fresh = store(root, rank, world).load(on_no_valid_checkpoint="fresh")
    return {"stop": stop, "fresh": fresh}


def late_visibility(rank: int, world: int, root: str) -> dict[str, Any]:
    """BR-28: rank 1 sees new files late. It waits; save returns there after the commit, load finds the same step."""
    import time

    from resilient.checkpoint import commit, loading

    patient = commit.wait_until
    if rank == 1:

        def late(condition: Callable[[], bool], timeout_s: float) -> bool:
            visible_from = time.monotonic() + 0.4
            return patient(lambda: time.monotonic() > visible_from and condition(), timeout_s)

        commit.wait_until = loading.wait_until = late
    try:
        ours = store(root, rank, world)
        saved = ours.save(snapshot(5, rank))
        returned = time.time()
        committed = (ours.folder / "step-00000005-a00000005" / MANIFEST).stat().st_mtime
        loaded = store(root, rank, world).load()
    finally:
        commit.wait_until = loading.wait_until = patient
    return {"saved": saved, "after commit": returned >= committed, "step": loaded and loaded.step}


def full_disk(rank: int, world: int, root: str) -> dict[str, Any]:
    """Rank 1's writes fail for real after 64 KiB: the kernel refuses (EFBIG), as it does on a full disk (ENOSPC)."""
    ours = store(root, rank, world)
    before = ours.save(snapshot(5, rank))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        during = ours.save(snapshot(10, rank, size=200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    problem, left = ours.problem, names(root)
    loaded = store(root, rank, world).load()
    after = ours.save(snapshot(15, rank))
    return {
        "saved": (before, during, after),
        "problem": problem,
        "left": left,
        "intact": loaded is not None and same(vars(loaded), vars(snapshot(5, rank))),
    }


def tiny_disk(rank: int, world: int, root: str) -> dict[str, Any]:
    """A file system of 1 MiB that is really full (skipped by the caller where nothing can be mounted)."""
    ours = store(root, rank, world, keep=5)
    saved = [ours.save(snapshot(step, rank, size=40_000)) for step in (1, 2, 3, 4)]
    problem = ours.problem
    loaded = store(root, rank, world).load()
    folder = Path(root) / "checkpoints"
    return {
        "saved": saved,
        "problem": problem,
        "intact": loaded is not None and same(vars(loaded), vars(snapshot(loaded.step, rank, size=40_000))),
        "step": loaded and loaded.step,
        "partial": [p.name for p in folder.rglob("*.partial")],
        "complete": [c.manifest.step for c in list_checkpoints(folder).complete],
    }


SCENARIOS = (
    round_trip,
    flipped_byte,
    missing_files,
    unfit,
    retention,
    node_local,
    traces,
    late_visibility,
    full_disk,
)


def all_scenarios(rank: int, world: int, root: str, tiny: str | None) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    seen = {s.__name__: s(rank, world, f"{root}/{s.__name__}") for s in SCENARIOS}
    if tiny is not None:
        seen["tiny_disk"] = tiny_disk(rank, world, tiny)
    return seen


# -- what they must have seen -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("stores")
    tiny = root / "tiny"
    tiny.mkdir()
    mounted = os.system(f"mount -t tmpfs -o size=1m tmpfs '{tiny}' 2>/dev/null") == 0
    try:
        return run_pooled(all_scenarios, 2, str(root), str(tiny) if mounted else None, timeout=100)
    finally:
        if mounted:
            os.system(f"umount -l '{tiny}'")
        shutil.rmtree(root, ignore_errors=True)


pytestmark = pytest.mark.timeout(120)


def test_round_trip_is_bitwise_and_the_same_step_twice_is_a_no_op(seen: list[dict[str, Any]]) -> None:
    """C3, BR-27."""
    for rank in seen:
        found = rank["round_trip"]
        assert found["fresh"] is None
        assert found["saved"] == [True, True]
        assert found["no-op"]
        assert found["same"]
        assert found["older"]
        assert found["digests"]
        assert found["outer"] == {"budget": 4, "skipped": [[3, 5]], "by_step": {"9": 1, "10": 2}}
        kind, text = found["no such step"]
        assert kind == "CheckpointError"
        assert "step 7" in text
        assert "[10, 5]" in text
        assert found["left over"] == []


def test_one_flipped_bit_on_one_rank_sends_both_to_the_next_older(seen: list[dict[str, Any]]) -> None:
    assert [r["flipped_byte"]["step"] for r in seen] == [5, 5]
    assert [r["flipped_byte"]["wanted"][0] for r in seen] == ["CheckpointError"] * 2
    assert [r["flipped_byte"]["saved"] for r in seen] == [True, True]
    assert [r["flipped_byte"]["repaired"] for r in seen] == [True, True]


def test_nothing_usable_stops_unless_told_to_start_afresh(seen: list[dict[str, Any]]) -> None:
    """BR-25."""
    for number, rank in enumerate(seen):
        (kind, text), forced = rank["flipped_byte"]["all damaged"]
        assert kind == "NothingUsable"
        assert "on_no_valid_checkpoint" in text
        assert forced is None
        kind, text = rank["traces"]["stop"]
        assert kind == "NothingUsable"
        assert ("steps.jsonl" if number == 0 else "as another rank sees") in text
        assert rank["traces"]["fresh"] is None
    assert NothingUsable.exit_code == 77
    assert issubclass(NothingUsable, CheckpointError)


def test_only_complete_checkpoints_count_whatever_latest_says(seen: list[dict[str, Any]]) -> None:
    """BR-23; a manifest cannot point out of its folder, and its size is limited."""
    for rank in seen:
        assert rank["missing_files"]["step"] == 1
        assert rank["missing_files"]["complete"] == [1]
        assert rank["missing_files"]["orphans"] == [f"step-0000000{i}-a0000000{i}" for i in (2, 3, 4, 5, 6)]


def test_another_world_engine_or_run_is_refused_by_name(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        found = rank["unfit"]
        assert found["world"][0] == found["engine"][0] == found["run"][0] == "CheckpointError"
        assert "world size 2 there, 4 here (start 2 ranks)" in found["world"][1]
        assert "engine 'ddp' there, 'fsdp2' here" in found["engine"][1]
        assert "precision" not in found["engine"][1]
        assert "belongs to run 'run', this is run 'other'" in found["run"][1]


def test_a_missing_required_part_is_an_error_at_save_and_at_load(seen: list[dict[str, Any]]) -> None:
    """BR-09."""
    for number, rank in enumerate(seen):
        found = rank["unfit"]
        assert found["save without rng"][0] == "CheckpointError"
        assert "rng" in found["save without rng"][1]
        assert found["only one rank lacks it"][0] == ("CheckpointError" if number == 1 else "")
        assert found["manifest without judge"][0] == "CheckpointError"
        assert "judge" in found["manifest without judge"][1]
        assert found["complete"] == [5], "nothing was committed by the failed saves"
        assert found["names"] == ["step-00000005-a00000005"], "and nothing was left behind"


def test_a_state_that_could_not_be_loaded_again_fails_at_the_save(seen: list[dict[str, Any]]) -> None:
    """Pickled classes are refused by weights_only; finding that out at the resume would be too late."""
    for rank in seen:
        assert rank["unfit"]["unloadable state"] is False
        assert "cannot be loaded again: " in rank["unfit"]["problem"]
        assert "PosixPath" in rank["unfit"]["problem"]


def test_retention_keeps_the_newest_by_commit_and_never_loses_the_last(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        found = rank["retention"]
        assert found["kept"] == ["step-00000020-a00000020", "step-00000030-a00000030"]
        assert found["after rollback"] == (20, 35), "the newest commit, not the highest step"
        assert found["at the end"] == [(40, 5)]
        assert found["orphans left"] == 1, "the newest broken one stays for inspection"


def test_node_local_folders_have_a_manifest_each(seen: list[dict[str, Any]]) -> None:
    """BR-27, BR-34."""
    for number, rank in enumerate(seen):
        found = rank["node_local"]
        assert found == {"saved": True, "same": True, "ranks": [(number,)], "domains": ((0,), (1,))}


def test_save_returns_after_the_commit_where_files_show_up_late(seen: list[dict[str, Any]]) -> None:
    """BR-28."""
    for rank in seen:
        assert rank["late_visibility"] == {"saved": True, "after commit": True, "step": 5}


def test_a_failed_write_on_one_rank_is_a_no_on_all_and_leaves_the_previous_one(seen: list[dict[str, Any]]) -> None:
    """BR-29, BR-31."""
    for rank in seen:
        found = rank["full_disk"]
        assert found["saved"] == (True, False, True)
        assert found["left"] == ["step-00000005-a00000005"]
        assert found["intact"]
    assert "rank 1 could not write" in seen[1]["full_disk"]["problem"]
    assert "another rank" in seen[0]["full_disk"]["problem"]


def test_a_full_file_system_leaves_the_previous_checkpoint(seen: list[dict[str, Any]]) -> None:
    """BR-29 on a tmpfs of 1 MiB."""
    if "tiny_disk" not in seen[0]:
        pytest.skip("mounting a tmpfs needs root")
    for rank in seen:
        found = rank["tiny_disk"]
        assert found["saved"][0] is True
        assert found["saved"][-1] is False
        assert found["saved"] == sorted(found["saved"], reverse=True)
        assert found["intact"]
        assert found["partial"] == []
        assert found["complete"] == list(range(sum(found["saved"]), 0, -1))
        assert found["step"] == found["complete"][0]
    assert seen[0]["tiny_disk"]["saved"] == seen[1]["tiny_disk"]["saved"]


def test_traces_of_training(tmp_path: Path) -> None:
    """A save of step 0 that never committed loses nothing; everything else is a trace."""
    folder = tmp_path / "checkpoints"
    assert traces_of_training(folder) == ""
    (folder / "step-00000000-a00000000").mkdir(parents=True)
    (tmp_path / "steps.jsonl").touch()
    assert traces_of_training(folder) == ""
    (folder / "step-00000050-a00000050").mkdir()
    assert "step-00000050" in traces_of_training(folder)
