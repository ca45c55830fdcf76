"""Peer of bench_all_reduce: the all-reduce of torch.distributed (Gloo, or NCCL), sum.

  torchrun --nproc-per-node 2 benchmarks/peers/all_reduce.py [--sizes 4096,1048576] [--json out.json]

One line per size, with bench_all_reduce's meaning: the buffer is filled again and a barrier passed before each
iteration, an iteration counts with its slowest rank, and the last result is verified on every rank.
"""
import argparse
import json
import time

import torch
import torch.distributed as dist

import common


def measure(size, dtype, device, warmup, iterations):
    count = max(1, size // torch.empty(0, dtype=dtype).element_size())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    base = torch.arange(count, device=device) % 251 % 5  # small: the sum is exact in every dtype, in any order
    source = (base + rank % 2).to(dtype)
    expected = (base * ranks + ranks // 2).to(dtype)
    del base
    buffer, times = torch.empty_like(source), []
    for i in range(-warmup, iterations):
        buffer.copy_(source)
        common.synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(buffer)
        common.synchronize(device)
        if i >= 0:
            times.append((time.perf_counter() - begin) * 1e3)
    wrong = torch.tensor(int((buffer != expected).sum()), device=device)
    dist.all_reduce(wrong)
    times = common.worst_rank(times, device)
    ms, bytes_ = common.percentile(times, 0.5), source.numel() * source.element_size()
    algbw = bytes_ / ms / 1e6
    return dict(bytes=bytes_, ms=ms, p50_ms=ms, p99_ms=common.percentile(times, 0.99), min_ms=min(times),
                algbw_gbs=algbw, busbw_gbs=algbw * 2 * (ranks - 1) / ranks, wrong=int(wrong))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096,65536,1048576,4194304,26214400,67108864", help="bytes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--json")
    args = parser.parse_args()
    device = common.join(args.backend)
    rows = []
    for size in args.sizes.split(","):
        rows.append(measure(int(size), getattr(torch, args.dtype), device, args.warmup, args.iterations))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    common.write_json(args.json, dict(program="peers/all_reduce.py", op="all_reduce", dtype=args.dtype,
                                      ranks=dist.get_world_size(), backend=args.backend,
                                      iterations=args.iterations, rows=rows))
    common.leave()


if __name__ == "__main__":
    main()
