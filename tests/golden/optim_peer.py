#!/usr/bin/env python3
"""The other side of optim_golden_test.cpp: goes on from an optimizer's state that libddp wrote.

  python optim_peer.py in.pt out.pt

Reads {"parameters": [...], "optimizer": state_dict} with weights_only, makes AdamW of other options over the parameters,
loads the state, takes one fused step with gradients of ones, and saves the same.
"""
import sys

import torch

saved = torch.load(sys.argv[1], weights_only=True)
parameters = [p.requires_grad_() for p in saved["parameters"]]
optim = torch.optim.AdamW(parameters, lr=9, fused=True)
optim.load_state_dict(saved["optimizer"])
print("maximize", [group["maximize"] for group in optim.param_groups])
print("master", ["master" in optim.state[p] for p in parameters])
for group in optim.param_groups:
    group["fused"] = True  # as the file has None there
for p in parameters:
    p.grad = torch.ones_like(p)
optim.step()
torch.save({"parameters": [p.detach() for p in parameters], "optimizer": optim.state_dict()}, sys.argv[2])
