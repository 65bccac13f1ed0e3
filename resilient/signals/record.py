"""What one rank measures of one attempt, and how all ranks' measurements travel and are read.

`StepRecord` (one rank) -> `pack` (a float64 row on the device) -> one all-reduce (coordinator/exchange)
-> `StepTable` (signals/table.py) or `StepSketch` (signals/step_sketch.py), of all ranks, on the host
-> `Observation` (what detectors read, also built from log files).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.signals.checks import CHECK_COLUMNS, Checks
from resilient.signals.digest import short_digest

if TYPE_CHECKING:
    from resilient.signals.sketch import SketchSummary

# The wire format: one float64 per name, in this order. float64 keeps integers exact up to 2**53, so counters and
# 48-bit digests ride along unharmed. Append only; every reader goes by name.
COLUMNS: tuple[str, ...] = (
    "kind",  # Kind: what this row is for; all ranks must send the same
    "step",  # optimizer step being attempted, 1-based
    "attempt",  # attempts since the run began, 1-based, never decreases
    "loss",  # mean over micro-steps, raw: NaN and Inf are kept
    "loss_max",  # largest micro-step loss
    "tokens",  # tokens that carry loss in this window on this rank
    "local_grad_norm",  # L2 of this rank's own gradient before reduction, unscaled
    "reduced_sq_share",  # this rank's share of ||g||^2 after reduction, before clipping, unscaled; shares add up to the whole
    "nonfinite_forward",  # micro-steps whose model output was not finite
    "nonfinite_loss",  # micro-steps whose loss was not finite although the output was
    "nonfinite_backward",  # 1 if the local gradient was not finite although the loss was
    "logit_max",  # peak |output| over the window
    "attention_entropy",  # mean over probed layers, nats; NaN when not probed on this step
    "loss_scale",  # 1 when none is used
    "lr",  # of group 0, as the optimizer would use it now
    "compute_s",  # forward + backward wall time, without gradient reduction
    "wait_s",  # time waiting for data
    "has_next",  # 1 if this rank holds the next window of data
    "next_tokens",  # tokens that carry loss in that next window
    "digest",  # of the decision taken on the previous table (48 bits); in a HELLO: of the layer groups' names
    "flags",  # Flag bits: what this rank has to tell the others
    "weight_sq_share",  # this rank's share of the squared weight norm; NaN on steps that do not measure it
    "longest",  # longest sequence of the window, tokens that carry loss
    "padding",  # share of the window's positions that carry no loss
    "asked",  # rank 0: the number of a request from outside (Flag.LR, Flag.ROLLBACK)
    "update_sq_share",  # share of the squared L2 change made by the last applied step; NaN: not measured, or told before
    "attention_logit_max",  # peak |q.k| before the softmax over probed layers; NaN when not probed on this step
    "leftover_sq",  # squared L2 of gradients that lay in the buffers before the first micro-step; 0: none, or not looked
    "collective_s",  # waiting for other ranks inside gradient reduction; NaN where the host cannot see it
    "eval_loss",  # of an evaluation since the last attempt; NaN: there was none; inf: it was not finite (BR-35)
    "entropy",  # of the model's output over text it sampled at that evaluation, nats a token; NaN, inf as above
    "repetition",  # share of that text's n-grams that repeat earlier ones, 0..1; NaN, inf as above
    "digest_parameters",  # 48 bits of what ranks of a replica group must hold alike; NaN when it is not due or not replicated
    "digest_optimizer",  # likewise: optimizer moments and step counts
    "digest_buffers",  # likewise: module buffers
    "digest_rng_shared",  # likewise: random streams that must be equal on all ranks
    "digest_rng_own",  # random streams that must differ from rank to rank
    "digest_batch",  # 48 bits of the window's content: equal on two ranks if they were fed the same samples
    "check_plan",  # 48 bits of the reduction check's plan as this rank's engine has it; 0: none
    "digest_sampler",  # 48 bits of the sampler's seed, epoch and split: must be equal on all ranks; NaN: unknown
    # The smallest digests of single samples in the window, ascending; NaN: there are none, or they cannot be told apart.
    *(f"digest_sample_{i}" for i in range(4)),
    "reduce_s",  # host seconds in gradient reduction, handing it over and waiting; NaN where the host cannot see it
)
# Behind them a tail with one number per layer group each, once the ranks have agreed on the groups (S3); NaN: not measured.
LAYER_COLUMNS: tuple[str, ...] = (
    "layer_sq_share",  # `reduced_sq_share` by group
    "layer_update_sq_share",  # `update_sq_share` by group
    "layer_lag_share",  # share of the mean of g^2/v (Adam) in the last applied step
)
# And behind those one number per cell of the reduction check for each of CHECK_COLUMNS, where the engine has one; NaN: not
# measured.
INDEX: Mapping[str, int] = {name: i for i, name in enumerate(COLUMNS)}
DIGESTS = tuple(name for name in COLUMNS if name.startswith("digest_"))


class Kind:
    """Values of the `kind` column. Rows of different kinds in one table mean that ranks are out of step."""

    STEP = 1.0
    CONFIRM = 2.0
    HELLO = 3.0
    VOTE = 4.0
    RERUN = 5.0


class Flag:
    """Bits of the `flags` column: facts only one rank may know that all must act on together."""

    GUARD_FAILED = 1 << 0  # this rank's guard broke: everybody goes on unguarded, together
    TELEMETRY_FAILED = 1 << 1  # this rank cannot write its journal
    PREEMPTED = 1 << 2  # this rank received TERM or USR1
    BLIND = 1 << 3  # no gradient has reached this rank's guard before this attempt
    SCHEDULE = 1 << 4  # LR or schedule position is wrong on this rank
    COUNTERS = 1 << 5  # engine, step and data positions disagree on this rank
    CHECKPOINT = 1 << 6  # this rank was asked to checkpoint at the next quiescent point
    NO = 1 << 7  # in a VOTE: this rank votes no
    LR = 1 << 8  # rank 0: a request asks for the LR factor in `asked`
    ROLLBACK = 1 << 9  # rank 0: a request asks to go back before the step in `asked`, 0: to the newest good snapshot
    NO_OUTPUT = 1 << 10  # no output of the model has reached this rank's guard before this attempt
    SAVE_BUSY = 1 << 11  # what this rank does in the background for a checkpoint is not done yet
    SAVE_FAILED = 1 << 12  # this rank could not do it
    COPY_BUSY = 1 << 13  # this rank's copy of a snapshot for the peer tier is not done yet
    COPY_FAILED = 1 << 14  # this rank could not make it


def row_width(layers: int, cells: int = 0) -> int:
    """Numbers in a row whose tail is about so many layer groups and cells of the reduction check."""
    return len(COLUMNS) + len(LAYER_COLUMNS) * layers + len(CHECK_COLUMNS) * cells


def names_digest(names: Sequence[str]) -> float:
    """48 bits of the names and their order, exact in a float64."""
    return short_digest("\n".join(names).encode())


@dataclass(slots=True)
class StepRecord:
    """One rank's measurements of one attempt. Values are Python floats or 0-dim tensors still on the device:
    `pack` brings all of them over in one copy, so filling a record never synchronises with the host."""

    step: int
    attempt: int
    kind: float = Kind.STEP
    loss: Any = math.nan
    loss_max: Any = math.nan
    tokens: float = 0.0
    local_grad_norm: Any = 0.0
    reduced_sq_share: Any = 0.0
    nonfinite_forward: Any = 0.0
    nonfinite_loss: Any = 0.0
    nonfinite_backward: Any = 0.0
    logit_max: Any = 0.0
    attention_entropy: Any = math.nan
    loss_scale: float = 1.0
    lr: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    has_next: float = 1.0
    next_tokens: float = 0.0
    digest: float = 0.0
    flags: int = 0
    weight_sq_share: Any = math.nan
    longest: float = 0.0
    padding: float = 0.0
    asked: float = 0.0
    update_sq_share: Any = math.nan
    attention_logit_max: Any = math.nan
    leftover_sq: Any = 0.0
    collective_s: float = math.nan
    eval_loss: float = math.nan
    entropy: float = math.nan
    repetition: float = math.nan
    digest_parameters: Any = math.nan
    digest_optimizer: Any = math.nan
    digest_buffers: Any = math.nan
    digest_rng_shared: float = math.nan
    digest_rng_own: float = math.nan
    digest_batch: Any = math.nan
    check_plan: float = 0.0
    digest_sampler: float = math.nan
    digest_sample_0: Any = math.nan
    digest_sample_1: Any = math.nan
    digest_sample_2: Any = math.nan
    digest_sample_3: Any = math.nan
    reduce_s: float = math.nan
    layers: Mapping[str, Any] = field(default_factory=dict)  # LAYER_COLUMNS name -> (groups,) tensor
    checks: Mapping[str, Any] = field(default_factory=dict)  # CHECK_COLUMNS name -> (cells,) tensor

    def values(self) -> list[Any]:
        """The record in COLUMNS order, without the tail."""
        return [getattr(self, name) for name in COLUMNS]


@dataclass(frozen=True)
class Observation:
    """What a detector sees of one attempt: named global signals and, inside a live run, per-rank values.

    values: signal -> float, may be NaN or Inf (detectors must sanitise).
    per_rank: signal -> float64 array of shape (world,).
    peers: peer groups, tuples of global ranks that differ only in data; ranks are compared inside a group only.
    checks: the sums of the reduction check, where the engine has one.
    sketch: in sketch mode what is known of the ranks instead of per_rank, which is empty then.
    """

    step: int
    attempt: int
    values: Mapping[str, float]
    per_rank: Mapping[str, np.ndarray] = field(default_factory=dict)
    peers: tuple[tuple[int, ...], ...] = ()
    checks: Checks | None = None
    sketch: SketchSummary | None = None

    @property
    def world(self) -> int:
        """Number of ranks; 0: they are not known (a log file)."""
        if self.sketch is not None:
            return self.sketch.world
        return len(next(iter(self.per_rank.values()), ()))

    def largest(self, name: str) -> float:
        """Largest value of a column over the ranks; NaN if any is NaN, or none is known."""
        if self.sketch is not None:
            return self.sketch.peaks[name]
        return float(self.per_rank[name].max()) if name in self.per_rank else math.nan

    def total(self, name: str) -> float:
        """Sum of a column over the ranks; NaN if it is not known."""
        if self.sketch is not None:
            return self.sketch.totals[name]
        return float(self.per_rank[name].sum()) if name in self.per_rank else math.nan

    def unfed(self, ranks: Sequence[int]) -> bool:
        """None of these ranks has a token that carries loss, as far as is known of them."""
        if self.sketch is not None:
            return set(ranks) <= set(self.sketch.named.get("no tokens", (0, ()))[1])
        tokens = self.per_rank.get("tokens")
        return tokens is not None and max(ranks) < len(tokens) and not (tokens[list(ranks)] > 0).any()


assert {*COLUMNS, "layers", "checks"} == set(StepRecord.__dataclass_fields__), "StepRecord and the wire format differ"
