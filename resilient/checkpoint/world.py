"""What becomes of the parts of a snapshot other than the engine's when the number of ranks changes.

    rng      rng.rederive: streams that were common stay, all others start anew from a stated seed
    data     `fit_data`: a position that means the same in every world goes on; anything else is refused, by name
    judge    `fit_judge`: what was learned about single ranks is forgotten, everything else stays
    outer    `fit_excluded`: windows of another number of samples

Pure functions on the plain states, the same on every rank where they get the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilient.checkpoint.digest import state_digest
from resilient.checkpoint.rng import rederive
from resilient.errors import DataPositionError

ABOUT_RANKS = ("crossrank", "reduction", "replicas", "stragglers")
"""Detectors (by the first part of their name) that keep a history of each rank, or of how the ranks are grouped."""


def fit_data(
    saved: Sequence[Mapping[str, Any]], *, any_world: bool, accumulation: int, step: int, rank: int, world: int
) -> dict[str, Any]:
    """The feed's state on `rank` of another world.

    saved: the feed's states on all ranks of the earlier world, rank 0's first. any_world: the loader says that its own
    state means the same in a world of any size (a position in samples over all ranks; equal on all ranks). accumulation:
    micro-batches per window from now on. step: after which it was saved.

    The count of windows goes on: it counts optimizer steps' worth of data, however large. The samples behind it are the
    loader's. Raises DataPositionError, naming what stands in the way, where going on would repeat or lose samples: a
    loader that is restored by counting batches, in the middle of an epoch; one whose state is each rank's own;
    micro-batches carried over from the last epoch."""
    first = saved[0]
    _refuse_apart(saved, ("window", "epoch", "batches", "ended", "accumulation"))
    if any(state["carry"] for state in saved):
        raise DataPositionError(
            "data/carry: ranks hold micro-batches left over from the last epoch, which cannot be dealt out to "
            f"{world} ranks: resume with {len(saved)} ranks until the next epoch, or use tail=drop"
        )
    fitted = {**first, "carry": [], "accumulation": accumulation}
    if first["loader"] is not None:
        if not any_world:
            raise DataPositionError(
                "data/loader: the loader's state is a position among one rank's own batches, and may be another sample on "
                f"{world} ranks: give the loader a state in samples over all ranks, and `any_world = True` to say so"
            )
        _refuse_apart(saved, ("loader",))
        if any(state["since"] for state in saved):
            raise DataPositionError(
                f"data/since: the loader does not tell its state again after a restore, and {first['since']} batches by "
                f"count are other samples on {world} ranks: resume with {len(saved)} ranks until the epoch ends"
            )
        return fitted
    if first["batches"] and not first["ended"]:
        raise DataPositionError(
            f"data/batches: the position is {first['batches']} batches into epoch {first['epoch']} by count, which are "
            f"other samples on {world} ranks: resume with {len(saved)} ranks until the epoch ends, or give the loader a "
            "state (state_dict, load_state_dict) in samples over all ranks"
        )
    rngs = [state["epoch_rng"] for state in saved]
    if all(one is not None for one in rngs):  # the order of the epoch that is about to begin
        fitted["epoch_rng"], _ = rederive(rngs, step=step, rank=rank, world=world)
    return fitted


def _refuse_apart(saved: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    for key in keys:
        if len({state_digest(state[key]) for state in saved}) > 1:
            raise DataPositionError(
                f"data/{key}: not the same on all {len(saved)} ranks that saved it, so there is no one position to go on from"
            )


def fit_excluded(
    excluded: Sequence[Sequence[int]], *, window: int, samples_before: int, samples_now: int
) -> list[list[int]]:
    """Data windows [first, last) that are not to be delivered again, when a window holds another number of samples.

    window: the next one, at the change. samples_before, samples_now: of a window over all ranks. What lies ahead is put
    into windows of the new size, rounded outwards: every excluded sample stays excluded, and at most a window's worth
    with it at each end. What lies behind stays as it is: a record."""
    found = []
    for first, last in excluded:
        if last > window:
            last = window - (-(last - window) * samples_before // samples_now)
            if first > window:
                first = window + (first - window) * samples_before // samples_now
        found.append([int(first), int(last)])
    return found


def fit_judge(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The monitor's state for another world, and the names of the detectors that begin anew: those about ranks, whose
    numbers now stand for other processes with other data, and those that a fresh monitor has and the saved one had not.

    saved: of any rank of the earlier world. fresh: of a monitor that has seen nothing. Episodes that name a rank end."""
    if not saved:
        return dict(saved), []
    detectors, anew = {}, []
    for name, state in fresh["detectors"].items():
        known = name in saved["detectors"] and name.partition("/")[0] not in ABOUT_RANKS
        detectors[name] = saved["detectors"][name] if known else state
        if not known:
            anew.append(name)
    episodes = {key: told for key, told in saved["episodes"].items() if "@" not in key}
    rest = {key: value for key, value in saved.items() if key != "sketch"}  # what each rank knew of itself
    return {**rest, "detectors": detectors, "episodes": episodes}, anew
