"""Seeded training curves with known truth: the events E1-E10, and healthy runs with everything that only looks like trouble.

Each generator makes `runs` curves side by side: values[signal] is a float64 array (runs, steps). The truth is known because
it is injected. Numbers of E1, E2 and E6 are those of public runs (the worked case S12, BLOOM-176B and its failed 104B
predecessor, Marin 32B); everything else is synthetic, and says so by being simple.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Noise = Literal["gauss", "t5", "t3"]
Split = Literal["calibrate", "test"]  # the two never share a seed
NOISES: tuple[Noise, ...] = ("gauss", "t5", "t3")

FIRST_STEP = 5000  # healthy curves begin in mid-training
BENIGN_STEPS = 50  # an alarm this close after a benign event counts as caused by it
LOSS_SIGMA = 0.02  # nats, step-to-step noise of the loss
NORM_SIGMA = 0.15  # of the log gradient norm
RHO = 0.3  # AR(1) coefficient of the log gradient norm
WORLD = 8  # ranks of the curves that have any


@dataclass
class Streams:
    """Runs of one kind, side by side. Positions are indices into the second axis; `steps` gives the step numbers.

    values: signal -> (runs, points); NaN or Inf was really logged. missing: signal -> bool (runs, points), not logged there.
    onset, blowup: (runs,) positions, -1 for none. due: what the lead is counted back from; the blow-up unless the case says else.
    benign: bool (runs, points), harmless events and the time just after. per_rank: name -> (runs, points, ranks)."""

    name: str
    steps: np.ndarray
    values: dict[str, np.ndarray]
    onset: np.ndarray
    blowup: np.ndarray
    due: np.ndarray
    missing: dict[str, np.ndarray] = field(default_factory=dict)
    benign: np.ndarray | None = None
    per_rank: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        return int(self.steps.shape[0])

    @property
    def points(self) -> int:
        return int(self.steps.shape[1])

    def present(self, signal: str) -> np.ndarray:
        """Where the signal was logged, bool (runs, points)."""
        if signal not in self.values:
            return np.zeros(self.steps.shape, dtype=bool)
        missing = self.missing.get(signal)
        return np.ones(self.steps.shape, dtype=bool) if missing is None else ~missing

    def lengths(self) -> np.ndarray:
        """Points of each run up to the last logged one, (runs,)."""
        logged = np.zeros(self.steps.shape, dtype=bool)
        for signal in self.values:
            logged |= self.present(signal)
        return np.where(logged.any(axis=1), self.points - np.argmax(logged[:, ::-1], axis=1), 0)

    def only(self, *signals: str) -> Streams:
        """The same runs as seen by somebody who measures these signals alone, and no rank by itself."""
        values = {name: x for name, x in self.values.items() if name in signals}
        return Streams(self.name, self.steps, values, self.onset, self.blowup, self.due, self.missing, self.benign)


def join(name: str, parts: Sequence[Streams]) -> Streams:
    """Runs of several kinds and lengths in one batch; what a run does not have is missing there. Per-rank values are dropped."""
    points = max(part.points for part in parts)
    signals = list(dict.fromkeys(signal for part in parts for signal in part.values))
    values: dict[str, np.ndarray] = {}
    missing: dict[str, np.ndarray] = {}
    for signal in signals:
        xs, gone = [], []
        for part in parts:
            x = part.values.get(signal, np.zeros(part.steps.shape))
            xs.append(np.pad(x, ((0, 0), (0, points - part.points))))
            gone.append(np.pad(~part.present(signal), ((0, 0), (0, points - part.points)), constant_values=True))
        values[signal], missing[signal] = np.concatenate(xs), np.concatenate(gone)
    blank = [np.zeros(p.steps.shape, bool) if p.benign is None else p.benign for p in parts]
    return Streams(
        name,
        np.concatenate([np.pad(p.steps, ((0, 0), (0, points - p.points))) for p in parts]),
        values,
        np.concatenate([p.onset for p in parts]),
        np.concatenate([p.blowup for p in parts]),
        np.concatenate([p.due for p in parts]),
        missing,
        np.concatenate([np.pad(b, ((0, 0), (0, points - b.shape[1]))) for b in blank]),
    )


def generator(seed: int, split: Split, name: str) -> np.random.Generator:
    """The random numbers of one cell: apart for every seed, split and name."""
    return np.random.default_rng([seed, {"calibrate": 0, "test": 1}[split], zlib.crc32(name.encode())])


def draws(rng: np.random.Generator, noise: Noise, shape: tuple[int, int]) -> np.ndarray:
    """Unit-variance noise: Gaussian, or Student t with 5 or 3 degrees of freedom."""
    if noise == "gauss":
        return rng.standard_normal(shape)
    freedom = {"t5": 5, "t3": 3}[noise]
    return rng.standard_t(freedom, shape) / np.sqrt(freedom / (freedom - 2))


def autoregressive(rng: np.random.Generator, noise: Noise, shape: tuple[int, int]) -> np.ndarray:
    """AR(1) with coefficient RHO and unit variance along the second axis."""
    shocks = draws(rng, noise, shape)
    out = np.empty(shape)
    out[:, 0] = shocks[:, 0]
    for t in range(1, shape[1]):
        out[:, t] = RHO * out[:, t - 1] + np.sqrt(1 - RHO**2) * shocks[:, t]
    return out


@dataclass
class Curve:
    """A curve before its noise is turned into values, so that an event can change level and spread of either signal."""

    rng: np.random.Generator
    noise: Noise
    steps: np.ndarray  # (runs, points)
    loss: np.ndarray  # noise-free level, nats
    loss_sigma: np.ndarray
    norm: np.ndarray  # level of the gradient norm (its mean)
    norm_sigma: np.ndarray  # of its logarithm
    lr: np.ndarray
    extra: dict[str, np.ndarray] = field(default_factory=dict)  # further signals, as they are
    missing: dict[str, np.ndarray] = field(default_factory=dict)
    benign: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    onset: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))
    blowup: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))
    due: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (int(self.steps.shape[0]), int(self.steps.shape[1]))

    @property
    def time(self) -> np.ndarray:
        """(1, points) positions, to compare with (runs, 1) positions of events."""
        return np.arange(self.shape[1])[None, :]

    def somewhere(self, first: int, last: int) -> np.ndarray:
        """(runs, 1) random positions, one a run."""
        return self.rng.integers(first, max(last, first + 1), size=(self.shape[0], 1))

    def mark(self, since: np.ndarray, steps: int = BENIGN_STEPS) -> None:
        """A benign event begins at the positions `since`, (runs, 1)."""
        self.benign |= (self.time >= since) & (self.time < since + steps)

    def event(self, onset: np.ndarray, blowup: np.ndarray) -> None:
        self.onset, self.blowup = onset.reshape(-1), blowup.reshape(-1)

    def streams(self, name: str) -> Streams:
        """Draw the noise."""
        loss = self.loss + self.loss_sigma * draws(self.rng, self.noise, self.shape)
        swing = autoregressive(self.rng, self.noise, self.shape)
        norm = self.norm * np.exp(self.norm_sigma * swing - self.norm_sigma**2 / 2)
        values = {"loss": loss, "grad_norm": norm, "lr": self.lr, **self.extra}
        due = self.blowup if self.due is None else self.due
        return Streams(name, self.steps, values, self.onset, self.blowup, due, self.missing, self.benign)


def curve(
    rng: np.random.Generator, noise: Noise, runs: int, points: int, *, first: int = FIRST_STEP, every: int = 1
) -> Curve:
    """A healthy run in mid-training: loss on a slow power law, gradient norm around 1."""
    shape = (runs, points)
    steps = np.broadcast_to(first + every * np.arange(points), shape).copy()
    return Curve(
        rng,
        noise,
        steps,
        loss=2.08 * (np.maximum(steps, 1) / 9000.0) ** -0.03,
        loss_sigma=np.full(shape, LOSS_SIGMA),
        norm=np.ones(shape),
        norm_sigma=np.full(shape, NORM_SIGMA),
        lr=np.full(shape, 3e-4),
        benign=np.zeros(shape, dtype=bool),
        onset=np.full(runs, -1),
        blowup=np.full(runs, -1),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Events


def worked_case(
    rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 2500, sigma: float = 0.9
) -> Streams:
    """E1, S12. Steps 9000-9400: spread of the log gradient norm 0.15 -> `sigma`, its mean unchanged; peak logit 12 -> 20;
    loss 2.08 -> 2.06, still falling; then 2.04 -> 7.4 at step 9448. The lead is counted back from step 9400."""
    onset, full, blow = before, before + 400, before + 448
    c = curve(rng, noise, runs, blow + 60, first=9000 - before)
    ramp = np.clip((c.time - onset) / (full - onset), 0.0, 1.0)
    settled = np.clip((c.time - full) / (blow - full), 0.0, 1.0)
    c.loss = np.where(c.time < onset, c.loss, 2.08 - 0.02 * ramp - 0.02 * settled)
    c.norm_sigma = NORM_SIGMA + (sigma - NORM_SIGMA) * np.broadcast_to(ramp, c.shape)
    broken = c.time >= blow
    c.loss = np.where(broken, 7.4, c.loss)
    c.norm = np.where(broken, 5.0, c.norm)
    logit = 12.0 + 8.0 * ramp + 2.0 * settled + 0.25 * draws(rng, noise, c.shape)
    c.extra["logit_max"] = logit
    c.event(np.full(runs, onset), np.full(runs, blow))
    c.due = np.full(runs, full)
    return c.streams("E1 worked case")


# (gradient norm over its level, loss over its level) step by step; the last of `lead` steps is the blow-up.
_CASCADES: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "BLOOM-176B": (
        (0.24 / 0.2, 0.95 / 0.2, 2.4 / 0.2, 15.9 / 0.2, 145 / 0.2, 960 / 0.2, 40, 12, 6, 4),
        (0.0, 0.0, 0.0, 0.01, 0.05, 2.90, 1.30, 1.01, 0.59, 0.5),
    ),
    "104B 11446": ((4.01 / 0.198, 3.89 / 0.198, 20, 20), (0.05, 4.65, 4.5, 4.4)),
    "104B 8738": ((3.5, 1.4, 22.7, 50.0, 30, 20), (0.0, 0.1, 0.36, 3.95, 3.5, 3.2)),
}


def cascade(
    rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 4000, log: str = "BLOOM-176B"
) -> Streams:
    """E2: a fast cascade from a public log, replayed on top of this noise; it is over before a slow rule has seen anything.

    BLOOM-176B: gradient norm 0.24, 0.95, 2.4, 15.9, 145, 960 while the loss still reads 2.20, then 5.10; it recovered by
    itself within 30 steps, the 104B did not. Onset: 0.95."""
    norms, losses = _CASCADES[log]
    c = curve(rng, noise, runs, before + len(norms) + 60)
    for i, (factor, extra) in enumerate(zip(norms, losses, strict=True)):
        c.norm[:, before + i] = factor
        c.loss[:, before + i] += extra
    end = before + len(norms)
    stays = np.exp(-(c.time[:, end:] - end) / 15.0) if log == "BLOOM-176B" else 1.0
    c.norm[:, end:] = 1 + (norms[-1] - 1) * stays
    c.loss[:, end:] += losses[-1] * stays
    onset = before + (1 if log == "BLOOM-176B" else 0)
    blow = before + next(i for i, extra in enumerate(losses) if extra > 0.5)
    c.event(np.full(runs, onset), np.full(runs, blow))
    return c.streams(f"E2 cascade {log}")


def bad_batch(rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 1500) -> Streams:
    """E3: a bad batch throws the loss up by 2.4 nats and the norm by 20; both are back after about 30 steps."""
    c = curve(rng, noise, runs, before + 400)
    decay = np.where(c.time >= before, np.exp(-(c.time - before) / 8.0), 0.0)
    c.loss = c.loss + 2.4 * decay
    c.norm = c.norm * (1 + 19 * decay)
    c.event(np.full(runs, before), np.full(runs, before))
    return c.streams("E3 bad batch")


def level_shift(rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 1500, after: int = 1200) -> Streams:
    """E4: loss 2.08 -> 7.4 and norm x3 from one step to the next, for good."""
    c = curve(rng, noise, runs, before + after)
    c.loss = np.where(c.time >= before, 7.4, c.loss)
    c.norm = np.where(c.time >= before, 3.0, c.norm)
    c.event(np.full(runs, before), np.full(runs, before))
    return c.streams("E4 level shift")


def norm_shift(rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 1500, after: int = 1500) -> Streams:
    """E4b: the gradient norm alone x3 for good. A rule that clips or skips on it must not do so for ever."""
    c = curve(rng, noise, runs, before + after)
    c.norm = np.where(c.time >= before, 3.0, c.norm)
    c.event(np.full(runs, before), np.full(runs, before))
    return c.streams("E4b norm x3")


def slow_drift(rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 1500) -> Streams:
    """E5: +1.2 nats in 400 steps and no return, like a public SPAM run. The lead is counted back from the end of the drift."""
    c = curve(rng, noise, runs, before + 500)
    c.loss = c.loss + 1.2 * np.clip((c.time - before) / 400.0, 0.0, 1.0)
    c.event(np.full(runs, before), np.full(runs, before + 400))
    return c.streams("E5 slow drift")


def small_spike(rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 1500) -> Streams:
    """E6: 1.96 -> 2.02 -> 1.975 and no better, as in Marin 32B before it was lost. It must be reported within 50 steps, so
    the position 50 steps after the onset stands for the blow-up. A large batch: noise of 0.008 nats."""
    c = curve(rng, noise, runs, before + 300)
    since = c.time - before
    shape = np.where(since < 5, 0.06 * (since + 1) / 5, 0.015 + 0.045 * np.exp(-(since - 4) / 25.0))
    c.loss = c.loss - c.loss[:, before : before + 1] + 1.96 + np.where(since >= 0, shape, 0.0)
    c.loss_sigma = np.full(c.shape, 0.008)
    c.norm = c.norm * np.where((since >= 0) & (since < 30), 1.3, 1.0)
    c.event(np.full(runs, before), np.full(runs, before + 50))
    return c.streams("E6 small spike")


def nonfinite(rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 1500, burst: int = 1) -> Streams:
    """E7: loss and norm are NaN for `burst` steps, then the run goes on as before. burst 0 is the undisturbed twin."""
    c = curve(rng, noise, runs, before + max(burst, 1) + 1000)
    c.event(np.full(runs, before), np.full(runs, before))
    streams = c.streams(f"E7 NaN x{burst}")
    for signal in ("loss", "grad_norm"):
        streams.values[signal][:, before : before + burst] = np.nan
    return streams


def scale_collapse(rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 1600) -> Streams:
    """E8: the fp16 loss scale halves again and again from 30 steps before the loss explodes (GLM-130B, S4)."""
    c = curve(rng, noise, runs, before + 90)
    power = 16.0 + (c.time // 1000) - (c.time % 1000 == 500).cumsum(axis=1)  # grows and backs off once in 1000 steps
    since = c.time - before
    drops = np.clip(since // 3 + 1, 0, 12)
    c.extra["loss_scale"] = np.broadcast_to(2.0 ** (power - drops), c.shape).copy()
    broken = since >= 30
    c.loss = np.where(broken, np.minimum(c.loss + 0.5 * (since - 29), 8.0), c.loss)
    c.norm = np.where(broken, 12.0, c.norm)
    c.event(np.full(runs, before), np.full(runs, before + 30))
    return c.streams("E8 scale collapse")


LAYERS = ("embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head")


def embedding_growth(rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 1500) -> Streams:
    """E9: only the embedding's gradient norm grows, x10 over 250 steps, then the loss explodes (GLM-130B, S3). The embedding
    carries 4 % of the squared norm, so that the global norm hides it for long."""
    blow = before + 280
    c = curve(rng, noise, runs, blow + 60)
    share = {"embedding": 0.04, "head": 0.16} | {f"layers.{i}": 0.20 for i in range(4)}
    growth = np.exp(np.log(10.0) * np.clip((c.time - before) / 250.0, 0.0, 1.0))
    squares = np.zeros(c.shape)
    common = autoregressive(rng, noise, c.shape)
    layers: dict[str, np.ndarray] = {}
    for layer in LAYERS:
        own = 0.8 * common + 0.6 * autoregressive(rng, noise, c.shape)
        norm = np.sqrt(share[layer]) * np.exp(NORM_SIGMA * own - NORM_SIGMA**2 / 2)
        if layer == "embedding":
            norm = norm * growth
        norm = np.where(c.time >= blow, 6 * norm, norm)
        layers[f"grad_norm/{layer}"] = norm
        squares += norm**2
    c.loss = np.where(c.time >= blow, 7.0, c.loss)
    c.event(np.full(runs, before), np.full(runs, blow))
    streams = c.streams("E9 embedding growth")
    streams.values |= layers | {"grad_norm": np.sqrt(squares)}
    return streams


def one_rank(
    rng: np.random.Generator, noise: Noise, runs: int, *, before: int = 600, kind: str = "factor", ranks: int = WORLD
) -> Streams:
    """E10: something is off on one of 8 ranks only. factor: its gradient x6 for 10 steps; flip: a bit flip, x1e4 once;
    stale: its loss stays 0.6 nats above the others' (a replica that missed an update)."""
    c = curve(rng, noise, runs, before + 200)
    shape = (*c.shape, ranks)
    own = 0.2 * (draws(rng, noise, (runs, c.shape[1] * ranks))).reshape(shape)
    base = autoregressive(rng, noise, c.shape)
    local = 1.5 * np.exp(NORM_SIGMA * base[..., None] + own)
    losses = c.loss[..., None] + 0.05 * draws(rng, noise, (runs, c.shape[1] * ranks)).reshape(shape)
    who = rng.integers(0, ranks, runs)
    rows = np.arange(runs)
    if kind == "factor":
        local[rows, before : before + 10, who] *= 6.0
    elif kind == "flip":
        local[rows, before, who] *= 1e4
    else:
        losses[rows, before:, who] += 0.6
    c.event(np.full(runs, before), np.full(runs, before + 10))
    streams = c.streams(f"E10 one rank: {kind}")
    noise_part = (
        np.sqrt((local**2).sum(axis=2)) / ranks
    )  # of the mean gradient, as far as the ranks' parts are independent
    streams.values["grad_norm"] = np.sqrt(0.8 * np.exp(2 * NORM_SIGMA * base) + noise_part**2)
    streams.values["loss"] = losses.mean(axis=2)
    zeros = np.zeros(shape)
    streams.per_rank = {"local_grad_norm": local, "loss": losses, "tokens": zeros + 1024.0} | {
        f"nonfinite_{place}": zeros for place in ("forward", "loss", "backward")
    }
    return streams


Maker = Callable[[np.random.Generator, Noise, int], Streams]

EVENTS: Mapping[str, Maker] = {
    "E1": worked_case,
    "E2 BLOOM-176B": cascade,
    "E2 104B 11446": lambda rng, noise, runs: cascade(rng, noise, runs, log="104B 11446"),
    "E2 104B 8738": lambda rng, noise, runs: cascade(rng, noise, runs, log="104B 8738"),
    "E3": bad_batch,
    "E4": level_shift,
    "E4b": norm_shift,
    "E5": slow_drift,
    "E6": small_spike,
    "E7 once": nonfinite,
    "E7 burst": lambda rng, noise, runs: nonfinite(rng, noise, runs, burst=20),
    "E8": scale_collapse,
    "E9": embedding_growth,
    "E10 factor": one_rank,
    "E10 flip": lambda rng, noise, runs: one_rank(rng, noise, runs, kind="flip"),
    "E10 stale": lambda rng, noise, runs: one_rank(rng, noise, runs, kind="stale"),
}


def make_event(name: str, noise: Noise, runs: int, *, seed: int, split: Split = "test") -> Streams:
    """Runs of the event `name` (a key of EVENTS). The name joins the seed, so that no two events share their noise."""
    return EVENTS[name](generator(seed, split, f"{name}/{noise}"), noise, runs)


# ---------------------------------------------------------------------------------------------------------------------
# Healthy runs


def _warmup_end(c: Curve) -> None:
    """From step 1: loss 11 -> 4 on a steep curve, norm falling from 8, LR warm-up over 500 steps."""
    c.steps = c.steps - FIRST_STEP + 1
    t = c.steps.astype(float)
    c.loss = 2.6 + 8.4 * (1 + t / 40.0) ** -0.6
    c.norm = 1 + 7 * np.exp(-t / 120.0)
    c.lr = 3e-4 * np.minimum(t / 500.0, 1.0)
    c.loss_sigma = np.full(c.shape, 0.03)
    c.mark(np.zeros((c.shape[0], 1), int), 700)


def _lr_decay(c: Curve) -> None:
    """LR to a tenth over 1200 steps: loss falls faster, norm rises slowly by a third."""
    at = c.somewhere(1400, 2000)
    part = np.clip((c.time - at) / 1200.0, 0.0, 1.0)
    c.lr = c.lr * (1 - 0.9 * part)
    c.loss = c.loss - 0.12 * part
    c.norm = c.norm * (1 + 0.33 * part)
    c.mark(at, 1200)


def _lr_step(c: Curve) -> None:
    """LR / 10 in one step: loss falls by 0.15 within 60 steps, norm by 20 %."""
    at = c.somewhere(1400, 2600)
    part = np.where(c.time >= at, 1 - np.exp(-(c.time - at) / 20.0), 0.0)
    c.lr = np.where(c.time >= at, c.lr / 10, c.lr)
    c.loss = c.loss - 0.15 * part
    c.norm = c.norm * (1 - 0.2 * part)
    c.mark(at, 100)


def _batch_ramp(c: Curve) -> None:
    """Batch x2 at one place (spread / sqrt 2, norm / 1.2), then back to the old size at another."""
    up, down = c.somewhere(1300, 1700), c.somewhere(2600, 3000)
    small = (c.time < up) | (c.time >= down)
    c.norm_sigma = np.where(small, c.norm_sigma, c.norm_sigma / np.sqrt(2))
    c.loss_sigma = np.where(small, c.loss_sigma, c.loss_sigma / np.sqrt(2))
    c.norm = np.where(small, c.norm, c.norm / 1.2)
    c.extra["tokens"] = np.where(small, 2.0**21, 2.0**22)
    c.mark(up, 150)
    c.mark(down, 150)


def _data_mix(c: Curve) -> None:
    """A new mix over 60 steps: loss 0.12 nats up or down, norm 15 % up."""
    at = c.somewhere(1400, 2600)
    part = np.clip((c.time - at) / 60.0, 0.0, 1.0)
    sign = c.rng.choice([-1.0, 1.0], size=(c.shape[0], 1))
    c.loss = c.loss + 0.12 * sign * part
    c.norm = c.norm * (1 + 0.15 * part)
    c.mark(at, 150)


def _resume(c: Curve) -> None:
    """Restart from 150 steps earlier: the counter jumps back, loss bumps by 0.1 nats and norm by 1.6 for some 40 steps."""
    at = c.somewhere(1400, 2600)
    c.steps = c.steps - np.where(c.time >= at, 150, 0)
    part = np.where(c.time >= at, np.exp(-(c.time - at) / 15.0), 0.0)
    c.loss = c.loss + 0.1 * part
    c.norm = c.norm * (1 + 0.6 * part)
    c.mark(at, 100)


def _eval_pause(c: Curve) -> None:
    """Every 500 steps nothing is logged for 10 steps."""
    gone = np.broadcast_to((c.time % 500) < 10, c.shape) & (c.time > 0)
    c.missing = {name: gone for name in ("loss", "grad_norm", "lr")}
    for at in range(500, c.shape[1], 500):
        c.mark(np.full((c.shape[0], 1), at + 10))


def _epochs(c: Curve) -> None:
    """Staircase: every 900 steps a new epoch begins 0.12 nats lower."""
    for at in range(900, c.shape[1], 900):
        c.loss = c.loss - np.where(c.time >= at, 0.12, 0.0)
        c.mark(np.full((c.shape[0], 1), at))


def _bumps(c: Curve) -> None:
    """Three single odd batches a run, gone at the next step: loss +0.3 to +1.5 nats, norm x2 to x6 (S5)."""
    rows = np.arange(c.shape[0])
    for first in (1200, 2000, 2800):
        at = c.somewhere(first, first + 700)
        c.loss[rows, at[:, 0]] += c.rng.uniform(0.3, 1.5, c.shape[0])
        c.norm[rows, at[:, 0]] *= c.rng.uniform(2.0, 6.0, c.shape[0])
        c.mark(at)


def _plain(c: Curve) -> None:
    """Nothing but noise."""


CONFOUNDERS: Mapping[str, Callable[[Curve], None]] = {
    "warm-up end": _warmup_end,
    "LR decay": _lr_decay,
    "LR step": _lr_step,
    "batch ramp": _batch_ramp,
    "data mix": _data_mix,
    "resume": _resume,
    "evaluation pause": _eval_pause,
    "epoch staircase": _epochs,
    "single-batch bumps": _bumps,
    "missing and stale": _plain,
    "every 10th step": _plain,
}
HEALTHY: tuple[str, ...] = (*NOISES, *CONFOUNDERS)
POINTS = 4000  # of a healthy run


def make_healthy(name: str, runs: int, *, seed: int, split: Split, points: int = POINTS) -> Streams:
    """Healthy runs: a noise name (clean), or a confounder under t5 noise. `benign` marks what the confounder did.

    Events lie after 1200 points, when every rule is armed, except the warm-up, which is about rules that are not yet."""
    rng = generator(seed, split, f"healthy/{name}")
    if name in NOISES:
        return curve(rng, name, runs, points).streams(name)  # type: ignore[arg-type]
    c = curve(rng, "t5", runs, points, every=10 if name == "every 10th step" else 1)
    CONFOUNDERS[name](c)
    streams = c.streams(name)
    if name == "missing and stale":
        _missing_and_stale(rng, streams)
    return streams


def _missing_and_stale(rng: np.random.Generator, streams: Streams) -> None:
    """5 % of the values are not logged, 2 % of the norms repeat the one before, as a skipped step does."""
    shape = streams.steps.shape
    streams.missing = {name: rng.random(shape) < 0.05 for name in ("loss", "grad_norm")}
    norm = streams.values["grad_norm"]
    stale = rng.random(shape) < 0.02
    stale[:, 0] = False
    for t in range(1, shape[1]):
        norm[:, t] = np.where(stale[:, t], norm[:, t - 1], norm[:, t])
