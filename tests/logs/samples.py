"""Logs in the form that training programs write them, made up here: name -> (lines, training rows, evaluation rows).

Training rows: (step, {signal: value}) of the signals that must be there with that value; evaluation rows likewise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

Expected = list[tuple[int, dict[str, float]]]
Sample = tuple[list[str], Expected, Expected]

N = 12
NAN = math.nan


def loss(i: int) -> float:
    return round(10.5 - 0.3 * i + 0.01 * (i * 7 % 5), 4)


def norm(i: int) -> float:
    return round(2.0 - 0.05 * i + 0.01 * (i * 3 % 7), 3)


def lr(i: int) -> float:
    return round(1e-4 * (i + 1), 6)


def three(steps: list[int], scale: Callable[[int], int] = lambda i: i) -> Expected:
    return [(step, {"loss": loss(i), "grad_norm": norm(i), "lr": lr(i)}) for i, step in enumerate(steps)]


STEPS = list(range(1, N + 1))
TENS = [10 * s for s in STEPS]


def megatron() -> Sample:
    lines = [
        "using world size: 8, data-parallel-size: 8",
        "    train_iters ..................................... 1000",
        "training ...",
    ]
    for i, s in enumerate(TENS):
        lines.append(
            f" [2024-05-01 10:00:0{i % 10}] iteration {s:8d}/    1000 | consumed samples: {s * 4:12d} | elapsed time per iteration (ms): "
            f"3171.3 | learning rate: {lr(i):.6E} | global batch size:     4 | lm loss: {loss(i):.6E} | loss scale: 65536.0 | "
            f"grad norm: {norm(i):.3f} | num zeros: 0.0 | params norm: 512.250 | number of skipped iterations:   0 | "
            "number of nan iterations:   0 |"
        )
        lines.append("time (ms) | forward-compute: 265.42 | backward-compute: 462.83 | optimizer: 82.95")
        if i == 5:
            lines += [
                "-" * 80,
                f" validation loss at iteration {s} | lm loss value: 8.095942E+00 | lm loss PPL: 3.281128E+03 | ",
                "-" * 80,
            ]
    rows = three(TENS)
    for _, values in rows:
        values |= {"loss_scale": 65536.0, "weight_norm": 512.25, "time_s": 3.1713}
    return lines, rows, [(60, {"eval_loss": 8.095942})]


def gpt_neox() -> Sample:
    lines = [
        f"10.0.0.1:  samples/sec: 51.201 | iteration {s:8d}/  320000 | elapsed time per iteration (ms): 5000.1 | learning rate: "
        f"{lr(i):.3E} | approx flops per GPU: 41.2TFLOPS | lm_loss: {loss(i):.6E} | loss scale: 4096.0 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |"
        for i, s in enumerate(TENS)
    ]
    return lines, [(s, {"loss": loss(i), "lr": lr(i), "loss_scale": 4096.0}) for i, s in enumerate(TENS)], []


def hf_console() -> Sample:
    lines = [
        "[INFO|trainer.py:2409] ***** Running training *****",
        "  Num examples = 1,000",
        "  0%|          | 0/120 [00:00<?, ?it/s]",
    ]
    for i in range(N):
        lines.append(f"{{'loss': {loss(i)}, 'grad_norm': {norm(i)}, 'learning_rate': {lr(i)}, 'epoch': {0.1 * i:.2f}}}")
    lines.append("{'eval_loss': 7.25, 'eval_runtime': 3.1, 'eval_samples_per_second': 32.0, 'epoch': 1.0}")
    lines.append("{'train_runtime': 46.4, 'train_samples_per_second': 0.4, 'train_loss': 3.3, 'epoch': 1.0}")
    return lines, three(STEPS), [(N, {"eval_loss": 7.25})]


def hf_console_strings() -> Sample:
    lines = []
    for i, s in enumerate(TENS):
        lines.append(f"  {s}%|█▏        | {s}/120 [00:{s // 3:02d}<02:00,  2.1it/s]")
        lines.append(
            f"                                                 \r{{'loss': '{loss(i)}', 'grad_norm': '{norm(i)}', 'learning_rate': '{lr(i)}', 'epoch': '0.1'}}"
        )
    return lines, three(TENS), []


def swift_console() -> Sample:
    lines = [
        f"Train:   2%|▏         | {s}/120 [00:55<54:36, 55.53s/it]{{'loss': {loss(i)}, 'grad_norm': {norm(i)}, 'learning_rate': {lr(i)}, "
        f"'token_acc': 0.85, 'epoch': 0.08, 'global_step/max_steps': '{s}/120', 'elapsed_time': '56s', 'memory(GiB)': 14.34}}"
        for i, s in enumerate(TENS)
    ]
    return lines, three(TENS), []


def nanogpt() -> Sample:
    lines = ["tokens per iteration will be: 491,520", "step 0: train loss 10.9, val loss 10.8"]
    for i, s in enumerate(TENS):
        if i == 6:
            lines += [f"step {s}: train loss 8.5, val loss 8.6", "saving checkpoint to out"]
        lines.append(f"iter {s}: loss {loss(i):.4f}, time 49.33ms, mfu 7.83%")
    return (
        lines,
        [(s, {"loss": loss(i), "time_s": 0.04933}) for i, s in enumerate(TENS)],
        [(0, {"eval_loss": 10.8}), (70, {"eval_loss": 8.6})],
    )


def evaluations_only() -> Sample:
    lines = ["10.788929 M parameters"] + [
        f"step {s}: train loss {loss(i):.4f}, val loss {loss(i) + 0.5:.4f}" for i, s in enumerate(TENS)
    ]
    return (
        lines,
        [(s, {"loss": loss(i)}) for i, s in enumerate(TENS)],
        [(s, {"eval_loss": round(loss(i) + 0.5, 4)}) for i, s in enumerate(TENS)],
    )


def llmc() -> Sample:
    lines = ["s:0 tel:11.0092"]
    for i, s in enumerate(range(N)):
        lines.append(f"s:{s} trl:{loss(i):.4f} lr:{lr(i):.6f} norm:{norm(i):.2f}")
    lines += ["s:11 tel:6.1710", "s:11 eval:0.2446"]
    rows = [(i, {"loss": loss(i), "lr": lr(i), "grad_norm": round(float(f"{norm(i):.2f}"), 2)}) for i in range(N)]
    return lines, rows, [(0, {"eval_loss": 11.0092}), (11, {"eval_loss": 6.171})]


def llmc_console() -> Sample:
    lines = ["| parameter             | value |", "val loss 11.009"]
    for i, s in enumerate(STEPS):
        lines.append(
            f"step {s:4d}/19560 | loss {loss(i):.6f} (+nanz)| norm {norm(i):.4f} (+1.25z)| lr {lr(i):.2e} | 3230.72 ms | 43.1% bf16 MFU | 162285 tok/s"
        )
    return lines, three(STEPS), []


def modded() -> Sample:
    code = [
        "import os", "with open(sys.argv[0]) as f:", "    code = f.read()", "class Hyperparameters:", "    learning_rate = 0.0036 # step 1 loss 3.0",
        "    val_loss_every = 125", "for step in range(args.num_iterations + 1):", "    last_step = (step == 3)", "    val_loss = 0.0",
        '    print0(f"step:{step}/{args.num_iterations} val_loss:{val_loss:.4f} train_time:{t:.0f}ms")', "=" * 100,
        "Running python 3.12.7", "Running pytorch 2.6.0+cu124", "| 0  NVIDIA H100   On  | 00000000:61:00.0 Off |  0 |",
    ]  # fmt: skip
    lines = (
        code + [f"    x{i} = {i}" for i in range(60)] + ["step:0/9536 val_loss:10.8258 train_time:240ms step_avg:nanms"]
    )
    for i, s in enumerate(STEPS):
        lines.append(f"step:{s}/9536 train_loss:{loss(i):.4f} train_time:{s * 140}ms step_avg:140.11ms")
    return lines, [(s, {"loss": loss(i)}) for i, s in enumerate(STEPS)], [(0, {"eval_loss": 10.8258})]


def modded_validation_only() -> Sample:
    lines = []
    for i, s in enumerate(TENS):
        lines += [
            f"step:{s - 5}/120 train_time:{s}ms step_avg:35.30ms",
            f"step:{s}/120 val_loss:{loss(i):.4f} train_time:{s}ms step_avg:35.30ms",
        ]
    return lines, [], [(s, {"eval_loss": loss(i)}) for i, s in enumerate(TENS)]


def build_nanogpt() -> Sample:
    lines = ["0 val 10.9504", "0 hella 0.2463"] + [f"{i} train {loss(i):.6f}" for i in range(N)] + ["11 val 6.5"]
    return (
        lines,
        [(i, {"loss": loss(i)}) for i in range(N)],
        [(0, {"eval_loss": 10.9504}), (0, {"eval_hellaswag": 0.2463}), (11, {"eval_loss": 6.5})],
    )


def fairseq() -> Sample:
    lines = ["[2022-07-30 10:49:31,688][fairseq_cli.train][INFO] - model: RobertaModel"]
    for i, s in enumerate(TENS):
        record = {
            "epoch": 1,
            "update": 0.004,
            "loss": str(loss(i)),
            "ppl": "34584.6",
            "wps": "389279",
            "num_updates": str(s),
            "lr": str(lr(i)),
            "gnorm": str(norm(i)),
            "loss_scale": "64",
            "wall": "96",
        }
        lines.append(f"[2022-07-30 10:51:28,021][train_inner][INFO] - {json.dumps(record)}")
        if i == 3:
            lines.append(
                "[2022-07-30 10:50:48,574][fairseq.trainer][INFO] - NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 64.0"
            )
    lines.append(
        '[2022-07-30 14:58:59,622][valid][INFO] - {"epoch": 1, "valid_loss": "2.699", "valid_ppl": "6.49", "valid_num_updates": "120"}'
    )
    lines.append(
        '[2022-07-30 14:58:59,700][train][INFO] - {"epoch": 1, "train_loss": "9.1", "train_num_updates": "120", "train_gnorm": "1.2"}'
    )
    return lines, three(TENS), [(120, {"eval_loss": 2.699})]


def fairseq_simple() -> Sample:
    lines = [
        f"2020-08-06 15:53:57 | INFO | train_inner | epoch 001:     {s} / 390 loss={loss(i)}, nll_loss=15.1, ppl=34584.6, wps=389279, ups=3.3, "
        f"wpb=118059, bsz=256, num_updates={s}, lr={lr(i)}, gnorm={norm(i)}, clip=0, train_wall=64, wall=96"
        for i, s in enumerate(TENS)
    ]
    lines.append(
        "2020-08-06 15:59:57 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 9.1 | ppl 512.1 | wps 1000 | num_updates 120"
    )
    lines.append(
        "2020-08-06 15:59:59 | INFO | train | epoch 001 | loss 9.7 | ppl 512.1 | wps 1000 | num_updates 120 | gnorm 1.0"
    )
    return lines, three(TENS), [(120, {"eval_loss": 9.1})]


def torchtitan() -> Sample:
    lines = ["[rank0]:2025-02-25 12:00:00,101 - root - INFO - Starting job: Llama 3 8B training"]
    for i, s in enumerate(TENS):
        lines.append(
            f"[rank0]:[titan] 2025-02-25 12:00:01,123 - root - INFO - \x1b[31mstep: {s:2}  \x1b[32mloss: {loss(i):7.4f}  \x1b[38;2;180;60;0m"
            f"grad_norm: {norm(i):7.4f}  \x1b[33mmemory: 20.63GiB(21.73%)  \x1b[34mtps: 1,234  \x1b[36mtflops: 71.25  \x1b[35mmfu: 22.80%\x1b[39m"
        )
    lines.append(
        "[rank0]:[titan] 2025-02-25 12:10:01,123 - root - INFO - \x1b[36mvalidate step: 120  \x1b[32mloss: 7.1000  \x1b[33mmemory: 20.63GiB(21.73%)  \x1b[34mtps: 1,234\x1b[39m"
    )
    return (
        lines,
        [(s, {"loss": loss(i), "grad_norm": norm(i)}) for i, s in enumerate(TENS)],
        [(120, {"eval_loss": 7.1})],
    )


def olmo() -> Sample:
    lines = []
    for i, s in enumerate(STEPS):
        lines += [
            f"[2024-04-17 09:42:26] INFO     [olmo.train:816, rank=0] [step={s}/739328,epoch=0]",
            f"    optim/total_grad_norm={norm(i)}", f"    train/CrossEntropyLoss={loss(i)}", "    train/Perplexity=76,631",
            "    throughput/total_tokens=4,194,304", "    System/Peak GPU Memory (MB)=42,133",
        ]  # fmt: skip
    return lines, [(s, {"loss": loss(i), "grad_norm": norm(i)}) for i, s in enumerate(STEPS)], []


def olmo_core() -> Sample:
    lines = []
    for i, s in enumerate(TENS):
        lines += [
            f"2026-08-08 12:01:00\thost\tINFO\t[olmo_core.train.callbacks.console_logger:68]\t[step={s}/2000,epoch=0,eta=5h11m]",
            f"    optim/LR (group 0)={lr(i)}", f"    optim/total grad norm={norm(i)}", f"    train/CE loss={loss(i)}",
            "    throughput/total tokens=1.2B", "    train/PPL=511.9", "2026-08-08 12:03:10 INFO [olmo_core.train.trainer:1003] Saving checkpoint",
        ]  # fmt: skip
    return lines, three(TENS), []


def composer() -> Sample:
    lines = []
    for i, s in enumerate(STEPS):
        lines += [
            f"[batch={s}/1000]:",
            f"\t Train time/batch: {s - 1}",
            f"\t Train loss/train/total: {loss(i)}",
            f"\t Train l2_norm/grad/global: {norm(i)}",
            f"\t Train lr-DecoupledAdamW/group0: {lr(i)}",
        ]
    return lines, three(STEPS), []


def nanotron() -> Sample:
    lines = [
        f"05/01/2024 10:00:00 [INFO|DP=0|PP=0|TP=0|ip-26-0]: iteration: {s} / 1000 | consumed_tokens: 1.05M | elapsed_time_per_iteration_ms: 1.2K | "
        f"tokens_per_sec: 300K | tokens_per_sec_per_gpu: 18.7K | global_batch_size: 1.02K | lm_loss: {loss(i)} | lr: {lr(i)} | "
        f"model_tflops_per_gpu: 40 | grad_norm: {norm(i)}"
        for i, s in enumerate(STEPS)
    ]
    return lines, three(STEPS), []


def litgpt() -> Sample:
    lines = [
        f"Epoch 1 | iter {s} step {s // 4 + 1} | loss train: {loss(i):.3f}, val: n/a | iter time: 300.20 ms (step) remaining time: 1 day, 2:03:04"
        for i, s in enumerate(STEPS)
    ]
    return lines, [], []


def maxtext() -> Sample:
    lines = [
        f"I0501 12:00:00.123456 140 max_logging.py:50] completed step: {s}, seconds: 1.230, TFLOP/s/device: 101.2, Tokens/s/device: 4000.1, total_weights: 8192, loss: {loss(i)}"
        for i, s in enumerate(STEPS)
    ]
    lines.append("eval metrics after step: 12, loss=7.345, total_weights=65536.0")
    return lines, [(s, {"loss": loss(i)}) for i, s in enumerate(STEPS)], [(12, {"eval_loss": 7.345})]


def levanter() -> Sample:
    lines = [
        f"2024-05-01T12:00:00 - 0 - levanter.tracker - INFO :: Progress on:train {s}.0it/1.00kit rate:1.2it/s remaining:10:00 elapsed:05:00 postfix:loss={loss(i)}"
        for i, s in enumerate(TENS)
    ]
    return lines, [(s, {"loss": loss(i)}) for i, s in enumerate(TENS)], []


def tqdm() -> Sample:
    text = "".join(
        f"\rtrain:  {s}%|█▏    | {s}/100 [00:{s:02d}<01:30,  1.1it/s, loss={loss(i)}]" for i, s in enumerate(STEPS)
    )
    return [text], [(s, {"loss": loss(i)}) for i, s in enumerate(STEPS)], []


def verl() -> Sample:
    lines = [
        f"\x1b[36m(TaskRunner pid=123)\x1b[0m step:{s} - global_seqlen/min:100 - actor/entropy:0.31 - actor/pg_loss:np.float64({loss(i)}) - "
        f"actor/grad_norm:{norm(i)} - actor/lr:{lr(i)} - critic/score/mean:0.5 - timing_s/step:12.1"
        for i, s in enumerate(STEPS)
    ]
    return lines, three(STEPS), []


def mmengine() -> Sample:
    lines = []
    for epoch in (1, 2):
        for i in range(N // 2):
            at = (epoch - 1) * N // 2 + i
            lines.append(
                f"2023/01/01 12:00:00 - mmengine - INFO - Epoch(train)  [{epoch}][ {10 * (i + 1)}/60]  lr: {lr(at):.4e}  eta: 1:00:00  time: 0.3  data_time: 0.1  memory: 1000  grad_norm: {norm(at)}  loss: {loss(at)}  loss_cls: 1.2"
            )
    return lines, three(TENS), []


def torch_examples() -> Sample:
    lines = []
    for epoch in (0, 1):
        for i in range(N // 2):
            at = epoch * N // 2 + i
            lines.append(
                f"Epoch: [{epoch}][ {10 * i}/60]\tTime  0.321 (  1.234)\tData  0.001\tLoss {loss(at):.4e} (7.0101e+00)\tAcc@1   0.00 (  0.10)"
            )
    return lines, [(10 * i, {"loss": loss(i)}) for i in range(N)], []


def course() -> Sample:
    lines = [f"Epoch [{1 + i // 6}/2], Step [{10 * (i % 6 + 1)}/60], Loss: {loss(i):.4f}" for i in range(N)]
    return lines, [(s, {"loss": loss(i)}) for i, s in enumerate(TENS)], []


def pipes() -> Sample:
    lines = ["Using device: cuda", "Compiling model..."] + [
        f"Iter {s:5d}/5000 | Loss: {loss(i):.4f} | Time: 12.5s | Speed: 6553600 tok/s" for i, s in enumerate(TENS)
    ]
    lines += ["[VRAM LOG] Iter 5000: Device cuda | Allocated: 25.3438 GB", "Training Complete.", "Final loss: 3.1"]
    return lines, [(s, {"loss": loss(i)}) for i, s in enumerate(TENS)], []


def equals() -> Sample:
    lines = [
        f"2024-01-01 10:00:00 INFO step={s} loss={loss(i)} grad_norm={norm(i)} lr={lr(i)} logit_max=12.5 attention_entropy=3.25"
        for i, s in enumerate(STEPS)
    ]
    rows = three(STEPS)
    for _, values in rows:
        values |= {"logit_max": 12.5, "attention_entropy": 3.25}
    return lines, rows, []


def deepspeed() -> Sample:
    lines = []
    for i, s in enumerate(TENS):
        lines += [
            f"[2024-05-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={s}, skipped=0, lr=[{lr(i)}, {lr(i)}], mom=[(0.9, 0.95)]",
            "[2024-05-01 10:00:00,124] [INFO] [timer.py:199:stop] epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=51.2, MemAllocated=1.2GB",
            f"steps: {s} loss: {loss(i):.4f} iter time (s): 1.250 samples/sec: 51.200",
        ]
    return lines, [(s, {"loss": loss(i), "lr": lr(i)}) for i, s in enumerate(TENS)], []


def ranks() -> Sample:
    lines = []
    for i, s in enumerate(STEPS):
        lines += [
            f"{r}: step {s} | loss {loss(i) + (0.5 if r != 2 else 0):.4f} | norm {norm(i)} | lr {lr(i)}"
            for r in (2, 0, 1, 3)
        ]
    return lines, three(STEPS), []


def ranks_unmarked() -> Sample:
    lines = []
    for i, s in enumerate(STEPS):
        lines += [f"step {s} loss {loss(i):.4f} grad_norm {norm(i)} lr {lr(i)}"] * 4
    return lines, three(STEPS), []


def csv_plain() -> Sample:
    lines = ["step,loss,grad_norm,lr,loss_scale,logit_max,grad_norm/layers.0,my_metric"]
    lines += [f"{s},{loss(i)},{norm(i)},{lr(i)},,12.5,0.25,3" for i, s in enumerate(STEPS)]
    rows = three(STEPS)
    for _, values in rows:
        values |= {"logit_max": 12.5, "grad_norm/layers.0": 0.25, "my_metric": 3.0}
    return lines, rows, []


def lightning_csv() -> Sample:
    lines = ["epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,grad_norm,val_loss"]
    for i, s in enumerate(TENS):
        lines += [f",{lr(i)},{s},,,,", f"0,,{s},,{loss(i)},{norm(i)},"]
    lines += ["0,,120,,,,7.5", "0,,120,8.1,,,"]
    return lines, three(TENS), [(120, {"eval_loss": 7.5})]


def keras_csv() -> Sample:
    lines = ["epoch,accuracy,loss,val_accuracy,val_loss"] + [f"{i},0.5,{loss(i)},0.4,{loss(i) + 1}" for i in range(N)]
    return lines, [(i, {"loss": loss(i)}) for i in range(N)], [(i, {"eval_loss": loss(i) + 1}) for i in range(N)]


def wandb_csv() -> Sample:
    lines = ['"Step","run-a - train/loss","run-a - train/loss__MIN","run-a - train/loss__MAX","run-b - train/loss"']
    lines += [f'"{s}","{loss(i)}","1","99","{50 + i}"' for i, s in enumerate(STEPS)]
    return lines, [(s, {"loss": loss(i)}) for i, s in enumerate(STEPS)], []


def tensorboard_csv() -> Sample:
    return (
        ["Wall time,Step,Value"] + [f"1700000000.5,{s},{loss(i)}" for i, s in enumerate(STEPS)],
        [(s, {"loss": loss(i)}) for i, s in enumerate(STEPS)],
        [],
    )


def notebook_tsv() -> Sample:
    lines = ["Step\tTraining Loss\tValidation Loss"] + [
        f"{s}\t{loss(i)}\t{'No log' if i % 3 else 7.0 + i}" for i, s in enumerate(TENS)
    ]
    return (
        lines,
        [(s, {"loss": loss(i)}) for i, s in enumerate(TENS)],
        [(s, {"eval_loss": 7.0 + i}) for i, s in enumerate(TENS) if i % 3 == 0],
    )


def pandas_csv() -> Sample:
    """Gaps filled with nan, an index column."""
    lines = [",iteration,train/loss,val/loss"]
    for i, s in enumerate(STEPS):
        lines.append(f"{i},{s},{loss(i)},{7.5 if i == 6 else 'nan'}")
    return lines, [(s, {"loss": loss(i)}) for i, s in enumerate(STEPS)], [(7, {"eval_loss": 7.5})]


def spaces() -> Sample:
    return (
        ["step loss grad_norm lr"] + [f"{s}   {loss(i)}  {norm(i)} {lr(i)}" for i, s in enumerate(STEPS)],
        three(STEPS),
        [],
    )


def long_csv() -> Sample:
    lines = ["step,metric,value"]
    for i, s in enumerate(STEPS):
        lines += [f"{s},train/loss,{loss(i)}", f"{s},train/grad_norm,{norm(i)}", f"{s},lr,{lr(i)}"]
    return lines, three(STEPS)[1:], []


def jsonl() -> Sample:
    lines = [
        json.dumps({"_step": s, "_runtime": 1.5, "train": {"loss": loss(i), "grad_norm": norm(i)}, "lr": lr(i)})
        for i, s in enumerate(STEPS)
    ]
    lines.insert(5, json.dumps({"_step": 5, "eval/loss": 7.5, "eval/runtime": 3.0}))
    return lines, three(STEPS), [(5, {"eval_loss": 7.5})]


def llamafactory() -> Sample:
    lines = [
        json.dumps(
            {
                "current_steps": s,
                "total_steps": 120,
                "loss": loss(i),
                "lr": lr(i),
                "epoch": 0.1,
                "percentage": 1.0,
                "elapsed_time": "0:00:10",
                "remaining_time": "1:00:00",
            }
        )
        for i, s in enumerate(TENS)
    ]
    lines.append(json.dumps({"current_steps": 120, "total_steps": 120, "eval_loss": 7.5, "epoch": 1.0}))
    return lines, [(s, {"loss": loss(i), "lr": lr(i)}) for i, s in enumerate(TENS)], [(120, {"eval_loss": 7.5})]


def mmcv_json() -> Sample:
    lines = [json.dumps({"env_info": "x", "seed": 1})] + [
        json.dumps(
            {
                "mode": "train",
                "epoch": 1 + i // 6,
                "iter": 10 * (i % 6 + 1),
                "lr": lr(i),
                "loss": loss(i),
                "grad_norm": norm(i),
            }
        )
        for i in range(N)
    ]
    lines.append(json.dumps({"mode": "val", "epoch": 2, "iter": 60, "loss": 7.5}))
    return (
        lines,
        [(s, v) for s, v in three([10 * (i % 6 + 1) + (60 if i > 5 else 0) - (0) for i in range(N)])],
        [(120, {"eval_loss": 7.5})],
    )


def own() -> Sample:
    lines = []
    for i, s in enumerate(STEPS):
        record: dict[str, Any] = {
            "step": s,
            "attempt": i + 1,
            "applied": i != 4,
            "action": "apply",
            "loss": loss(i),
            "grad_norm": norm(i),
            "lr": lr(i),
            "loss_scale": 1.0,
            "tokens": 512.0,
            "time_s": 0.5,
            "level": "A",
            "stability": 100.0,
            "drivers": [["loss/point", 0.5]],
            "logit_max": 0.0,
            "signal.level": 3.0,
            "generation": 0,
            "ranks": {"loss": {"median": 1.0}},
        }
        if i == 4:
            record |= {"grad_norm": None, "nonfinite": ["grad_norm", "ranks.loss.spread"]}
        lines.append(json.dumps(record))
    lines.insert(6, '{"step": 7, "att')
    rows = [
        (
            s,
            {
                "loss": loss(i),
                "grad_norm": NAN if i == 4 else norm(i),
                "lr": lr(i),
                "tokens": 512.0,
                "logit_max": 0.0,
                "level": 3.0,
            },
        )
        for i, s in enumerate(STEPS)
    ]
    return lines, rows, []


SAMPLES: dict[str, Sample] = {
    make.__name__: make()
    for make in (
        megatron, gpt_neox, hf_console, hf_console_strings, swift_console, nanogpt, evaluations_only, llmc, llmc_console, modded, modded_validation_only,
        build_nanogpt, fairseq, fairseq_simple, torchtitan, olmo, olmo_core, composer, nanotron, maxtext, levanter, tqdm, verl, mmengine, torch_examples,
        course, pipes, equals, deepspeed, ranks, ranks_unmarked, csv_plain, lightning_csv, keras_csv, wandb_csv, tensorboard_csv, notebook_tsv, pandas_csv,
        spaces, jsonl, llamafactory, mmcv_json, own,
    )
}  # fmt: skip
