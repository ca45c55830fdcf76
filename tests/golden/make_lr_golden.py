#!/usr/bin/env python3
"""Writes lr.txt: learning rates of PyTorch's schedulers, which libddp's curves must equal.

usage: make_lr_golden.py > lr.txt        (made with torch 2.15.0)

A line is: name of the curve as libddp writes it, ";", then base learning rate and the rates of steps 0, 1, 2, ...
"""
import math
import warnings

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, StepLR

warnings.simplefilter("ignore")
BASE = 0.3


def rates(make, steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    scheduler = make(optimizer)
    out = []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return out


def line(name, make, steps):
    print(f"{name};", " ".join(repr(x) for x in [BASE] + rates(make, steps)))


line("warmup(10)", lambda o: LinearLR(o, start_factor=1 / 10, total_iters=9), 25)
line("warmup(1)", lambda o: LambdaLR(o, lambda s: 1.0), 5)
# To the end only: PyTorch's cosine rises again behind T_max.
line("cosine(40, 0)", lambda o: CosineAnnealingLR(o, T_max=40), 41)
line("cosine(40, 0.1)", lambda o: CosineAnnealingLR(o, T_max=40, eta_min=0.1 * BASE), 41)
line("linear_decay(30, 0)", lambda o: LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=30), 45)
line("linear_decay(30, 0.25)", lambda o: LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=30), 45)
line("step_decay(7, 0.5)", lambda o: StepLR(o, step_size=7, gamma=0.5), 40)


def product(step):
    return min(1.0, (step + 1) / 10) * (0.5 * (1 + math.cos(math.pi * min(step, 40) / 40)))


line("warmup(10) * cosine(40, 0)", lambda o: LambdaLR(o, product), 60)
