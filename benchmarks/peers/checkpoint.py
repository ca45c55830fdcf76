"""Peer of bench_checkpoint: the same state through torch.save, torch.load and torch.distributed.checkpoint.

  python3 benchmarks/peers/checkpoint.py [--mb 2000] [--dir /scratch] [--json out.json]

Options, rounds and columns are bench_checkpoint's. torch.save does not reach the disk by itself, so an fsync of the
file and of its directory and a rename are added; torch.distributed.checkpoint (DCP) calls fsync itself. `blocked` is
the time that async_save takes to return.
"""
import argparse
import json
import os
import shutil
import statistics
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

TENSOR_BYTES = 8 << 20


def status_mib(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024


def measure(action):
    """Milliseconds, and the most resident memory above that before."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status_mib("VmRSS")
    start = time.perf_counter()
    result = action()
    return 1e3 * (time.perf_counter() - start), status_mib("VmHWM") - before, result


def fsync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(state, folder):
    temporary, final = os.path.join(folder, "tmp.pt"), os.path.join(folder, "checkpoint.pt")
    torch.save(state, temporary)
    fsync(temporary)
    os.rename(temporary, final)
    fsync(folder)


def load(model, path, mmap):
    model.load_state_dict(torch.load(path, weights_only=True, mmap=mmap)["model_state_dict"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--json")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=0, world_size=1)  # async_save wants one

    def make():
        model, left = torch.nn.ParameterList(), args.mb * 1_000_000
        while left > 0:
            model.append(torch.nn.Parameter(torch.randn(min(left, TENSOR_BYTES) // 4), requires_grad=False))
            left -= TENSOR_BYTES
        return model

    model, other = make(), make()
    state = {"epoch": 0, "step": 0, "model_state_dict": model.state_dict()}
    folder = os.path.join(args.dir, f"peer_checkpoint.{os.getpid()}")
    os.makedirs(folder)
    series = {}

    def record(key, ms):
        series.setdefault(key + "_ms", []).append(ms)

    wrong = 0
    try:
        for round in range(-1, args.rounds):  # the first is not measured
            for parameter in model:
                parameter.add_(1)
            measured = {}
            measured["save"] = measure(lambda: save(state, folder))
            path = os.path.join(folder, "checkpoint.pt")
            measured["load"] = measure(lambda: load(other, path, False))
            wrong += sum(not a.equal(b) for a, b in zip(model, other))
            measured["load_mmap"] = measure(lambda: load(other, path, True))
            wrong += sum(not a.equal(b) for a, b in zip(model, other))
            shutil.rmtree(os.path.join(folder, "dcp"), ignore_errors=True)
            measured["dcp_save"] = measure(lambda: dcp.save(state, checkpoint_id=os.path.join(folder, "dcp")))
            shutil.rmtree(os.path.join(folder, "dcp"), ignore_errors=True)

            def background():
                start = time.perf_counter()
                future = dcp.async_save(state, checkpoint_id=os.path.join(folder, "dcp"))
                blocked = 1e3 * (time.perf_counter() - start)
                getattr(future, "upload_completion", future).result()
                return blocked

            measured["dcp_written"] = measure(background)
            for key, (ms, mib, _) in measured.items():
                series.setdefault(key + "_mib", []).append(mib)
            if round < 0:
                continue
            for key, (ms, _, _) in measured.items():
                record(key, ms)
            record("dcp_blocked", measured["dcp_written"][2])
        size = os.path.getsize(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    result = {key: max(values) if key.endswith("_mib") else statistics.median(values) for key, values in series.items()}
    result.update(program="peers/checkpoint.py", bytes=size, rounds=args.rounds, wrong=wrong, torch=torch.__version__)
    print(f"# {size / 1e9:.3f} GB, {args.rounds} rounds, torch {torch.__version__}")
    for key in ("save", "load", "load_mmap", "dcp_save", "dcp_blocked", "dcp_written"):
        ms = result[key + "_ms"]
        print(f"{key:14} {ms:10.1f} ms {size / ms / 1e6:8.2f} GB/s {result.get(key + '_mib', 0):8.1f} + MiB")
    print(f"#wrong {wrong}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    dist.destroy_process_group()
    raise SystemExit(wrong != 0)


if __name__ == "__main__":
    main()
