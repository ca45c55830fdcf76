"""What the peers share: the process group, the worst rank, and the same measures as benchmarks/harness/measure.h."""
import json
import os
import time

import torch
import torch.distributed as dist


def join(backend):
    """Joins the group that the launcher's variables describe; returns this rank's device."""
    dist.init_process_group(backend)
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def leave():
    dist.barrier()
    dist.destroy_process_group()


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def percentile(values, fraction):
    """Nearest rank, as in the C++ programs."""
    return sorted(values)[int(fraction * (len(values) - 1) + 0.5)] if values else 0.0


def worst_rank(values, device):
    """Each number's largest value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def peak_rss_mib():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024


def seconds_since_process_start():
    """To 10 ms, never too small; the interpreter's own start and `import torch` count."""
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def write_json(file, result):
    if file and dist.get_rank() == 0:
        with open(file, "w") as out:
            json.dump(result, out, indent=1)
