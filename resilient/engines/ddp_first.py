"""DDP's first reduction, done in the layout of all later ones.

DDP reduces its first backward in one bucket, learns from it in which order gradients arrive, and rebuilds its buckets
from that. A ring adds up ranks in an order that depends on where in a bucket an element lies, so with three ranks or
more the first backward of a process rounds differently from any later one: a resumed run would leave its undisturbed
twin in the last bits (seen on gloo, torch 2.13). Here the first backward is reduced in the buckets that DDP is about
to build, so every backward of every process agrees.
"""

# No `from __future__ import annotations`, as in ddp.py.

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def rebuilds_buckets(model: DistributedDataParallel) -> bool:
    """True until DDP has learned the order of the gradients and cut its buckets anew (in its second forward). With
    find_unused_parameters it never does, unless the graph is static."""
    return not model._has_rebuilt_buckets and (model.static_graph or not model.find_unused_parameters)


class FirstReduction:
    """Watches gradients arrive until DDP has rebuilt its buckets; `reduce` then stands in for one all-reduce a bucket."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._caps = list(model.bucket_bytes_cap_list) or [
            dist._DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else model.bucket_bytes_cap,
            model.bucket_bytes_cap,
        ]
        self._arrived: list[torch.Tensor] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(self._arrived.append) for p in model.parameters() if p.requires_grad
        ]

    @staticmethod
    def lies_ahead(model: DistributedDataParallel) -> bool:
        """True if this model will still rebuild its buckets, and more than two ranks make the order of addition matter.

        A static graph rebuilds in an order that cannot be seen from here.
        """
        return dist.get_world_size(model.process_group) > 2 and rebuilds_buckets(model) and not model.static_graph

    def begin_backward(self) -> None:
        self._arrived.clear()

    def reduce(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
        """Sum the bucket over ranks, in place, in the buckets to come (`Reducer::rebuild_buckets`, reducer.cpp)."""
        buffer, params = bucket.buffer(), bucket.parameters()
        place = {id(p): i for i, p in enumerate(params)}
        arrived = [place.pop(id(p)) for p in self._arrived if id(p) in place]
        order = torch.tensor(arrived + list(place.values()), device=buffer.device)
        dist.broadcast(order, group=group, group_src=0)  # DDP, too, goes by rank 0's order
        indices = order.tolist()
        layout, _ = dist._compute_bucket_assignment_by_size(
            [params[i] for i in indices], self._caps, [False] * len(params), indices
        )
        pieces = buffer.split([p.numel() for p in params])
        flats = [torch.cat([pieces[i] for i in members]) for members in layout]
        for work in [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]:
            work.wait()
        for flat, members in zip(flats, layout, strict=True):
            for i, part in zip(members, flat.split([params[i].numel() for i in members]), strict=True):
                pieces[i].copy_(part)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._arrived.clear()
