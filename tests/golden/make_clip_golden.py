#!/usr/bin/env python3
"""What torch.nn.utils.clip_grad_norm_ makes of given gradients, for clip_golden_test.cpp.

  python3 make_clip_golden.py clip.txt

Each case is a line "case NAME DTYPE MAX_NORM", a line "norm BITS" and a line of the gradients' bits after clipping, in the
order of the parameters; bits are the hexadecimal value that a float32 holds (bfloat16 is exact in it). Squares are summed
without rounding (norms are exact), so the bits do not depend on the vector width of a CPU. The inputs
are the table GRADIENTS, which the test repeats.
"""
import struct
import sys

import torch

NAN, INF = float("nan"), float("inf")
GRADIENTS = {  # a 2x2 and a 3-vector: a matrix and a bias
    "plain": [[3, 4, -12, 84], [1, 2, 2]],  # norms 85 and 3
    "third": [[0, 4, 0, -3], [0, 12, 0]],  # norm 13
    "fractions": [[1.5, 2, -0.0, 6], [0.5, 1, 1]],  # norms 6.5 and 1.5
    "tiny": [[1e-40, -3e-39, 0, 0], [2e-38, 0, 0]],
    "zero": [[0, 0, 0, 0], [0, -0.0, 0]],
    "nan": [[1, NAN, 2, 3], [1, 2, 3]],
    "infinite": [[1, INF, 2, 3], [1, -INF, 3]],
    "overflow": [[1e20, 3e38, 0, 0], [1, 2, 3]],  # finite, but not its norm
}
MAX_NORMS = [1.0, 0.1, 3.0, 7.3, 13.0, 85.05292470959103, 1e6]


def bits(tensor):
    return " ".join(struct.pack(">f", v).hex() for v in tensor.float().flatten().tolist())


def main():
    lines = []
    for name, gradients in GRADIENTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for max_norm in MAX_NORMS:
                parameters = [torch.zeros(2, 2, dtype=dtype), torch.zeros(3, dtype=dtype)]
                for parameter, gradient in zip(parameters, gradients):
                    parameter.requires_grad_(True)
                    parameter.grad = torch.tensor(gradient, dtype=torch.float32).to(dtype).view_as(parameter)
                norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
                lines.append(f"case {name} {str(dtype).removeprefix('torch.')} {max_norm!r}")
                lines.append(f"norm {bits(norm)}")
                lines.append(" ".join(bits(p.grad) for p in parameters))
    open(sys.argv[1], "w").write("\n".join(lines) + "\n")


main()
