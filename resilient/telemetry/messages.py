"""What a person reads when something happened: what, which rank, where, what was done about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from resilient.coordinator.events import Incident

_DONE = {
    "skip": "skipped on all ranks",
    "retry": "run again on all ranks",
    "stop": "stopped on all ranks",
    "apply": "applied all the same",
}
_WOULD = {"skip": "skipped", "retry": "run again", "rollback": "rolled back", "stop": "stopped"}


def incident_message(incident: Incident, budget_left: int | None) -> str:
    """One line without markup, such as
    `step 40: non-finite loss on rank 1 (forward) -> skipped on all ranks; cause: unknown (0.6); budget left 15`."""
    parts = [
        f"step {incident.step}: {what_happened(incident)} -> {what_was_done(incident)}",
        f"cause: {incident.cause} ({incident.confidence:.1f})",
    ]
    if incident.onset_step is not None and incident.onset_step != incident.step:
        parts.append(f"began at step {incident.onset_step}")
    if budget_left is not None:
        parts.append(f"budget left {budget_left}")
    return "; ".join(parts)


def what_happened(incident: Incident) -> str:
    """The policy's reason or the first piece of evidence, with the rank and the place if it does not name them."""
    text = incident.reason or (incident.evidence[0] if incident.evidence else "something is wrong")
    if incident.ranks and "rank" not in text:
        text += f" on {rank_names(incident.ranks)}"
    if incident.place and incident.place not in text:
        text += f" ({incident.place})"
    return text


def origin_message(origin: Mapping[str, Any]) -> str:
    """Where a NaN began, from a `nan_origin` event, such as
    `the NaN of step 40 began in blocks.1.mlp.down (forward, micro-step 1, rank 1): ...`."""
    step, said = origin.get("step", "?"), origin.get("message", "")
    if not origin.get("reproduced"):
        return f"the NaN of step {step}, run again: {said}"
    where = [f"{origin.get('place')}", f"micro-step {origin.get('micro_step')}"]
    ranks = origin.get("ranks") or [origin.get("rank", 0)]
    module = f" in {origin['module']}" if origin.get("module") else ""
    return f"the NaN of step {step} began{module} ({', '.join(where)}, {rank_names(ranks)}): {said}"


def what_was_done(incident: Incident) -> str:
    if incident.action.startswith("would "):
        wanted = incident.action.removeprefix("would ")
        return f"applied all the same (observed only; would have {_WOULD.get(wanted, wanted)})"
    if incident.action != "rollback":
        return _DONE.get(incident.action, incident.action)
    target = "an earlier step" if incident.target_step is None else f"step {incident.target_step}"
    done = [f"rolled back from step {incident.step} to {target} on all ranks"]
    window = window_text(incident.skipped_windows)
    if window:
        done.append(f"{window} will not be trained on again")
    knobs = knob_text(incident.knobs)
    if knobs:
        done.append(knobs)
    return ", ".join(done)


def rank_names(ranks: tuple[int, ...] | list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r) for r in ranks)


def window_text(window: tuple[int, int] | list[int] | None) -> str:
    """[first, last) data windows as a person counts them: both ends included."""
    if not window or window[1] <= window[0]:
        return ""
    first, last = window[0], window[1] - 1
    return f"data window {first}" if first == last else f"data windows {first} to {last}"


def knob_text(knobs: Mapping[str, Any]) -> str:
    """`LR x 0.3, clip x 0.3`; empty when nothing was turned."""
    parts = []
    for key, name in (("lr_factor", "LR"), ("clip_factor", "clip")):
        factor = knobs.get(key)
        if isinstance(factor, int | float) and factor != 1:
            parts.append(f"{name} x {factor:.3g}")
    if knobs.get("betas"):
        parts.append("betas " + ", ".join(f"{b:g}" for b in knobs["betas"]))
    return ", ".join(parts)


def number(value: Any, digits: int = 4) -> str:
    """A number for a table cell; a dash for what is missing or not finite."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def duration(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def alarm_message(fields: Mapping[str, Any]) -> str:
    """An alarm of the journal in one line."""
    since = fields.get("onset_step")
    began = f", since about step {since}" if since is not None and since != fields.get("step") else ""
    return f"step {fields.get('step')}: {fields.get('severity')}: {fields.get('message')}{began}"
