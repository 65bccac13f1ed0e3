"""What a column, tag or key of somebody else's log means: its name, read as words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from resilient.logs.rows import SIGNALS

Kind = Literal["step", "epoch", "signal", "evaluation", "skipped", "nan_count", "own", "ignore"]


@dataclass(frozen=True)
class Meaning:
    """kind: step and epoch are counters; signal: a canonical one; evaluation: belongs to an evaluation row; skipped and
    nan_count: refused and non-finite iterations since the last report; own: numeric, kept under its own name in tables.
    rank: which of several columns of one meaning is the best one, smallest first. factor: multiply by it."""

    kind: Kind
    name: str = ""
    rank: int = 0
    factor: float = 1.0


_IGNORE = Meaning("ignore")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SPLIT = re.compile(r"[^a-z0-9]+")
_LAYERED = re.compile(r"grad(?:ient)?s?[ _.\-]*(?:\d(?:\.\d)?[ _.\-]*)?norms?\s*[/.:]\s*(?P<layer>.+)$", re.IGNORECASE)
_LAYERED_GROUP = re.compile(r"update[ _.\-]*norms?\s*[/.:]\s*(?P<layer>.+)$", re.IGNORECASE)

EVALUATION_WORDS = frozenset({"val", "valid", "validation", "validate", "eval", "evaluation", "evals", "test", "dev", "heldout", "tel"})  # fmt: skip

# Steps by rank: an explicit count of optimizer steps first, a count of batches last.
_STEPS: dict[str, int] = {
    "global step": 0, "global steps": 0, "globalstep": 0, "global step max steps": 0, "num updates": 0, "global iter": 0,
    "optimizer step": 1, "opt step": 1, "current steps": 1, "current step": 1, "global iteration": 0,
    "step": 2, "steps": 2, "train step": 2, "training step": 2, "train steps": 2, "completed step": 2,
    "completed steps": 2, "gradient step": 2, "steps completed": 2, "update step": 2, "n step": 2, "model step": 2,
    "trainer step": 2, "step number": 2, "step num": 2, "step id": 2, "training steps": 2, "learning step": 2,
    "iteration": 3, "iterations": 3, "iter": 3, "iters": 3, "it": 3, "itr": 3, "train iter": 3, "train iteration": 3,
    "training iteration": 3, "iter num": 3, "n iter": 3, "num iter": 3, "iteration number": 3, "current iteration": 3,
    "update": 4, "updates": 4, "num update": 4, "minibatch": 5, "batch": 5, "batches": 5, "batch idx": 5, "batch num": 5,
    "batch index": 5, "batch number": 5, "mini batch": 5, "train batch": 5,
}  # fmt: skip
_EPOCHS = frozenset(
    {"epoch", "epochs", "ep", "train epoch", "trainer epoch", "current epoch", "epoch idx", "num epoch"}
)
_GRAD = frozenset({"grad", "gradient", "gradients", "grads"})
_SINGLE_GRAD = frozenset({"gnorm", "gradnorm", "gradientnorm", "gn"})
_WEIGHT = frozenset({"weight", "weights", "param", "params", "parameter", "parameters"})
_OF_EXTREMES = frozenset({"max", "min", "std", "var", "median", "p50", "p90", "p95", "p99", "zero", "zeros", "ratio", "count", "num", "target", "threshold", "limit", "histogram", "noise", "cosine", "delta", "diff", "ema", "log"})  # fmt: skip
_NOISE = frozenset({
    "train", "training", "trainer", "tr", "total", "global", "all", "the", "current", "cur", "value", "item", "scalar", "scalars",
    "metrics", "metric", "losses", "optim", "optimizer", "model", "info", "raw", "batch", "step", "iter", "micro", "last", "now",
    "samples", "main", "log", "logging", "stats", "mb", "minibatch", "interval", "inner", "stage", "monitor", "is", "at", "with",
})  # fmt: skip
_LOSS_NOISE = _NOISE | frozenset({
    "loss", "lm", "ce", "xent", "cross", "entropy", "nll", "crossentropy", "language", "modeling", "modelling", "token",
    "per", "avg", "average", "mean", "running", "smoothed", "smooth", "lazy", "causal", "clm", "mlm", "masked", "next",
    "text", "sft", "pretrain", "pretraining", "objective", "reduced", "accum", "accumulated", "supervised", "llm",
})  # fmt: skip
_AVERAGED = frozenset({"avg", "average", "mean", "running", "smoothed", "smooth", "accum", "accumulated"})
_LR_NOISE = _NOISE | frozenset({"lr", "learning", "rate", "rates", "group", "groups", "group0", "pg", "pg1", "pg0", "grp", "param", "params", "adam", "adamw", "w", "decoupled", "fused", "muon", "sgd", "lion", "adafactor", "actor", "schedule", "scheduler", "sched", "default", "non", "embedding", "decay", "cosine", "rank"})  # fmt: skip
_NOT_LR = frozenset({"final", "min", "initial", "init", "base", "peak", "warmup", "end", "scale"})
_GRAD_NOISE = _NOISE | frozenset({"norm", "norms", "l2", "l", "clip", "clipping", "before", "pre", "unclipped", "preclip", "of", "avg", "average", "mean", "actor", "full", "overall", "fro", "unscaled", "local", "policy"})  # fmt: skip
_CUMULATIVE = frozenset(
    {"seen", "consumed", "total", "cumulative", "num", "processed", "trained", "so", "far", "throughput"}
)
_MEASURED = frozenset(SIGNALS)
_NEVER = frozenset(
    {"vs", "best", "wall", "walltime", "timestamp", "runtime", "datetime", "eta"}
)  # no signal has such a word


def words_of(name: str) -> list[str]:
    """The words of a name: camel case, underscores, slashes and the rest taken apart."""
    return [word for word in _SPLIT.split(_CAMEL.sub(" ", name).lower()) if word]


def without_run(name: str) -> str:
    """A column of a wandb export without the run's name: `my-run - train/loss` -> `train/loss`."""
    return name.rsplit(" - ", 1)[-1].strip() if " - " in name else name.strip()


@lru_cache(maxsize=8192)
def meaning_of(name: str) -> Meaning:
    """The meaning of a column, tag or key. `name` may carry a wandb run before ` - `."""
    name = name.strip()
    if not name or name.endswith(("__MIN", "__MAX")):
        return _IGNORE
    if name in _MEASURED:
        return Meaning("evaluation" if name == "eval_loss" else "signal", name)
    if name.startswith(("grad_norm/", "update_norm/")) and words_of(name)[2:] not in (["total"], ["global"], ["all"]):
        return Meaning("signal", name)
    name = without_run(name)
    if name.endswith(("__MIN", "__MAX")):
        return _IGNORE
    words = words_of(name)
    if not words or len(words) > 16 or _NEVER & set(words):
        return _IGNORE
    counter = _counter(words)
    if counter:
        return counter
    if "skipped" in words or words == ["num", "skipped", "steps"]:
        return Meaning("skipped", "skipped") if {"iterations", "steps", "iters", "skipped"} & set(words) else _IGNORE
    if "nan" in words and {"iterations", "iters", "steps"} & set(words):
        return Meaning("nan_count", "nan_iterations")
    kept = [word for word in words if word not in EVALUATION_WORDS]
    if len(kept) < len(words):
        return _evaluation(name, words, kept)
    return _signal(name, words) or Meaning("own", name)


def _counter(words: list[str]) -> Meaning | None:
    """A step or an epoch, or None."""
    kept = [
        w
        for w in words
        if w not in EVALUATION_WORDS and w not in ("wandb", "trainer", "progress", "charts", "counters")
    ]
    if kept[:1] == ["training"] or kept[:1] == ["train"]:
        kept = kept[1:] or kept
    if len(kept) > 1 and kept[-2] in ("at", "after", "on", "for", "completed"):
        kept = kept[-1:]  # `validation loss at iteration 100`
    joined = " ".join(kept)
    if joined in _EPOCHS:
        return Meaning("epoch", "epoch")
    rank = _STEPS.get(joined)
    return None if rank is None else Meaning("step", "step", rank)


def _evaluation(name: str, words: list[str], kept: list[str]) -> Meaning:
    """A column of an evaluation: eval_loss, or a metric of its own (not its speed)."""
    found = set(kept)
    if words == ["tel"]:
        return Meaning("evaluation", "eval_loss")
    if found & {
        "runtime",
        "time",
        "second",
        "seconds",
        "samples",
        "wps",
        "wpb",
        "bsz",
        "memory",
        "duration",
        "throughput",
        "flops",
    }:
        return _IGNORE
    if _is_loss(found) and not found & {"aux", "scale", "max", "min", "std"}:
        return Meaning("evaluation", "eval_loss", 0 if found <= _LOSS_NOISE else 5 + len(found))
    if "train" in found and not found - {"train"}:
        return _IGNORE
    return Meaning("evaluation", name, 9)


def _is_loss(found: set[str]) -> bool:
    return (
        bool(found & {"loss", "losses", "nll", "xent", "crossentropy"})
        or {"cross", "entropy"} <= found
        or found == {"ce"}
    )


def _signal(name: str, words: list[str]) -> Meaning | None:
    found = set(words)
    if "scale" in found or "scaler" in found or "gradscaler" in found or "lossscale" in found:
        rest = found - {"loss", "scale", "scaler", "grad", "gradscaler", "lossscale", "amp", "fp16", "dynamic", "gradient", "value"} - _NOISE  # fmt: skip
        return None if rest else Meaning("signal", "loss_scale", 0 if "loss" in found else 2)
    if words == ["trl"]:
        return Meaning("signal", "loss")
    if _is_loss(found):
        return _loss(name, words, found)
    norm = _norm(name, words, found)
    if norm:
        return norm
    if ("lr" in found or {"learning", "rate"} <= found) and not found & _NOT_LR:
        rest = {w for w in found - _LR_NOISE if not w.isdigit()}
        return (
            None
            if rest
            else Meaning("signal", "lr", 0 if len(words) < 3 else 3 if "0" in found or len(words) < 5 else 4)
        )
    if found & {"logit", "logits"} and found & {"max", "peak"} and not found & {"attention", "attn", "router", "min"}:
        return Meaning("signal", "logit_max", 0 if found <= _NOISE | {"logit", "logits", "max", "peak", "abs"} else 5)
    if "entropy" in found:
        rest = found - _NOISE - {"entropy", "mean", "avg", "average"}
        if rest and rest <= {"attention", "attn"}:
            return Meaning("signal", "attention_entropy")
        return Meaning("signal", "entropy") if rest <= {"output", "policy", "actor"} else None
    if found & {"tokens"} and not found & {"second", "sec", "s", "per", "gpu", "device", "tps"}:
        return Meaning("own", "tokens_seen") if found & _CUMULATIVE else Meaning("signal", "tokens") if found <= _NOISE | {"tokens", "n"} else None  # fmt: skip
    return _time(words, found)


def _loss(name: str, words: list[str], found: set[str]) -> Meaning | None:
    rest = {w for w in found - _LOSS_NOISE}
    if rest == {"max"}:
        return Meaning("signal", "loss_max")
    if rest & {"pg", "policy"} and not rest - {"pg", "policy", "actor"}:
        return Meaning("signal", "loss", 9)
    if rest:
        return None  # an auxiliary loss, the loss of an epoch, or somebody's own
    if words == ["loss"]:
        return Meaning("signal", "loss", 0)
    if words.count("train") > 1:
        return Meaning("signal", "loss", 6)  # Hugging Face's train/train_loss: the mean of the whole run, said once
    if found & _AVERAGED:
        return Meaning("signal", "loss", 4)
    if found & {"nll"}:
        return Meaning("signal", "loss", 3)
    return Meaning("signal", "loss", 1 if found <= {"train", "training", "tr", "lm", "loss", "step"} else 2)


def _norm(name: str, words: list[str], found: set[str]) -> Meaning | None:
    if found & _SINGLE_GRAD:
        rest = {w for w in found - _SINGLE_GRAD - _GRAD_NOISE if not w.isdigit()}
        return None if rest else Meaning("signal", "grad_norm", 1)
    if not found & {"norm", "norms"}:
        return None
    if found & _GRAD:
        layered = _LAYERED.search(name)
        if layered:
            layer = words_of(layered.group("layer"))
            if {w for w in layer} - _GRAD_NOISE:
                return None if set(layer) <= _OF_EXTREMES | _GRAD_NOISE else Meaning("signal", "grad_norm/" + layered.group("layer").strip())  # fmt: skip
            return Meaning("signal", "grad_norm", 2)
        rest = {w for w in found - _GRAD - _GRAD_NOISE if not w.isdigit()}
        if rest:
            return None
        return Meaning("signal", "grad_norm", 0 if len(words) <= 2 else 1 if found & {"before", "unclipped", "pre", "preclip"} else 2)  # fmt: skip
    if found & {"update", "updates"}:
        layered = _LAYERED_GROUP.search(name)
        if layered and set(words_of(layered.group("layer"))) - _NOISE:
            return Meaning("signal", "update_norm/" + layered.group("layer").strip())
        rest = found - _WEIGHT - _GRAD_NOISE - {"update", "updates"}
        return None if rest else Meaning("signal", "update_norm")
    if found & _WEIGHT:
        rest = found - _WEIGHT - _GRAD_NOISE
        return None if rest else Meaning("signal", "weight_norm")
    if found <= {"norm", "total", "global"}:
        return Meaning("signal", "grad_norm", 5)
    return None


def _time(words: list[str], found: set[str]) -> Meaning | None:
    """Seconds a step took, where name or unit leaves no doubt; cumulative clocks are not it."""
    if {"elapsed", "time", "per", "iteration"} <= found or {"time", "per", "iteration"} <= found:
        return Meaning("signal", "time_s", 0, 1e-3 if "ms" in found else 1.0)
    if found & {"time", "duration"} and found & {"step", "iter", "iteration"}:
        clear = found <= {"time", "duration", "step", "iter", "iteration", "s", "sec", "seconds", "ms"}
        return Meaning("signal", "time_s", 1, 1e-3 if "ms" in found else 1.0) if clear else None
    return None
