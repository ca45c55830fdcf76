"""Peer of examples/mini_train: Linear(1024), batch 32, Adam, five steps in PyTorch's own DistributedDataParallel.

  torchrun --nproc-per-node 2 benchmarks/peers/mini_train.py [--steps 300] [--fused --bucket-view] [--no-ddp] [--json F]

It prints "Step n, Loss x" for the first five steps, then a line of JSON; the options are those of step.py.
"""
import sys

import step

if __name__ == "__main__":
    step.main(["--model", "linear", "--dim", "1024", "--warmup", "0", "--steps", "5"] + sys.argv[1:])
