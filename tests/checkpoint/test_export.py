"""A checkpoint of ours, read by plain torch.distributed.checkpoint without us, and trained on, bit for bit (issue 5,
deliver 1 and 9)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from resilient.checkpoint.dcp import Stored, _Planner, write_dcp
from resilient.checkpoint.export import export_dcp, open_checkpoint
from resilient.checkpoint.manifest import Manifest, Part, part_name, write_manifest
from resilient.checkpoint.pieces import Piece, to_plain
from resilient.checkpoint.reshape import SourcePart, held_by
from resilient.checkpoint.snapshot import PARTS
from resilient.engines.export import export_checkpoint
from resilient.engines.pieces import pieces_of
from resilient.errors import CheckpointError
from tests.engines import contract
from tests.engines.models import batch, build_model, build_optimizer, build_scheduler, loss_of
from tests.engines.worlds import SETUP, WINDOWS, assert_same, build, build_wrapped, load, part, save
from tests.ranks import run_pooled, run_ranks

OTHER = SETUP.but(seed=99)


def commit(folder: Path, contents: Sequence[dict[str, Any]]) -> Path:
    """A committed checkpoint folder out of the engine states (and pieces) of all ranks."""
    folder.mkdir(parents=True)
    parts = []
    for rank, content in enumerate(contents):
        path = folder / part_name(rank)
        snapshot = {"parts": {**{name: {} for name in PARTS}, "engine": content["state"]}, "pieces": content["pieces"]}
        torch.save(snapshot, path)
        data = path.read_bytes()
        parts.append(Part(path.name, len(data), xxhash.xxh3_128(data).hexdigest(), {}))
    manifest = Manifest(
        run_id="r", generation=1, serial=1, step=WINDOWS, attempt=WINDOWS, position=WINDOWS, lr=0.5, schedule=WINDOWS,
        world=len(parts), fingerprint={}, parts=tuple(parts), versions={}, written_at="",
    )  # fmt: skip
    write_manifest(folder, manifest)
    return folder


def saved_by(rank: int, world: int, folder: Path) -> None:
    for kind in ("ddp", "fsdp2"):
        save(rank, world, kind, SETUP, folder / kind)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<kind>/step.../ : checkpoints of 2 ranks; <kind>/parts beside what torch gathered (whole.pt)."""
    folder = tmp_path_factory.mktemp("export")
    run_pooled(saved_by, 2, folder)
    for kind in ("ddp", "fsdp2"):
        contents = [torch.load(part(folder / kind, rank), weights_only=True) for rank in range(2)]
        commit(folder / kind / "step-00000003-a00000003", contents)
    return folder


def checkpoint(committed: Path, kind: str) -> Path:
    return committed / kind / "step-00000003-a00000003"


def plain_train(model: nn.Module, optimizer: Any, scheduler: Any, windows: Sequence[int], rank: int) -> None:
    for index in windows:
        tokens, targets = batch(index, 0, rank)
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def loaded_by_plain_torch(rank: int, world: int, exported: Path, flat: Path, oracle: Path, kind: str) -> None:
    """What a person without this package writes, in a fresh process, for a model wrapped as `kind`."""
    full = torch.load(oracle / "whole.pt", weights_only=True)
    for out, options in (
        (exported, StateDictOptions()),
        (flat, StateDictOptions(flatten_optimizer_state_dict=True)),
    ):
        model, module = build_wrapped(kind, OTHER, world)
        optimizer = build_optimizer(module, OTHER)
        scheduler = build_scheduler(optimizer, OTHER)
        assert scheduler is not None
        weights, moments = get_state_dict(model, optimizer, options=options)
        state = {"model": weights, "optim": moments, "scheduler": scheduler.state_dict(), "train": {"step": 0}}
        dcp.load(state, checkpoint_id=out)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
        )
        scheduler.load_state_dict(state["scheduler"])
        assert state["train"]["step"] == WINDOWS
        gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
        now_model, now_optim = get_state_dict(model, optimizer, options=gather)
        if rank == 0:
            assert_same({"model": now_model, "optim": now_optim}, full, f"{out.name} -> {kind}")
        plain_train(model, optimizer, scheduler, range(WINDOWS, WINDOWS + 2), rank)
        after = get_state_dict(model, optimizer, options=gather)
        if oracle.name == kind:  # the job that wrote it, never interrupted
            twin = build(kind, SETUP, world)
            twin.restore(dict(load(oracle)[rank].state))
            contract.train(twin, SETUP, range(WINDOWS, WINDOWS + 2), rank)
            due = get_state_dict(twin.module, twin.optimizer, options=gather)
            if rank == 0:
                assert_same(after, due, f"{out.name} -> {kind}, trained on")
        dist.barrier()


@pytest.mark.parametrize("source", ["ddp", "fsdp2"])
def test_plain_dcp_loads_it_into_any_wrapping_and_trains_on(committed: Path, tmp_path: Path, source: str) -> None:
    exported, flat = tmp_path / "nested", tmp_path / "flat"
    export_checkpoint(checkpoint(committed, source), "dcp", exported)
    export_checkpoint(checkpoint(committed, source), "dcp", flat, flatten_optimizer=True)
    for kind in ("ddp", "fsdp2"):
        run_pooled(loaded_by_plain_torch, 2, exported, flat, committed / source, kind)


def test_torchs_own_converter_reads_it(committed: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint(committed, "fsdp2"), "dcp", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    full = torch.load(committed / "fsdp2" / "whole.pt", weights_only=True)
    assert_same({"model": found["model"], "optim": found["optim"]}, full, "converted")
    assert found["train"] == {"step": WINDOWS, "position": WINDOWS, "lr": 0.5}


def test_nothing_is_left_where_an_export_fails(committed: Path, tmp_path: Path) -> None:
    """Damage, drifted copies and a missing list of pieces are told by name; a full folder is not touched."""
    contents = [torch.load(part(committed / "ddp", rank), weights_only=True) for rank in range(2)]
    out = tmp_path / "out"

    damaged = commit(tmp_path / "step-00000001-a00000001", contents)
    data = bytearray((damaged / part_name(1)).read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / part_name(1)).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00001\.pt: its content is not what was written"):
        export_checkpoint(damaged, "dcp", out)

    nothing = commit(tmp_path / "step-00000002-a00000002", [{**content, "pieces": []} for content in contents])
    with pytest.raises(CheckpointError, match="does not say what its tensors are pieces of"):
        export_checkpoint(nothing, "dcp", out)

    contents[1]["state"]["params"]["head.weight"][0, 0] += 1
    drifted = commit(tmp_path / "step-00000003-a00000003", contents)
    with pytest.raises(CheckpointError, match=r"parameters/head\.weight is not the same on rank 0 and rank 1"):
        export_checkpoint(drifted, "dcp", out)

    good = checkpoint(committed, "ddp")
    with pytest.raises(CheckpointError, match="'hf': dcp, deepspeed, universal can be written"):
        export_checkpoint(good, "hf", out)
    with pytest.raises(CheckpointError, match="not written by a DeepSpeed engine"):
        export_checkpoint(good, "universal", out)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="is not empty"):
        export_checkpoint(good, "dcp", out)
    assert (out / "mine").read_text() == "x"


def test_a_failure_in_the_middle_of_writing_leaves_no_folder_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("resilient.checkpoint.dcp.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_dcp({"model": {"a": torch.zeros(3)}}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flat_ranges_become_boxes_of_the_parameters_own_shape(tmp_path: Path) -> None:
    """As ZeRO holds masters and moments: cut anywhere; and a scalar, a tensor without elements, a bool."""
    whole = torch.randn(5, 3, 2)
    flat = whole.reshape(-1)
    values = {"s": torch.tensor(2.5), "none": torch.empty(0, 3), "flag": torch.tensor([True, False])}
    sources = []
    for rank, (a, b) in enumerate([(0, 7), (7, 8), (8, 30)]):
        state = {"w": torch.cat([torch.zeros(2), flat[a:b]]), **values}
        pieces = [Piece(("w",), 2, "parameters/w", (5, 3, 2), (a,), (b - a,))]
        pieces += [
            Piece((n,), 0, f"parameters/{n}", tuple(v.shape), (0,) * v.ndim, tuple(v.shape), rank == 0)
            for n, v in values.items()
        ]
        sources.append(SourcePart(rank, state, pieces))
    held = held_by(sources)
    write_dcp(
        {name: Stored(f"parameters/{name}", held[f"parameters/{name}"]) for name in ("w", *values)}, tmp_path / "out"
    )
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".metadata"] + [f"__{r}_0.distcp" for r in range(3)]
    found = {"w": torch.zeros(5, 3, 2), **{name: torch.ones_like(value) for name, value in values.items()}}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(found, {"w": whole, **values}, "flat")


def test_wrappers_do_not_show_in_names(tmp_path: Path) -> None:
    """torch.compile and activation checkpointing put a level of their own into parameter names; torch leaves it out."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 2)), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    from resilient.engines.ddp import DDPEngine

    engine = DDPEngine(model, optimizer)
    state = engine.capture()
    folder = commit(
        tmp_path / "step-00000001-a00000001", [{"state": state, "pieces": to_plain(pieces_of(model, state))}]
    )
    export_dcp(open_checkpoint(folder), tmp_path / "out")
    weights, moments = get_state_dict(model, optimizer)
    blank = {"model": {k: torch.zeros_like(v) for k, v in weights.items()}, "optim": moments}
    dcp.load(blank, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(blank["model"], weights, "wrapped")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


def test_a_part_with_code_in_it_is_not_run(committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = [torch.load(part(committed / "ddp", rank), weights_only=True) for rank in range(2)]
    contents[0]["state"]["counters"] = Evil()
    folder = commit(tmp_path / "step-00000001-a00000001", contents)
    with pytest.raises(CheckpointError, match=r"rank-00000\.pt cannot be read"):
        open_checkpoint(folder)
    assert "ran" not in capsys.readouterr().out


def peak_of_export(rank: int, world: int, folder: str, out: str) -> int:
    """Kilobytes by which anonymous memory grew at most."""
    import threading

    opened = open_checkpoint(Path(folder))
    done, peak = threading.Event(), 0

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before = anonymous()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    export_dcp(opened, Path(out))
    done.set()
    watcher.join()
    return peak


def test_memory_stays_at_a_piece(tmp_path: Path) -> None:
    """96 MB in 24 tensors: the process grows by a few of them, not by all."""
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.full((1024, 1024), float(i))) for i in range(24)})
    from resilient.engines.ddp import DDPEngine

    engine = DDPEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = engine.capture()
    folder = commit(tmp_path / "step-00000001-a00000001", [{"state": state, "pieces": to_plain(engine.pieces(state))}])
    (peak,) = run_ranks(peak_of_export, 1, str(folder), str(tmp_path / "out"))
    assert peak < 40 * 1024
    found = {"model": {"p7": torch.zeros(1024, 1024)}}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert (found["model"]["p7"] == 7).all()


def test_an_export_that_is_off_by_one_bit_is_seen(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    right = _Planner.lookup_object

    def wrong(self: _Planner, index: Any) -> Any:
        value = right(self, index)
        if index.fqn == "optim.state.head.weight.exp_avg":
            value.view(torch.int32).view(-1)[0] ^= 1
        return value

    monkeypatch.setattr(_Planner, "lookup_object", wrong)
    export_checkpoint(checkpoint(committed, "fsdp2"), "dcp", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    full = torch.load(committed / "fsdp2" / "whole.pt", weights_only=True)
    assert_same(found["model"], full["model"], "weights")
    with pytest.raises(AssertionError, match=r"head.weight/exp_avg differs"):
        assert_same(found["optim"], full["optim"], "moments")


# --- DeepSpeed ---


def saved_by_deepspeed(rank: int, world: int, folder: Path) -> None:
    """Parts of ZeRO 1 and ZeRO 3 in bf16, and what DeepSpeed itself says of masters and moments."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from resilient.engines.deepspeed.pieces import pieces_of as pieces_of_deepspeed
    from tests.engines.test_deepspeed import DeepSpeedAdapter

    for stage in (1, 3):
        setup = SETUP.but(precision="bf16")
        engine = DeepSpeedAdapter(stage).make(setup, rank, world)
        contract.train(engine, setup, range(WINDOWS), rank)
        state = engine.capture()
        torch.save({"state": state, "pieces": to_plain(pieces_of_deepspeed(state))}, folder / f"{stage}-{rank}.pt")
        if (
            stage == 1
        ):  # deepspeed 0.19.8 links all groups when the first has stepped, and then finds no other's moments
            engine.engine.optimizer._hp_optimizer_states_linked = False
            engine.engine.optimizer._lazy_init_hp_params_optimizer_state()
        told = {
            name: [
                safe_get_full_fp32_param(p),
                *(safe_get_full_optimizer_state(p, k) for k in ("exp_avg", "exp_avg_sq")),
            ]
            for name, p in engine.module.named_parameters()
        }
        if rank == 0:
            torch.save(told, folder / f"{stage}-told.pt")
        dist.barrier()


@pytest.mark.slow
def test_plain_torch_goes_on_from_a_deepspeed_checkpoint(tmp_path: Path) -> None:
    """Masters become the weights of an fp32 model with a torch optimizer, its moments and steps come along."""
    run_ranks(saved_by_deepspeed, 2, tmp_path)
    for stage in (1, 3):
        contents = [torch.load(tmp_path / f"{stage}-{rank}.pt", weights_only=True) for rank in range(2)]
        folder = commit(tmp_path / f"step-0000000{stage}-a00000003", contents)
        export_checkpoint(folder, "dcp", tmp_path / f"dcp-{stage}")
        model = build_model(OTHER)
        optimizer = build_optimizer(model, OTHER)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": {"state": moments["state"]}}
        dcp.load(state, checkpoint_id=tmp_path / f"dcp-{stage}", no_dist=True)
        told = torch.load(tmp_path / f"{stage}-told.pt", weights_only=True)
        for name, (master, exp_avg, exp_avg_sq) in told.items():
            assert_same(state["model"][name], master, f"ZeRO {stage} {name}")
            saved = state["optim"]["state"][name]
            assert_same([saved["exp_avg"], saved["exp_avg_sq"]], [exp_avg, exp_avg_sq], f"ZeRO {stage} {name}")
            assert float(saved["step"]) == WINDOWS
