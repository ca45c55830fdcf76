"""Peer of bench_step: the same training step in PyTorch's own DistributedDataParallel.

  torchrun --nproc-per-node 2 benchmarks/peers/step.py [--fused --bucket-view] [--json out.json]
  torchrun --nproc-per-node 2 benchmarks/peers/step.py --model stack --dim 512 --no-ddp

Options, lines and JSON keys are bench_step's. --fused: Adam's fused kernel; --bucket-view: gradients are views of the
buckets (both are off by default in PyTorch); --no-ddp: no averaging at all, the floor.
"""
import argparse
import json
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import common


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="linear", choices=["linear", "stack"])
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200, help="measured")
    parser.add_argument("--warmup", type=int, default=20, help="before them, not in the medians")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bucket-cap-mb", type=float, default=25)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--bucket-view", action="store_true")
    parser.add_argument("--no-ddp", action="store_true")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--json")
    return parser.parse_args(arguments)


def make_model(args, device):
    if args.model == "linear":
        model = torch.nn.Linear(args.dim, args.dim)
    else:
        layers = [m for _ in range(args.layers) for m in (torch.nn.Linear(args.dim, args.dim), torch.nn.ReLU())]
        model = torch.nn.Sequential(*layers)
    model = model.to(device)
    if args.no_ddp:
        return model
    return DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb, gradient_as_bucket_view=args.bucket_view)


def main(arguments=None):
    args = parse(arguments)
    device = common.join(args.backend)
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    model = make_model(args, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=args.fused or None)
    loss_of = torch.nn.MSELoss()
    x = torch.randn(args.batch, args.dim).to(device)  # drawn once, so that the loss falls steadily
    y = torch.randn(args.batch, args.dim).to(device)

    times, losses, first_step_s = [], [], 0.0
    for step in range(args.warmup + args.steps):
        begin = time.perf_counter()
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        common.synchronize(device)
        backward = time.perf_counter()
        loss.backward()
        common.synchronize(device)
        update = time.perf_counter()
        optimizer.step()
        common.synchronize(device)
        end = time.perf_counter()
        if step == 0:
            first_step_s = common.seconds_since_process_start()
        if step < 5:
            losses.append(loss.item())
            if rank == 0:
                print(f"Step {step}, Loss {losses[-1]:.6f}", flush=True)
        if step >= args.warmup:
            times.append([1e3 * t for t in (end - begin, backward - begin, update - backward, end - update)])

    names, values = [], []
    for phase, ms in zip(("step", "forward", "backward", "update"), zip(*times)):
        names += [f"{phase}_ms", f"{phase}_p10_ms", f"{phase}_p90_ms"]
        values += [common.percentile(ms, fraction) for fraction in (0.5, 0.1, 0.9)]
    values += [first_step_s, common.peak_rss_mib()]
    result = dict(zip(names + ["first_step_s", "peak_rss_mib"], common.worst_rank(values, device)))
    result.update(program="peers/step.py", model=args.model, dim=args.dim, batch=args.batch, steps=args.steps,
                  reducer="none" if args.no_ddp else "ddp", ranks=dist.get_world_size(), backend=args.backend,
                  threads=torch.get_num_threads(), fused=args.fused, bucket_view=args.bucket_view, losses=losses)
    if rank == 0:
        print(json.dumps(result), flush=True)
    common.write_json(args.json, result)
    common.leave()


if __name__ == "__main__":
    main()
