"""A guarded DistributedDataParallel loop of one's own.

    python docs/examples/ddp.py --steps 40                                    one process, no launcher
    torchrun --standalone --nproc-per-node 2 docs/examples/ddp.py --steps 40  two ranks

Run it again with the same --run-dir and more --steps: it goes on from the last checkpoint.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resilient


def samples(count: int, seed: int) -> TensorDataset:
    """Made-up data: 16 numbers, and which of the first four is largest."""
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/example-ddp")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(0)  # the same weights on every rank
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    model = DistributedDataParallel(net) if world > 1 else net
    torch.manual_seed(1 + rank)  # dropout differs from rank to rank
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1.0))
    train, held_out = samples(1024, seed=2), samples(256, seed=3)
    loader = DataLoader(train, batch_size=16, sampler=DistributedSampler(train, world, rank))

    with resilient.Guard(
        model, optimizer, scheduler=scheduler, data=loader, accumulation=2, clip=1.0, run_dir=args.run_dir
    ) as guard:
        for x, y in guard.batches(steps=args.steps, epochs=1000):
            guard.backward(F.cross_entropy(model(x), y))  # not divided by the accumulation
            guard.step()  # once per micro-batch; optimizer, scheduler and zero_grad are the guard's business

        model.eval()
        with guard.evaluation(), torch.no_grad():
            x, y = held_out.tensors
            loss = float(F.cross_entropy(model(x), y))
        guard.finish("done", eval_loss=loss)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
