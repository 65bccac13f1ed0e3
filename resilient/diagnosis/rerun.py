"""What running a suspect's window again says: a passing fault, that machine, or the batch (BR-37)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilient.diagnosis.case import NOT_RERUN, Case
from resilient.signals import Cause, Confirmation


@dataclass(frozen=True)
class Rerun:
    """cause None: it decides nothing, the rest of the evidence does."""

    cause: Cause | None = None
    confidence: float = 0.0
    evidence: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


def read(case: Case, ranks: Sequence[int]) -> Rerun:
    """What is known of these ranks from a re-run of one of them."""
    found = case.confirmation
    if found is None or found.rank not in ranks:
        return Rerun(unchecked=(NOT_RERUN,))
    note = (found.note,) if found.note else ()
    norms = f" (local gradient norms {', '.join(f'{n:.4g}' for n in found.norms)})" if found.norms else ""
    again = f"run again on rank {found.rank}, same weights and batch"
    elsewhere = f"on rank {found.peer}{', another machine,' if found.other_host else ''} the same batch"
    if found.bad_again is False:
        if found.peer_bad:
            told = f"{again}, it was normal, yet {elsewhere} is off too{norms}: the runs contradict each other"
            return Rerun("unknown", 0.4, (told,), note)
        told = f"{again}, it was normal{norms}: a passing fault in computing it"
        return Rerun("compute", 0.9, (told,), note)
    repeated = f"{again}, it is off once more{_bits(found)}" if found.bad_again else ""
    if found.peer_bad:
        told = f"{elsewhere} is off too{norms}: it is the batch"
        return Rerun("data", 0.9 if found.bad_again else 0.8, (repeated, told), note)
    if found.peer_bad is False:
        told = f"{elsewhere} is normal{norms}: it is the machine of rank {found.rank}"
        doubt = "" if found.other_host else "the peer is on the same machine: what the two share is not told apart"
        return Rerun("compute", 0.9 if found.other_host else 0.75, (repeated, told), (doubt, *note))
    if found.bad_again or found.same_again:
        same = f"{again}, it came out the same{norms}: its batch, or a lasting fault of its machine"
        lacking = note or ("no peer ran the batch: batch and machine are not told apart",)
        return Rerun("unknown", 0.5, (repeated or same,), lacking)
    if found.same_again is False:
        told = f"{again}, it gave other bits{norms}: its computing is not steady, or not deterministic"
        return Rerun("compute", 0.6, (told,), note)
    return Rerun(unchecked=note or ("the re-run established nothing",))


def _bits(found: Confirmation) -> str:
    return {True: ", bit for bit", False: ", with other bits", None: ""}[found.same_again]
