"""What several ranks must hold alike, and what they must not: digests compared across ranks (BR-14, BR-39, S18).

    parameters, optimizer, buffers   alike inside a replica group; a difference was made between two looks
    rng_shared, sampler              alike on all ranks
    rng_own                          different on every rank: equal streams make dropout masks that are copies
    batch                            different on every rank: equal windows are the same samples trained on twice

The majority is taken to be right where one is: of two ranks that differ, none can be said to be wrong. Digests have 48
bits, so what is equal is the same and what differs is not. NaN: not measured, not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from resilient.signals import Finding, Observation, Place, Severity

Groups = Mapping[str, tuple[tuple[int, ...], ...]]

_ALIKE: dict[str, tuple[Severity, Place | None, str]] = {
    "parameters": (Severity.ACT, "optimizer", "parameters differ between replicas"),
    "optimizer": (Severity.ACT, "optimizer", "optimizer states differ between replicas"),
    "buffers": (Severity.WARN, "optimizer", "module buffers differ between replicas"),
    "rng_shared": (Severity.WARN, None, "random streams that must be equal differ"),
    "sampler": (Severity.WARN, None, "seed, epoch or split of the sampler differ: samples are seen twice or never"),
}
_EVERYWHERE = ("rng_shared", "sampler")  # alike on all ranks unless `groups` says otherwise
_SHOWN = 4


class Replicas:
    """One per run; silent about what has no digest in this attempt.

    groups: kind (as above, without `digest_`) -> groups of global ranks that hold it alike, as `Engine.replicas()` says;
        may be set anew at any time. parameters, optimizer and buffers are compared in groups only; the rest, where no group
        is given, over all ranks.
    repeats: windows, of the last `window`, that two ranks must have been fed alike before it warns: one may be a sampler's
        padding at the end of an epoch."""

    name = "replicas"

    def __init__(self, groups: Groups | None = None, repeats: int = 3, window: int = 8) -> None:
        self.groups: Groups = groups or {}
        self.repeats = repeats
        self.window = window
        self._alike: dict[str, int] = {}  # kind -> last step at which it was looked at and alike
        self._onset: dict[str, int] = {}  # signal -> first step of what is off now
        self._batches: dict[tuple[int, ...], list[int]] = {}  # ranks fed alike -> attempts lately

    def observe(self, observation: Observation) -> list[Finding]:
        findings: list[Finding] = []
        if not observation.per_rank:  # a log file
            return findings
        for kind in _ALIKE:
            findings += self._compare(observation, kind)
        return [*findings, *self._same_streams(observation), *self._same_batches(observation)]

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        if not observation.per_rank:
            return
        mine = [f for f in findings if f.detector == self.name]
        for kind in _ALIKE:
            signal = f"digest_{kind}"
            if signal not in observation.per_rank:
                continue
            found = [f for f in mine if f.signal == signal]
            if found:
                self._onset.setdefault(signal, min(f.onset_step for f in found))
            else:
                self._alike[kind] = observation.step
                self._onset.pop(signal, None)
        for signal in ("digest_rng_own", "digest_batch"):
            if signal in observation.per_rank:
                found = [f for f in mine if f.signal == signal]
                if found:
                    self._onset.setdefault(signal, observation.step)
                elif signal == "digest_rng_own" or not self._lately(observation):
                    self._onset.pop(signal, None)
        for f in mine:
            if f.signal == "digest_batch":
                self._batches.setdefault(f.ranks, []).append(observation.attempt)
        self._batches = {
            ranks: recent
            for ranks, attempts in self._batches.items()
            if (recent := [a for a in attempts if a > observation.attempt - self.window])
        }

    # -- what must be alike ---------------------------------------------------------------------------------------

    def _compare(self, observation: Observation, kind: str) -> list[Finding]:
        digests = observation.per_rank.get(f"digest_{kind}")
        if digests is None:
            return []
        severity, place, what = _ALIKE[kind]
        everywhere = kind in _EVERYWHERE
        groups: Any = self._all(observation, kind) if everywhere else self.groups.get(kind, ())
        findings = []
        for group in groups:
            camps = _camps(digests, group)
            if len(camps) < 2:
                continue
            ranks, who = _minority(camps)
            message = f"{what}: {who}{self._since(kind, observation)}"
            findings.append(self._finding(observation, f"digest_{kind}", severity, place, ranks, message, kind))
        return findings

    def _since(self, kind: str, observation: Observation) -> str:
        seen = self._alike.get(kind)
        if seen is None:
            return ", since before the first look"
        return f", since step {seen}" if seen + 1 >= observation.step else f", since some step from {seen} on"

    # -- what must not --------------------------------------------------------------------------------------------

    def _same_streams(self, observation: Observation) -> list[Finding]:
        digests = observation.per_rank.get("digest_rng_own")
        if digests is None:
            return []
        return [
            self._finding(
                observation,
                "digest_rng_own",
                Severity.WARN,
                None,
                ranks,
                f"{_ranks(ranks)} draw from the same random stream: their dropout masks are copies of each other",
                "rng_own",
            )
            for ranks in _equal(digests, self._all(observation, "rng_own"))
        ]

    def _same_batches(self, observation: Observation) -> list[Finding]:
        findings = []
        for ranks in _equal(self._batch_digests(observation), self._all(observation, "batch")):
            earlier = [a for a in self._batches.get(ranks, ()) if a > observation.attempt - self.window]
            times = len(earlier) + 1
            fed = f"{_ranks(ranks)} are fed the same samples"
            if times < self.repeats:
                severity, message = Severity.WATCH, f"{fed} in this window"
            else:
                severity = Severity.WARN
                message = f"{fed}, {times} windows of the last {self.window}: is there a DistributedSampler?"
            finding = self._finding(observation, "digest_batch", severity, None, ranks, message, "batch")
            findings.append(finding)
        return findings

    def _batch_digests(self, observation: Observation) -> np.ndarray | None:
        """(ranks,); NaN where no token carries loss: padding windows are alike and no duplicates."""
        digests, tokens = observation.per_rank.get("digest_batch"), observation.per_rank.get("tokens")
        if digests is None or tokens is None or not (tokens > 0).any():
            return digests
        return np.where(tokens > 0, digests, np.nan)

    def _lately(self, observation: Observation) -> bool:
        return any(a > observation.attempt - self.window for attempts in self._batches.values() for a in attempts)

    # -- telling --------------------------------------------------------------------------------------------------

    def _all(self, observation: Observation, kind: str) -> Sequence[Sequence[int] | np.ndarray]:
        digests = observation.per_rank.get(f"digest_{kind}")
        return self.groups.get(kind) or ((np.arange(len(digests)),) if digests is not None else ())

    def _finding(
        self,
        observation: Observation,
        signal: str,
        severity: Severity,
        place: Place | None,
        ranks: tuple[int, ...],
        message: str,
        kind: str,
    ) -> Finding:
        begin = self._alike.get(kind, observation.step) if kind in _ALIKE else observation.step
        return Finding(
            detector=self.name,
            signal=signal,
            severity=severity,
            score=float(max(len(ranks), 1)),
            step=observation.step,
            onset_step=self._onset.get(signal, begin),
            ranks=ranks,
            place=place,
            message=message,
            statistic="batch" if kind in ("batch", "sampler") else "replica",
        )

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Without `groups`: those are the engine's to say."""
        return {
            "alike": dict(self._alike),
            "onset": dict(self._onset),
            "batches": [[list(ranks), list(attempts)] for ranks, attempts in self._batches.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._alike, self._onset = dict(state["alike"]), dict(state["onset"])
        self._batches = {tuple(ranks): list(attempts) for ranks, attempts in state["batches"]}


def _camps(digests: np.ndarray, group: Sequence[int] | np.ndarray) -> list[tuple[int, ...]]:
    """Ranks of the group that hold the same, largest camp first, then by lowest rank."""
    members = np.asarray(group)
    values = digests[members]
    members, values = members[~np.isnan(values)], values[~np.isnan(values)]
    if len(values) == 0 or (values == values[0]).all():
        return [tuple(members.tolist())] if len(values) else []
    order = np.lexsort((members, values))
    members, values = members[order], values[order]
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    camps = [tuple(part.tolist()) for part in np.split(members, starts[1:])]
    return sorted(camps, key=lambda c: (-len(c), c))


def _equal(digests: np.ndarray | None, groups: Sequence[Sequence[int] | np.ndarray]) -> list[tuple[int, ...]]:
    """Ranks, inside a group, that hold the same."""
    if digests is None:
        return []
    found: list[tuple[int, ...]] = []
    for group in groups:
        ordered = np.sort(digests[np.asarray(group)])  # NaN last, and equal to nothing
        if (ordered[1:] == ordered[:-1]).any():
            found += [camp for camp in _camps(digests, group) if len(camp) > 1]
    return found


def _minority(camps: list[tuple[int, ...]]) -> tuple[tuple[int, ...], str]:
    """Who is to be named, and in which words."""
    everybody = sorted(r for camp in camps for r in camp)
    if 2 * len(camps[0]) > len(everybody):
        ranks = tuple(sorted(r for camp in camps[1:] for r in camp))
        return ranks, f"{_ranks(ranks)} against {len(camps[0])} others that agree"
    if len(everybody) == 2:
        return tuple(everybody), f"{_ranks(everybody)}; of two, none can be told to be right"
    return tuple(everybody), f"{' against '.join(_ranks(c) for c in camps[:_SHOWN])}; there is no majority"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + shown + more
