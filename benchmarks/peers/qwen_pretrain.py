"""Peer of qwen_pretrain: Qwen2 of transformers, pretrained in PyTorch's own DistributedDataParallel.

  torchrun --nproc-per-node 2 benchmarks/peers/qwen_pretrain.py --data docs libddp --preset tiny [--dtype bfloat16]

Options and JSON keys are qwen_pretrain's, and so are model, data, order and optimizer: windows of bytes, AdamW with weight
decay, accumulation under no_sync, clipping at 1. The fastest settings that come with PyTorch: a fused AdamW, gradients as
views of the buckets, scaled_dot_product_attention. Needs the packages torch and transformers.
"""
import argparse
import contextlib
import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import Qwen2Config, Qwen2ForCausalLM

import common

# hidden, intermediate, vocabulary; tokens of a window, windows of a forward pass
PRESETS = {"tiny": (128, 352, 512, 256, 8), "small": (256, 704, 8192, 512, 4)}
ACCUMULATED = 2


class Windows(Dataset):
    """Window i: the bytes [i * seq, (i + 1) * seq) and, as targets, their successors."""

    def __init__(self, paths, seq):
        self.text, self.seq = torch.frombuffer(bytearray(b"".join(map(read, files(paths)))), dtype=torch.uint8), seq

    def __len__(self):
        return (len(self.text) - 1) // self.seq

    def __getitem__(self, i):
        window = self.text[i * self.seq:(i + 1) * self.seq + 1].long()
        return window[:-1], window[1:]


def files(paths):
    """Files as they are; of a folder its text, at any depth, in the order of the paths."""
    for path in paths:
        if os.path.isfile(path):
            yield path
            continue
        found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        yield from sorted(f for f in found if f.endswith((".h", ".hpp", ".txt", ".md")))


def read(path):
    with open(path, "rb") as file:
        return file.read()


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="text files, or folders of .h .hpp .txt .md")
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--json")
    return parser.parse_args(arguments)


def make_model(args, device):
    hidden, intermediate, vocabulary, seq, _ = PRESETS[args.preset]
    config = Qwen2Config(hidden_size=hidden, intermediate_size=intermediate, vocab_size=vocabulary, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32768,
                         tie_word_embeddings=True, use_cache=False)
    return Qwen2ForCausalLM(config).to(device, getattr(torch, args.dtype)), seq


def main(arguments=None):
    args = parse(arguments)
    device = common.join(args.backend)
    torch.manual_seed(args.seed)
    model, seq = make_model(args, device)
    batch = PRESETS[args.preset][-1]
    parameters = sum(p.numel() for p in model.parameters())
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    data = Windows(args.data, seq)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    rows = iter(DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True))

    times, losses, first_step_s = [], [], 0.0
    for step in range(args.max_steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for micro in range(ACCUMULATED):
            tokens, targets = (t.to(device) for t in next(rows))
            with model.no_sync() if micro < ACCUMULATED - 1 else contextlib.nullcontext():
                logits = model(input_ids=tokens).logits.float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / ACCUMULATED
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        common.synchronize(device)
        times.append(time.perf_counter() - begin)
        losses.append(total)
        if step == 0:
            first_step_s = common.seconds_since_process_start()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"Step {step}, Loss {total:.4f}", flush=True)

    step_s = common.percentile(times, 0.5)
    numbers = common.worst_rank([step_s, first_step_s, common.peak_rss_mib()], device)
    result = dict(zip(("step_s", "first_step_s", "peak_rss_mb"), numbers))
    result.update(program="peers/qwen_pretrain.py", params=parameters, ranks=dist.get_world_size(),
                  tokens_per_s=dist.get_world_size() * batch * seq * ACCUMULATED / result["step_s"],
                  first_loss=losses[0], last_loss=losses[-1], losses=losses)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    common.write_json(args.json, result)
    common.leave()


if __name__ == "__main__":
    main()
