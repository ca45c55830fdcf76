#!/usr/bin/env python3
"""Bits of torch.optim's fused CPU kernels over several steps, for optim_golden_test.cpp.

  python make_optim_golden.py optim.txt

Parameters and gradients are multiples of 1/64 and so exact in every dtype. ATen has these kernels once per kind of CPU, and
their last bits differ; so each kind that this machine can run is written (ATEN_CPU_CAPABILITY). A line:

  kind | optimizer and options | dtype | steps taken | hash of the parameters | hash of the optimizer's state

Hashes are FNV-1a (64 bits) of the bytes, tensor after tensor; the state's are those of each parameter in Python's order.
"""
import os
import subprocess
import sys

import torch

SHAPES = [(), (7,), (3, 5), (67,), (11, 13), (64,), (2, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WRITTEN = (1, 2, 6)  # steps
ADAM = {
    "": {},
    " decay": {"weight_decay": 0.125},
    " amsgrad": {"amsgrad": True},
    " maximize": {"maximize": True},
    " decay amsgrad maximize": {"weight_decay": 0.125, "amsgrad": True, "maximize": True},
}
CASES = {
    **{"Adam" + name: (torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.99), "weight_decay": 0, **o}) for name, o in ADAM.items()},
    **{"AdamW" + name: (torch.optim.AdamW, {"lr": 0.05, "betas": (0.8, 0.99), "weight_decay": 0, **o}) for name, o in ADAM.items()},
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD maximize": (torch.optim.SGD, {"lr": 0.05, "maximize": True}),
    "SGD decay momentum": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.125, "momentum": 0.9}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.125, "momentum": 0.9, "nesterov": True}),
    "SGD dampening maximize": (
        torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.125, "momentum": 0.8, "dampening": 0.3, "maximize": True}),
}


def pattern(shape, salt):
    n = torch.Size(shape).numel()
    i = torch.arange(n, dtype=torch.int64)
    return ((((i * 37 + salt * 101) % 127) - 63).to(torch.float32) / 64).view(shape)


def fnv(tensors):
    hashed = 0xCBF29CE484222325
    for tensor in tensors:
        for byte in bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()):
            hashed = ((hashed ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{hashed:016x}"


def lines():
    kind = torch.backends.cpu.get_cpu_capability()
    for name, (optimizer, options) in CASES.items():
        for dtype in DTYPES:
            parameters = [pattern(shape, 50 + k).to(dtype).requires_grad_() for k, shape in enumerate(SHAPES)]
            optim = optimizer(parameters, fused=True, **options)
            for step in range(max(WRITTEN)):
                for k, parameter in enumerate(parameters):
                    parameter.grad = pattern(parameter.shape, 7 * step + k).to(dtype)
                if step == 3:
                    parameters[2].grad = None
                if step == 4:
                    optim.param_groups[0]["lr"] = 0.02
                optim.step()
                if step + 1 in WRITTEN:
                    state = [
                        value
                        for parameter in parameters
                        for value in optim.state[parameter].values()
                        if isinstance(value, torch.Tensor)
                    ]
                    yield f"{kind}|{name}|{str(dtype)[6:]}|{step + 1}|{fnv(parameters)}|{fnv(state)}"


def main():
    torch.set_num_threads(1)
    if len(sys.argv) < 2:
        print("\n".join(lines()))
        return
    flags = open("/proc/cpuinfo").read().split()
    kinds = ["default"] + ["avx2"] * ("avx2" in flags and "fma" in flags)
    kinds += ["avx512"] * all(f in flags for f in ("avx512f", "avx512vl", "avx512bw", "avx512dq"))
    with open(sys.argv[1], "w") as out:
        out.write(f"# torch {torch.__version__}, by make_optim_golden.py\n")
        for kind in kinds:
            environment = {**os.environ, "ATEN_CPU_CAPABILITY": kind}
            out.write(subprocess.run([sys.executable, __file__], env=environment, check=True, text=True,
                                     capture_output=True).stdout)


main()
