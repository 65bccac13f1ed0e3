"""Room for a DeepSpeed engine's state in host memory, to be filled in with pieces of another world's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from resilient.engines.absent import BUFFER, report
from resilient.engines.base import EngineState
from resilient.engines.deepspeed.layout import differences, layout_of, missing_parts, shape_of
from resilient.engines.deepspeed.pieces import Span, describe, is_sharded, labelled_spans, per_element
from resilient.engines.deepspeed.stages import Stage
from resilient.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine

# Entries of a state that belong to a rank: where it is, what it holds, and buffers, which every forward moves by itself.
PER_RANK = ("layout", "spans", "buffers")


@torch.no_grad()
def frame_of(
    engine: Engine, stage: Stage, schedulers: list[Any], source: EngineState, absent: Collection[str] = ()
) -> EngineState:
    """Zeros where pieces say what goes (fill in every piece of `pieces_of` it, then restore it), buffers as they are here,
    and all else from `source`: rank 0's state, of which options, schedules, loss scaler, counters and plain values of the
    optimizer (step counts) are those of every rank. absent: parts of the source that were completed from this engine: the
    frame is without them.

    CheckpointError, with what differs, if the source is of another model, stage, precision, optimizer or schedule."""
    lines = missing_parts(source)
    masters, description = stage.masters(), describe(stage)
    frame: EngineState = {
        **source,
        "layout": layout_of(engine, stage, schedulers),
        "spans": dict(description.spans),
        "shared": dict(description.shared),
        "parameters": {name: _room(stage.parameter(p)) for name, p in stage.parameters.items()},
        "buffers": {
            name: b.detach().to("cpu", copy=True)
            for name, b in engine.module.named_buffers()
            if BUFFER + name not in absent
        },
        "masters": {m.label: _room(m.tensor) for m in masters if not m.alias},
    }
    lines += differences(frame["layout"], source["layout"], anywhere=True).values()
    if lines:
        raise CheckpointError(report("the state does not fit this engine, in any world:", lines))
    for part in absent:
        frame.pop(part, None)
    if "moments" not in absent:
        frame["moments"] = {m.label: _moments(frame, m.label, source) for m in masters}
    return frame


def _room(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, device="cpu")  # zeros: what fills a flat tensor up is in no piece


def _moments(frame: EngineState, label: str, source: EngineState) -> dict[str, Any]:
    """What the optimizer keeps beside one label. Sub-groups of ZeRO 3 may be cut otherwise in another world: a label gets
    what those of its parameters had, which must be the same for all of them."""
    origins = [label]
    if is_sharded(source):
        there = {span.number: name for name, spans in labelled_spans(source).items() for span in spans}
        here = [Span(*row).number for row in frame["spans"][label].tolist()]
        origins = list(dict.fromkeys(there[number] for number in here)) or list(source["moments"])[:1]
    made = [_like(frame, label, source, origin) for origin in origins]
    for origin, other in zip(origins[1:], made[1:], strict=True):
        if not _same(made[0], other):
            raise CheckpointError(
                f"optimizer state of {label} comes from {origins[0]} and {origin}, which differ in their plain values or "
                "in what they keep: they cannot be put together"
            )
    return made[0]


def _like(frame: EngineState, label: str, source: EngineState, origin: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in source["moments"][origin].items():
        if per_element(source, origin, key, value):
            made[key] = value.new_zeros(shape_of(frame, f"master {label}"), device="cpu")
        else:
            made[key] = value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    return made


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else bool(a[k] == b[k]) for k in a)
