#!/usr/bin/env python3
"""Writes sampler.txt: the rows of torch.utils.data.DistributedSampler, which libddp's sampler must equal.

usage: make_sampler_golden.py > sampler.txt        (made with torch 2.15.0)

A line is: N W rank shuffle drop_last epoch length, then the indices, or "#" and a hash where they are many. The hash is
FNV-1a over the indices as 64-bit words: h = 0xcbf29ce484222325; h = ((h ^ index) * 0x100000001b3) mod 2^64.
"""
from torch.utils.data.distributed import DistributedSampler

SEED = 42
LITERAL = 10  # up to this N the indices are written out


def fnv1a(indices):
    h = 0xCBF29CE484222325
    for i in indices:
        h = ((h ^ i) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


print(f"# torch.utils.data.DistributedSampler, seed {SEED}")
for n in (1, 3, 8, 10, 1000, 1000003):
    for world in (1, 2, 3, 4, 8):
        for shuffle in (False, True):
            for drop_last in (False, True):
                for rank in range(world):
                    sampler = DistributedSampler(range(n), world, rank, shuffle, SEED, drop_last)
                    for epoch in range(3):
                        sampler.set_epoch(epoch)
                        rows = list(sampler)
                        what = " ".join(map(str, rows)) if n <= LITERAL else f"# {fnv1a(rows):016x}"
                        print(n, world, rank, int(shuffle), int(drop_last), epoch, len(rows), what)
