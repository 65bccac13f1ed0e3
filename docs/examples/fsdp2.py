"""A guarded FSDP2 (`fully_shard`) loop of one's own.

    torchrun --standalone --nproc-per-node 2 docs/examples/fsdp2.py --steps 40

Run it again with the same --run-dir and more --steps: it goes on from the last checkpoint.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import resilient

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(count: int, seed: int) -> list[Batch]:
    """Made-up data: 16 numbers, and which of the first four is largest. A plain list is a loader, too."""
    source = torch.Generator().manual_seed(seed)
    return [(x, x[:, :4].argmax(dim=1)) for x in (torch.randn(16, 16, generator=source) for _ in range(count))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/example-fsdp2")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    mesh = init_device_mesh("cpu", (world,))
    for block in (model[0], model[3]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the whole model last; the guard needs it to be sharded itself
    torch.manual_seed(1 + rank)  # dropout differs from rank to rank
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1.0))
    train, held_out = batches(64, seed=10 + rank), batches(8, seed=3)

    with resilient.Guard(
        model, optimizer, scheduler=scheduler, data=train, accumulation=2, clip=1.0, run_dir=args.run_dir
    ) as guard:
        for x, y in guard.batches(steps=args.steps, epochs=1000):
            guard.backward(F.cross_entropy(model(x), y))  # not divided by the accumulation
            guard.step()  # once per micro-batch; optimizer, scheduler and zero_grad are the guard's business

        model.eval()
        with guard.evaluation(), torch.no_grad():  # on every rank: a forward gathers parameters
            loss = sum(float(F.cross_entropy(model(x), y)) for x, y in held_out) / len(held_out)
        guard.finish("done", eval_loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
