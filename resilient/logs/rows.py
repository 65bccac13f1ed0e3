"""What every reader yields, whatever the file's format: rows of named numbers, and remarks on what was (not) read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Row:
    """One logged point.

    step: as the file counts it (optimizer steps, micro-batches, or the row's number when the file has no counter).
    values: canonical signal name -> float. NaN or Inf: the run really logged it. A signal that the file does not
        report on this row, or reports as a placeholder, is absent.
    applied: False if the file says that the optimizer step was refused or skipped.
    attempt: our own steps.jsonl only; else 0.
    evaluation: a row of an evaluation (`eval_loss` and such), not of a training step.
    rolled_back: our own steps.jsonl only: the state of an earlier step was restored after this attempt.
    line: 1-based line (or record) of the file, for messages."""

    step: int
    values: Mapping[str, float]
    applied: bool = True
    attempt: int = 0
    evaluation: bool = False
    rolled_back: bool = False
    line: int = 0


@dataclass
class Remarks:
    """What a reader wants to tell about the file. `unread` signals: name -> why it is not taken as data."""

    format: str = ""
    notes: list[str] = field(default_factory=list)  # in plain words, one sentence each
    unread: dict[str, str] = field(default_factory=dict)


class LineParser(Protocol):
    """A text format, fed line by line: reads a finished file and a growing one with the same code."""

    format: str
    remarks: Remarks

    def feed(self, line: str, number: int) -> Iterable[Row]:
        """Rows completed by this line (without its newline). number: 1-based."""

    def finish(self) -> Iterable[Row]:
        """Rows still held back at the end of the file."""


class Log(Protocol):
    """An opened file. Iterate `rows()` once; `remarks` is complete afterwards."""

    path: str
    remarks: Remarks

    def rows(self) -> Iterator[Row]: ...


SIGNALS: tuple[str, ...] = (
    "loss", "grad_norm", "lr", "loss_scale", "eval_loss", "tokens", "time_s", "logit_max", "attention_entropy",
    "update_norm", "weight_norm", "loss_max", "longest", "padding", "entropy", "repetition",
)  # fmt: skip
"""Canonical names; besides these `grad_norm/<layer>`, `update_norm/<group>`, and numeric columns under their own name."""
