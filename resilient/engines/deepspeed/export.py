"""A DeepSpeed engine's checkpoint as DeepSpeed's own `save_checkpoint` would have left it, and in its universal format.

    out/latest                                       the tag
    out/<tag>/mp_rank_00_model_states.pt             weights, buffers, steps, schedule; under ZeRO 0 the optimizer, too
    out/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt   ZeRO 1 to 3: what rank r steps
    out/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt          ZeRO 3, in place of the first one

Loaded by `engine.load_checkpoint(out)` at the same world size, without us; `zero_to_fp32.py` and `ds_to_universal.py`
read it as well. At any other world size: `write_universal`. DeepSpeed restores no random state and no data position.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from resilient.checkpoint import deepspeed_export
from resilient.checkpoint.deepspeed_export import UNIVERSAL_INFO, VERSION, AllOrNothing, Progress, common_state
from resilient.checkpoint.export import OptimizerView
from resilient.checkpoint.reshape import SourcePart, held_by
from resilient.engines.base import EngineState
from resilient.engines.deepspeed.layout import groups_of, shape_of
from resilient.engines.deepspeed.pieces import Span, is_sharded, labelled_spans, per_element
from resilient.errors import CheckpointError


def optimizer_view(state: Mapping[str, Any]) -> OptimizerView:
    """What is no piece of the optimizer, read from rank 0's state."""
    state = dict(state)
    names = list(state["parameters"])
    groups = [{**options, "params": g} for options, g in zip(state["groups"], groups_of(state), strict=True)]
    values: dict[str, dict[str, Any]] = {}
    for label, spans in labelled_spans(state).items():
        kept = state["moments"][label]
        plain = {key: value for key, value in kept.items() if not per_element(state, label, key, value)}
        whole_group = label in state["spans"] and not is_sharded(state)  # of which this rank may hold a part only
        for name in groups[_group_number(label)]["params"] if whole_group else [names[span.number] for span in spans]:
            values[name] = plain
    return OptimizerView(groups, values)


def progress_of(state: Mapping[str, Any]) -> Progress:
    """Where the job of a state is."""
    counters, schedules = state["counters"], state["schedulers"]
    return Progress(
        counters["global_steps"],
        counters["skipped_steps"],
        counters["global_samples"],
        schedules[0] if schedules else None,
    )


def write_universal(sources: Sequence[SourcePart], out: Path, *, tag: str | None = None) -> None:
    """See `checkpoint.deepspeed_export`; the loss scaler comes along."""
    state = dict(sources[0].state)
    deepspeed_export.write_universal(
        held_by(sources),
        optimizer_view(state),
        progress_of(state),
        out,
        world=len(sources),
        tag=tag,
        loss_scaler=_loss_scaler(state) if "dynamic" in state["scaler"].get("scaler", {}) else None,
    )


def write_deepspeed(
    sources: Sequence[SourcePart], out: Path, *, tag: str | None = None, clip: float | None = None
) -> None:
    """Write `out`, which must not exist or be empty; it is removed again if this fails. `latest` comes last.

    sources: of all ranks, rank 0's first. tag: of the folder, `global_step<steps>` if None. clip: gradient clipping of the
    job, which only the loader of a fused FP16_Optimizer (ZeRO 0 on an accelerator) wants from the file. One process that
    can import deepspeed; memory: one rank's state. Raises CheckpointError and OSError."""
    states = [dict(source.state) for source in sources]
    if [state["layout"]["rank"] for state in states] != [str(rank) for rank in range(len(states))]:
        raise CheckpointError("the parts are not those of ranks 0, 1, 2 ... in this order")
    first = states[0]
    stage = int(first["layout"]["zero stage"])
    tag = tag or f"global_step{first['counters']['global_steps']}"
    with AllOrNothing(out):
        folder = out / tag
        for rank, state in enumerate(states):
            if stage == 3:
                name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                deepspeed_export.save(_model_states(state, states), folder / name)
            elif rank == 0:
                content = _model_states(state, states)
                if stage == 0:
                    content["optimizer"] = _plain_optimizer(state, clip)
                deepspeed_export.save(content, folder / "mp_rank_00_model_states.pt")
            if stage > 0:
                prefix = "bf16_" if _weights_dtype(first) == "torch.bfloat16" else ""
                optimizer = _sharded_optimizer(rank, states) if stage == 3 else _partition(rank, states)
                content = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": VERSION}
                deepspeed_export.save(content, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        deepspeed_export.point_at(out / "latest", tag)


# --- model states ---


def _model_states(state: EngineState, states: Sequence[EngineState]) -> dict[str, Any]:
    stage, sharded = int(state["layout"]["zero stage"]), is_sharded(state)
    weights = state["parameters"] | {name: state["parameters"][of] for name, of in state["shared"].items()}
    if sharded:  # what a module holds while its parameters are taken apart
        weights = {name: weight.new_empty(0) for name, weight in weights.items()}
    buffers = {name: b for name, b in state["buffers"].items() if f"buffer {name}" in state["layout"]}
    trained = {name for group in groups_of(state) for name in group}
    frozen = {name: weight for name, weight in state["parameters"].items() if name not in trained}
    return {
        **common_state(progress_of(state), len(states)),
        "module": OrderedDict(weights | buffers),
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": _shapes_in_order(states) if stage > 0 else None,
        "shared_params": dict(state["shared"]) if stage > 0 else None,
        "frozen_param_shapes": OrderedDict((n, _size(state, n)) for n in frozen) if stage > 1 else None,
        "frozen_param_fragments": OrderedDict(frozen) if stage > 1 else None,
        "data_sampler": None,
        "random_ltd": None,
        "universal_checkpoint_info": UNIVERSAL_INFO,
    }


def _shapes_in_order(states: Sequence[EngineState]) -> list[OrderedDict[str, torch.Size]]:
    """For each flat tensor, the parameters in it in their order."""
    names = list(states[0]["parameters"])
    found = []
    for label in states[0]["moments"]:
        numbers = dict.fromkeys(span.number for spans in _over_ranks(states, label) for span in spans)
        found.append(OrderedDict((names[n], _size(states[0], names[n])) for n in numbers))
    return found


def _over_ranks(states: Sequence[EngineState], label: str) -> list[list[Span]]:
    return [[Span(*row) for row in state["spans"][label].tolist()] for state in states]


def _size(state: EngineState, name: str) -> torch.Size:
    return torch.Size(shape_of(state, f"parameter {name}"))


def _weights_dtype(state: EngineState) -> str:
    return str(state["layout"][f"parameter {groups_of(state)[0][0]}"].split(" ", 1)[0])


# --- optimizers ---


def _base(state: EngineState, members: Sequence[Sequence[int]]) -> dict[str, Any]:
    """As `torch.optim.Optimizer.state_dict`. members: of each parameter group, the numbers of its tensors."""
    return {
        "state": {i: dict(kept) for i, kept in enumerate(state["moments"].values()) if kept},
        "param_groups": [{**g, "params": list(m)} for g, m in zip(state["groups"], members, strict=True)],
    }


def _plain_optimizer(state: EngineState, clip: float | None) -> dict[str, Any]:
    """ZeRO 0: torch's own, FP16_UnfusedOptimizer, or FP16_Optimizer."""
    flat = bool(state["spans"])
    names = list(state["moments"])
    sizes = [1 if flat else len(group) for group in groups_of(state)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    members = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    base = _base(state, members)
    if not state["masters"]:
        return base
    scaler = state["scaler"]["scaler"]
    kept = ["dynamic_loss_scale", "cur_scale", "cur_iter"]
    if scaler["dynamic_loss_scale"]:
        kept += ["last_overflow_iter", "scale_factor", "scale_window"]
    content = {key: scaler[key] for key in kept} | {"optimizer_state_dict": base}
    if not flat:
        return content | {"fp32_groups": [[state["masters"][names[i]] for i in m] for m in members]}
    if clip is None:
        raise CheckpointError("FP16_Optimizer reads its gradient clipping from the checkpoint: say what it is (clip)")
    return content | {"fp32_groups_flat": list(state["masters"].values()), "clip_grad": clip}


def _partition(rank: int, states: Sequence[EngineState]) -> dict[str, Any]:
    """ZeRO 1 and 2, BF16_Optimizer: rank's flat partition of every parameter group."""
    from deepspeed.utils.tensor_fragment import fragment_address

    state, names = states[rank], list(states[0]["parameters"])
    bf16_optimizer = state["layout"]["optimizer"].startswith("BF16_Optimizer")
    masters, fillings, between, slices = [], [], [], []
    for label, master in state["masters"].items():
        end, gaps = _gaps(states, label)
        filled = max(0, min(len(master), (rank + 1) * len(master) - end))  # beyond the last parameter
        spans = _over_ranks(states, label)[rank]
        masters.append(master if bf16_optimizer else master[: len(master) - filled].clone())
        fillings.append(filled)
        between.append(gaps)
        slices.append(OrderedDict((names[s.number], fragment_address(s.size, s.start)) for s in spans))
    content = {
        "base_optimizer_state": _base(state, [[i] for i in range(len(masters))]),
        "single_partition_of_fp32_groups": masters,
        "zero_stage": int(state["layout"]["zero stage"]),
        "group_paddings": fillings,
        "partition_count": [len(states)] * len(masters),
        "param_slice_mappings": slices,
        "ds_version": VERSION,
        "universal_checkpoint_info": UNIVERSAL_INFO,
    }
    return content if bf16_optimizer else content | {"param_alignment_paddings": between} | _scaling(state)


def _gaps(states: Sequence[EngineState], label: str) -> tuple[int, list[int]]:
    """Where the last parameter of a flat tensor ends, over all ranks, and what is left free after each parameter before
    the next one."""
    names, size = list(states[0]["parameters"]), len(states[0]["masters"][label])
    begins: dict[int, int] = {}
    for rank, spans in enumerate(_over_ranks(states, label)):
        for span in spans:
            begins.setdefault(span.number, rank * size + span.start - span.first)
    ends = [begin + _size(states[0], names[number]).numel() for number, begin in begins.items()]
    following = [*list(begins.values())[1:], ends[-1]]
    return ends[-1], [begin - end for begin, end in zip(following, ends, strict=True)]


def _sharded_optimizer(rank: int, states: Sequence[EngineState]) -> dict[str, Any]:
    """ZeRO 3: rank's shards, a flat tensor for each sub-group."""
    state, names = states[rank], list(states[0]["parameters"])
    group_of = {name: i for i, group in enumerate(groups_of(state)) for name in group}
    members: list[list[int]] = [[] for _ in state["groups"]]
    for i, spans in enumerate(labelled_spans(states[0]).values()):  # rank 0 holds something of every parameter
        members[group_of[names[spans[0].number]]].append(i)
    return {
        "zero_stage": 3,
        "partition_count": len(states),
        "optimizer_state_dict": _base(state, members),
        "fp32_flat_groups": list(state["masters"].values()),
        **_scaling(state),
    }


def _scaling(state: EngineState) -> dict[str, Any]:
    scaler = _loss_scaler(state)
    return {"loss_scaler": scaler, "dynamic_loss_scale": scaler.dynamic, "overflow": False}


def _loss_scaler(state: EngineState) -> Any:
    """DeepSpeed keeps the object itself in its files."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    values = state["scaler"]["scaler"]
    kind = DynamicLossScaler if values["dynamic"] else LossScaler
    scaler = kind.__new__(kind)
    vars(scaler).update(values)
    if values["dynamic"]:
        scaler.dtype = torch.half
    return scaler


def _group_number(label: str) -> int:
    return int(label.removeprefix("group"))
