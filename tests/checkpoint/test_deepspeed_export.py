"""Exported checkpoints are loaded by plain DeepSpeed, hold what its own `save_checkpoint` would have written, and give
back every bit. DeepSpeed's readers unpickle whatever a file holds: here they read files of these very tests only."""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resilient.checkpoint.deepspeed_export import Progress, whole, write_universal
from resilient.checkpoint.export import OptimizerView
from resilient.checkpoint.pieces import Piece
from resilient.checkpoint.reshape import SourcePart, held_by
from resilient.engines.deepspeed import DeepSpeedEngine, export
from resilient.engines.deepspeed.pieces import pieces_of
from resilient.errors import CheckpointError
from tests.engines.contract import assert_same, leaves, train
from tests.engines.models import Setup, build_model
from tests.engines.test_deepspeed import FP32_GRADIENTS, DeepSpeedAdapter, warm_up
from tests.ranks import run_ranks

Case = tuple[int, str, dict[str, Any]]
SETUP = Setup(groups=True, tied=True, accumulation=2)
SMALL: dict[str, Any] = {"zero_optimization": {"sub_group_size": 300}}
CORE: tuple[Case, ...] = ((2, "bf16", {}), (3, "fp16", SMALL))
OTHERS: tuple[Case, ...] = (
    (0, "fp32", {}),
    (0, "bf16", {}),
    (0, "fp16", {}),
    (1, "fp32", {}),
    (1, "bf16", FP32_GRADIENTS),
    (1, "fp16", {}),
    (2, "fp16", {}),
    (2, "fp32", {"zero_optimization": {"parameter_alignment": True}}),
    (2, "bf16", {"zero_optimization": {"round_robin_gradients": True}}),
    (3, "fp32", SMALL),
    (3, "bf16", {}),
)


FROZEN = "blocks.1.norm.bias"


def engine_of(case: Case, seed: int, **settings: Any) -> tuple[DeepSpeedEngine, Setup]:
    """With a parameter that is not trained."""
    stage, precision, own = case
    setup = SETUP.but(precision=precision, seed=seed)
    module = build_model(setup)
    module.get_parameter(FROZEN).requires_grad_(False)
    return DeepSpeedAdapter(stage, settings={**own, **settings}).around(module, setup), setup


def everyones(engine: DeepSpeedEngine) -> list[SourcePart]:
    state = engine.capture()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, SourcePart(dist.get_rank(), state, pieces_of(state)))
    return parts


def loaded(case: Case, folder: Path, **settings: Any) -> DeepSpeedEngine:
    """A fresh engine of other weights that plain DeepSpeed has loaded `folder` into."""
    fresh, _ = engine_of(case, 9, **settings)
    fresh.close()
    path, _ = fresh.engine.load_checkpoint(str(folder))
    assert path is not None
    return fresh


def exported(rank: int, world: int, folder: str, cases: Sequence[Case]) -> None:
    warm_up()
    for number, case in enumerate(cases):
        stage, precision, settings = case
        engine, setup = engine_of(case, 1)
        with torch.no_grad():
            engine._stage.parameter(engine.module.get_parameter(FROZEN)).add_(0.5)  # no fresh engine has that
        train(engine, setup, [0, 1], rank)
        engine.skip(overflow=precision == "fp16")
        parts = everyones(engine)
        root = Path(folder, str(number))
        # there deepspeed 0.19.8 takes a parameter's place in the group for its place in the buffer
        rounds = settings.get("zero_optimization", {}).get("round_robin_gradients", False)
        engine.engine.save_checkpoint(str(root / "theirs"))
        if rank == 0:
            export.write_deepspeed(parts, root / "ours")
            export.write_universal(parts, root / "universal")
        dist.barrier()
        try:
            if rank == 0:
                same_files(root, ("ds_config", "clip_grad", *(("param_slice_mappings",) if rounds else ())))
                if stage > 0:
                    same_universal(root)
                    same_weights(root / "ours", parts, stage)
            state = engine.capture()
            if stage < 3:
                state["buffers"] = dict(parts[0].state["buffers"])  # one file for all ranks: they get rank 0's
            expected = leaves(state, ("micro_steps",))  # DeepSpeed saves none
            same_state(expected, loaded(case, root / "ours"), "load_checkpoint")
            if stage > 0 and not rounds:
                universal = loaded(case, root / "universal", checkpoint={"load_universal": True})
                left = ("buffers/", f"parameters/{FROZEN}", *(("groups/",) if stage == 3 else ()))
                same_state(expected, universal, "load_universal", left)
        except Exception as error:
            raise AssertionError(f"ZeRO {stage} {precision} {settings}: {error}") from error
        engine.close()


def same_state(expected: Mapping[str, Any], engine: DeepSpeedEngine, what: str, left: tuple[str, ...] = ()) -> None:
    """left: what DeepSpeed leaves as the new job made it."""
    found = leaves(engine.capture(), ("micro_steps",))
    mine, theirs = ({p: v for p, v in s.items() if not p.strip("/").startswith(left)} for s in (expected, found))
    assert_same(mine, theirs, what)


def same_files(root: Path, leave_out: tuple[str, ...]) -> None:
    """The files of `save_checkpoint`, and in each of them all that DeepSpeed writes. leave_out: the job's configuration,
    which is not in a checkpoint of ours and which no reader asks for; what DeepSpeed gets wrong."""
    theirs, ours = (sorted((root / side).glob("global_step*/*.pt")) for side in ("theirs", "ours"))
    assert [p.name for p in ours] == [p.name for p in theirs]
    assert (root / "ours" / "latest").read_text() == (root / "theirs" / "latest").read_text()
    for a, b in zip(theirs, ours, strict=True):
        written, mine = (flat(torch.load(p, weights_only=False)) for p in (a, b))
        written = {path: value for path, value in written.items() if not any(name in path for name in leave_out)}
        assert_same(written, {path: value for path, value in mine.items() if path in written}, a.name)
        extra = mine.keys() - written.keys()  # names of tied parameters are in rank 0's file alone
        known = ("universal_checkpoint", "zero_stage", "shared_params", *leave_out)
        assert not {path for path in extra if not any(name in path for name in known)}, extra


def flat(content: Any) -> dict[str, Any]:
    """Leaves by path; objects of DeepSpeed's classes by their attributes."""
    return leaves(plain(content))


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, torch.Size):
        return str(list(value))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__") and vars(value):
        return {"class": type(value).__name__, **plain(vars(value))}
    return value


def same_universal(root: Path) -> None:
    """Our universal format is what DeepSpeed's converter makes of our usual one."""
    from deepspeed.checkpoint.ds_to_universal import main

    (tag,) = (p.name for p in (root / "ours").iterdir() if p.is_dir())
    converted = root / "converted"
    arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(
            argparse.Namespace(
                input_folder=str(root / "ours" / tag),
                output_folder=str(converted / tag),
                inject_missing_state=False,
                **arguments,
            )
        )
    assert (converted / "latest_universal").read_text() == (root / "universal" / "latest_universal").read_text()
    theirs = {p.relative_to(converted) for p in converted.rglob("*.pt") if p.parent.parent.name == "zero"}
    ours = {p.relative_to(root / "universal") for p in (root / "universal").rglob("*.pt")}
    ours = {p for p in ours if p.parent.parent.name == "zero"}
    stepless = {p for p in theirs ^ ours if p.name == "step.pt"}  # ZeRO 3: DeepSpeed keeps one for all
    unread = {p for p in theirs - ours if p.parent.name in ("head.weight", "centre.mean", FROZEN)}
    assert not (theirs ^ ours) - stepless - unread, theirs ^ ours
    for path in ours & theirs:
        a, b = (torch.load(folder / path, weights_only=False) for folder in (converted, root / "universal"))
        a, b = ((x["param"] if isinstance(x, dict) else torch.as_tensor(x)) for x in (a, b))
        assert torch.equal(a.reshape(-1), b.reshape(-1)), path
        torch.load(root / "universal" / path, weights_only=True)  # nothing in ours can run code


def same_weights(folder: Path, parts: Sequence[SourcePart], stage: int) -> None:
    """`zero_to_fp32.py` finds every master, tied names, buffers and from ZeRO 2 on what is not trained."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    held = held_by(parts)
    names = [name.removeprefix("masters/") for name in held if name.startswith("masters/")]
    assert set(found) == {*names, "head.weight", "centre.mean", *((FROZEN,) if stage > 1 else ())}
    for name in names:
        assert torch.equal(found[name].reshape(-1), whole(held, f"masters/{name}").reshape(-1)), name


@pytest.mark.timeout(200)
@pytest.mark.parametrize("cases", [CORE, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["core", "others"])
def test_plain_deepspeed_loads_what_is_exported(tmp_path: Path, cases: tuple[Case, ...]) -> None:
    """Deliver 1 of issue 5: a checkpoint of ours can be read by plain DeepSpeed, bit for bit, in each ZeRO stage."""
    run_ranks(exported, 2, str(tmp_path), cases, timeout=190)


# --- without DeepSpeed ---------------------------------------------------------------------------------------------


def of_two_ranks(steps: tuple[float, float] = (3.0, 3.0)) -> tuple[list[SourcePart], OptimizerView]:
    """A model of two parameters, the first cut over two ranks; the second has no moments."""
    sources = []
    for rank in (0, 1):
        a = torch.arange(3.0) + 3 * rank
        state = {"a": a, "m": a * 10, "b": torch.ones(2)}
        box = ((2, 3), (rank, 0), (1, 3))
        pieces = [
            Piece(("a",), 0, "parameters/a", *box),
            Piece(("m",), 0, "moments/a/exp_avg", *box),
            Piece(("b",), 0, "parameters/b", (2,), (0,), (2,), owner=rank == 0),
            Piece(("b",), 0, "buffers/c", (2,), (0,), (2,), owner=rank == 0),
        ]
        sources.append(SourcePart(rank, state, pieces))
    values = {name: {"step": torch.tensor(step)} for name, step in zip("ab", steps, strict=True)}
    groups = [{"lr": 0.1, "weight_decay": decay, "params": [name]} for name, decay in (("a", 0.5), ("b", 0.0))]
    return sources, OptimizerView(groups, values)


def test_universal_of_any_engine(tmp_path: Path) -> None:
    sources, optimizer = of_two_ranks()
    write_universal(held_by(sources), optimizer, Progress(3, 1, 24, {"last_epoch": 3}), tmp_path / "out", world=2)
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step3"
    folder = tmp_path / "out" / "global_step3"

    def read(name: str) -> Any:
        return torch.load(folder / name, weights_only=True)

    assert torch.equal(read("zero/a/fp32.pt")["param"], torch.arange(6.0).view(2, 3))
    assert torch.equal(read("zero/a/exp_avg.pt")["param"], 10 * torch.arange(6.0).view(2, 3))
    assert not (folder / "zero" / "b" / "exp_avg.pt").exists()
    assert float(read("zero/b/step.pt")) == 3
    states = read("mp_rank_00_model_states.pt")
    assert (states["global_steps"], states["skipped_steps"], states["global_samples"]) == (3, 1, 24)
    assert states["lr_scheduler"] == {"last_epoch": 3}
    assert list(states["module"]) == ["c"]
    options = read("zero/optimizer_state.pt")
    assert [g["weight_decay"] for g in options["param_groups"]] == [0.5, 0.0]
    assert options["optimizer_state_dict"]["param_groups"] == [{"lr": 0.1, "params": [0]}]  # ZeRO 3: what all share


def test_universal_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    sources, optimizer = of_two_ranks()
    progress = Progress(3, 0, 24, None)
    one_group = OptimizerView([{"lr": 0.1, "params": ["a", "b"]}], of_two_ranks((3.0, 2.0))[1].values)
    with pytest.raises(CheckpointError, match="b has taken 2 steps"):
        write_universal(held_by(sources), one_group, progress, tmp_path / "out", world=2)
    assert not (tmp_path / "out").exists()
    odd = OptimizerView(optimizer.groups, {"a": {"mu_product": 0.5}})
    with pytest.raises(CheckpointError, match="mu_product"):
        write_universal(held_by(sources), odd, progress, tmp_path / "out", world=2)
    with pytest.raises(CheckpointError, match="parameters/a is not whole: 3 of its 6"):
        write_universal(held_by(sources[:1]), optimizer, progress, tmp_path / "out", world=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text(json.dumps("keep"))
    with pytest.raises(CheckpointError, match="not empty"):
        write_universal(held_by(sources), optimizer, progress, tmp_path / "out", world=2)
    assert (tmp_path / "out" / "mine").exists()
