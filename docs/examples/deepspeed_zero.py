"""A guarded DeepSpeed ZeRO 2 loop of one's own. (A script named deepspeed.py would hide the package.)

    deepspeed --num_gpus 2 docs/examples/deepspeed_zero.py --steps 40                    DS_ACCELERATOR=cpu without GPUs
    torchrun --standalone --nproc-per-node 2 docs/examples/deepspeed_zero.py --steps 40

Run it again with the same --run-dir and more --steps: it goes on from the last checkpoint.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import resilient
from resilient.engines.deepspeed.setup import load_deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,  # the guard takes accumulation and clipping from here
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Made-up data: 16 numbers, and which of the first four is largest. A plain list is a loader, too."""
    source = torch.Generator().manual_seed(seed)
    return [(x, x[:, :4].argmax(dim=1)) for x in (torch.randn(16, 16, generator=source) for _ in range(count))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/example-deepspeed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)  # appended by the deepspeed launcher
    args = parser.parse_args()
    deepspeed = load_deepspeed(torch.device("cpu"), "fp32")  # with a GPU a plain `import deepspeed` does
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same weights on every rank
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1.0))
    model, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG, dist_init_required=False)
    torch.manual_seed(1 + rank)  # dropout differs from rank to rank
    train, held_out = batches(64, seed=10 + rank), batches(8, seed=3)

    # A scheduler given to deepspeed.initialize instead needs no mention here.
    with resilient.Guard(model, scheduler=scheduler, data=train, run_dir=args.run_dir) as guard:
        for x, y in guard.batches(steps=args.steps, epochs=1000):
            guard.backward(F.cross_entropy(model(x), y))  # in place of engine.backward
            guard.step()  # in place of engine.step, once per micro-batch

        model.eval()
        with guard.evaluation(), torch.no_grad():
            loss = sum(float(F.cross_entropy(model(x), y)) for x, y in held_out) / len(held_out)
        guard.finish("done", eval_loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
