"""Symptom -> likely cause -> remedy (S18, S20, T5, T8, T10), as data: what a person looks up, and the matcher reads.

A row matches when all of `needs`, at least one of `either` (if there is any) and none of `unless` hold. Each of those is
a Sign, which one of the findings must show, or the name of a fact of FACTS, which whoever analyses has established.
`stronger` adds to the confidence. Confidences are statements about how many checks stand behind a row, not probabilities:
0.3 a place to look, 0.5 the usual cause, 0.7 well supported. Where two rows of one symptom differ in cause, both are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resilient.signals import Cause

FACTS: dict[str, str] = {
    "spiked": "the loss broke away from its trend and came back",
    "diverged": "the loss broke away from its trend and did not come back",
    "not_finite": "loss or gradient norm are NaN or Inf, and stay so",
    "never_learned": "the loss stays where it began, or on a plateau that it reached at once",
    "abrupt": "nothing was off more than a few points before the loss broke away",
    "warming_up": "the LR was still rising when it began",
    "early": "it began within the first tenth of the log",
    "lr_rose": "the LR rose shortly before it began",
    "lr_cut_brief": "the LR was cut, the run was calm for a while, and it began again",
    "clips_always": "nearly every step is clipped",
    "scale_fell": "the fp16 loss scale fell several times without recovering",
    "restarted": "it began right after a restart",
    "reinitialised": "the loss jumped to where it stood at the very beginning",
    "eval_rises": "the evaluation loss rises while the training loss falls",
    "constant": "a signal has one and the same value on every row",
    "staircase": "the loss falls in steps at equal distances",
    "level_shift": "the loss moved to a new level and stays there calmly",
}
"""Facts that an analysis may establish, and what each says."""


@dataclass(frozen=True)
class Sign:
    """One thing that a finding of severity warn or act can show.

    signals: names, `*` and `?` as in file names. statistics: families; empty: any. ranks: some (the finding names
    ranks) | none (all ranks together) | any. before: no finding on these signals has an earlier onset."""

    signals: tuple[str, ...]
    statistics: tuple[str, ...] = ()
    ranks: Literal["some", "none", "any"] = "any"
    before: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Such as `grad_norm (scale or trend) before loss`."""
        text = " or ".join(f"`{name}`" for name in self.signals) if self.signals != ("*",) else "any signal"
        if self.statistics:
            text += f" ({' or '.join(self.statistics)})"
        if self.ranks != "any":
            text += ", ranks named" if self.ranks == "some" else ", all ranks together"
        if self.before:
            text += f", not later than {' or '.join(f'`{name}`' for name in self.before)}"
        return text


Condition = Sign | str


@dataclass(frozen=True)
class Remedy:
    """What to do. source: where the numbers come from; empty: no number in it needs one."""

    action: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.action} [{self.source}]" if self.source else self.action


@dataclass(frozen=True)
class Symptom:
    """One row. rows: requirement ids. detail: the cause in words. evidence: a template over the finding that showed the
    first Sign ({signal}, {statistic}, {step}, {onset}, {score}, {ranks}, {message}); facts add their own sentence."""

    id: str
    rows: tuple[str, ...]
    symptom: str
    cause: Cause
    detail: str
    confidence: float
    needs: tuple[Condition, ...] = ()
    either: tuple[Condition, ...] = ()
    unless: tuple[Condition, ...] = ()
    stronger: tuple[tuple[Condition, float], ...] = ()
    evidence: str = ""
    remedies: tuple[Remedy, ...] = ()


_LOSS = Sign(("loss",))
_GRADIENT = Sign(("grad_norm", "grad_norm/*"))
_ANY = Sign(("*",))
_TRAINING = ("loss", "grad_norm")
_POINT = ("point", "confirmed")
_DRIFT = ("level", "drift", "trend", "scale")

_GO_BACK = Remedy(
    "go back to the newest checkpoint before the onset, not before the blow-up; start about 100 steps earlier and skip "
    "200 to 500 batches",
    "PaLM, arXiv 2204.02311 section 5.1; S13",
)
_CUT = Remedy("LR to 30 %, clipping from max_norm 1.0 to 0.3, after going back", "S13")
_BETA2 = Remedy(
    "Adam beta2 from 0.999 to 0.95, with a lower LR, so that v follows a gradient that grows",
    "S14; arXiv 2304.13013: v lags 1 to 8 steps behind before a spike",
)
_REWARM = Remedy("warm the LR up again over 100 to 1000 steps after any change of weights, data or optimizer state")
_LINKS = Remedy(
    "run a link and collective check on the hosts of these ranks (`nccl-tests`, XID and ECC counters)", "S19"
)
_BF16 = Remedy("train in bf16 if the hardware has it: same exponent range as fp32, no loss scale")

SYMPTOMS: tuple[Symptom, ...] = (
    # -- how it ends: spikes, divergence, NaN ------------------------------------------------------------------------
    Symptom(
        id="slow_loss_rise",
        rows=("S18", "S6"),
        symptom="The loss rises slowly, without a jump",
        cause="optimizer",
        detail="the LR is too high for this phase, or the weights drift (logits, norms)",
        confidence=0.5,
        needs=(Sign(("loss",), _DRIFT),),
        unless=("abrupt", "restarted", "staircase"),
        stronger=((Sign(("grad_norm",), _DRIFT), 0.1), ("diverged", 0.1)),
        evidence="{signal}/{statistic} from step {onset} on: {message}",
        remedies=(
            Remedy(
                "do not wait: a rise that is slow at first rarely comes back by itself", "IDEFICS-80B training notes"
            ),
            _GO_BACK,
            Remedy("cut the LR by 10 % if it only drifts", "OPT-175B logbook, 12.43"),
            _CUT,
            Remedy("compare the data mix of the stretch with the one before it", "S5"),
        ),
    ),
    Symptom(
        id="sudden_nan",
        rows=("S18", "S1", "T6", "T12"),
        symptom="NaN or Inf out of nothing",
        cause="precision",
        detail="an overflow in forward or backward, or a batch that divides by zero (all padding, a fully masked row)",
        confidence=0.45,
        needs=(Sign(("*",), ("nonfinite",), before=("grad_norm", "update_norm", "logit_max")),),
        unless=("spiked", "diverged", "early"),
        stronger=(("not_finite", 0.1),),
        evidence="first non-finite value at step {step} ({signal}); nothing grew before it",
        remedies=(
            Remedy("run that step again with probes in the modules: the first module with a NaN names the place", "T6"),
            Remedy(
                "check the batch: label out of range, empty sequence, all padding, fully masked attention row", "T7"
            ),
            Remedy("run the same batch in fp32: if the NaN is gone, it is precision", "T4"),
            _BF16,
        ),
    ),
    Symptom(
        id="nan_from_the_start",
        rows=("S1", "T5", "T6"),
        symptom="NaN or Inf within the first steps, and it stays",
        cause="optimizer",
        detail="LR far too high, no warm-up, an initialisation that overflows, or bad labels",
        confidence=0.55,
        needs=("not_finite", "early"),
        remedies=(
            Remedy(
                "run ten steps with LR 0: if it is NaN all the same, it is the model or the batch, not the LR", "T5"
            ),
            Remedy("halve the LR and double the warm-up until it survives 1000 steps", "T11"),
            Remedy("decode one batch and look at labels, mask and shift", "T5"),
            Remedy("run in fp32 on one process", "T11"),
        ),
    ),
    Symptom(
        id="nan_after_growth",
        rows=("S18", "T6", "T8"),
        symptom="NaN or Inf after a growing gradient, update or logit",
        cause="optimizer",
        detail="the weights were already running away; the NaN is the end of it, not the beginning",
        confidence=0.6,
        needs=(
            Sign(("grad_norm", "grad_norm/*", "update_norm", "logit_max"), (*_POINT, *_DRIFT), before=("loss",)),
            "not_finite",
        ),
        evidence="{signal}/{statistic} was off from step {onset} on, before the first NaN: {message}",
        remedies=(_GO_BACK, _CUT, _BETA2, Remedy("do not only skip the NaN steps: the weights carry the fault")),
    ),
    Symptom(
        id="abrupt_blow_up",
        rows=("S18", "S1"),
        symptom="The loss jumps without any warning",
        cause="data",
        detail="a bad batch or stretch of data met weights that were fine until then",
        confidence=0.45,
        needs=("abrupt",),
        either=("spiked", "diverged"),
        unless=("restarted", "reinitialised", "early", "scale_fell"),
        remedies=(
            _GO_BACK,
            Remedy("look at the batches of the onset step: repeated text, odd lengths, wrong language", "S20"),
            Remedy("play the same batches from another checkpoint: if they spike again it is the data", "T4"),
        ),
    ),
    Symptom(
        id="gradient_oscillates_then_explodes",
        rows=("S18", "S7", "S12", "T8"),
        symptom="The gradient norm oscillates more and more, then explodes",
        cause="optimizer",
        detail="the step size is at the edge of stability: LR too high for the curvature, or beta2 too slow",
        confidence=0.6,
        needs=(Sign(("grad_norm", "grad_norm/*"), _DRIFT, before=("loss",)),),
        unless=("restarted",),
        stronger=(("diverged", 0.1), ("spiked", 0.05), (Sign(("logit_max", "update_norm")), 0.1)),
        evidence="{signal}/{statistic} from step {onset} on, not later than the loss: {message}",
        remedies=(_CUT, _BETA2, Remedy("save a checkpoint now and halve the LR", "S10"), _GO_BACK),
    ),
    Symptom(
        id="gradient_explosion",
        rows=("T8",),
        symptom="The gradient explodes, and the loss with it",
        cause="optimizer",
        detail="no clipping, extreme lengths, missing norm layers, or optimizer state that is damaged or was not restored",
        confidence=0.5,
        needs=(Sign(("grad_norm", "grad_norm/*", "local_grad_norm"), (*_POINT, "nonfinite"), before=("loss",)),),
        either=("spiked", "diverged"),
        unless=("reinitialised",),
        stronger=(("diverged", 0.05),),
        evidence="{signal}/{statistic} from step {onset} on, not later than the loss: {message}",
        remedies=(
            Remedy("clip at max_norm 1.0; where it is clipped already, at 0.3", "T8; S13"),
            Remedy("look at lengths and padding of the batch at the onset", "T8"),
            Remedy("check the optimizer's moments against the checkpoint: finite, and of the right step", "T8; T9"),
            Remedy("norm layers before attention and MLP, and in fp32", "T8"),
            _GO_BACK,
        ),
    ),
    Symptom(
        id="update_norm_first",
        rows=("S18",),
        symptom="The optimizer's update grows before the gradient does",
        cause="optimizer",
        detail="second moments too small for what comes: v decayed, was lost, or eps is too small",
        confidence=0.65,
        needs=(Sign(("update_norm", "update_norm/*"), before=_TRAINING),),
        stronger=((_GRADIENT, 0.05), (_LOSS, 0.05)),
        evidence="{signal}/{statistic} from step {onset} on, before gradient norm and loss: {message}",
        remedies=(
            Remedy(
                "clip the update, not only the gradient: to mean plus 2 to 3 standard deviations of the last 128 norms",
                "levanter clip_update_norm, Marin 32B",
            ),
            Remedy("per tensor lr / max(1, RMS of g/sqrt(v)) (StableAdamW)", "arXiv 2304.13013"),
            _BETA2,
        ),
    ),
    Symptom(
        id="one_layer_first",
        rows=("S3", "S18", "S17"),
        symptom="Layers are off before the whole is, one of them first",
        cause="optimizer",
        detail="the instability began in that layer",
        confidence=0.5,
        needs=(Sign(("grad_norm/*", "update_norm/*", "layers"), before=_TRAINING),),
        evidence="{signal}/{statistic} from step {onset} on, before the global norm: {message}",
        remedies=(
            Remedy("lower LR for that layer; embedding and output layer at 0.5 to 0.7 of the middle ones", "S17"),
            Remedy("shrink the embedding gradient to a tenth if it is the embedding", "GLM-130B, arXiv 2210.02414"),
        ),
    ),
    # -- quiet growth ------------------------------------------------------------------------------------------------
    Symptom(
        id="logits_grow",
        rows=("S18", "S8", "S12"),
        symptom="The peak logit grows while the loss looks normal",
        cause="optimizer",
        detail="attention or output logits run away; the loss follows later",
        confidence=0.65,
        needs=(Sign(("logit_max",), before=("loss",)),),
        stronger=((_GRADIENT, 0.1),),
        evidence="{signal}/{statistic} from step {onset} on, before the loss: {message}",
        remedies=(
            Remedy("z-loss of 1e-4 log^2 Z on the output logits", "PaLM, arXiv 2204.02311"),
            Remedy("normalise query and key (QK-norm)", "arXiv 2309.14322"),
            Remedy("QK-clip at 100 per head", "Kimi K2, arXiv 2507.20534"),
            Remedy("LR to 30 % from a checkpoint before the onset", "S13"),
        ),
    ),
    Symptom(
        id="attention_entropy_jump",
        rows=("S18", "S9"),
        symptom="The attention entropy jumps or falls away",
        cause="optimizer",
        detail="heads degenerate: all weight on one token, or none anywhere",
        confidence=0.6,
        needs=(Sign(("attention_entropy", "attention_entropy/*")),),
        stronger=((Sign(("logit_max",)), 0.1),),
        evidence="{signal}/{statistic} from step {onset} on: {message}",
        remedies=(
            Remedy("reset the degenerated heads (re-initialise their query and key projections)", "S18"),
            Remedy("lower that layer's LR", "S18"),
            Remedy("normalise query and key, or sigma-reparametrise them", "arXiv 2303.06296"),
            Remedy("sample text: repetition says that the model is already collapsing", "S1"),
        ),
    ),
    Symptom(
        id="silent_collapse",
        rows=("S1", "S9", "T10"),
        symptom="The loss looks fine while entropy, repetition or evaluation say otherwise",
        cause="optimizer",
        detail="silent collapse: the output degenerates",
        confidence=0.6,
        needs=(Sign(("attention_entropy", "attention_entropy/*", "entropy", "repetition"), ("collapse",)),),
        stronger=((Sign(("eval_loss",), ("collapse",)), 0.1),),
        evidence="{signal}/{statistic} from step {onset} on: {message}",
        remedies=(
            Remedy("stop, and compare samples of the last checkpoints", "S1"),
            Remedy("roll back to the best checkpoint by evaluation, not by training loss", "T10"),
            Remedy("check the data for repeated text", "S20"),
        ),
    ),
    # -- ranks and wire ----------------------------------------------------------------------------------------------
    Symptom(
        id="single_spike_on_a_rank",
        rows=("S18", "S19", "C2"),
        symptom="One rank's gradient norm spikes at a single point, the loss does not",
        cause="communication",
        detail="a slow or faulty gradient synchronisation on that rank's node",
        confidence=0.6,
        needs=(Sign(("grad_norm", "local_grad_norm", "reduced_sq_share"), ranks="some"),),
        unless=(_LOSS, "spiked", "diverged"),
        evidence="{signal} of {ranks} at step {step}: {message}",
        remedies=(
            _LINKS,
            Remedy("re-run the micro-step there and on a peer: a difference is the machine, none is the wire"),
            Remedy("exclude the host if it comes back"),
        ),
    ),
    Symptom(
        id="single_gradient_spike",
        rows=("S19",),
        symptom="The gradient norm spikes at a single point, the loss does not; no rank is named",
        cause="unknown",
        detail="one odd batch, or the wire: the log alone cannot tell",
        confidence=0.35,
        needs=(Sign(("grad_norm",), _POINT, ranks="none"),),
        unless=(
            _LOSS,
            Sign(("grad_norm",), _DRIFT),
            Sign(("*",), ("nonfinite",)),
            "spiked",
            "diverged",
            "not_finite",
        ),
        evidence="{signal} at step {step}: {message}",
        remedies=(
            Remedy(
                "record the gradient norm per rank before the reduction: it names the rank, or clears the wire", "S19"
            ),
            Remedy("look at that batch: extreme lengths, odd text", "T8"),
            Remedy("clip at max_norm 1.0 if it is not clipped", "T8"),
        ),
    ),
    Symptom(
        id="reduction_fails",
        rows=("C2", "S19"),
        symptom="What ranks received is not what was sent",
        cause="communication",
        detail="the gradient was damaged, lost or left over between sending and receiving: the link, or a race in the program",
        confidence=0.8,
        needs=(Sign(("reduction",), ("check",)),),
        stronger=((Sign(("reduced_sq_share", "grad_norm"), ("nonfinite",)), 0.05),),
        evidence="step {step}, {ranks}: {message}",
        remedies=(
            _LINKS,
            Remedy(
                "train a stretch without overlap of communication and backward, or with larger buckets: if it is gone, it is "
                "a race, not the link",
                "DeepSpeed#5242",
            ),
            Remedy("keep the batch: it is not to blame"),
            Remedy("exclude the host if it comes back"),
        ),
    ),
    Symptom(
        id="replicas_differ",
        rows=("S18", "C2"),
        symptom="Parameters or optimizer state differ between replicas",
        cause="communication",
        detail="a reduction was lost on the step that mattered, or the memory of a rank was damaged",
        confidence=0.55,
        needs=(Sign(("digest_parameters", "digest_optimizer", "digest_buffers"), ("replica",)),),
        stronger=((Sign(("reduction",), ("check",)), 0.2),),
        evidence="step {step}, {ranks}: {message}",
        remedies=(
            Remedy("go back to the newest checkpoint at which they were alike; later ones are damaged"),
            Remedy("check that the last micro-step of a window is the one that synchronises", "FunASR#3472"),
            Remedy("check for forward passes around the wrapper, and for parameters that some ranks do not use"),
            Remedy("where reductions hold: memory test and ECC counters on the host of the rank that differs"),
        ),
    ),
    Symptom(
        id="slow_wire",
        rows=("S19",),
        symptom="All ranks wait in the reduction for longer than usual",
        cause="communication",
        detail="a slow link, or a reduction that no longer overlaps with the backward pass",
        confidence=0.55,
        needs=(Sign(("collective_s",), ("time",)),),
        unless=(Sign(("compute_s",), ("time",)),),
        evidence="from step {onset} on: {message}",
        remedies=(Remedy("probe the links in pairs (`resilient probe`): it names the slow one"), _LINKS),
    ),
    Symptom(
        id="straggler",
        rows=("S19", "C2"),
        symptom="One rank computes for longer than the others, which wait for it",
        cause="compute",
        detail="a slow machine (clock, heat, a neighbour on the host), or more work than the others have",
        confidence=0.55,
        needs=(Sign(("compute_s",), ("time",)),),
        unless=(Sign(("longest", "padding", "tokens")),),
        evidence="{ranks}, from step {onset} on: {message}",
        remedies=(
            Remedy("compare tokens and longest sequence of that rank with the others'", "T8"),
            Remedy("clock, temperature and processes on its host; the matmul self-test of `resilient probe`"),
            Remedy("exclude the host if it stays slow"),
        ),
    ),
    Symptom(
        id="multi_node_loss_jump",
        rows=("S18", "S16"),
        symptom="The loss jumps on some ranks only",
        cause="communication",
        detail="communication, or seeds and data split that differ between ranks",
        confidence=0.55,
        needs=(Sign(("loss", "loss_max"), ranks="some"),),
        unless=(Sign(("digest_sampler", "digest_batch"), ("batch",)),),
        stronger=((Sign(("reduction",), ("check",)), 0.2), (Sign(("digest_parameters",), ("replica",)), 0.1)),
        evidence="{signal} of {ranks} at step {step}: {message}",
        remedies=(
            Remedy("compare parameter digests across replicas: replicas that differ mean a lost or damaged reduction"),
            Remedy(
                "compare seeds, sampler epoch and shard of every rank: two ranks on one shard, or one without data",
                "T1",
            ),
            _LINKS,
            Remedy("restore model, optimizer and random state of all ranks from one checkpoint", "S16"),
        ),
    ),
    # -- precision ---------------------------------------------------------------------------------------------------
    Symptom(
        id="loss_scale_falls",
        rows=("S4", "S18"),
        symptom="The fp16 loss scale falls several times in a row",
        cause="precision",
        detail="gradients or activations grow out of fp16's range, even while the loss looks fine",
        confidence=0.65,
        either=(Sign(("loss_scale",)), "scale_fell"),
        stronger=(("diverged", 0.1), ("not_finite", 0.15), (_GRADIENT, 0.05)),
        remedies=(
            _BF16,
            Remedy(
                "go back to before the loss-scale trend turned, not to before the loss spike", "BigScience 104B notes"
            ),
            Remedy("keep softmax, norms and the output layer in fp32"),
            Remedy(
                "a scale at 1 with overflows on every step never recovers: no step is applied any more; stop the run",
                "DeepSpeed: min_loss_scale 1",
            ),
        ),
    ),
    # -- data --------------------------------------------------------------------------------------------------------
    Symptom(
        id="shuffle_mismatch",
        rows=("S18", "T5"),
        symptom="Ranks shuffle or divide the data in different ways",
        cause="data",
        detail="seed, epoch or split of the sampler differ between ranks: samples are seen twice or never",
        confidence=0.8,
        needs=(Sign(("digest_sampler",), ("batch",)),),
        stronger=((Sign(("loss", "loss_max"), ranks="some"), 0.05),),
        evidence="step {step}, {ranks}: {message}",
        remedies=(
            Remedy(
                "one seed and one epoch number for the sampler on all ranks; call `set_epoch` on each of them", "S18"
            ),
            Remedy("compare the number of shares and the own share of each rank's sampler with world size and rank"),
        ),
    ),
    Symptom(
        id="fed_alike",
        rows=("S18", "T5"),
        symptom="Two ranks are fed the same samples",
        cause="data",
        detail="a loader without a distributed sampler, or two ranks on one shard: the batch is smaller than it seems",
        confidence=0.8,
        needs=(Sign(("digest_batch",), ("batch",)),),
        evidence="step {step}: {message}",
        remedies=(
            Remedy("give each rank its own share (`DistributedSampler` with rank and world size)", "S18"),
            Remedy("look at restored loader positions: each rank needs its own", "prime-rl#1035"),
        ),
    ),
    Symptom(
        id="random_streams",
        rows=("S18",),
        symptom="Random streams are equal where they must differ, or differ where they must be equal",
        cause="data",
        detail="seeds, or a restore that gave ranks another rank's random state: nothing in the machines is broken",
        confidence=0.7,
        needs=(Sign(("digest_rng_own", "digest_rng_shared"), ("replica",)),),
        evidence="step {step}, {ranks}: {message}",
        remedies=(
            Remedy("seed each rank with seed + rank for dropout; one seed for what must be common"),
            Remedy("check that a checkpoint keeps the random state of every rank, not of one", "Megatron-LM#6858"),
        ),
    ),
    Symptom(
        id="data_window",
        rows=("S5", "S18"),
        symptom="The loss is off over a window of batches, gradient and update follow but do not lead",
        cause="data",
        detail="a subset that was suddenly mixed in, or a dirty shard, rather than one odd batch",
        confidence=0.5,
        needs=(
            Sign(("loss", "loss_max"), (*_POINT, "level", "drift"), before=("grad_norm", "update_norm", "logit_max")),
        ),
        either=("spiked", "level_shift"),
        unless=("restarted", "reinitialised", "warming_up", Sign(("loss",), ranks="some")),
        evidence="{signal}/{statistic} from step {onset} on, before gradient norm: {message}",
        remedies=(
            Remedy("map the steps from onset to alarm to their files, and read some of them", "S20"),
            Remedy("skip that window on the way forward: 200 to 500 batches", "PaLM, arXiv 2204.02311 section 5.1"),
            Remedy("warm a new mix in over 2000 steps, with LR re-warm", "GLM-130B, arXiv 2210.02414"),
        ),
    ),
    Symptom(
        id="lr_cut_helped_briefly",
        rows=("S20", "S18"),
        symptom="An LR cut helped only for a short while",
        cause="data",
        detail="the LR is not the cause: the same data, or the weights they damaged, bring it back",
        confidence=0.6,
        needs=("lr_cut_brief",),
        remedies=(
            Remedy("check the data before cutting again: repeated text, a dirty subset", "S20"),
            Remedy("go back to before the first onset, and skip the window", "S13"),
            Remedy("a lower LR only delays it", "BigScience 104B notes"),
        ),
    ),
    Symptom(
        id="extreme_lengths",
        rows=("T8", "T2"),
        symptom="Longest sequence, padding or token count are off",
        cause="data",
        detail="extreme lengths, or batches that are mostly padding",
        confidence=0.5,
        needs=(Sign(("longest", "padding", "tokens")),),
        stronger=((_GRADIENT, 0.1), (_LOSS, 0.1)),
        evidence="{signal}/{statistic} from step {onset} on: {message}",
        remedies=(
            Remedy("cut sequences at the model's length and bucket them by length", "T8"),
            Remedy("weight the loss by tokens, not by sequences", "T2"),
            Remedy("reject samples that are empty, all padding or fully masked", "T7"),
        ),
    ),
    Symptom(
        id="level_shift",
        rows=("S5", "T10"),
        symptom="The loss moved to a new level and stays there calmly",
        cause="data",
        detail="another data mix, batch size or averaging: usually not a fault",
        confidence=0.45,
        needs=("level_shift",),
        remedies=(
            Remedy("check what changed at that step: data mix, batch size, how the loss is averaged", "T10"),
            Remedy("compare evaluation before and after: it must not have moved with it", "T10"),
        ),
    ),
    Symptom(
        id="overfitting",
        rows=("T10", "S1"),
        symptom="The evaluation loss rises while the training loss falls",
        cause="data",
        detail="overfitting: the data are seen too often",
        confidence=0.7,
        either=("eval_rises", Sign(("eval_loss",), ("collapse",))),
        stronger=(("staircase", 0.1),),
        remedies=(
            Remedy("stop early; use the checkpoint with the best evaluation", "T10"),
            Remedy("fewer epochs, more data, more dropout or weight decay", "T10"),
            Remedy("check that the evaluation itself did not change (data, prompt, dtype)", "T10"),
        ),
    ),
    Symptom(
        id="epoch_staircase",
        rows=("T10",),
        symptom="The loss falls in steps at equal distances",
        cause="data",
        detail="memorisation at epoch boundaries: not a fault by itself",
        confidence=0.6,
        needs=("staircase",),
        remedies=(Remedy("watch the evaluation loss; one to three epochs are usual in fine-tuning", "T10"),),
    ),
    # -- learning rate, batch, optimizer -----------------------------------------------------------------------------
    Symptom(
        id="lr_too_high",
        rows=("T5", "S14"),
        symptom="It blows up during warm-up or right after the LR rose",
        cause="optimizer",
        detail="LR too high or warm-up too short",
        confidence=0.65,
        either=("warming_up", "lr_rose"),
        unless=("restarted",),
        stronger=(("diverged", 0.1), ("spiked", 0.05), ("not_finite", 0.1)),
        remedies=(
            Remedy("halve the LR and double the warm-up", "T11"),
            Remedy(
                "a warm-up of at least 2 / (1 - beta2) steps: 2000 for beta2 0.999, 40 for 0.95", "arXiv 1910.04209"
            ),
            _BETA2,
        ),
    ),
    Symptom(
        id="early_blow_up",
        rows=("T5",),
        symptom="It blows up in the first tenth of the run",
        cause="optimizer",
        detail="LR, warm-up or initialisation",
        confidence=0.5,
        needs=("early",),
        either=("spiked", "diverged"),
        unless=("restarted", "warming_up", "lr_rose"),
        remedies=(
            Remedy("halve the LR and double the warm-up", "T11"),
            Remedy("smaller initialisation: standard deviation sqrt(1 / (3 d)) for width d", "BLOOM training notes"),
            Remedy("clip at max_norm 1.0 from the first step", "T8"),
        ),
    ),
    Symptom(
        id="batch_and_lr",
        rows=("T5",),
        symptom="It blows up early: does the LR fit the batch?",
        cause="optimizer",
        detail="global batch = micro batch x accumulation x ranks, and the LR that it calls for",
        confidence=0.35,
        either=("warming_up", "early"),
        unless=("restarted",),
        remedies=(
            Remedy("compute the global batch and compare with a run that worked", "T5"),
            Remedy("scale the LR with the square root of the batch for Adam", "arXiv 2205.10782"),
            Remedy("scale it linearly, with warm-up, for SGD", "arXiv 1706.02677"),
        ),
    ),
    Symptom(
        id="optimizer_constants",
        rows=("T5", "S14"),
        symptom="Spikes in the middle of the run with gradients that widen first",
        cause="optimizer",
        detail="eps, betas or weight decay",
        confidence=0.35,
        needs=(Sign(("grad_norm", "update_norm"), ("drift", "trend", "scale")),),
        either=("spiked", "diverged"),
        unless=("early", "warming_up", "restarted"),
        remedies=(
            _BETA2,
            Remedy("eps 1e-6 rather than 1e-8 with low precision and small gradients", "RoBERTa, arXiv 1907.11692"),
            Remedy("no weight decay on norms, biases and embeddings"),
        ),
    ),
    Symptom(
        id="every_step_clips",
        rows=("T8",),
        symptom="Nearly every step is clipped",
        cause="optimizer",
        detail="the clip sets the step size, not the LR; a real explosion would not be seen by it",
        confidence=0.3,
        needs=("clips_always",),
        remedies=(
            Remedy("set the clip to about twice the median gradient norm, or lower the LR instead", "T8"),
            Remedy("log the norm before clipping", "T8"),
            Remedy("check that the gradients are averaged over micro-steps, not summed", "T5"),
        ),
    ),
    Symptom(
        id="never_learned",
        rows=("T5", "S1"),
        symptom="The loss never falls below where it began, or sits on a plateau from the start",
        cause="optimizer",
        detail="LR far too high or too low, labels or mask wrong, or gradients that do not reach the weights",
        confidence=0.5,
        needs=("never_learned",),
        remedies=(
            Remedy("decode one sample: labels, mask, and the shift by one", "T5"),
            Remedy("train 100 steps on one fixed batch: the loss must go to almost nothing", "T11"),
            Remedy("halve the LR and double the warm-up; then try it ten times lower", "T11"),
            Remedy("check that steps are applied at all (overflow on every step, frozen parameters)", "S4"),
        ),
    ),
    # -- restarts and loggers ----------------------------------------------------------------------------------------
    Symptom(
        id="resume_mismatch",
        rows=("T9", "T8"),
        symptom="The loss or gradient jumps right at a restart",
        cause="optimizer",
        detail="optimizer, scheduler, scaler or data position were not restored",
        confidence=0.65,
        needs=("restarted",),
        either=(_ANY, "spiked", "diverged", "level_shift"),
        remedies=(
            Remedy("compare step, LR, betas, moments and scaler with those in the checkpoint", "T9"),
            Remedy("replay one batch before and after: the losses must agree to rounding", "T9"),
            _REWARM,
        ),
    ),
    Symptom(
        id="reinitialised",
        rows=("T9",),
        symptom="The loss jumps to where it stood at the very beginning",
        cause="unknown",
        detail="the weights were initialised again: a restart without its checkpoint, or one by design",
        confidence=0.55,
        needs=("reinitialised",),
        remedies=(
            Remedy("check the resume path: what was loaded, and whether a missing checkpoint is an error", "T9"),
            Remedy("nothing to do if a new trial begins there by design"),
        ),
    ),
    Symptom(
        id="broken_logger",
        rows=("T2",),
        symptom="A signal has one and the same value on every row",
        cause="unknown",
        detail="a placeholder or a broken logger: that signal was not measured",
        confidence=0.8,
        needs=("constant",),
        remedies=(
            Remedy("check the logging callback against the training loop's own print", "T2"),
            Remedy("look at another log of the same run before judging it"),
        ),
    ),
)
