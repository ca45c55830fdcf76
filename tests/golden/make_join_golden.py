#!/usr/bin/env python3
"""Gradients of PyTorch's own DistributedDataParallel.join with uneven inputs, for join_golden_test.cpp.

  torchrun --standalone --nproc-per-node 2 make_join_golden.py join.txt

Rank 0 has 5 batches, rank 1 has 3. Inputs are made by exact arithmetic on both sides and weights stay, so that every bit of the
result comes from the averaging, as in make_ddp_golden.py. One line per number, as the 32 bits of a float in hex.
"""
import struct
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

BATCHES = (5, 3)


def pattern(n, salt):
    i = torch.arange(n, dtype=torch.int64)
    return (((i * 37 + salt * 101) % 127) - 63).to(torch.float32) / 64


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    lines = []
    for by_world in (True, False):
        net = torch.nn.Sequential(torch.nn.Linear(17, 29), torch.nn.ReLU(), torch.nn.Linear(29, 5))
        with torch.no_grad():
            for k, p in enumerate(net.parameters()):
                p.copy_(pattern(p.numel(), k).view_as(p))
        model = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=0.001)
        with model.join(divide_by_initial_world_size=by_world):
            for step in range(BATCHES[rank]):
                x = pattern(7 * 17, 10 * step + rank + 5).view(7, 17)
                model(x).square().sum().backward()
                if rank == 0:
                    for name, p in net.named_parameters():
                        lines.append(f"{'world' if by_world else 'active'} step {step} {name}")
                        lines += [struct.pack(">f", v).hex() for v in p.grad.flatten().tolist()]
                model.zero_grad()
    if rank == 0:
        open(sys.argv[1], "w").write("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()


main()
